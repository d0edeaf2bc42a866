"""Write inverse edges at other leaders, and reject copies that a deposed coordinator sends.

The copy of an edge is a plain write at the leader that receives it: idempotent, and the last one wins. So a copy
that a paused coordinator sends late could undo what its successor has written since. Every copy therefore names the
coordinator's shard and the generation of its ownership, and a leader accepts none from a generation below the
highest it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from tao.leader.copies_to_leaders import CopySender
from tao.leader.ownership import Ownership
from tao.leader.write_path import Written
from tao.model.changes import ShardMessages
from tao.model.edge_states import UNSET_NODE, EdgeRegisters, NodeState
from tao.model.errors import (
    DatabaseDown,
    DatabaseFull,
    Fenced,
    NotMine,
    OutcomeUnknown,
    RetryableError,
    TaoError,
    Unauthorized,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import WriteStore
from tao.model.rows import IntentRow, ShardRow
from tao.model.topology import CacheServer
from tao.model.writes import Coordinator, JoinEdges, SettleEdge, Write
from tao.serving.configuration import ServerContext
from tao.wire.convert import error_from_pb, node_state_from_pb, registers_from_pb, shard_messages_from_pb
from tao.wire.v1 import session_pb2 as pb


class Deposed(Fenced):
    """This leader no longer coordinates the pair: the coordinating shard has changed hands."""


class RemoteOutcomeUnknown(OutcomeUnknown):
    """The leader of the far side does not know the outcome of its commit.

    That leader writes nothing more of the shard before it, or another leader, has taken the shard again, and a
    takeover waits for transactions that hold the shard's row. By then the commit has happened or never will. So this
    copy cannot overtake one that is sent later."""


def may_still_be_written(error: TaoError) -> bool:
    """Return whether a copy that failed with this error may still be written after one that is sent later."""
    return not isinstance(error, (RetryableError, RemoteOutcomeUnknown))


def unknown_outcome_of(error: TaoError) -> OutcomeUnknown | None:
    """Return the error that says that a copy may have been written: this one, or the earlier attempt's, which is its
    cause."""
    return next((each for each in (error, error.__cause__) if isinstance(each, OutcomeUnknown)), None)


class Copied(NamedTuple):
    """The result of a copy: the messages for caches, and the copies of edges with states of which the far side knows
    more, newer operations or the state of its node. Their registers are what the near side is to join."""

    messages: list[ShardMessages]
    raised: list[SettleEdge]

    def add(self, settle: SettleEdge, registers: EdgeRegisters | None, node: NodeState) -> None:
        """Add the registers that the far side has after a copy, and the state of its node."""
        if registers is not None and (registers != settle.registers or node != UNSET_NODE):
            self.raised.append(msgspec.structs.replace(settle, registers=registers.with_id2(node)))


JOINED_EDGES: Final = 64
"""Most edges that are joined in one write: as many as a transaction takes."""


def joins_of(copies: Sequence[SettleEdge]) -> list[JoinEdges]:
    """Return the writes that join copies of edges of one type with states, whose ends are on one shard."""
    return [JoinEdges(tuple(copies[start : start + JOINED_EDGES])) for start in range(0, len(copies), JOINED_EDGES)]


class OtherLeaders(Protocol):
    """Calls to the leaders of other shards."""

    def leader_name(self, shard: int) -> str:
        """Return the name of the shard's leader, in the region that masters the shard."""

    async def settle(
        self,
        shard: int,
        settles: Sequence[SettleEdge],
        coordinator: Coordinator,
        timeout_seconds: float,
        *,
        background: bool = False,
    ) -> Copied:
        """Have the shard's leader write these edges on behalf of ``coordinator``. ``background``: no caller waits for
        them, so they queue with the writes of callers and not before them.

        Raises `Deposed` when the coordinator has been deposed, and other `TaoError`. An `OutcomeUnknown` that is not
        a `RemoteOutcomeUnknown` means that a copy may still be in progress; `unknown_outcome_of` reveals that of
        earlier attempts."""

    async def hand_over(self, intent: IntentRow, timeout_seconds: float) -> list[ShardMessages]:
        """Have the leader that has taken the coordinating shard settle the pair. Returns the messages for caches.

        Raises `Deposed` when no other leader is to have the shard, and other `TaoError` when it is not settled in
        time."""


