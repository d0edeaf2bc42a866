"""`tao audit verify`, and the records that commands make of what they change."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from tao.admin.documents import read_schema
from tao.cli import frame
from tao.cli.commands import tao
from tao.observability.audit_log import AuditFile
from tao.observability.audit_records import AuditEvent
from tests.rigs.audit_rig import read_records

EXAMPLE = Path(__file__).parents[3] / "config" / "topology.example.json"


def call(*arguments: object, typed: str = "") -> Result:
    return CliRunner().invoke(tao, list(map(str, arguments)), input=typed, catch_exceptions=False)


def write(path: Path, count: int, max_bytes: int = 1 << 20) -> str:
    file = AuditFile(path, max_bytes)
    file.open()
    for number in range(count):
        file.append([AuditEvent(time_ms=number, server="s", caller="operator/ann", action="invalidate")])
    file.close()
    return file.end.hash


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_a_whole_log_in_several_files_is_checked_in_any_order_against_its_newest_hash(path: Path) -> None:
    newest = write(path, 6, max_bytes=1_200)
    files = sorted(path.parent.glob("audit.jsonl*"), reverse=True)
    assert len(files) == 3
    result = call("audit", "verify", *files, "--newest", newest)
    assert (result.exit_code, result.stdout) == (0, f"whole: 6 records, the newest is 6 with hash {newest}\n")
    assert "--newest" in call("audit", "verify", *files).stdout, "it says what was not checked"
    oldest = path.with_name("audit.jsonl.000000000001")
    rest = [each for each in files if each != oldest]
    gone = call("audit", "verify", *rest, "--json")
    assert (gone.exit_code, json.loads(gone.stdout)["fault"]) == (1, "gap")
    before = read_records(oldest)[-1]["hash"]
    assert call("audit", "verify", *rest, "--after", before, "--newest", newest).exit_code == 0


def test_the_first_line_that_does_not_fit_is_named_with_its_file(path: Path) -> None:
    newest = write(path, 4, max_bytes=1_200)
    former = path.with_name("audit.jsonl.000000000001")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"ann", b"bob"))
    result = call("audit", "verify", former, path, "--newest", newest)
    assert result.exit_code == 1
    assert (
        result.stdout
        == f"not whole after 3 records: {path}:2: changed: record 4 does not have the hash that it names\n"
    )
    assert json.loads(call("audit", "verify", former, path, "--json").stdout) == {
        "whole": False,
        "records": 3,
        "newest": {"seq": 3, "hash": json.loads(lines[0])["hash"]},
        "fault": "changed",
        "file": str(path),
        "line": 2,
        "detail": "record 4 does not have the hash that it names",
    }


@pytest.mark.parametrize(("cut", "fault"), [(1, "torn"), (30, "torn"), (None, "truncated")])
def test_a_log_that_is_cut_off_is_not_whole(path: Path, cut: int | None, fault: str) -> None:
    newest = write(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 1] if cut is None else whole[:-cut])
    result = call("audit", "verify", path, "--newest", newest, "--json")
    assert (result.exit_code, json.loads(result.stdout)["fault"]) == (1, fault)
    assert call("audit", "verify", path).exit_code == (0 if cut is None else 1)


def test_a_wrong_hash_or_file_is_a_mistake_in_one_line(path: Path) -> None:
    write(path, 1)
    assert "64 hexadecimal digits" in call("audit", "verify", path, "--newest", "abc").stderr
    missing = call("audit", "verify", path.with_name("missing.jsonl"))
    assert (missing.exit_code, "missing.jsonl" in missing.stderr) == (2, True)


# ---- the records of commands -----------------------------------------------------------------------------------------


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    file = tmp_path / "topology.json"
    file.write_bytes(EXAMPLE.read_bytes())
    return file


def test_a_command_records_what_it_changes_before_and_after(path: Path, topology: Path) -> None:
    mark = ("topology", "mark-down", "east-leader-1", "--topology", topology)
    assert call("--audit-log", path, *mark, "--yes").exit_code == 0
    assert call("--audit-log", path, *mark, typed="n\n").exit_code == 0, "nothing to change, nothing asked"
    begun, ended = read_records(path)
    assert begun["api"]["operation"] == ended["api"]["operation"] == "topology mark-down"
    assert begun["actor"]["user"]["name"].startswith("operator/")
    assert [(each["unmapped"]["phase"], each["status_id"]) for each in (begun, ended)] == [("begun", 0), ("ended", 1)]
    assert begun["unmapped"]["name"] == "east-leader-1"
    assert begun["unmapped"]["topology"] == str(topology)
    assert call("audit", "verify", path, "--newest", ended["hash"]).exit_code == 0


def test_what_is_not_confirmed_or_changes_nothing_is_not_recorded(path: Path, topology: Path) -> None:
    mark = ("topology", "mark-down", "east-leader-1", "--topology", topology)
    assert call("--audit-log", path, *mark, typed="n\n").exit_code == 1
    assert call("--audit-log", path, "topology", "show", "--topology", topology).exit_code == 0
    assert not path.exists()


def test_a_command_that_fails_is_recorded_with_its_reason_and_no_secret(
    path: Path, topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAO_AUDIT_LOG", str(path))
    monkeypatch.setenv("TAO_TOKEN", "a-secret")
    monkeypatch.setenv("TAO_ADMIN_PASSWORD", "another-secret")
    failed = call("migrate", "--topology", topology, "--schema", EXAMPLE.with_name("schema.yaml"), "--yes")
    assert failed.exit_code != 0
    assert [each["status_id"] for each in read_records(path)] == [0, 2]
    assert "secret" not in path.read_text()


def test_a_new_token_is_recorded_with_its_role_and_id_and_without_the_secret(path: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    made = call("--audit-log", path, "token", "new", "ann", "--role", "operator", "--file", tokens)
    assert made.exit_code == 0
    begun, ended = read_records(path)
    assert begun["api"]["operation"] == ended["api"]["operation"] == "token new"
    assert (begun["unmapped"]["phase"], ended["unmapped"]["phase"], ended["status_id"]) == ("begun", "ended", 1)
    assert (begun["unmapped"]["role"], begun["unmapped"]["caller"], ended["unmapped"]["id"]) == (
        "operator",
        "ann",
        "ann-1",
    )
    assert made.stdout.strip() not in path.read_text()


def test_no_token_is_made_that_cannot_be_recorded(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    tokens, out = tmp_path / "tokens.yaml", tmp_path / "ann.token"
    refused = call(*("--audit-log", path, "token", "new", "ann", "--role", "operator", "--file", tokens, "--out", out))
    assert (refused.exit_code, tokens.exists(), out.exists()) == (2, False, False)


def test_a_load_is_recorded_though_it_asks_nothing(path: Path, tmp_path: Path) -> None:
    rows = tmp_path / "users.csv"
    rows.write_text("key,name\n1,Ann\n")
    load = ("load", "objects", rows, "--otype", "user", "--key", "key", "--connect", tmp_path / "no-topology.json")
    assert call("--audit-log", path, *load).exit_code != 0
    assert [(each["api"]["operation"], each["status_id"]) for each in read_records(path)] == [
        ("load objects", 0),
        ("load objects", 2),
    ]


def test_values_of_fields_are_not_recorded(path: Path, tmp_path: Path) -> None:
    add = ("add", "object", "user", "name=Ann Smith", "--connect", tmp_path / "no-topology.json")
    assert call("--audit-log", path, *add).exit_code != 0
    assert [each["api"]["operation"] for each in read_records(path)] == ["add object"] * 2
    assert "Smith" not in path.read_text()


@pytest.mark.parametrize("assignment", ["external_id=S3cret", "S3cret"])
def test_a_value_that_does_not_fit_its_field_is_in_no_record(
    path: Path, assignment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = SimpleNamespace(schema=read_schema(EXAMPLE.with_name("schema.yaml"))[0], obj_add=None)
    monkeypatch.setattr("tao.cli.graph.on_graph", lambda work: asyncio.run(work(graph)))
    failed = call("--audit-log", path, "add", "object", "page", assignment)
    assert "S3cret" in failed.stderr, "the person who typed it sees what is wrong"
    assert [each.get("status_code") for each in read_records(path)] == [None, "INVALID_FIELD"]
    assert "S3cret" not in path.read_text()


CHANGES_NOTHING = {
    *("access check", "access explain", "arenas", "audit verify", "backup binlogs", "backup create", "backup verify"),
    *(
        "count",
        "counter",
        "demo",
        "doctor",
        "export edges",
        "export nodes",
        "export objects",
        "follower",
        "get",
        "history",
    ),
    *("jobs list", "jobs show", "journal parked", "journal status", "leader", "list", "ready", "schema check"),
    *("schema show", "sets", "shard hot", "stats", "status", "story", "tailer", "token list", "topology export"),
    *("topology show", "verify", "watcher", "worker"),
}
"""Commands that are not recorded: they change nothing in the cluster, or are servers, which keep logs of their own."""


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for each in list(command.commands):
        found = command.commands[each]
        yield from leaves(found, f"{name} {each}".strip())


def begins(function: object, seen: set[object]) -> bool:
    """Return whether a function, or one of its module that it refers to, records that it begins."""
    if not inspect.isfunction(function) or function in seen:
        return False
    seen.add(function)
    module = sys.modules[function.__module__]
    found = [getattr(module, name, None) for name in function.__code__.co_names]
    return any(each in (frame.ask, frame.begin) or begins(each, seen) for each in found)


def test_every_command_that_changes_something_records_it() -> None:
    silent = {
        name
        for name, command in leaves(tao)
        if not name.startswith("dev ") and not begins(inspect.unwrap(command.callback or print), set())
    }
    assert silent == CHANGES_NOTHING


def test_nothing_is_changed_that_cannot_be_recorded(path: Path, topology: Path) -> None:
    path.mkdir()
    before = topology.read_bytes()
    result = call(*("--audit-log", path, "topology", "mark-down", "east-leader-1", "--topology", topology, "--yes"))
    assert (result.exit_code, topology.read_bytes()) == (2, before)
    assert "nothing was changed" in result.stderr
