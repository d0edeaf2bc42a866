"""The topology document's text, and every rule broken once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tao.model.errors import TopologyError
from tao.model.topology import DatabaseServer, Topology
from tao.routing.shard_map import Ring
from tao.routing.topology_changes import record_change
from tao.topology import document as document_module
from tao.topology.document import check_topology, decode_topology, dump_topology, encode_region, parse_topology

Document = dict[str, Any]  # Any: plain JSON, taken apart by the tests


def document_of(topology: Topology) -> Document:
    found: Document = json.loads(dump_topology(topology))
    return found


def web(document: Document) -> Document:
    tier: Document = document["regions"][0]["followers"][0]
    return tier


def test_a_document_survives_writing_and_reading(topology: Topology) -> None:
    text = dump_topology(topology)
    assert parse_topology(text, "t.json") == topology
    assert dump_topology(parse_topology(text.encode(), "t.json")) == text
    assert text.count("\n") > 50


def test_a_server_seen_from_another_region_has_the_addresses_that_are_good_there(topology: Topology) -> None:
    document = document_of(topology)
    document["regions"].append({**document["regions"][0], "name": "there", "tailers": []})
    document["regions"][1]["leaders"] = {"name": "leaders", "servers": [{"name": "l-9", "grpc": "a:9"}]}
    document["regions"][1]["followers"] = [{"name": "web", "servers": [{"name": "w-9", "grpc": "b:9"}]}]
    document["databases"][0]["servers"]["there"] = {"name": "db-there", "socket": "/run/db.sock"}
    seen_from(document["regions"][1]["leaders"]["servers"][0], "here", grpc="gate:1", frames="gate:2")
    seen_from(document["databases"][0]["servers"]["there"], "here", host="gate", port=3)
    document["regions"][0]["tailers"] = [{"name": "t-1", "database": "db", "admin": "a:3"}]
    parsed = parse_topology(json.dumps(document), "t.json")
    assert parse_topology(dump_topology(parsed), "t.json") == parsed

    leader = parsed.regions[1].leaders.servers[0]
    assert (leader.seen_from("here").grpc, leader.seen_from("here").frames) == ("gate:1", "gate:2")
    assert leader.seen_from("there") is leader
    server = parsed.databases[0].servers["there"]
    seen = server.seen_from("here")
    assert (seen.host, seen.port, seen.socket) == ("gate", 3, "")
    assert server.seen_from("there") is server


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"version": 1}', b"\xff\xfe"])
def test_what_is_no_document_is_refused_with_the_name_of_its_source(text: bytes | str) -> None:
    with pytest.raises(TopologyError, match=r"^t\.json(:\d+)?: "):
        parse_topology(text, "t.json")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            '{"version": 1,\n "shards": 16\n "regions": []}',
            "t.json:3: is not JSON: Expecting ',' delimiter, at column 2",
        ),
        ("version: 1\n", "t.json:1: is not JSON: Expecting value, at column 1"),
        ('{"version": 1,\n', "t.json:2: is not JSON: Expecting property name enclosed in double quotes, at column 1"),
        (b'{"version": 1, "shards": \xff}', "t.json: is not JSON: "),
        ('{"version": 1, "x": ' + "[" * 100_000, "t.json: "),
        ('{"version": "x"}', "t.json: Expected `int`, got `str` - at `$.version`"),
    ],
)
def test_what_is_no_json_is_refused_with_line_and_column(text: bytes | str, fault: str) -> None:
    with pytest.raises(TopologyError) as failed:
        parse_topology(text, "t.json")
    assert failed.value.message.startswith(fault)


def database(document: Document) -> Document:
    server: Document = document["databases"][0]["servers"]["here"]
    return server


def seen_from(server: Document, region: str, **address: object) -> None:
    server["reached_from"] = {region: address}


BROKEN: list[tuple[str, Callable[[Document], object], str]] = [
    ("version", lambda d: d.update(version=0), "versions start at 1"),
    ("shards", lambda d: d.update(shards=65_537), "65536"),
    ("no region", lambda d: d.update(regions=[]), "at least one"),
    ("unknown field", lambda d: web(d)["servers"][0].update(dwon=True), r"servers\[0\].dwon"),
    ("no followers", lambda d: d["regions"][0].update(followers=[]), "no follower tier"),
    ("no leaders", lambda d: d["regions"][0]["leaders"].update(servers=[]), "here/leaders: has no servers"),
    ("all weights 0", lambda d: [s.update(weight=0) for s in web(d)["servers"]], "here/web: .*weight"),
    ("bad name", lambda d: d["regions"][0].update(name="a b"), "'a b' is no name"),
    ("name twice", lambda d: web(d)["servers"][0].update(name="l-1"), "'l-1' is there 2 times"),
    ("tier twice", lambda d: web(d).update(name="leaders"), "'leaders' is there 2 times"),
    ("address", lambda d: web(d)["servers"][0].update(grpc="localhost"), "here/web/w-1.grpc: 'localhost' is no addr"),
    ("port", lambda d: web(d)["servers"][0].update(frames="h:70000"), "w-1.frames"),
    ("admin", lambda d: web(d)["servers"][0].update(admin=":80"), "w-1.admin"),
    ("moved to nobody", lambda d: web(d)["moved"].update({"3": []}), "moved.3: names no server"),
    ("moved twice", lambda d: web(d)["moved"].update({"3": ["w-1", "w-1"]}), "moved.3: names a server twice"),
    ("moved away", lambda d: web(d)["moved"].update({"3": ["l-1"]}), "'l-1' is not a server of this tier"),
    ("moved shard", lambda d: web(d)["moved"].update({"16": ["w-1"]}), "moved.16: there is no such shard"),
    ("overlap", lambda d: d["databases"][0].update(shards=[[0, 12], [12, 15]]), "shard 12 belongs to db already"),
    ("hole", lambda d: d["databases"][0].update(shards=[[0, 11], [13, 15]]), "none holds shard 12"),
    ("range", lambda d: d["databases"][0].update(shards=[[0, 16]]), "no range within 0 to 15"),
    ("backward", lambda d: d["databases"][0].update(shards=[[15, 0]]), "no range"),
    ("master", lambda d: d["databases"][0].update(master_region="there"), "no region 'there'"),
    ("no server", lambda d: d["databases"][0].update(servers={}), "none in region 'here'"),
    ("viewpoint", lambda d: seen_from(web(d)["servers"][0], "there", grpc="h:1"), "w-1.reached_from: there is no reg"),
    ("view address", lambda d: seen_from(web(d)["servers"][0], "here", grpc="h"), "w-1.reached_from.here.grpc: 'h'"),
    ("database view", lambda d: seen_from(database(d), "there", host="h", port=1), "db-here.reached_from: there is no"),
    ("database view port", lambda d: seen_from(database(d), "here", host="h", port=0), "here: needs a host and a port"),
    ("tailer", lambda d: d["regions"][0].update(tailers=[{"name": "t", "database": "x"}]), "no database 'x'"),
    ("tailer name", lambda d: d["regions"][0].update(tailers=[{"name": "l-1", "database": "db"}]), "'l-1' is there 2"),
    ("change from later", lambda d: d.update(changes=[{"version": 2}]), "changes/2: versions ascend"),
    ("changes in disorder", lambda d: d.update(version=9, changes=[{"version": 5}, {"version": 5}]), "changes/5: vers"),
    ("change outside", lambda d: d.update(changes=[{"version": 1, "leaders": {"a": "3,0-16"}}]), "'3,0-16' is not of"),
    ("change backward", lambda d: d.update(changes=[{"version": 1, "leaders": {"a": "5-3"}}]), "'5-3' is not of"),
    ("change too long", lambda d: d.update(changes=[{"version": 1, "leaders": {"a": "9" * 5000}}]), "is not of shards"),
    ("change of no shards", lambda d: d.update(changes=[{"version": 1, "leaders": {"a": "x"}}]), "1.leaders.a: 'x' is"),
    ("database port", lambda d: d["databases"][0]["servers"]["here"].update(port=0), "db-here: needs a socket"),
]


@pytest.mark.parametrize(("edit", "complaint"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_rule_is_named_with_its_place(
    topology: Topology, edit: Callable[[Document], object], complaint: str
) -> None:
    document = document_of(topology)
    edit(document)
    with pytest.raises(TopologyError, match=complaint):
        parse_topology(json.dumps(document), "t.json")


def test_many_faults_are_listed_up_to_ten(topology: Topology) -> None:
    document = document_of(topology)
    web(document)["moved"] = {str(shard): [] for shard in range(15)}
    with pytest.raises(TopologyError, match="and 5 more"):
        parse_topology(json.dumps(document), "t.json")


class CountedName(str):
    """A name that counts how often it is compared."""

    comparisons = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def test_thousands_of_names_are_checked_with_a_number_of_comparisons_that_grows_linearly() -> None:
    """9,000 servers took 81 million comparisons, 4 s."""
    names: list[str] = [CountedName(f"server-{number}") for number in range(2_000)]
    CountedName.comparisons = 0
    assert list(document_module._name_faults("servers", names)) == []
    assert CountedName.comparisons <= 2 * len(names)


def test_checking_a_document_builds_no_rings(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "__init__", lambda *_: pytest.fail("a ring was built"))
    assert parse_topology(dump_topology(topology), "t.json") == topology


def test_the_part_of_a_region_has_its_servers_and_all_databases_and_no_marks_or_changes(topology: Topology) -> None:
    there = msgspec.structs.replace(topology.regions[0], name="there")
    marked = msgspec.structs.replace(
        topology, regions=(*topology.regions, there), marked_by_watcher=("w-1",), changes=()
    )
    part = decode_topology(encode_region(marked, "there"), "server")
    assert part.regions == (there,)
    assert (part.version, part.shards, part.databases) == (topology.version, topology.shards, topology.databases)
    assert (part.marked_by_watcher, part.changes) == ((), None)
    with pytest.raises(TopologyError, match=r"no region 'nowhere' .*: its regions are here, there$"):
        encode_region(marked, "nowhere")


def test_a_standby_is_written_only_where_there_is_one(topology: Topology) -> None:
    assert "standbys" not in document_of(topology)["databases"][0]
    (database,) = topology.databases
    with_standby = msgspec.structs.replace(database, standbys={"here": DatabaseServer(name="db-2")})
    found = msgspec.structs.replace(topology, databases=(with_standby,))
    assert parse_topology(dump_topology(found), "here") == found
    for standbys, fault in (
        ({"there": DatabaseServer(name="db-2")}, "databases/db.standbys: there is no region 'there'"),
        ({"here": DatabaseServer(name="db-here")}, "'db-here' is there 2 times"),
        ({"here": DatabaseServer(name="db-2", port=0)}, "databases/db/db-2: needs a socket"),
    ):
        broken = msgspec.structs.replace(database, standbys=standbys)
        with pytest.raises(TopologyError, match=fault):
            check_topology(msgspec.structs.replace(topology, databases=(broken,)))


def test_what_a_server_sends_may_have_fields_of_a_later_version(topology: Topology) -> None:
    document = document_of(topology)
    document["colour"] = "blue"
    assert decode_topology(json.dumps(document), "server") == topology
    with pytest.raises(TopologyError, match=r"there is no such field: \$.colour"):
        parse_topology(json.dumps(document), "t.json")


def test_changes_are_written_only_into_a_document_that_records_them(topology: Topology) -> None:
    """Programs of earlier versions refuse the field."""
    assert "changes" not in document_of(topology)
    begun = msgspec.structs.replace(topology, changes=())
    assert document_of(begun)["changes"] == []
    recorded = record_change(begun, msgspec.structs.replace(begun, version=2))
    assert document_of(recorded)["changes"] == [{"version": 2, "leaders": {}, "databases": []}]
    assert parse_topology(dump_topology(recorded), "t.json") == recorded
