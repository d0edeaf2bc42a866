"""`tao verify` and `tao repair` report what they found, and ask before they delete."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tao.admin.access import ReaderLogin
from tao.admin.cache_verification import CacheReport, CachesReport, DatabaseReport, Finding, Sample
from tao.admin.documents import example_schema_file, read_schema
from tao.admin.repair import BrokenPair, Faults, LeaderResult, Repairs, WrongCount
from tao.cli import repair, verify
from tao.cli.commands import tao
from tao.model.graph import EdgeKey
from tao.model.rows import IntentRow
from tao.model.topology import Topology

SCHEMA = read_schema(example_schema_file())[0]
FRIEND = SCHEMA.atype("friend").number
ABOVE, BELOW = EdgeKey(9, FRIEND, 5), EdgeKey(5, FRIEND, 9)
ONLY_AT_LARGER = BrokenPair(5, 9, FRIEND, ABOVE, "no inverse")
ONLY_AT_SMALLER = BrokenPair(5, 9, FRIEND, BELOW, "no inverse")
AT_BOTH = BrokenPair(5, 9, FRIEND, ABOVE, "inverse has another time")


@dataclass
class Checked:
    """What the databases and caches are made to say."""

    report: CachesReport
    pairs: list[BrokenPair]
    repaired: int = 0
    counts: list[WrongCount] = field(default_factory=list)
    recounted: int = 0
    intents: list[IntentRow] = field(default_factory=list)
    settled: list[LeaderResult] = field(default_factory=list)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    found = Checked(CachesReport([CacheReport(server="follower-1a", role="follower", entries=1_000)]), [])
    login = ReaderLogin(Topology(version=1, shards=1, regions=(), databases=()), SCHEMA, "reader", "x")

    async def verify_caches(*_: Any) -> CachesReport:
        return found.report

    async def find(_login: object, only: str | None) -> Faults:
        counts = [] if only == "inverses" else found.counts
        return Faults([], [], counts) if only == "counts" else Faults(found.intents, found.pairs, counts)

    async def work(_login: object, faults: Faults) -> Repairs:
        found.repaired, found.recounted = len(faults.pairs), len(faults.counts)
        return Repairs(
            found.settled,
            [LeaderResult("leader-1", found.repaired, found.repaired)],
            [LeaderResult("leader-1", found.recounted, found.recounted)],
        )

    monkeypatch.setattr(verify, "reader_login", lambda: login)
    monkeypatch.setattr(repair, "reader_login", lambda: login)
    monkeypatch.setattr(verify, "_verify", verify_caches)
    monkeypatch.setattr(repair, "_find", find)
    monkeypatch.setattr(repair, "_repair", work)
    return found


def call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(tao, list(arguments), input=given, catch_exceptions=False)


def test_an_edge_that_the_smaller_id_does_not_have_is_shown_as_one_to_be_deleted(checked: Checked) -> None:
    for pair, text in (
        (ONLY_AT_LARGER, "deleted at the larger id"),
        (ONLY_AT_SMALLER, "copied to the larger id"),
        (AT_BOTH, "copied to the larger id"),
    ):
        checked.pairs = [pair]
        assert text in call("repair", "--dry-run").stdout
        (pair_shown,) = json.loads(call("repair", "--dry-run", "--json").stdout)["broken"]
        assert (pair_shown["atype"], pair_shown["repair"], pair_shown["mending"]) == ("friend", text, text)


def test_the_question_counts_what_would_be_deleted_and_a_no_changes_nothing(checked: Checked) -> None:
    checked.pairs = [ONLY_AT_LARGER, AT_BOTH]
    result = call("repair", given="n\n")
    assert "Repair 2 pairs, deleting 1 edge?" in result.stderr
    assert (result.exit_code, "nothing was changed" in result.stderr, checked.repaired) == (1, True, 0)
    result = call("repair", "--json", given="")
    assert (result.exit_code, result.stdout, "--yes" in result.stderr, checked.repaired) == (2, "", True, 0)
    assert call("repair", given="y\n").exit_code == 0
    assert checked.repaired == 2


def test_a_server_that_could_not_be_asked_is_unchecked_and_not_wrong(checked: Checked) -> None:
    checked.report.servers.append(CacheReport(server="follower-1b", role="follower", error="it is away"))
    result = call("verify")
    assert result.exit_code == 1
    assert "1,000 entries compared, none wrong; 1 server could not be checked: follower-1b" in result.stdout
    report = json.loads(call("verify", "--json").stdout)
    assert (report["wrong"], report["unchecked_servers"], report["clean"]) == (0, 1, False)


def test_a_long_reason_stands_below_the_table_and_not_in_a_column(checked: Checked) -> None:
    reason = "database server east-db-1 is down: " + 40 * "it does not answer; "
    checked.report.servers.append(CacheReport(server="leader-1", role="leader", error=reason))
    lines = call("verify").stdout.splitlines()
    assert lines[0].split() == ["server", "role", "entries", "in", "flight", "wrong"]
    assert lines[3] == f"leader-1: {reason}"
    assert max(map(len, lines[:3])) < 60


def test_nothing_compared_with_a_database_that_hangs_is_not_none_wrong(checked: Checked) -> None:
    checked.report.servers[:] = [CacheReport(server="leader-1", role="leader", error="entries of db-1 …")]
    checked.report.databases.append(DatabaseReport(database="db-1", server="east-db-1", error="no answer"))
    result = call("verify")
    assert result.exit_code == 1
    assert "none wrong" not in result.stdout
    assert "database db-1 (east-db-1) could not be read: no answer" in result.stdout
    report = json.loads(call("verify", "--json").stdout)
    assert (report["unchecked_databases"], report["clean"]) == (["db-1"], False)
    assert report["databases"] == [{"database": "db-1", "server": "east-db-1", "entries": 0, "error": "no answer"}]


def test_findings_name_types_and_other_content_of_the_same_version(checked: Checked) -> None:
    checked.report.servers[0].wrong = 2
    checked.report.findings += [
        Finding("follower-1a", "list", 5, FRIEND, "different", 7, 7),
        Finding("follower-1a", "object", 6, 0, "behind", 7, 8),
    ]
    shown = call("verify").stdout
    assert "list 5 type friend has the same version, other content" in shown
    assert "object 6 is behind: version 7 cached, 8 stored" in shown
    assert "1,000 entries compared, 2 wrong" in shown
    findings = json.loads(call("verify", "--json").stdout)["findings"]
    assert [finding["atype"] for finding in findings] == ["friend", None]


def test_a_clean_result_is_reported(checked: Checked) -> None:
    assert "none wrong: all caches equal the databases" in call("verify").stdout
    assert call("repair").stdout == "every edge has its inverse\nevery list has its count\n"
    assert call("repair", "--only", "counts").stdout == "every list has its count\n"


def test_consistency_is_shown_in_nines(checked: Checked) -> None:
    assert "consistency: 100 % (at least 2.5 nines) of 1,000 entries" in call("verify").stdout
    checked.report.servers[0].wrong = 1
    assert "consistency: 99.90 % (3.0 nines) of 1,000 entries" in call("verify").stdout
    report = json.loads(call("verify", "--json").stdout)["consistency"]
    assert (report["looks"], report["wrong"], round(report["nines"], 3)) == (1_000, 1, 3.0)


def test_wrong_counts_are_shown_and_repaired_unless_it_is_a_dry_run(checked: Checked) -> None:
    checked.counts = [WrongCount(5, FRIEND, 7, 3, 1)]
    result = call("repair", "--dry-run")
    assert result.exit_code == 1
    assert "1 count is wrong; 0 repaired" in result.stdout
    assert checked.recounted == 0
    assert call("repair", "--yes").exit_code == 0
    assert checked.recounted == 1
    report = json.loads(call("repair", "--json", "--yes").stdout)
    assert report["wrong_counts"] == [{"id1": 5, "atype": "friend", "stored": 7, "counted": 3}]
    assert report["recounted"] == 1
    assert call("repair", "--only", "inverses").exit_code == 0


def test_an_old_intent_is_shown_and_settled_and_a_silent_leader_is_named(checked: Checked) -> None:
    checked.intents = [IntentRow(5, 9, (FRIEND,), 1, 0), IntentRow(6, 9, (FRIEND,), 1, 1)]
    checked.counts = [WrongCount(5, FRIEND, 7, 3, 1)]
    result = call("repair", "--dry-run")
    assert result.exit_code == 1
    assert "1970-01-01" in result.stdout
    assert "2 intents left over; 0 settled" in result.stdout
    checked.settled = [LeaderResult("leader-1", 1, 1), LeaderResult("leader-2", 1, 0, "it is away")]
    result = call("repair", "--yes")
    assert (result.exit_code, checked.recounted) == (1, 1), "what others can mend is mended"
    assert "leader-2: 0 of 1 repaired: it is away" in result.stderr
    report = json.loads(call("repair", "--yes", "--json").stdout)
    assert (report["settled"], report["recounted"], report["unreachable"]) == (1, 1, ["leader-2"])
    assert [each["atypes"] for each in report["old_intents"]] == [["friend"], ["friend"]]
    assert report["leaders"][0] == {"server": "leader-1", "asked": 2, "repaired": 2, "mended": 2, "error": ""}


@pytest.mark.parametrize("sample", ["x", "5.5", "0%", "101%", "%", "-1"])
def test_a_sample_is_a_number_or_a_share(checked: Checked, sample: str) -> None:
    assert CliRunner().invoke(tao, ["verify", "--sample", sample]).exit_code == 2
    assert call("verify", "--sample", "5%").exit_code == 0


def test_a_sample_is_spread_over_all_entries() -> None:
    assert [Sample().stride(1_000), Sample(share=0.05).stride(1_000), Sample(10).stride(1_000)] == [1, 20, 100]
    assert Sample(10).stride(3) == 1
