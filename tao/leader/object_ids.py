"""Give out the ids of new objects, and reserve their times in the database before that.

An id that was given out need not be in the database yet: a caller may hold it as a reservation, a journal or a load may
name it, and a commit may be lost with its master. So a leader that takes a shard cannot see which ids its predecessors
have given out. It knows a time above which they have given out none: each shard's database holds it, and an owner
raises it, a minute ahead, in a commit that checks the ownership as every write does.

So most ids cost no commit. An owner's first id in a shard does. While a shard's ids are used, more time is reserved
when half a minute is left. Such a commit also raises the time of the server's other shards in use, up to 64 in all, of
which a quarter of a minute is used up. So many shards in use cost few commits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from tao.leader.ownership import Ownership, concerns_the_server
from tao.model.errors import (
    DeadlineExceeded,
    InternalError,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.ids import RESERVED_AHEAD_MS, SHARD_SHIFT, IdSequence, next_reserved
from tao.model.ports import WriteStore
from tao.model.rows import RowChanges, ShardRow, WriteKeys
from tao.serving.configuration import ServerContext

_MAX_SHARDS_PER_TRANSACTION: Final = 64
"""Shards that reserve time in one transaction. A new owner of thousands of shards needs time in most of them within a
moment."""


class _Tenure(NamedTuple):
    """The ids of a shard under one ownership, which the shard's row identifies as it was taken.

    The generation alone does not: a master that was lost with its last commits and returns may give out the same one
    again, but under another version epoch."""

    row: ShardRow
    ids: IdSequence


@dataclass(slots=True)
class _Reservation:
    """A reservation of time for one shard that is queued or in a transaction, and how many callers wait for it."""

    done: asyncio.Future[None]
    waiting: int = 0


class ObjectIds:
    """Gives out and admits ids of the shards that this leader owns."""

    def __init__(
        self,
        context: ServerContext,
        ownership: Ownership,
        store: WriteStore,
        *,
        timeout_seconds: float,
        max_waiting_per_shard: int,
    ) -> None:
        """``timeout_seconds`` bounds a transaction that reserves time; ``max_waiting_per_shard`` those who wait."""
        self._ownership: Final = ownership
        self._store: Final = store
        self._timeout_seconds: Final = timeout_seconds
        self._max_waiting_per_shard: Final = max_waiting_per_shard
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._spawn: Final = context.spawn_as("id reservation")
        self._tenures: dict[int, _Tenure] = {}
        self._queued: dict[str, list[int]] = {}
        self._busy: set[str] = set()
        self._under_way: dict[int, _Reservation] = {}

    async def allocate(self, shard: int, count: int = 1, *, deadline: float) -> int:
        """Give out ``count`` consecutive ids of the shard and return the first. ``deadline`` is a time of the clock.

        Raises `NotMine`, `Overloaded` when the ids may not run further ahead of the clock or too many callers wait,
        `DeadlineExceeded`, and what a transaction raises before anything is written."""
        while True:
            ids = self._ids_of(shard)
            if ids is not None:
                now = self._clock.unix_ms()
                first = ids.take(count, now)
                if first is not None:
                    if ids.is_running_out(now):
                        _ = self._reserve(shard)  # in the background
                    return first
            await self._reserved(shard, deadline)

    async def admit(self, object_id: int, deadline: float) -> None:
        """Check an id that the caller chose for a new object. Raises `IdNotReserved`, and as `allocate`."""
        while not self.admit_known(object_id):
            await self._reserved(object_id >> SHARD_SHIFT, deadline)

    def admit_known(self, object_id: int) -> bool:
        """Check an id as `admit` does. Returns False where time has to be reserved first. Raises `IdNotReserved` and
        `NotMine`."""
        ids = self._ids_of(object_id >> SHARD_SHIFT)
        return ids is not None and ids.admit(object_id, self._clock.unix_ms())

    def _ids_of(self, shard: int) -> IdSequence | None:
        """Return the ids of an owned shard; None until time is reserved under this ownership. Raises `NotMine`."""
        row = self._ownership.row(shard)
        tenure = self._tenures.get(shard)
        return tenure.ids if tenure is not None and tenure.row == row else None

    async def _reserved(self, shard: int, deadline: float) -> None:
        reservation = self._reserve(shard)
        if reservation.waiting >= self._max_waiting_per_shard:
            raise Overloaded(f"{reservation.waiting} callers wait for ids of shard {shard} already")
        reservation.waiting += 1
        try:
            async with asyncio.timeout(deadline - self._clock.monotonic()):
                # Not awaited itself: who is cancelled would cancel it, and others may wait for it.
                await asyncio.wait([reservation.done])
                reservation.done.result()
        except TimeoutError as error:
            raise DeadlineExceeded(f"no id of shard {shard} was reserved before the deadline") from error
        finally:
            reservation.waiting -= 1

    def _reserve(self, shard: int) -> _Reservation:
        """Have more time reserved for the shard, together with what other shards of its server need."""
        reservation = self._under_way.get(shard)
        if reservation is None:
            server = self._ownership.row(shard).master_server
            reservation = self._under_way[shard] = _Reservation(asyncio.get_running_loop().create_future())
            self._queued.setdefault(server, []).append(shard)
            if server not in self._busy:
                self._busy.add(server)
                asyncio.get_running_loop().call_soon(self._start, server)
        return reservation

    def _start(self, server: str) -> None:
        try:
            self._spawn(self._work(server))
        except TaoError as error:
            self._busy.discard(server)
            self._finish(self._queued.pop(server), error)

    async def _work(self, server: str) -> None:
        """Reserve time for the queued shards of a server, until none is left, and with them for others in use."""
        queue = self._queued[server]
        shards: list[int] = []
        try:
            while queue:
                shards = queue[:_MAX_SHARDS_PER_TRANSACTION]
                del queue[: len(shards)]
                shards += self._join(server, _MAX_SHARDS_PER_TRANSACTION - len(shards))
                await self._reserve_together(server, shards)
        except BaseException as error:
            # Whatever ends the work, nobody may wait for it for ever.
            failed: TaoError = InternalError(f"{type(error).__name__} while ids were reserved; see the leader's log")
            if isinstance(error, asyncio.CancelledError):
                failed = Unavailable("the leader stopped before ids were reserved")
            self._finish([*shards, *queue], failed)
            raise
        finally:
            self._busy.discard(server)
            del self._queued[server]

    def _join(self, server: str, limit: int) -> list[int]:
        """Have time reserved for shards of the server that would need a commit of their own soon. Return them."""
        now = self._clock.unix_ms()
        owned = self._ownership.owned
        soon = (
            shard
            for shard, tenure in self._tenures.items()
            if tenure.row.master_server == server
            and tenure.ids.is_worth_raising(now)
            and owned.get(shard) == tenure.row
            and shard not in self._under_way
        )
        joined = list(islice(soon, limit))
        for shard in joined:
            self._under_way[shard] = _Reservation(asyncio.get_running_loop().create_future())
        return joined

    async def _reserve_together(self, server: str, shards: list[int]) -> None:
        """Reserve time for these shards in one transaction, or in several when one of them has it rejected: the others
        must not fail with it."""
        groups = [shards]
        while groups:
            group = groups.pop()
            try:
                await self._transact(server, group)
            except OutcomeUnknown as error:
                # Whether or not the time was raised, none of it has been used.
                self._finish(group, Unavailable(f"no ids could be reserved: {error.message}"))
            except TaoError as error:
                if len(group) == 1 or concerns_the_server(error):
                    self._finish(group, error)
                elif isinstance(error, ShardBlocked) and error.shard in group:
                    self._finish([error.shard], error)
                    groups.append([shard for shard in group if shard != error.shard])
                else:
                    groups.extend([shard] for shard in group)
            else:
                self._finish(group, None)

    async def _transact(self, server: str, shards: list[int]) -> None:
        """Raise the reserved time of these shards in one commit, except of those that this leader does not own."""
        async with self._store.transaction(server, timeout_seconds=self._timeout_seconds) as transaction:
            rows, existing = await transaction.lock_and_read(sorted(shards), WriteKeys(reserved_times=set(shards)))
            now = self._clock.unix_ms()
            # Without a row, no leader that reserves time has owned the shard. The ids that one of a former version
            # gave out are unknown, so begin above them.
            stored = {shard: existing.reserved_times.get(shard, now + RESERVED_AHEAD_MS) for shard in shards}
            taken = {
                shard: self._ownership.row(shard)
                for shard in shards
                if self._ownership.confirm_locked(shard, rows.get(shard), server)
            }
            # Where no more may be reserved yet, an owner that has just begun learns that it has nothing to give out.
            raised = {shard: time for shard in taken if (time := next_reserved(stored[shard], now)) is not None}
            if raised:
                await transaction.apply(RowChanges(put_reserved_times=raised))
                await transaction.commit()
        for shard, row in taken.items():
            tenure = self._tenures.get(shard)
            if tenure is None or tenure.row != row:
                tenure = self._tenures[shard] = _Tenure(row, IdSequence(shard, stored[shard]))
            tenure.ids.reserved_unix_ms = raised.get(shard, stored[shard])

    def _finish(self, shards: list[int], error: TaoError | None) -> None:
        for shard in shards:
            reservation = self._under_way.pop(shard, None)
            if reservation is None or reservation.done.done():
                continue
            if error is None:
                reservation.done.set_result(None)
            else:
                reservation.done.set_exception(error)
                reservation.done.exception()  # marks it as retrieved: perhaps nobody waits
        if error is not None and shards:
            self._log.warning("ids_not_reserved", shards=len(shards), reason=error.message)
