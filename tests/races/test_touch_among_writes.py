"""A touch meets writes of its own key, or is under way when its leader loses the shard.

someone               owner of the shard                    binlog
inserts an edge                                             edge without a step  → touch
                      a write of the list, and the touch,
                      in one transaction?                   an edge with two steps: foreign! → touch → …
                      one after the other                   a step; a version that rises alone
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.model.errors import ShardBlocked
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.relay import Relay, Touch
from tao.model.versions import counter_of
from tao.model.writes import AssocAdd
from tao.planning.row_events import translate
from tao.wire.convert import error_from_pb, relay_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, SCHEMA, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore, MemoryTransaction
from tests.rigs.pacing import Gate, until
from tests.unit.planning.row_events_of import row_events_of

A = make_id(64)
LIST = ListKey(A, COMMENT)
BY_HAND = EdgeKey(A, COMMENT, 1_000)


class Watched(MemoryStore):
    """Records what a tailer would make of each transaction."""

    def __init__(self) -> None:
        super().__init__(shards=2)
        self.foreign = 0

    def transaction(self, server: str, *, timeout_seconds: float) -> MemoryTransaction:
        store = self

        class Transaction(MemoryTransaction):
            async def commit(self) -> str:
                events = row_events_of(store.rows, self._changes, SCHEMA)
                translated = translate(events, SCHEMA)
                store.foreign += len(translated.touches) + len(translated.bulk_shards)
                return await super().commit()

        return Transaction(self)


@pytest.fixture
async def store() -> MemoryStore:
    return Watched()


@pytest.fixture
async def leader(store: Watched) -> AsyncIterator[LeaderRig]:
    rig = LeaderRig(store, store)
    await rig.take(0)
    await rig.write(AssocAdd(A, COMMENT, 1, 1, b""))
    store.rows.edges[BY_HAND] = Edge(BY_HAND.id2, 7)
    yield rig
    await rig.close()


def relay(leader: LeaderRig) -> list[pb.Answer]:
    answers: list[pb.Answer] = []
    request = pb.Request(relay=relay_to_pb(Relay(touches=(Touch(A, COMMENT, 0),))), deadline_ms=5_000)
    leader.relays.handle(request, MemoryReply(answers.append, peer="tailer"))
    return answers


async def test_a_touch_shares_no_transaction_with_the_writes_before_and_behind_it(
    leader: LeaderRig, store: Watched
) -> None:
    before = len(store.transactions)
    gate = Gate()
    store.before_commit = gate.pass_through
    writes = [asyncio.ensure_future(leader.write(AssocAdd(A, COMMENT, 2, 2, b"")))]
    await gate.arrived.wait()
    answers = relay(leader)
    writes.append(asyncio.ensure_future(leader.write(AssocAdd(A, COMMENT, 3, 3, b""))))
    await until(lambda: leader.writes.waiting == 3)  # and the next batch would hold the last two
    gate.open()
    await asyncio.gather(*writes)
    await until(lambda: bool(answers))
    assert answers[0].HasField("relayed")
    assert store.foreign == 0
    assert store.rows.lists[LIST].count == len(store.edges(A, COMMENT)) == 4
    assert len(store.transactions) - before == counter_of(store.rows.lists[LIST].version) - 1
    held = leader.cache.peek_count(A, COMMENT)
    assert held is None or int.from_bytes(held[8:16], "little") == 4


async def test_a_touch_of_a_leader_that_has_lost_the_shard_is_sent_to_the_next_one(
    leader: LeaderRig, store: Watched
) -> None:
    other = LeaderRig(store, store, name="leader-2")

    async def taken_over() -> None:
        await other.take(0)

    store.before_lock = taken_over
    answers = relay(leader)
    await until(lambda: bool(answers))
    assert isinstance(error_from_pb(answers[0].error), ShardBlocked), "the tailer has to send it again"
    assert store.rows.lists[LIST].count == 1
    assert 0 not in leader.ownership.owned

    async def nothing() -> None: ...

    store.before_lock = nothing
    answers = relay(other)
    await until(lambda: bool(answers))
    assert answers[0].HasField("relayed")
    assert store.rows.lists[LIST].count == 2
    await other.close()
