"""The documents of a cluster in a file and in etcd: compare-and-set, watches, restored snapshots, and both ways between
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tao.model.errors import SchemaError, TopologyConflict, TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.topology.document import dump_topology, parse_topology
from tao.topology.edits import begin_record, mark_server, move_shard, unmove_shard
from tests.conformance.store_rig import Ear, StoreRig

SCHEMA = Path(__file__).parents[2] / "config" / "schema.yaml"


def topology(shards: int = 16, leaders: int = 2) -> Topology:
    def servers(kind: str, count: int) -> tuple[CacheServer, ...]:
        return tuple(CacheServer(name=f"{kind}-{n}", grpc=f"127.0.0.1:{n}") for n in range(1, count + 1))

    region = Region(
        name="here",
        leaders=Tier(name="leaders", servers=servers("l", leaders)),
        followers=(Tier(name="web", servers=servers("w", 2), moved={2: ("w-2", "w-1")}),),
    )
    database = Database(
        name="db",
        master_region="here",
        servers={"here": DatabaseServer(name="db-here")},
        shards=((0, 11), (12, shards - 1)),
    )
    return Topology(version=1, shards=shards, regions=(region,), databases=(database,), changes=())


async def test_the_first_document_is_stored_as_version_1_and_read_back(stores: StoreRig) -> None:
    stored = await stores.store().change(0, topology())
    assert stored.version == 1
    assert await stores.store().load() == stored


async def test_no_document_is_an_error_that_names_the_place(stores: StoreRig) -> None:
    with pytest.raises(TopologyError, match=str(stores.place)):
        await stores.store().load()


async def test_of_two_changes_at_once_one_wins_and_the_other_is_rejected(stores: StoreRig) -> None:
    first, second = stores.store(), stores.store()
    await first.change(0, topology())
    for version in range(1, 6):
        edits = [move_shard(await first.load(), "here", "web", version, name) for name in ("w-1", "w-2")]
        results = await asyncio.gather(
            first.change(version, edits[0]), second.change(version, edits[1]), return_exceptions=True
        )
        assert {type(result) for result in results} == {Topology, TopologyConflict}
        (won,) = (result for result in results if isinstance(result, Topology))
        assert await first.load() == await second.load() == won


async def test_a_change_of_a_former_version_is_rejected(stores: StoreRig) -> None:
    store = stores.store()
    first = await store.change(0, topology())
    await store.change(1, mark_server(first, "w-1", down=True))
    with pytest.raises(TopologyConflict, match="is at version 2, not 1"):
        await stores.store().change(1, first)
    with pytest.raises(TopologyConflict, match="is at version 2, not 0"):
        await stores.store().change(0, first)


async def test_a_document_that_breaks_a_rule_is_not_stored(stores: StoreRig) -> None:
    with pytest.raises(TopologyError, match="at least one"):
        await stores.store().change(0, msgspec.structs.replace(topology(), regions=()))
    with pytest.raises(TopologyError):
        await stores.store().load()


async def test_every_kind_of_change_is_read_back_by_another_process(stores: StoreRig) -> None:
    store, other = stores.store(), stores.store()
    found = await store.change(0, begin_record(topology()))
    edits: list[Callable[[Topology], Topology]] = [
        lambda before: mark_server(before, "w-1", down=True),
        lambda before: move_shard(before, "here", "web", 3, "w-2"),
        lambda before: unmove_shard(before, "here", "web", 3),
        lambda before: unmove_shard(before, "here", "web", 2),
    ]
    for edit in edits:
        found = await store.change(found.version, edit(found))
        assert await other.load() == found
    assert [each.version for each in found.changes or ()] == [2, 3, 4, 5]


async def test_a_watcher_hears_of_every_final_state_but_not_of_the_one_it_loaded(stores: StoreRig) -> None:
    ear, late = Ear(), Ear()
    watched, other = stores.store(ear), stores.store()
    found = await other.change(0, topology())
    await watched.load()
    stop = watched.watch(ear.changed)
    found = await other.change(1, found)
    await ear.until(lambda: ear.versions == [2])
    for _ in range(5):
        found = await other.change(found.version, mark_server(found, "w-1", not found.tiers[1].tier.servers[0].down))
    await ear.until(lambda: ear.versions[-1] == found.version)
    assert ear.versions == sorted(ear.versions)
    stop_late = watched.watch(late.changed)
    found = await other.change(found.version, found)
    await late.until(lambda: late.versions[-1:] == [found.version])
    assert ear.errors == []
    stop()
    stop_late()


async def test_a_document_older_than_the_own_is_refused_named_and_mended_by_an_import(stores: StoreRig) -> None:
    ear = Ear()
    store, watched = stores.store(), stores.store(ear)
    first = await store.change(0, topology())
    snapshot = await stores.snapshot()
    second = await store.change(1, mark_server(first, "w-1", down=True))
    await watched.load()
    stop = watched.watch(ear.changed)
    await stores.restore(snapshot)
    await ear.until(lambda: any("version 1 is not above 2" in each for each in ear.errors))
    assert ear.versions == []
    mended = await stores.store().replace(1, msgspec.structs.replace(second, version=3))
    await ear.until(lambda: ear.versions == [3])
    assert await watched.load() == mended
    stop()


async def test_a_whole_document_is_stored_under_a_version_above_the_present_one(stores: StoreRig) -> None:
    store = stores.store()
    assert (await store.replace(0, msgspec.structs.replace(topology(), version=7))).version == 7
    with pytest.raises(TopologyError, match="version 7 is not above 7"):
        await store.replace(7, msgspec.structs.replace(topology(), version=7))
    with pytest.raises(TopologyConflict):
        await store.replace(6, msgspec.structs.replace(topology(), version=8))
    large = msgspec.structs.replace(topology(shards=1024, leaders=200), version=8)
    assert await store.replace(7, large) == await stores.store().load() == large
    assert (await store.change(8, mark_server(large, "w-1", down=True))).version == 9


async def test_a_document_goes_both_ways_unchanged(stores: StoreRig, tmp_path: Path) -> None:
    store = stores.store()
    found = await store.change(0, topology())
    text = dump_topology(found)
    elsewhere = StoreRig(tmp_path / "copy.json").store()
    await elsewhere.replace(0, parse_topology(text, "copy"))
    assert dump_topology(await elsewhere.load()) == text
    back = msgspec.structs.replace(await elsewhere.load(), version=2)
    await store.replace(1, back)
    assert await stores.store().load() == back


async def test_an_access_document_may_be_missing_at_first_and_a_wrong_one_is_not_used(stores: StoreRig) -> None:
    ear = Ear()
    await stores.store().change(0, topology())
    access = stores.access(ear)
    assert await access.load_if_there() is None
    stop = access.watch(ear.changed)
    await stores.write("access", "format: 1\nversion: 1\n")
    await ear.until(lambda: ear.versions == [1])
    await stores.write("access", "format: 1\nversion: 2\ncallers: {web: [reader]}\n")
    await ear.until(lambda: any("no role 'reader'" in each for each in ear.errors))
    await stores.write("access", "format: 1\nversion: 2\n")
    await ear.until(lambda: ear.versions == [1, 2])
    assert (await stores.access(Ear(), required=True).load()).version == 2
    stop()


async def test_a_schema_is_read_and_followed(stores: StoreRig) -> None:
    ear, schema = Ear(), stores.schema()
    with pytest.raises(SchemaError):
        await schema.load()
    text = await asyncio.to_thread(SCHEMA.read_text)
    await stores.write("schema", text)
    loaded = await schema.load()
    following = asyncio.create_task(schema.watch(ear.changed_text))
    await stores.write("schema", f"# changed\n{text}")
    await ear.until(lambda: ear.texts == [f"# changed\n{text}"])
    assert (await stores.schema().load()).version_hash == loaded.version_hash
    following.cancel()
