"""Ports: what the core asks of the outside, as Protocols (DESIGN.md §14).

Above these there are no threads, no sockets and no time but the loop's, so that a simulator can put its own clock,
store and network under the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from tao.model.delivery import SpoolMark, SpoolRow
from tao.model.errors import TaoError
from tao.model.queries import FillRead, MemberPage, Query
from tao.model.rows import ExistingRows, IntentRow, RowChanges, ShardRow, WriteKeys
from tao.model.topology import Topology


class Clock(Protocol):
    """Time, from the loop."""

    def monotonic(self) -> float:
        """Seconds; only differences mean something."""

    def unix_ms(self) -> int:
        """Milliseconds since 1970, for ids and people."""


OnRead = Callable[[Sequence[int], FillRead | TaoError], None]
"""Takes the answers to some of the queries, given by their places, or why these have none."""


class ReadStore(Protocol):
    """Reads of one region's databases for cache fills (autocommit, read-only account)."""

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        """Answer each query by its encoded value, once, as soon as it is there: what is slow or refused holds up and
        fails its own shard's queries alone, by `Unavailable`, `Overloaded`, `DeadlineExceeded` or `OperatorError`.
        Every answer is of one snapshot. ``critical`` goes to the master database. An error that ``on_read`` raises
        ends the read, and is raised here."""

    async def read(self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float) -> FillRead:
        """`read_each` for those to whom only all answers together, in the order of the queries, are of use. Raises the
        first failure."""
        values = [b""] * len(queries)
        epochs: dict[int, int] = {}

        def take(places: Sequence[int], read: FillRead | TaoError) -> None:
            if isinstance(read, TaoError):
                raise read
            epochs.update(read.version_epochs)
            for place, value in zip(places, read.values, strict=True):
                values[place] = value

        await self.read_each(queries, critical=critical, timeout_seconds=timeout_seconds, on_read=take)
        return FillRead(values, epochs)


class MemberScans(Protocol):
    """Reads long lists for their membership filters (DESIGN.md §10)."""

    async def read_members(self, id1: int, atype: int, after_id2: int, limit: int, *, deadline: float) -> MemberPage:
        """The id2s above ``after_id2``, ascending, at most ``limit``, all of one snapshot of the region's database.
        ``deadline`` is in the loop's time. Raises `TaoError`."""


class Transaction(Protocol):
    """One write transaction on one database server."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Rolls back unless committed; the connection is never returned to the pool with a transaction open."""

    async def lock_and_read(self, shards: Sequence[int], keys: WriteKeys) -> tuple[dict[int, ShardRow], ExistingRows]:
        """Share-lock the rows of table ``shard`` in shard order, then lock and read the named rows in key order.
        Raises `ShardBlocked` when a lock was not had in time; everything is rolled back."""

    async def apply(self, rows: RowChanges) -> None:
        """Write, now or with `commit`; raises as `lock_and_read` does."""

    async def commit(self) -> None:
        """Raises as `apply` for rows that are refused, and `OutcomeUnknown` when the connection broke meanwhile."""


class WriteStore(Protocol):
    """Writes to the master databases (leaders only)."""

    def server_of(self, shard: int) -> str:
        """Name of the database server that is master of the shard. Writes of shards with one name can share a
        transaction."""

    def transaction(self, server: str, *, timeout_seconds: float) -> Transaction:
        """A transaction on that server, to be used as a context manager; begins with `Transaction.lock_and_read`."""

    async def take_ownership(self, shard: int, owner: str, *, timeout_seconds: float) -> ShardRow:
        """Make ``owner`` the owner of the shard under a generation one higher, under the exclusive lock. When it is
        the owner already the generation is raised all the same: an older incarnation must be fenced off."""

    async def read_ownership(self, shards: Sequence[int], *, timeout_seconds: float) -> dict[int, ShardRow]:
        """The rows of table ``shard`` as they are, without locks."""

    async def write_heartbeat(self, shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        """Commit the writer's row in the shard's table ``heartbeat``: whoever sees it has seen every commit to the
        shard's database that was acknowledged before ``unix_ms``. Returns whether commits there wait until a replica
        has received them. Fails as any write does, whole or with an unknown outcome; another one follows."""

    async def old_intents(self, shards: Sequence[int], *, before_unix_ms: int, limit: int) -> list[IntentRow]:
        """Intents created before the given time, at most ``limit``, for repair."""


class TopologyStore(Protocol):
    """Where the topology document lives."""

    async def load(self) -> Topology:
        """Raises `TopologyError` when there is none or it is wrong."""

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        """Compare-and-set: store ``changed`` as version ``expected_version + 1``. Raises `TopologyConflict`."""

    def watch(self, on_change: Callable[[Topology], None]) -> Callable[[], None]:
        """Call back on every newer document until the returned function is called."""


class Spool(Protocol):
    """Guaranteed messages on disk, behind a leader's memory (DESIGN.md §7). Nothing here blocks; jobs are done in the
    order in which they were given, and ``stored`` and ``answer`` are called from the loop."""

    def marks(self) -> Sequence[SpoolMark]:
        """What the spool held when it was opened."""

    def on_change(self, dropped: Callable[[int, str, int], None], lost: Callable[[], None]) -> None:
        """Whom to tell that a shard's rows up to a number of a source have made room for newer ones, and that nothing
        stored so far can be relied on (the disk is full or broken)."""

    def append(self, rows: Sequence[SpoolRow], marks: Sequence[SpoolMark], stored: Callable[[], None]) -> None:
        """Keep them, all or none. ``stored``: a loss of power does them no harm any more, or they are not in the spool,
        which has been said by ``lost``."""

    def prove(self, source: str, number: int) -> None:
        """All linked shards of the source have been told everything up to there."""

    def read(
        self,
        shard: int,
        source: str,
        after: tuple[int, int],
        max_bytes: int,
        answer: Callable[[Sequence[SpoolRow] | None], None],
    ) -> None:
        """The shard's rows after ``(number, place)``, in their order, as many as fit and at least one if there is one.
        None: they cannot be read."""
