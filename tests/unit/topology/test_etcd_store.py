"""A topology in an etcd that was restored from a snapshot, that repeats calls late, or that another process changes."""

from __future__ import annotations

import msgspec
import pytest

from tao.admin import documents
from tao.admin.documents import ClusterTexts, import_documents
from tao.etcd.client import EtcdRefused
from tao.etcd.v3 import kv_pb2
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import TopologyConflict, TopologyError
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