class LocalInverses(Protocol):
    """Writes of inverse edges on shards that this leader owns itself."""

    async def write(self, write: Write, deadline: float, *, sub_write: bool = False) -> tuple[Written, bool]:
        """Execute a checked write. See `tao.leader.inverse_path.InversePath.write`."""


_FIRST_PAUSE_SECONDS: Final = 0.05
"""Pause before a refused copy is sent again; it doubles. A takeover takes a few hundred milliseconds."""

_LONGEST_PAUSE_SECONDS: Final = 0.2
"""Longest pause between two copies. When a cut ends, takeovers wait a second or more for the database; the copy should
follow soon after them. A refusal costs the other leader little."""

_Result = TypeVar("_Result")


class RemoteLeaders:
    """Implements `OtherLeaders` over links.

    A shard that this leader owns itself, on another database, is settled locally. When the shard is mastered in
    another region, this region's caches get the copy's changes before its writer is answered."""

    def __init__(
        self,
        context: ServerContext,
        ownership: Ownership,
        apply_changes: Callable[[list[ShardMessages]], Awaitable[None]],
    ) -> None:
        """``apply_changes`` applies the changes of a copy to this region's caches of shards that another region
        masters."""
        self._configuration: Final = context.configuration
        self._links: Final = context.links
        self._ownership: Final = ownership
        self._clock: Final = context.clock
        self._budget: Final = context.budget
        self.local: LocalInverses | None = None
        self._apply_changes: Final = apply_changes
        self._copies: Final = CopySender(context)

    def leader_name(self, shard: int) -> str:
        """See `OtherLeaders.leader_name`."""
        return self._leader(shard).name

    def _leader(self, shard: int) -> CacheServer:
        routes = self._configuration.routes
        return routes.leaders(routes.master_region(shard)).home(shard)

    async def settle(
        self,
        shard: int,
        settles: Sequence[SettleEdge],
        coordinator: Coordinator,
        timeout_seconds: float,
        *,
        background: bool = False,
    ) -> Copied:
        """See `OtherLeaders.settle`. Retries while the shard changes hands, because the writer waits for the copy."""

        async def attempt(left_seconds: float) -> Copied:
            row = self._ownership.owned.get(coordinator.shard)
            if row is None or row.generation != coordinator.generation:
                raise Deposed(f"another leader owns shard {coordinator.shard} now and settles the intent")
            return await self._settle(shard, settles, coordinator, left_seconds, background=background)

        return await self._retry(attempt, timeout_seconds)

    async def hand_over(self, intent: IntentRow, timeout_seconds: float) -> list[ShardMessages]:
        """See `OtherLeaders.hand_over`."""
        shard = intent.low_id >> SHARD_SHIFT
        pair = pb.Pair(low_id=intent.low_id, high_id=intent.high_id, atypes=intent.atypes, token=intent.token)

        async def attempt(left_seconds: float) -> list[ShardMessages]:
            routes = self._configuration.routes
            leader = self._leader(shard)
            if leader.name == self._ownership.name:
                raise Deposed(f"shard {shard} is being taken again by this leader; its intent is settled later")
            request = pb.Request(topology_version=routes.version, settle_pairs=pb.SettlePairs(pairs=(pair,)))
            answer = await self._links.to(leader).ask(request, left_seconds)
            if not answer.settled_pairs.settled:
                raise Unavailable(f"{leader.name} could not settle the pair; try again")
            return await self._applied(answer.settled_pairs.changes)

        return await self._retry(attempt, timeout_seconds)

    async def _retry(self, attempt: Callable[[float], Awaitable[_Result]], timeout_seconds: float) -> _Result:
        """Repeat the attempt until it succeeds, fails for good, or the time is up.

        A leader that does not own the shard has begun nothing, and a shard changes hands with all its pairs at once:
        that is no overload, and the pauses bound the retries. All other retries use up the budget."""
        until = self._clock.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        unknown: RemoteOutcomeUnknown | None = None
        while True:
            try:
                done = await attempt(until - self._clock.monotonic())
                self._budget.earn()
                return done
            except Deposed:
                raise
            except (NotMine, Fenced, Unavailable, RemoteOutcomeUnknown) as error:
                if isinstance(error, RemoteOutcomeUnknown):
                    unknown = error
                now = self._clock.monotonic()
                is_over = isinstance(error, DatabaseDown | DatabaseFull) or now + pause >= until
                if is_over or (not isinstance(error, (NotMine, Fenced)) and not self._budget.spend(now)):
                    raise error from (None if error is unknown else unknown)
            await asyncio.sleep(pause)
            # No longer than the pause: while etcd is silent, a read takes all the time that is left. It goes on.
            await self._configuration.refresh(min(pause, until - self._clock.monotonic()))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _settle(
        self,
        shard: int,
        settles: Sequence[SettleEdge],
        coordinator: Coordinator,
        timeout_seconds: float,
        *,
        background: bool,
    ) -> Copied:
        if shard in self._ownership.owned and self.local is not None:
            return await self._settle_here(self.local, settles, timeout_seconds, sub_write=not background)
        copies = await self._copies.send(
            self._leader(shard), settles, coordinator, timeout_seconds, background=background
        )
        for result in copies.results:
            if result.HasField("error"):
                error = error_from_pb(result.error)
                raise RemoteOutcomeUnknown(error.message) if isinstance(error, OutcomeUnknown) else error
        copied = Copied(copies.changes, [])
        for settle, result in zip(settles, copies.results, strict=True):
            if result.HasField("registers"):
                copied.add(settle, registers_from_pb(result.registers), node_state_from_pb(result.node))
        await self._apply_changes(copied.messages)
        return copied

    async def _settle_here(
        self, local: LocalInverses, settles: Sequence[SettleEdge], timeout_seconds: float, *, sub_write: bool
    ) -> Copied:
        """Write the copies side by side, those of one type with states together. None goes on after an error is
        raised."""
        deadline = self._clock.monotonic() + timeout_seconds
        by_type: dict[int, list[SettleEdge]] = {}
        writes: list[SettleEdge | JoinEdges] = []
        for settle in settles:
            if settle.registers is None:
                writes.append(settle)
            else:
                by_type.setdefault(settle.atype, []).append(settle)
        for copies in by_type.values():
            writes += joins_of(copies)
        done = [local.write(write, deadline, sub_write=sub_write) for write in writes]
        copied = Copied([], [])
        for write, result in zip(writes, await asyncio.gather(*done, return_exceptions=True), strict=True):
            if isinstance(result, OutcomeUnknown):
                raise RemoteOutcomeUnknown(result.message) from result
            if isinstance(result, BaseException):
                raise result
            written, _ = result
            copied.messages.extend(written.messages)
            if isinstance(write, JoinEdges):
                for settle, joined in zip(write.edges, written.outcome.joined, strict=True):
                    copied.add(settle, joined.registers, joined.node)
        return copied

    async def _applied(self, changes: Iterable[pb.ShardMessages]) -> list[ShardMessages]:
        """Apply the changes of a copy in this region; return them."""
        messages = [shard_messages_from_pb(each) for each in changes]
        await self._apply_changes(messages)
        return messages


