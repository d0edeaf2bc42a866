"""The topology document and its sections say the same, and one change touches few of them."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import TopologyError
from tao.model.topology import (
    CacheServer,
    Database,
    DatabaseAddress,
    DatabaseServer,
    RecordedChange,
    Region,
    ServerAddress,
    TailerProcess,
    Tier,
    Topology,
    WatcherProcess,
)
from tao.topology.document import check_topology, dump_topology
from tao.topology.edits import mark_any, move_shard
from tao.topology.sections import HEAD, sections_of, topology_of

REGIONS = ("east", "west")


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    shards = draw(st.integers(1, 700))
    regions = REGIONS[: draw(st.integers(1, 2))]
    far = regions[-1]

    def cache_server(name: str) -> CacheServer:
        views = {far: ServerAddress(grpc="far:1", frames="far:2")} if draw(st.booleans()) else {}
        weight, down = draw(st.sampled_from((1.0, 2.5))), draw(st.booleans())
        return CacheServer(name=name, grpc="127.0.0.1:1", weight=weight, down=down, reached_from=views)

    def tier(region: str, name: str) -> Tier:
        names = [f"{region}-{name}-{number}" for number in range(draw(st.integers(1, 3)))]
        hosts = st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True).map(tuple)
        mappings = st.dictionaries(st.integers(0, shards - 1), hosts, max_size=5)
        moved, told = draw(mappings), draw(mappings)
        servers = tuple(map(cache_server, names))
        return Tier(name=name, servers=servers, moved=moved, told=told, cloned_by_watcher=tuple(sorted(moved)[:2]))

    def region(name: str) -> Region:
        return Region(
            name=name,
            leaders=tier(name, "leaders"),
            followers=tuple(tier(name, f"tier.{number}") for number in range(draw(st.integers(1, 2)))),
            tailers=tuple(
                TailerProcess(name=f"{name}-tailer", database="db-0") for _ in range(draw(st.integers(0, 1)))
            ),
            watchers=tuple(WatcherProcess(name=f"{name}-watcher") for _ in range(draw(st.integers(0, 1)))),
        )

    def database(number: int, first: int, last: int) -> Database:
        views = {far: DatabaseAddress(host="far", port=1)} if draw(st.booleans()) else {}
        return Database(
            name=f"db-{number}",
            master_region=draw(st.sampled_from(regions)),
            servers={each: DatabaseServer(name=f"{each}-{number}", reached_from=views) for each in regions},
            shards=((first, last),),
            version_epoch=draw(st.integers(1, 9)),
            semi_sync=draw(st.booleans()),
            standbys={each: DatabaseServer(name=f"{each}-{number}-2") for each in regions if draw(st.booleans())},
        )

    middle = draw(st.integers(0, shards - 1))
    ranges = [(0, middle), (middle + 1, shards - 1)] if middle < shards - 1 else [(0, middle)]
    version = draw(st.integers(1, 50))
    changes = tuple(RecordedChange(version=each, leaders={"east": "0"}) for each in range(max(1, version - 2), version))
    return Topology(
        version=version,
        shards=shards,
        regions=tuple(map(region, regions)),
        databases=tuple(database(number, *each) for number, each in enumerate(ranges)),
        marked_by_watcher=("east-leaders-0",) if draw(st.booleans()) else (),
        changes=draw(st.sampled_from((None, changes))),
    )


@given(topologies(), st.randoms(use_true_random=False))
def test_a_document_follows_from_its_sections_in_any_order(topology: Topology, order: random.Random) -> None:
    check_topology(topology)
    sections = list(sections_of(topology).items())
    order.shuffle(sections)
    found = topology_of(dict(sections), "here")
    assert found == topology
    assert dump_topology(found) == dump_topology(topology)
    assert sections_of(found) == dict(sections)


@given(topologies())
def test_a_change_touches_its_own_sections_and_the_head(topology: Topology) -> None:
    before = sections_of(topology)

    def touched(after: Topology) -> set[str]:
        now = sections_of(after)
        return {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}

    server = topology.regions[0].leaders.servers[0]
    assert touched(mark_any(topology, server.name, not server.down)) <= {HEAD, f"servers/{server.name}"}
    of_database = topology.database_servers[0].server.name
    assert touched(mark_any(topology, of_database, down=True)) <= {HEAD, f"database-servers/{of_database}"}
    shard = topology.shards - 1
    moved = move_shard(topology, "east", "leaders", shard, server.name)
    assert touched(moved) <= {HEAD, f"moved/east/leaders/{shard // 256:03}"}


@given(topologies(), st.data())
def test_a_section_that_is_missing_unnamed_or_wrong_is_named(topology: Topology, data: st.DataObject) -> None:
    sections = sections_of(topology)
    optional = [key for key in sections if key.split("/")[0] in ("moved", "told")]
    key = data.draw(st.sampled_from(sorted(sections.keys() - set(optional))))
    with pytest.raises(TopologyError, match=f"here: the section {key} is missing"):
        topology_of({other: value for other, value in sections.items() if other != key}, "here")
    with pytest.raises(TopologyError, match="nothing names the section servers/unknown"):
        topology_of({**sections, "servers/unknown": b"{}"}, "here")
    with pytest.raises(TopologyError, match=f"here: the section {key} is wrong"):
        topology_of({**sections, key: b"\xff"}, "here")
    if key.startswith("servers/"):
        fields = {**msgspec.json.decode(sections[key]), "dwon": True}
        with pytest.raises(TopologyError, match="there is no such field"):
            topology_of({**sections, key: msgspec.json.encode(fields)}, "here")
