"""Pages of all edges of a type: what a leader refuses, and what its answers must be."""

from __future__ import annotations

import pytest

from tao.leader.pair_scans import _MAX_UNDER_WAY
from tao.model.errors import InvalidArgument, NotMine, Overloaded, ProtocolError, TaoError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import ListRow
from tao.wire.convert import error_from_pb, pair_page_from_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FOLLOWS, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, until
from tests.rigs.versions import make_version

A = make_id(64)
VERSION = make_version(1, 2)


@pytest.fixture
async def rig() -> LeaderRig:
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    await rig.take(0)
    store.rows.lists[ListKey(A, FOLLOWS)] = ListRow(3, VERSION)
    for place in range(3):
        store.rows.edges[EdgeKey(A, FOLLOWS, A + place)] = Edge(A + place, place)
    return rig


def ask(rig: LeaderRig, answers: list[pb.Answer], **fields: int) -> None:
    asked = pb.ScanPairs(**{"shard": 0, "atype": FOLLOWS, "limit": 2, **fields})
    reply = MemoryReply(answers.append, peer="near-1")
    rig.service.handle(pb.Request(deadline_ms=9_000, scan_pairs=asked), reply)


async def test_a_page_says_where_the_next_one_begins(rig: LeaderRig) -> None:
    answers: list[pb.Answer] = []
    ask(rig, answers)
    await until(lambda: answers)
    first = answers.pop().scanned_pairs
    assert (first.after_id1, first.after_id2, first.id2s[:]) == (A, A + 1, [A, A + 1])
    ask(rig, answers, after_id1=A, after_id2=A + 1)
    await until(lambda: answers)
    last = answers.pop().scanned_pairs
    assert (last.after_id1, last.id2s[:], last.versions[:], last.known_id1s[:]) == (0, [A + 2], [VERSION], [])


async def test_a_page_reads_no_more_rows_than_its_limit_among_edges_of_other_types(rig: LeaderRig) -> None:
    store = rig.store
    assert isinstance(store, MemoryStore)
    for place in range(1, 30):
        store.rows.edges[EdgeKey(A - 1, COMMENT, A + place)] = Edge(A + place, 1)
    answers: list[pb.Answer] = []
    ask(rig, answers, limit=10)
    await until(lambda: answers)
    page = answers.pop().scanned_pairs
    assert (page.after_id1, page.id2s[:]) == (A - 1, []), "ten of 29 edges of another type were read"
    ask(rig, answers, after_id1=page.after_id1, limit=10)
    await until(lambda: answers)
    page = answers.pop().scanned_pairs
    assert (page.after_id1, page.id2s[:]) == (0, [A, A + 1, A + 2])


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"limit": 0}, InvalidArgument), ({"limit": 10_001}, InvalidArgument), ({"shard": 1}, NotMine)],
)
async def test_a_page_without_measure_or_of_another_shard_is_refused(
    rig: LeaderRig, fields: dict[str, int], error: type[TaoError]
) -> None:
    with pytest.raises(error):
        ask(rig, [], **fields)


async def test_pages_that_are_read_at_a_time_are_bounded(rig: LeaderRig) -> None:
    gate = Gate()
    store = rig.store
    assert isinstance(store, MemoryStore)
    store.before_read = gate.pass_through
    answers: list[pb.Answer] = []
    for _ in range(_MAX_UNDER_WAY):
        ask(rig, answers)
    with pytest.raises(Overloaded):
        ask(rig, answers)
    gate.open()
    await until(lambda: len(answers) == _MAX_UNDER_WAY)
    ask(rig, answers)
    await until(lambda: len(answers) == _MAX_UNDER_WAY + 1)


async def test_a_page_of_a_shard_that_was_given_up_during_the_read_is_refused(rig: LeaderRig) -> None:
    gate = Gate()
    store = rig.store
    assert isinstance(store, MemoryStore)
    store.after_read = gate.pass_through
    answers: list[pb.Answer] = []
    ask(rig, answers)
    await gate.arrived.wait()
    rig.ownership.want(())
    gate.open()
    await until(lambda: answers)
    assert isinstance(error_from_pb(answers[0].error), NotMine)


@pytest.mark.parametrize(
    "page",
    [
        pb.ScannedPairs(id1s=[A], sizes=[0]),
        pb.ScannedPairs(id1s=[A], versions=[1], sizes=[2], id2s=[1]),
        pb.ScannedPairs(known_id1s=[A]),
    ],
)
def test_a_page_whose_columns_do_not_belong_together_is_refused(page: pb.ScannedPairs) -> None:
    with pytest.raises(ProtocolError):
        pair_page_from_pb(page)
