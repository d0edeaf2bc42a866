"""Mirrors of edges between leaders: asked for here, and refused to a coordinator that was deposed (DESIGN.md §6).

The copy of an edge is a plain write at the leader that gets it: idempotent, last one wins. So one that a paused
coordinator sends late could undo what its successor has had written since. Every copy therefore names the coordinator's
shard and the generation of its ownership, and a leader takes none from a generation below the highest it knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from tao.leader.elsewhere import Elsewhere
from tao.leader.inverse_path import InversePath
from tao.leader.other_leaders import Deposed, Undecided
from tao.leader.ownership import Ownership
from tao.model.changes import ShardMessages
from tao.model.errors import DatabaseDown, Fenced, NotMine, OutcomeUnknown, Unauthorized, Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock, WriteStore
from tao.model.rows import IntentRow, ShardRow
from tao.model.writes import Coordinator, SettleEdge
from tao.peers.links import Links
from tao.routing.retry_budget import RetryBudget
from tao.serving.configuration import Configuration
from tao.wire.convert import error_from_pb, shard_messages_from_pb, write_to_pb
from tao.wire.v1 import session_pb2 as pb

_FIRST_PAUSE_SECONDS: Final = 0.05
"""Before a copy that was refused is sent again; it doubles. A takeover takes a few hundred milliseconds."""

_Result = TypeVar("_Result")


class SettlingLeaders:
    """`OtherLeaders` over links; a shard that this leader owns itself (on another database) is settled here. When the
    shard is mastered in another region, this region's caches of it hear of the copy before its writer does."""

    def __init__(
        self, configuration: Configuration, links: Links, ownership: Ownership, clock: Clock, budget: RetryBudget
    ) -> None:
        """``budget``: of all that this server asks again."""
        self._configuration: Final = configuration
        self._links: Final = links
        self._ownership: Final = ownership
        self._clock: Final = clock
        self._budget: Final = budget
        self.here: InversePath | None = None
        self.elsewhere: Elsewhere | None = None

    async def settle(
        self, shard: int, settles: Sequence[SettleEdge], coordinator: Coordinator, timeout_seconds: float
    ) -> list[ShardMessages]:
        """As `tao.leader.other_leaders.OtherLeaders`. A shard that is just changing hands is asked for again: its
        writer waits for the copy."""

        async def attempt(left_seconds: float) -> list[ShardMessages]:
            row = self._ownership.owned.get(coordinator.shard)
            if row is None or row.generation != coordinator.generation:
                raise Deposed(f"shard {coordinator.shard} has changed hands since; its owner settles the intent")
            return await self._settle(shard, settles, coordinator, left_seconds)

        return await self._again(attempt, timeout_seconds)

    async def hand_over(self, intent: IntentRow, timeout_seconds: float) -> list[ShardMessages]:
        """As `tao.leader.other_leaders.OtherLeaders`."""
        shard = intent.low_id >> SHARD_SHIFT
        pair = pb.Pair(low_id=intent.low_id, high_id=intent.high_id, atypes=intent.atypes, token=intent.token)

        async def attempt(left_seconds: float) -> list[ShardMessages]:
            routes = self._configuration.routes
            leader = routes.leaders(routes.master_region(shard)).home(shard)
            if leader.name == self._ownership.name:
                raise Deposed(f"shard {shard} is being taken anew here; its intent is settled later")
            request = pb.Request(topology_version=routes.version, settle_pairs=pb.SettlePairs(pairs=(pair,)))
            answer = await self._links.to(leader).ask(request, left_seconds)
            if not answer.settled_pairs.settled:
                raise Unavailable(f"{leader.name} could not settle the pair just now")
            told = [shard_messages_from_pb(messages) for messages in answer.settled_pairs.changes]
            if self.elsewhere is not None:
                await self.elsewhere.take_in(told)
            return told

        return await self._again(attempt, timeout_seconds)

    async def _again(self, attempt: Callable[[float], Awaitable[_Result]], timeout_seconds: float) -> _Result:
        """Try until nobody says any more that it is not his to do, or that he cannot tell what he has done, or the time
        is up. Who says that it is not his has begun nothing, and a shard changes hands with all its pairs at once: that
        is no overload, and the pauses bound it. Whatever else is asked again is paid for."""
        until = self._clock.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        undecided: Undecided | None = None
        while True:
            try:
                done = await attempt(until - self._clock.monotonic())
                self._budget.earn()
                return done
            except Deposed:
                raise
            except (NotMine, Fenced, Unavailable, Undecided) as error:
                if isinstance(error, Undecided):
                    undecided = error
                now = self._clock.monotonic()
                is_over = isinstance(error, DatabaseDown) or now + pause >= until
                if is_over or (not isinstance(error, (NotMine, Fenced)) and not self._budget.spend(now)):
                    raise error from (None if error is undecided else undecided)
            await asyncio.sleep(pause)
            pause *= 2
            await self._configuration.refresh()

    async def _settle(
        self, shard: int, settles: Sequence[SettleEdge], coordinator: Coordinator, timeout_seconds: float
    ) -> list[ShardMessages]:
        if shard in self._ownership.owned and self.here is not None:
            deadline = self._clock.monotonic() + timeout_seconds
            told: list[ShardMessages] = []
            for settle in settles:
                try:
                    written, _ = await self.here.write(settle, deadline, sub_write=True)
                except OutcomeUnknown as unknown:
                    raise Undecided(unknown.message) from unknown
                told.extend(written.messages)
            return told
        routes = self._configuration.routes
        leader = routes.leaders(routes.master_region(shard)).home(shard)
        batch = pb.WriteBatch(
            writes=[write_to_pb(settle) for settle in settles],
            want_changes=True,
            coordinator=pb.Coordinator(shard=coordinator.shard, generation=coordinator.generation),
        )
        request = pb.Request(topology_version=routes.version, write=batch)
        answer = await self._links.to(leader).ask(request, timeout_seconds)
        for result in answer.write.results:
            if result.HasField("error"):
                error = error_from_pb(result.error)
                raise Undecided(error.message) if isinstance(error, OutcomeUnknown) else error
        told = [shard_messages_from_pb(messages) for messages in answer.write.changes]
        if self.elsewhere is not None:
            await self.elsewhere.take_in(told)
        return told


class CopyFence:
    """The highest generation heard of, per coordinating shard. Memory: one integer a shard."""

    def __init__(self, store: WriteStore, *, timeout_seconds: float) -> None:
        self._store: Final = store
        self._timeout_seconds: Final = timeout_seconds
        self._highest: dict[int, int] = {}

    def note(self, row: ShardRow) -> None:
        """This leader has taken the shard itself."""
        self._highest[row.shard] = max(row.generation, self._highest.get(row.shard, 0))

    async def admit(self, batch: pb.WriteBatch) -> None:
        """Raises `Fenced` for a copy of a deposed coordinator, `Unauthorized` for one that names none."""
        if not batch.HasField("coordinator"):
            raise Unauthorized("settle_edge is sent by the leader that coordinates the pair, which names itself")
        shard, generation = batch.coordinator.shard, batch.coordinator.generation
        if shard not in self._highest:
            # Started after the coordinator: who owns its shard is in the database.
            rows = await self._store.read_ownership((shard,), timeout_seconds=self._timeout_seconds)
            self._highest[shard] = max(rows[shard].generation, self._highest.get(shard, 0))
        if generation < self._highest[shard]:
            raise Fenced(f"shard {shard} is owned under generation {self._highest[shard]}, not {generation} any more")
        self._highest[shard] = generation
