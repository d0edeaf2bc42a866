"""A topology in an etcd that was restored from a snapshot, that repeats calls late, or that another process changes."""

from __future__ import annotations

import msgspec
import pytest

from tao.admin import documents
from tao.admin.documents import ClusterTexts, import_documents
from tao.etcd.client import MAX_TRANSACTION_BYTES, MAX_TRANSACTION_OPERATIONS, EtcdRefused
from tao.etcd.v3 import kv_pb2
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import TopologyConflict, TopologyError, TopologyTooLarge
from tao.model.topology import CacheServer, Topology
from tao.topology.document import dump_topology
from tao.topology.edits import mark_server
from tao.topology.etcd_store import EtcdTopology
from tao.topology.stores import TextDocuments
from tests.conformance.test_topology_stores import topology
from tests.rigs.memory_etcd import PLACE, MemoryEtcd


def fail(error: TopologyError) -> None:
    raise error


def store_in(etcd: MemoryEtcd) -> EtcdTopology:
    return EtcdTopology(etcd, PLACE, on_error=fail)


def copy_of(etcd: MemoryEtcd) -> dict[bytes, kv_pb2.KeyValue]:
    return dict(etcd.keys)


@pytest.mark.parametrize("changes", [1, 2])
async def test_a_document_that_a_restored_etcd_made_of_an_old_one_is_refused_until_it_is_newer(changes: int) -> None:
    etcd = MemoryEtcd()
    long_running = store_in(etcd)
    first = await long_running.change(0, topology())
    assert await long_running.load() == first
    snapshot = copy_of(etcd)
    found = first
    for _ in range(2):
        found = await store_in(etcd).change(found.version, mark_server(found, "w-1", down=not found.version % 2))
    assert await long_running.load() == found
    etcd.keys = snapshot
    restored = store_in(etcd)
    other = await restored.load()
    for _ in range(changes):
        other = await restored.change(other.version, mark_server(other, "w-2", down=bool(other.version % 2)))
    with pytest.raises(TopologyError, match=r"version 2 is below 3|version 3 had other content.*tao topology import"):
        await long_running.load()
    mended = await restored.replace(other.version, msgspec.structs.replace(found, version=4))
    assert await long_running.load() == mended


def exchange_head(etcd: MemoryEtcd) -> None:
    """Do what another process does that changes the document."""
    (head,) = (key for key in etcd.keys if key.endswith(b"/head"))
    etcd.revision += 1
    etcd.keys[head].mod_revision = etcd.revision


async def test_a_whole_document_is_stored_no_further_once_another_process_has_changed_the_one_that_is_there() -> None:
    etcd = MemoryEtcd()
    await store_in(etcd).change(0, topology())
    before = set(etcd.keys)
    sent: list[pb.TxnRequest] = []

    def interfere(request: pb.TxnRequest) -> None:
        sent.append(request)
        if len(sent) == 2:
            exchange_head(etcd)

    etcd.before_transaction = interfere
    large = msgspec.structs.replace(topology(shards=64, leaders=400), version=2)
    with pytest.raises(TopologyConflict):
        await store_in(etcd).replace(1, large)
    assert len(sent) == 3, "the third transaction clears away what the first one stored"
    assert set(etcd.keys) == before


def mapped(shards: int) -> Topology:
    """A document in which every shard is mapped by hand to a server with a long name: 17 KB for each 256 of them."""
    found = topology(shards=shards)
    long = CacheServer(name="w" * 63, grpc="127.0.0.1:9")
    tier = msgspec.structs.replace(
        found.regions[0].followers[0],
        servers=(*found.regions[0].followers[0].servers, long),
        moved=dict.fromkeys(range(shards), (long.name,)),
    )
    return msgspec.structs.replace(found, regions=(msgspec.structs.replace(found.regions[0], followers=(tier,)),))


def sizes(etcd: MemoryEtcd) -> list[tuple[int, int]]:
    """The operations of each transaction, and their bytes."""
    return [(len(each.success), sum(one.ByteSize() for one in each.success)) for each in etcd.transactions]


async def test_a_change_of_few_keys_and_many_bytes_is_refused_and_an_import_stores_it_in_several_transactions() -> None:
    etcd = MemoryEtcd()
    blocks = 100
    first = await store_in(etcd).change(0, topology(shards=256 * blocks))
    etcd.transactions.clear()
    with pytest.raises(TopologyTooLarge, match=r"the change has 10\d keys of 1,[5-9]\d\d,\d\d\d bytes"):
        await store_in(etcd).change(1, mapped(256 * blocks))
    assert etcd.transactions == [], "nothing was sent"
    assert await store_in(etcd).load() == first

    wanted = msgspec.structs.replace(mapped(256 * blocks), version=2)
    assert await store_in(etcd).replace(1, wanted) == await store_in(etcd).load() == wanted
    assert len(sizes(etcd)) == 3, "two with sections, and the head"
    assert all(count <= MAX_TRANSACTION_OPERATIONS and size <= MAX_TRANSACTION_BYTES for count, size in sizes(etcd))
    assert max(size for _, size in sizes(etcd)) > MAX_TRANSACTION_BYTES - 20_000, "as much as there is room for"


async def test_a_section_that_no_transaction_holds_is_refused_before_anything_is_stored_under_its_key() -> None:
    etcd = MemoryEtcd()
    first = await store_in(etcd).change(0, topology(shards=256))
    tier = first.regions[0].followers[0]
    clones = tuple(CacheServer(name=f"{number:063}", grpc=f"127.0.0.1:{number}") for number in range(1, 101))
    moved = dict.fromkeys(range(256), tuple(each.name for each in clones))
    tier = msgspec.structs.replace(tier, servers=(*tier.servers, *clones), moved=moved)
    region = msgspec.structs.replace(first.regions[0], followers=(tier,))
    wanted = msgspec.structs.replace(first, version=2, regions=(region,))
    before = set(etcd.keys)
    with pytest.raises(TopologyTooLarge, match="the change has 1 keys of 1,6"):
        await store_in(etcd).replace(1, wanted)
    assert await store_in(etcd).load() == first
    assert set(etcd.keys) == before


async def test_a_section_that_is_stored_again_late_leaves_nothing_behind() -> None:
    etcd = MemoryEtcd()
    await store_in(etcd).change(0, topology())
    etcd.transactions.clear()
    await store_in(etcd).replace(1, msgspec.structs.replace(topology(), version=2))
    late = etcd.transactions[0]
    await store_in(etcd).replace(2, msgspec.structs.replace(topology(), version=3))
    before = set(etcd.keys)
    assert not etcd.carry_out(late).succeeded
    assert set(etcd.keys) == before


async def test_an_import_whose_topology_is_not_stored_changes_no_other_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    etcd = MemoryEtcd()
    store, texts = store_in(etcd), TextDocuments(etcd, PLACE)
    monkeypatch.setattr(documents, "topology_file", lambda _place: store)
    monkeypatch.setattr(documents, "text_documents", lambda _place: texts)
    access = "format: 1\nversion: 1\n"
    await import_documents(PLACE, ClusterTexts(dump_topology(topology()), None, access), 0)

    def refuse(request: pb.TxnRequest) -> None:
        if any(b"/topology/" in each.request_put.key for each in request.success):
            raise EtcdRefused("etcdserver: permission denied")

    etcd.before_transaction = refuse
    with pytest.raises(EtcdRefused):
        await import_documents(PLACE, ClusterTexts(dump_topology(topology()), None, "format: 1\nversion: 2\n"), 0)
    assert await texts.read("access") == access
