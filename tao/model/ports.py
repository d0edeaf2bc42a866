"""Ports: the interfaces of the core to the outside, as Protocols.

Above them there are no threads, no sockets and no time but the loop's, so that a simulator can put its own clock, store
and network under the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

from tao.model.delivery import SpoolMark, SpoolRow
from tao.model.edge_states import EdgeRegisters
from tao.model.errors import TaoError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.jobs import JobCount, JobQuery, JobRow, PausedKind
from tao.model.queries import FillRead, MemberPage, PairPage, PairsQuery, Query
from tao.model.rows import (
    EdgePage,
    ExistingRows,
    IntentRow,
    ListRow,
    OldestEdges,
    RowChanges,
    ShardRow,
    StateRows,
    WriteKeys,
)
from tao.model.topology import Topology


class Clock(Protocol):
    """Time, from the loop."""

    def monotonic(self) -> float:
        """Return seconds; only differences have a meaning."""

    def unix_ms(self) -> int:
        """Return milliseconds since 1970, for ids and people."""


OnRead = Callable[[Sequence[int], FillRead | TaoError], None]
"""Receives the answers to some of the queries, given by their indexes, or the errors of queries without answers."""


class ReadStore(Protocol):
    """Reads of one region's databases for cache fills (autocommit, read-only account)."""

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        """Answer each query once by its encoded value, as soon as it is there. A slow or rejected query delays and
        fails only the queries of its own shard, by `Unavailable`, `Overloaded`, `DeadlineExceeded` or `OperatorError`.

        Every answer is of one snapshot. ``critical`` reads the master database. An error that ``on_read`` raises ends
        the read, and is raised here.
        """

    def read_at_once(
        self, queries: Sequence[Query], *, timeout_seconds: float, on_read: OnRead, on_end: Callable[[], None]
    ) -> bool:
        """Begin to read as `read_each` does, without a task, if that has to wait for nothing here. Returns whether it
        has begun.

        ``on_end`` is called once after it has begun. Queries that have no answer by then are to be read by
        `read_each`: the read failed in a way that another connection or a statement for each shard may mend."""
        return False

    async def read(self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float) -> FillRead:
        """Read as `read_each` does, for callers that need all answers together, in the order of the queries. Raises the
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


class IntentReads(ReadStore, Protocol):
    """Reads for those who settle pairs, which begin with the intents."""

    async def read_intents(self, shard: int, far_shard: int, *, limit: int, timeout_seconds: float) -> list[IntentRow]:
        """Return the intents of ``shard`` whose inverse edges are on ``far_shard``, at most ``limit``, in any order.

        The read is critical: a former master, which may lack intents, answers with `MasterReadOnly`. Raises
        `TaoError`."""


class MemberScans(Protocol):
    """Reads long lists for their membership filters."""

    async def read_members(self, id1: int, atype: int, after_id2: int, limit: int, *, deadline: float) -> MemberPage:
        """Return the id2s above ``after_id2``, ascending, at most ``limit``, all of one snapshot of the region's
        database. ``deadline`` is in the loop's time. Raises `TaoError`."""


class PairReads(Protocol):
    """Reads all lists of a type in a shard for their pair filter."""

    async def read_pairs(self, query: PairsQuery, *, deadline: float) -> PairPage:
        """Return a page of the edges of a type, all of one snapshot of the region's database. ``deadline`` is in
        the loop's time. Raises `TaoError`."""


class StoredState(NamedTuple):
    """The registers of an edge of a type with states, and the clock's second of their last change; 0: not known."""

    key: EdgeKey
    registers: EdgeRegisters
    changed_unix_s: int


class ShardScans(Protocol):
    """Reads the rows of a shard in the order of their keys, from its master database; fewer than ``limit`` at the end.
    Raises `TaoError`."""

    async def scan_object_types(self, shard: int, after_id: int, limit: int) -> list[tuple[int, int]]:
        """Return ids and types of objects above ``after_id``; deleted ones have the type `ABSENT`."""

    async def scan_edges(self, shard: int, table: str, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, Edge]]:
        """Return the edges of one table after a key."""

    async def scan_states(self, shard: int, after: EdgeKey, limit: int) -> list[StoredState]:
        """Return the registers of edges of types with states after a key."""


class Transaction(Protocol):
    """One write transaction on one database server."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Roll back unless committed; the connection is never returned to the pool with a transaction open."""

    async def lock_and_read(self, shards: Sequence[int], keys: WriteKeys) -> tuple[dict[int, ShardRow], ExistingRows]:
        """Share-lock the rows of table ``shard`` in shard order, then lock and read the named rows in key order. Raises
        `ShardBlocked` when a lock was not granted in time; everything is rolled back."""

    async def lock_oldest(self, lists: Mapping[ListKey, int]) -> dict[ListKey, OldestEdges]:
        """Lock and read so many of the oldest edges of each list, after `lock_and_read` has locked the lists. Raises as
        that does."""

    async def lock_lists(self, lists: AbstractSet[ListKey]) -> dict[ListKey, ListRow]:
        """Lock and read the rows of more lists, after `lock_and_read` has locked their edges. Raises as that does.
        Two transactions that do so at a time must have no list in common, in any state: see `lane_keys`."""

    async def lock_page(self, page: EdgePage) -> StateRows:
        """Lock and read the rows of a page of edges with states, after `lock_and_read` has locked their lists. Raises
        as that does."""

    async def apply(self, rows: RowChanges) -> None:
        """Write the changes, now or with `commit`; raises as `lock_and_read` does."""

    async def commit(self) -> str:
        """Commit, and return the transaction's GTID, or an empty text when it is not known. Raises as `apply` for rows
        that are rejected, and `OutcomeUnknown` when the connection broke meanwhile."""


