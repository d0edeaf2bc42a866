"""The checks of `tao doctor`: each finds its mistake in the facts, and nothing in a good installation."""

from __future__ import annotations

import configparser
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tao.admin.diagnosis import (
    REQUIRED_OPTIONS,
    DatabaseFacts,
    Facts,
    FileFacts,
    JournalFacts,
    Problem,
    ServerFacts,
    diagnose,
)
from tao.admin.diagnosis_facts import files_of

CONFIG = Path(__file__).resolve().parents[3] / "config"
OPTIONS = {name: accepted[0] for name, accepted in REQUIRED_OPTIONS["mariadb"].items()}


def server(name: str) -> ServerFacts:
    return ServerFacts(name, "leader", topology_version=3, schema_hash="abc", version="1.0", clock_ahead_seconds=0.1)


def database(name: str, number: int, **options: str) -> DatabaseFacts:
    found = OPTIONS | {"server_id": str(number)} | options
    return DatabaseFacts(name, "db-1", flavour="mariadb", version=(10, 11, 19), options=tuple(found.items()))


GOOD = Facts(
    3,
    (
        replace(server("a"), journal=JournalFacts(oldest_seconds=2.0)),
        server("b"),
        server("c"),
        replace(server("w-1"), role="watcher"),
        replace(server("w-2"), role="watcher"),
    ),
    (database("db-a", 1), database("db-b", 2)),
    (
        FileFacts("/s.yaml", "secret", mode=0o600),
        FileFacts("/etc/tao/s.yaml", "secret", mode=0o640),
        FileFacts("/spool", "folder", mode=0o700, free_mb=9_000),
    ),
)


def problems(facts: Facts) -> dict[str, list[Problem]]:
    return {finding.check: finding.problems for finding in diagnose(facts) if finding.problems}


def test_a_good_installation_has_no_problem_and_everything_was_looked_at() -> None:
    assert problems(GOOD) == {}
    assert all(finding.examined for finding in diagnose(GOOD))


def test_without_facts_nothing_is_called_good() -> None:
    assert {finding.examined for finding in diagnose(Facts(3))} == {0}


SERVERS = [
    ("ports of servers accept connections", {"silent_ports": ("grpc port h:1 does not answer: refused",)}, "grpc port"),
    ("clocks agree", {"clock_ahead_seconds": -4.9}, "5.0 s behind"),
    ("servers run one version", {"version": "0.9"}, "0.9"),
    ("servers use one topology", {"topology_version": 2}, "topology 2, not 3"),
    ("servers use one schema", {"schema_hash": "other"}, "other"),
    ("journals of followers", {"journal": JournalFacts(oldest_seconds=600.0, is_late=True)}, "600 s"),
    ("journals of followers", {"journal": JournalFacts(parked=2)}, "2 accepted writes"),
    ("journals of followers", {"journal": JournalFacts(lost=1)}, "set aside"),
    ("journals of followers", {"journal": JournalFacts(trouble="disk full")}, "disk full"),
    ("journals of followers", {"journal": JournalFacts(uncopied="near-2 is down")}, "near-2 is down"),
]


@pytest.mark.parametrize(("check", "change", "said"), SERVERS)
def test_a_mistake_of_one_server_is_named(check: str, change: dict[str, object], said: str) -> None:
    changed = replace(GOOD.servers[0], **change)  # type: ignore[arg-type]  # each case has its own field
    found = problems(replace(GOOD, servers=(changed, *GOOD.servers[1:])))
    assert list(found) == [check]
    assert [(each.subject, said in each.problem) for each in found[check]] == [("a", True)]
    assert found[check][0].remedy


def test_a_watcher_that_others_cannot_ask_is_named_and_a_single_one_is_not() -> None:
    *others, other, unheard = GOOD.servers
    unheard = replace(unheard, is_heard=False)
    (problem,) = problems(replace(GOOD, servers=(other, unheard)))["watchers can be asked"]
    assert (problem.subject, "frames address" in problem.remedy) == ("w-2", True)
    assert problems(replace(GOOD, servers=(*others, unheard))) == {}


DATABASES = [
    ("options of databases", database("db-b", 2, binlog_row_image="MINIMAL"), "binlog_row_image is MINIMAL, not FULL"),
    ("leases of databases", replace(database("db-b", 2), has_abandoned_lease=True), "keeps no lease"),
    ("server ids of databases", database("db-b", 1), "share server_id 1"),
    ("versions of databases", replace(database("db-b", 2), version=(10, 6, 1)), "mariadb 10.6.1"),
    ("databases answer", DatabaseFacts("db-b", "db-1", error="refused"), "refused"),
]


@pytest.mark.parametrize(("check", "changed", "said"), DATABASES)
def test_a_mistake_of_one_database_is_named(check: str, changed: DatabaseFacts, said: str) -> None:
    found = problems(replace(GOOD, databases=(GOOD.databases[0], changed)))
    assert list(found) == [check]
    assert said in found[check][0].problem


FILES = [
    ("rights of files", FileFacts("/f", "secret", mode=0o644), "chmod g-w,o= /f"),
    ("rights of files", FileFacts("/f", "secret", mode=0o660), "chmod g-w,o= /f"),
    ("rights of files", FileFacts("/f", "document", mode=0o666), "chmod o-w /f"),
    ("rights of files", FileFacts("/f", "document", error="it cannot be used: no such file"), "create it"),
    ("room on disks", FileFacts("/f", "folder", mode=0o700, free_mb=10), "make room"),
]


@pytest.mark.parametrize(("check", "file", "remedy"), FILES)
def test_a_mistake_of_one_file_is_named(check: str, file: FileFacts, remedy: str) -> None:
    found = problems(replace(GOOD, files=(*GOOD.files, file)))
    assert list(found) == [check]
    assert remedy in found[check][0].remedy


@pytest.mark.parametrize(("flavour", "section"), [("mariadb", "mariadbd"), ("mysql", "mysqld")])
def test_the_option_files_pass_the_check_of_options(flavour: str, section: str) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(CONFIG / f"{flavour}.cnf")
    given = dict(parser[section])
    # The file names the binlog's files, or uses a number, where the server shows ON; what it leaves out is a default.
    given |= {name: "ON" for name in ("log_bin", "log_slave_updates") if given.get(name) in ("binlog", "1")}
    required = {name: accepted[0] for name, accepted in REQUIRED_OPTIONS[flavour].items()}
    assert {name: given.get(name, value) for name, value in required.items()} == required


def test_a_settings_file_names_what_is_looked_at(tmp_path: Path) -> None:
    settings = tmp_path / "leader.yaml"
    (tmp_path / "spool").mkdir()
    settings.write_text("topology_file: topology.json\nspool: {folder: spool}\ntls: {private_key: key.pem}\n")
    settings.chmod(0o600)
    found = {Path(file.path).name: file for file in files_of(settings)}
    assert {name: file.kind for name, file in found.items()} == {
        "leader.yaml": "secret", "topology.json": "document", "key.pem": "secret", "spool": "folder",
    }  # fmt: skip
    assert "cannot be used" in found["key.pem"].error
    assert found["spool"].free_mb is not None


def test_the_guide_explains_every_check_and_no_other() -> None:
    page = (CONFIG.parent / "docs/how-to/check-an-installation.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert rows == ["check", *(finding.check for finding in diagnose(GOOD))]


def test_a_lease_that_was_given_up_counts_for_nobody_where_no_other_server_can_become_master() -> None:
    alone = replace(database("db-a", 1), has_abandoned_lease=True)
    assert problems(replace(GOOD, databases=(alone,))) == {}
