"""`tao topology` shows the document, and changes it after a confirmation and never over a concurrent change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.topology import edits
from tao.topology.document import dump_topology, parse_topology

SHARDS = 8
SCHEMA = Path(__file__).parents[3] / "config" / "schema.yaml"


def servers(*names: str) -> tuple[CacheServer, ...]:
    return tuple(CacheServer(name=name, grpc=f"127.0.0.1:{7000 + index}") for index, name in enumerate(names))


def region(name: str) -> Region:
    letter = name[0]
    return Region(
        name=name,
        leaders=Tier(name="leaders", servers=servers(f"{letter}-leader-1", f"{letter}-leader-2")),
        followers=(Tier(name=f"{name}-web", servers=servers(f"{letter}-1a", f"{letter}-1b")),),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    databases = {name: DatabaseServer(name=f"db-{name}") for name in ("east", "west")}
    database = Database(name="db", master_region="east", servers=databases, shards=((0, SHARDS - 1),))
    path = tmp_path / "topology.json"
    topology = Topology(version=1, shards=SHARDS, regions=(region("east"), region("west")), databases=(database,))
    path.write_text(dump_topology(topology))
    return path


def call(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tao, ["topology", *arguments, "--topology", str(file)], catch_exceptions=False)


def stored(file: Path) -> Topology:
    return parse_topology(file.read_bytes(), str(file))


def changed(file: Path, *arguments: str) -> dict[str, Any]:
    result = call(file, *arguments, "--yes", "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["version"] == stored(file).version
    return found


def test_it_shows_every_server_with_its_shards(file: Path) -> None:
    shown = call(file, "show").stdout
    for name in ("e-leader-1", "w-1b", "db-west", "version 1, 8 shards"):
        assert name in shown
    assert json.loads(call(file, "show", "--json").stdout)["shards"] == SHARDS


def test_a_range_of_one_shard_is_shown_as_its_number(file: Path) -> None:
    document = stored(file)
    servers = {name: DatabaseServer(name=f"other-{name}") for name in ("east", "west")}
    (one,) = document.databases
    other = Database(name="other", master_region="east", servers=servers, shards=((1, 1), (3, 5)))
    one = msgspec.structs.replace(one, shards=((0, 0), (2, 2), (6, 7)))
    file.write_text(dump_topology(msgspec.structs.replace(document, databases=(one, other))))
    lines = call(file, "show").stdout.splitlines()
    shards = {line.split()[0]: line for line in lines if line.startswith(("db ", "other "))}
    assert " 0, 2, 6-7 " in shards["db"]
    assert " 1, 3-5 " in shards["other"]


def test_a_document_that_cannot_be_imported_is_named_with_the_place_of_its_fault(file: Path, tmp_path: Path) -> None:
    good, bad, schema = file, tmp_path / "bad.json", tmp_path / "bad.yaml"
    bad.write_text('{"version": 1,\n "shards" 16}')
    schema.write_text("format: 1\nobjects: {user: [\n")
    for arguments, place in (
        ((str(bad),), f"tao: {bad}:2: is not JSON: "),
        ((str(good), "--schema", str(schema)), f"tao: {schema}:"),
        ((str(good), "--access", str(schema)), f"tao: {schema}:"),
    ):
        result = CliRunner().invoke(tao, ["topology", "import", *arguments, "--topology", str(file), "--yes"])
        assert result.exit_code == 2
        assert result.stderr.startswith(place)


def test_addresses_of_a_server_are_one_column_and_show_its_host_once(file: Path) -> None:
    changed(
        file, *("add-server", "e-1c", "--tier", "east-web"), *("--grpc", "10.0.0.9:7000", "--admin", "10.0.0.9:7002")
    )
    changed(file, *("add-server", "e-1d", "--tier", "east-web"), *("--grpc", "10.0.0.9:7010", "--admin", "[::1]:7002"))
    shown = call(file, "show").stdout
    assert "10.0.0.9 grpc:7000 admin:7002 " in shown
    assert "grpc:10.0.0.9:7010 admin:[::1]:7002 " in shown
    assert "127.0.0.1 grpc:7000 " in shown


def test_a_server_is_marked_down_and_up_again(file: Path) -> None:
    for name in ("e-1a", "w-leader-2", "db-west"):
        mark, *moves = changed(file, "mark-down", name)["changes"]
        assert mark == {"what": name, "before": said(file, name, "up"), "after": said(file, name, "down")}
        # Only shards of a leader are somebody else's meanwhile.
        assert [(move["before"], move["after"]) for move in moves] == [("w-leader-2", "w-leader-1")] * len(moves)
        assert bool(moves) == (name == "w-leader-2")
        assert len(changed(file, "mark-up", name)["changes"]) == 1 + len(moves)
    assert stored(file).version == 7
    assert call(file, "mark-down", "nobody", "--yes").exit_code == 2


def said(file: Path, name: str, state: str) -> str:
    places = {
        "e-1a": "east/east-web 127.0.0.1:7000",
        "w-leader-2": "west/leaders 127.0.0.1:7001",
        "db-west": "db in west",
    }
    return f"{places[name]} {state}"


def test_a_shard_is_moved_and_given_back_and_its_new_hosts_are_shown(file: Path) -> None:
    found = changed(file, "move-shard", "3", "e-1b", "e-1a", "--tier", "east-web")
    assert stored(file).regions[0].followers[0].moved == {3: ("e-1b", "e-1a")}
    assert [change["what"] for change in found["changes"]] == ["east/east-web shard 3"]
    assert found["changes"][0]["after"] == "e-1b, e-1a"
    changed(file, "unmove-shard", "3", "--tier", "east/east-web")
    assert stored(file).regions[0].followers[0].moved == {}
    home = changed(file, "move-shard", "3", found["changes"][0]["before"], "--tier", "east-web")
    assert [change["what"] for change in home["changes"]] == ["mapped by hand"]
    result = call(file, "unmove-shard", "4", "--tier", "east-web", "--yes")
    assert (result.exit_code, "not mapped by hand" in result.stderr) == (2, True)


def test_a_tier_that_several_regions_have_is_named_with_its_region(file: Path) -> None:
    result = call(file, "move-shard", "3", "e-leader-1", "--tier", "leaders", "--yes")
    assert (result.exit_code, "east/leaders, west/leaders" in result.stderr) == (2, True)
    changed(file, "move-shard", "3", "w-leader-1", "--tier", "west/leaders")
    assert stored(file).regions[1].leaders.moved == {3: ("w-leader-1",)}
    assert call(file, "move-shard", "3", "x", "--tier", "no-such", "--yes").exit_code == 2


def test_a_server_joins_and_leaves_and_the_shards_that_move_are_shown(file: Path) -> None:
    before = stored(file).regions
    joined = changed(file, "add-server", "e-1c", "--tier", "east-web", "--grpc", "127.0.0.1:7100")
    assert joined["changes"][0] == {"what": "e-1c", "before": "-", "after": "east/east-web 127.0.0.1:7100 up"}
    assert all(change["after"] == "e-1c" for change in joined["changes"][1:])
    again = call(file, "add-server", "e-1c", "--tier", "west-web", "--grpc", "127.0.0.1:7101", "--yes")
    assert (again.exit_code, again.stderr.startswith("tao: there is a server 'e-1c' already")) == (2, True)
    changed(file, "remove-server", "e-1c")
    assert stored(file).regions == before


def test_nothing_is_stored_without_a_yes(file: Path) -> None:
    result = call(file, "mark-down", "e-1a")
    assert (result.exit_code, "there is no input to ask for confirmation: repeat with --yes" in result.stderr) == (
        2,
        True,
    )
    assert "Store this as version 2" in result.stderr
    assert "down" in result.stdout
    assert stored(file).version == 1


def test_a_concurrent_change_is_not_overwritten(file: Path) -> None:
    other = edits.mark_server(stored(file), "w-1a", down=True)

    def somebody_else(*_: Any) -> None:
        file.write_text(dump_topology(other))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tao.cli.topology.ask", somebody_else)
        result = call(file, "mark-down", "e-1a")
    assert (result.exit_code, "changed meanwhile" in result.stderr) == (2, True)
    assert stored(file) == other


def test_a_record_of_changes_begins_once_and_has_every_later_change(file: Path) -> None:
    changed(file, "mark-down", "e-leader-1")
    assert "changes" not in json.loads(file.read_text()), "programs of earlier versions read the document"
    (begun,) = changed(file, "record-changes")["changes"]
    assert begun == {"what": "recorded changes", "before": "none", "after": "the last 64"}
    changed(file, "mark-up", "e-leader-1")
    changed(file, "mark-down", "w-1a")
    recorded = stored(file).changes or ()
    assert [(each.version, list(each.leaders)) for each in recorded] == [(3, []), (4, ["east"]), (5, [])]
    assert changed(file, "record-changes")["changes"] == []


def test_a_document_is_exported_and_imported_under_a_higher_version(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    assert call(file, "export", str(copy), "--json").stdout == json.dumps({"topology": str(copy)}, indent=2) + "\n"
    assert copy.read_text() == file.read_text()
    changed(file, "mark-down", "e-1a")
    assert changed(file, "import", str(copy)) == {"version": 3}
    assert not stored(file).tiers[1].tier.servers[0].down
    assert changed(file, "import", str(copy), "--above", "57") == {"version": 58}
    elsewhere = tmp_path / "elsewhere.json"
    assert changed(elsewhere, "import", str(file)) == {"version": 58}
    assert elsewhere.read_text() == file.read_text()


def test_what_lies_beside_a_topology_file_is_not_imported_or_exported(file: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    for arguments, why in (
        (("import", str(file), "--schema", str(SCHEMA), "--yes"), "the schema beside it is a file"),
        (("export", str(tmp_path / "t.json"), "--schema", str(tmp_path / "s.yaml")), "leave out the option for it"),
        (("import", str(tmp_path / "wrong.json"), "--yes"), "wrong.json: Object missing"),
    ):
        result = call(file, *arguments)
        assert result.exit_code == 2
        assert why in result.stderr


def test_an_export_that_cannot_be_written_is_reported_in_one_line(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "none" / "topology.json"
    result = call(file, "export", str(out))
    assert (result.exit_code, result.stderr) == (2, f"tao: {out}: cannot be written: No such file or directory\n")