class WriteStore(Protocol):
    """Writes to the master databases (leaders only)."""

    def server_of(self, shard: int) -> str:
        """Return the name of the database server that is master of the shard. Writes of shards with one name can share
        a transaction."""

    def transaction(self, server: str, *, timeout_seconds: float) -> Transaction:
        """Return a transaction on that server, to be used as a context manager; it begins with
        `Transaction.lock_and_read`."""

    async def take_ownership(self, shards: Sequence[int], owner: str, *, timeout_seconds: float) -> dict[int, ShardRow]:
        """Make ``owner`` the owner of these shards of one server, each under a generation one higher, in one
        transaction under exclusive locks. The generation is raised even when it is the owner already, because an older
        incarnation must be fenced off.

        A single shard's lock is waited for. Of several shards, those that other transactions hold now are left out of
        the transaction and of the answer, so that one busy shard delays none of the others."""

    async def read_ownership(self, shards: Sequence[int], *, timeout_seconds: float) -> dict[int, ShardRow]:
        """Return the rows of table ``shard`` as they are, without locks."""

    async def write_heartbeat(self, shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        """Commit the writer's row in the shard's table ``heartbeat``. A reader that sees it has seen every commit to
        the shard's database that was acknowledged before ``unix_ms``. Returns whether commits there wait until a
        replica has received them. It fails as any write does, whole or with an unknown outcome; another one follows."""

    async def old_intents(self, shards: Sequence[int], *, before_unix_ms: int, limit: int) -> list[IntentRow]:
        """Return intents created before the given time, at most ``limit``. A former master may return fewer than there
        are: `IntentReads.read_intents` is for those who conclude something from their absence."""

    async def read_jobs(self, shards: Sequence[int], query: JobQuery, *, timeout_seconds: float) -> list[JobRow]:
        """Return jobs of these shards without their bodies, and without locks: at most ``query.limit`` of each, and
        the first to be done first. A former master may return others than there are."""

    async def count_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[JobCount]:
        """Return how many jobs of these shards wait or are parked, as `read_jobs`, by state, lease and failures."""

    async def paused_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[PausedKind]:
        """Return the kinds of jobs that are paused on these shards, as `read_jobs`."""


class Versioned(Protocol):
    """A document whose version rises with every change."""

    @property
    def version(self) -> int: ...


Document_co = TypeVar("Document_co", bound=Versioned, covariant=True)


class DocumentStore(Protocol[Document_co]):
    """Stores a document that describes the cluster: the topology, or which caller has which rights."""

    async def load(self) -> Document_co:
        """Return the document. Raises an `OperatorError` when there is none or it is wrong."""

    def watch(self, on_change: Callable[[Document_co], None]) -> Callable[[], None]:
        """Call back on every newer document until the returned function is called."""


class TopologyStore(DocumentStore[Topology], Protocol):
    """Stores the topology document, which programs change, too. Its errors are `TopologyError`s."""

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        """Compare-and-set: store ``changed`` as version ``expected_version + 1``. Raises `TopologyConflict`."""

    async def replace(self, expected_version: int, document: Topology) -> Topology:
        """Compare-and-set: store a whole document of a higher version as it is. Raises `TopologyConflict`."""


class Spool(Protocol):
    """Guaranteed messages on disk, behind a leader's memory. Nothing here blocks; jobs are done in the order in which
    they were given, and ``stored`` and ``answer`` are called from the loop."""

    def marks(self) -> Sequence[SpoolMark]:
        """Return the marks that the spool held when it was opened."""

    def on_change(self, dropped: Callable[[int, str, int], None], lost: Callable[[], None]) -> None:
        """Register two listeners: one is called when a shard's rows up to a number of a source have made room for newer
        ones, the other when nothing stored so far can be relied on (the disk is full or broken)."""

    def append(self, rows: Sequence[SpoolRow], marks: Sequence[SpoolMark], stored: Callable[[], None]) -> None:
        """Store the rows, all or none. ``stored`` is called when a loss of power does them no harm any more, or when
        they are not in the spool, which ``lost`` has reported before."""

    def prove(self, source: str, number: int) -> None:
        """Record that everything up to this number has been delivered to all linked shards of the source."""

    def read(
        self,
        shard: int,
        source: str,
        after: tuple[int, int],
        max_bytes: int,
        answer: Callable[[Sequence[SpoolRow] | None], None],
    ) -> None:
        """Return the shard's rows after ``(number, place)``, in their order, as many as fit and at least one if there
        is one. None: they cannot be read."""
