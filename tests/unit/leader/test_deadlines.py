"""Deadlines at a leader: queued writes do not outstay them, and cache hits are served while misses wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tao.leader.write_path import WritePathSettings
from tao.model.errors import DeadlineExceeded
from tao.model.graph import encode_object
from tao.model.writes import AssocAdd
from tao.planning.coordination import scope_of
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, SCHEMA, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, until
from tests.rigs.versions import make_version

A, B = make_id(64), make_id(128)


def edge(id2: int) -> AssocAdd:
    return AssocAdd(A, COMMENT, id2, 1, b"")


async def test_a_write_queued_behind_a_database_that_hangs_is_refused_at_its_deadline() -> None:
    store = MemoryStore(4)
    rig = LeaderRig(store, store, writes=WritePathSettings(lanes_per_server=1))
    await rig.take(0)
    gate = Gate()
    store.before_commit = gate.pass_through
    hanging = asyncio.ensure_future(rig.write(edge(1)))
    await gate.arrived.wait()
    with pytest.raises(DeadlineExceeded):
        await rig.write(edge(2), within=0.02)
    assert not hanging.done(), "what is being committed is not given up"
    assert rig.writes.waiting == 1
    gate.open()
    await hanging
    assert len(store.transactions) == 1
    await rig.close()


async def test_a_late_write_whose_writer_fails_does_not_keep_others_beyond_their_deadlines() -> None:
    store = MemoryStore(4)
    rig = LeaderRig(store, store, writes=WritePathSettings(lanes_per_server=1))
    await rig.take(0)
    gate = Gate()
    store.before_commit = gate.pass_through
    hanging = asyncio.ensure_future(rig.write(edge(1)))
    await gate.arrived.wait()
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

    def fail(_: object) -> None:
        raise ValueError

    def begin(id2: int, seconds: float, on_done: Callable[[object], None]) -> None:
        scope = scope_of(edge(id2), SCHEMA)
        rig.writes.begin(edge(id2), scope, rig.clock.monotonic() + seconds, on_done, both_sides=True)

    results: list[object] = []
    begin(2, 0.01, fail)
    begin(3, 0.02, results.append)
    begin(4, 60.0, results.append)
    await until(lambda: results)
    assert [type(result) for result in results] == [DeadlineExceeded]
    assert [type(context["exception"]) for context in failed] == [ValueError]
    gate.open()
    await hanging
    await until(lambda: len(results) == 2)
    await rig.close()


async def test_hits_are_served_while_misses_are_refused() -> None:
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    await rig.take(0)
    rig.cache.store_object(rig.cache.object_ticket(B, 0.0), encode_object(make_version(1, 1), 1, b"x"), 1, 0.0)
    answers: list[pb.Answer] = []
    for deadline_ms, why in ((5, "too short"), (30, "not answered")):
        gate = Gate()
        store.before_read = gate.pass_through
        answers.clear()
        request = pb.Request(number=1, deadline_ms=deadline_ms, read=pb.ReadBatch(obj_ids=[A, B]))
        rig.reads.handle(request, MemoryReply(answers.append))
        assert list(answers[0].read.slots) == [1], "at once"
        await until(lambda: not answers[-1].more)
        assert (list(answers[-1].read.failed_slots), answers[-1].read.errors[0].reason) == (
            [0],
            DeadlineExceeded.reason,
        )
        assert why in answers[-1].read.errors[0].message
        gate.open()
    await rig.close()


async def test_a_settlement_without_time_for_it_is_refused_before_a_task_exists_that_nobody_hears() -> None:
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    await rig.take(0)
    pairs = [pb.Pair(low_id=A, high_id=B, atypes=[COMMENT])]
    request = pb.Request(number=1, deadline_ms=5, settle_pairs=pb.SettlePairs(pairs=pairs))
    with pytest.raises(DeadlineExceeded, match="5 ms"):
        rig.service.handle(request, MemoryReply(lambda _: None, peer="leader-2"))
    assert not rig.tasks.running
    await rig.close()
