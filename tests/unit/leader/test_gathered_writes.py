"""Writes that arrive while a transaction of their server is under way: which of them wait for its end.

first write    | lock … held in COMMIT ………………………… committed
further ones       | gathered until then, or until the first is old, or fill a transaction
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tao.leader.write_path import WritePathSettings
from tao.model.writes import AssocAdd
from tests.rigs.leader_rig import COMMENT, LeaderRig, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, quiet

HOUR = 3_600.0


class Held:
    """A leader whose first transaction is held up before its commit."""

    def __init__(self, settings: WritePathSettings) -> None:
        self.store = MemoryStore(4)
        self.store.before_commit = self._before_commit
        self.rig = LeaderRig(self.store, self.store, writes=settings)
        self.gate = Gate()
        self._lists = 0
        self._commits = 0

    async def _before_commit(self) -> None:
        self._commits += 1
        if self._commits == 1:
            await self.gate.pass_through()

    def write(self, count: int) -> list[asyncio.Task[object]]:
        """Begin to write an edge to each of so many further lists."""
        first, self._lists = self._lists + 1, self._lists + count
        adds = [AssocAdd(make_id(64 * at), COMMENT, make_id(1), 1, b"") for at in range(first, first + count)]
        return [asyncio.ensure_future(self.rig.write(add)) for add in adds]


@asynccontextmanager
async def held(settings: WritePathSettings) -> AsyncIterator[tuple[Held, asyncio.Task[object]]]:
    """Yield the leader, and its first write while that is held up. At the end, it is committed."""
    each = Held(settings)
    await each.rig.take(0)
    (first,) = each.write(1)
    await each.gate.arrived.wait()
    yield each, first
    each.gate.open()
    await first
    await each.rig.close()
    assert each.rig.tasks.errors == []


async def test_writes_on_other_lists_wait_for_a_young_transaction_and_share_the_next_one() -> None:
    async with held(WritePathSettings(gather_seconds=HOUR)) as (leader, _):
        gathered = leader.write(2)
        await quiet()
        gathered += leader.write(2)
        await quiet()
        assert len(leader.store.transactions) == 1
        leader.gate.open()
        await asyncio.gather(*gathered)
        assert len(leader.store.transactions) == 2


async def test_a_transaction_that_takes_long_holds_no_write_on_other_lists_up() -> None:
    async with held(WritePathSettings(gather_seconds=0.001)) as (leader, first):
        await asyncio.gather(*leader.write(2))
        assert not first.done()
        await asyncio.gather(*leader.write(1))
        assert not first.done()


async def test_as_many_writes_as_a_transaction_may_have_wait_for_no_other() -> None:
    async with held(WritePathSettings(gather_seconds=HOUR, max_batch_writes=3)) as (leader, first):
        gathered = leader.write(2)
        await quiet()
        assert len(leader.store.transactions) == 1
        await asyncio.gather(*gathered, *leader.write(1))
        assert not first.done()
        assert len(leader.store.transactions) == 2
