"""`tao verify` and `tao repair`: what they say about what was found, and what they ask before they delete."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tao.cli import check, repair
from tao.cli.checking.caches import Finding, Report, Sample, ServerReport
from tao.cli.checking.counts import WrongCount
from tao.cli.checking.inverses import BrokenPair
from tao.cli.checking.mending import LeaderResult
from tao.cli.commands import tao
from tao.cli.export_scan import ReaderLogin
from tao.devcluster.schema_copy import example_schema_file, read_schema
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

    report: Report
    pairs: list[BrokenPair]
    mended: int = 0
    counts: list[WrongCount] = field(default_factory=list)
    recounted: int = 0
    intents: list[IntentRow] = field(default_factory=list)
    settled: list[LeaderResult] = field(default_factory=list)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    found = Checked(Report([ServerReport("follower-1a", "follower", entries=1_000)]), [])
    login = ReaderLogin(Topology(version=1, shards=1, regions=(), databases=()), SCHEMA, "reader", "x")

    async def verify(*_: Any) -> Report:
        return found.report

    async def find_counts(*_: Any) -> list[WrongCount]:
        return found.counts

    async def mend_counts(*_: Any) -> list[LeaderResult]:
        found.recounted = len(found.counts)
        return [LeaderResult("leader-1", found.recounted, found.recounted)]

    async def find(*_: Any) -> list[BrokenPair]:
        return found.pairs

    async def mend(*_: Any) -> list[LeaderResult]:
        found.mended = len(found.pairs)
        return [LeaderResult("leader-1", found.mended, found.mended)]

    async def find_intents(*_: Any) -> list[IntentRow]:
        return found.intents

    async def settle(*_: Any) -> list[LeaderResult]:
        return found.settled

    monkeypatch.setattr("tao.cli.export_scan.reader_login", lambda **_: login)
    monkeypatch.setattr(check, "_verify", verify)
    monkeypatch.setattr(repair, "_find", find)
    monkeypatch.setattr(repair, "_mend", mend)
    monkeypatch.setattr(repair, "_find_intents", find_intents)
    monkeypatch.setattr(repair, "_settle", settle)
    monkeypatch.setattr(repair, "_find_counts", find_counts)
    monkeypatch.setattr(repair, "_mend_counts", mend_counts)
    return found


def call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(tao, list(arguments), input=given, catch_exceptions=False)


def test_an_edge_that_the_smaller_id_does_not_have_is_shown_as_one_to_be_deleted(checked: Checked) -> None:
    for pair, mending in (
        (ONLY_AT_LARGER, "deleted at the larger id"),
        (ONLY_AT_SMALLER, "copied to the larger id"),
        (AT_BOTH, "copied to the larger id"),
    ):
        checked.pairs = [pair]
        assert mending in call("repair", "--dry-run").stdout
        (told,) = json.loads(call("repair", "--dry-run", "--json").stdout)["broken"]
        assert (told["atype"], told["mending"]) == ("friend", mending)


def test_the_question_counts_what_would_be_deleted_and_a_no_changes_nothing(checked: Checked) -> None:
    checked.pairs = [ONLY_AT_LARGER, AT_BOTH]
    result = call("repair", given="n\n")
    assert "Mend 2 pairs, deleting 1 edge?" in result.stderr
    assert (result.exit_code, "nothing was changed" in result.stderr, checked.mended) == (1, True, 0)
    result = call("repair", "--json", given="")
    assert (result.exit_code, result.stdout, "--yes" in result.stderr, checked.mended) == (2, "", True, 0)
    assert call("repair", given="y\n").exit_code == 0
    assert checked.mended == 2


def test_a_server_that_could_not_be_asked_is_not_called_unequal(checked: Checked) -> None:
    checked.report.servers.append(ServerReport("follower-1b", "follower", error="it is away"))
    result = call("verify")
    assert result.exit_code == 1
    assert "1,000 entries compared, none wrong; 1 server could not be checked" in result.stdout
    told = json.loads(call("verify", "--json").stdout)
    assert (told["wrong"], told["unchecked_servers"], told["clean"]) == (0, 1, False)


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


def test_what_is_right_is_told_so(checked: Checked) -> None:
    assert "none wrong: all caches equal the databases" in call("verify").stdout
    assert call("repair").stdout == "every edge has its inverse\nevery list has its count\n"
    assert call("repair", "--only", "counts").stdout == "every list has its count\n"


def test_consistency_is_told_in_nines(checked: Checked) -> None:
    assert "consistency: 100 % (at least 2.5 nines) of 1,000 entries" in call("verify").stdout
    checked.report.servers[0].wrong = 1
    assert "consistency: 99.90 % (3.0 nines) of 1,000 entries" in call("verify").stdout
    told = json.loads(call("verify", "--json").stdout)["consistency"]
    assert (told["looks"], told["wrong"], round(told["nines"], 3)) == (1_000, 1, 3.0)


def test_wrong_counts_are_shown_and_counted_anew_when_that_is_wanted(checked: Checked) -> None:
    checked.counts = [WrongCount(5, FRIEND, 7, 3, 1)]
    result = call("repair", "--dry-run")
    assert result.exit_code == 1
    assert "1 count is wrong; 0 mended" in result.stdout
    assert checked.recounted == 0
    assert call("repair", "--yes").exit_code == 0
    assert checked.recounted == 1
    told = json.loads(call("repair", "--json", "--yes").stdout)
    assert told["wrong_counts"] == [{"id1": 5, "atype": "friend", "stored": 7, "counted": 3}]
    assert told["recounted"] == 1
    assert call("repair", "--only", "inverses").exit_code == 0


def test_an_intent_that_stands_for_long_is_shown_and_settled_and_whoever_is_away_is_named(checked: Checked) -> None:
    checked.intents = [IntentRow(5, 9, (FRIEND,), 1, 0), IntentRow(6, 9, (FRIEND,), 1, 1)]
    checked.counts = [WrongCount(5, FRIEND, 7, 3, 1)]
    result = call("repair", "--dry-run")
    assert result.exit_code == 1
    assert "1970-01-01" in result.stdout
    assert "2 intents left over; 0 settled" in result.stdout
    checked.settled = [LeaderResult("leader-1", 1, 1), LeaderResult("leader-2", 1, 0, "it is away")]
    result = call("repair", "--yes")
    assert (result.exit_code, checked.recounted) == (1, 1), "what others can mend is mended"
    assert "leader-2: 0 of 1 mended: it is away" in result.stderr
    told = json.loads(call("repair", "--yes", "--json").stdout)
    assert (told["settled"], told["recounted"], told["unreachable"]) == (1, 1, ["leader-2"])
    assert [each["atypes"] for each in told["old_intents"]] == [["friend"], ["friend"]]
    assert told["leaders"][0] == {"server": "leader-1", "asked": 2, "mended": 2, "error": ""}


@pytest.mark.parametrize("sample", ["x", "5.5", "0%", "101%", "%", "-1"])
def test_a_sample_is_a_number_or_a_share(checked: Checked, sample: str) -> None:
    assert CliRunner().invoke(tao, ["verify", "--sample", sample]).exit_code == 2
    assert call("verify", "--sample", "5%").exit_code == 0


def test_a_sample_is_spread_over_all_entries() -> None:
    assert [Sample().stride(1_000), Sample(share=0.05).stride(1_000), Sample(10).stride(1_000)] == [1, 20, 100]
    assert Sample(10).stride(3) == 1