class InverseFence:
    """The highest known generation of each coordinating shard. It keeps one integer per shard."""

    def __init__(self, store: WriteStore, *, timeout_seconds: float) -> None:
        self._store: Final = store
        self._timeout_seconds: Final = timeout_seconds
        self._highest: dict[int, int] = {}

    def note(self, row: ShardRow) -> None:
        """Record that this leader has taken the shard itself."""
        self._highest[row.shard] = max(row.generation, self._highest.get(row.shard, 0))

    async def admit(self, batch: pb.WriteBatch) -> None:
        """Check the coordinator of a copy.

        Raises `Fenced` when it has been deposed, `Unauthorized` when the batch names none."""
        if not self.admit_known(batch):
            # This leader started after the coordinator: the database knows the owner of the coordinating shard.
            shard = batch.coordinator.shard
            rows = await self._store.read_ownership((shard,), timeout_seconds=self._timeout_seconds)
            self._highest[shard] = max(rows[shard].generation, self._highest.get(shard, 0))
            self.admit_known(batch)

    def admit_known(self, batch: pb.WriteBatch) -> bool:
        """Check the coordinator of a copy as `admit` does. Returns False where the database has to be asked first."""
        if not batch.HasField("coordinator"):
            raise Unauthorized("settle_edge must name the coordinator of the pair; only leaders send it")
        shard, generation = batch.coordinator.shard, batch.coordinator.generation
        if shard not in self._highest:
            return False
        if generation < self._highest[shard]:
            raise Fenced(
                f"shard {shard} is owned under generation {self._highest[shard]} now, no longer under {generation}"
            )
        self._highest[shard] = generation
        return True
