"""Replication sets of simulated databases: transactions on the master, replicas with lag, binlogs, and a history.

A commit is written to the binlog first and becomes visible a moment later, on the master as on replicas, as on real
servers. Shard rows are locked as in the real store: shared by a transaction until it ends, exclusively by a takeover.
``past`` keeps every content that any version of a key ever had; the contents of caches and answers are compared with
it. A set that has lost its master may have lost transactions with it, and ``past`` knows which.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final

from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import ListRow, ObjectRow, RowChanges, ShardRow
from tao.planning.row_events import Row, RowEvent
from tao.replication.lease import EVENT_SECONDS
from tao.schema.registry import Schema
from tao.schema.types import STATES_TABLE
from tests.sim.loop import Process, SimLoop
from tests.sim.rows import Logged, Past, Rows, Statement


class ShardLocks:
    """Shared and exclusive locks on the shard rows of one server. A waiter for an exclusive lock goes first."""

    def __init__(self) -> None:
        self._shared: dict[int, int] = defaultdict(int)
        self._exclusive: set[int] = set()
        self._waiting: dict[int, int] = defaultdict(int)
        self._freed: list[asyncio.Future[None]] = []

    async def share(self, shard: int) -> None:
        while shard in self._exclusive or self._waiting[shard]:
            await self._next()
        self._shared[shard] += 1

    async def exclude(self, shard: int) -> None:
        self._waiting[shard] += 1
        try:
            while shard in self._exclusive or self._shared[shard]:
                await self._next()
            self._exclusive.add(shard)
        finally:
            self._waiting[shard] -= 1
            self._wake()

    def exclude_if_free(self, shard: int) -> bool:
        """Lock the shard exclusively if nobody holds it; return whether it is locked now."""
        if shard in self._exclusive or self._shared[shard]:
            return False
        self._exclusive.add(shard)
        return True

    def free(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self._shared[shard] -= 1
        self._wake()

    def free_exclusive(self, shard: int) -> None:
        self._exclusive.discard(shard)
        self._wake()

    async def _next(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._freed.append(waiting)
        await waiting

    def _wake(self) -> None:
        freed, self._freed = self._freed, []
        for each in freed:
            if not each.done():
                each.set_result(None)


class SimDatabase:
    """A database server, master or replica of its set. ``process`` represents it on the network."""

    def __init__(self, name: str, region: str, loop: SimLoop, rng: random.Random, server_id: int) -> None:
        self.process: Final = Process(name, region)
        self.name: Final = name
        self.region: Final = region
        self.rows: Final = Rows()
        """The rows that a reader sees."""
        self.truth: Final = Rows()
        """The committed rows of a master."""
        self.binlog: Final[list[Logged]] = []
        self.locks: Final = ShardLocks()
        self.replicas: Final[list[SimDatabase]] = []
        self.past: Past = Past()
        self.transactions: Final[dict[object, Process]] = {}
        """Open transactions and the processes that they belong to."""
        self.commit_faults: Final[list[str]] = []
        """The faults of the next commits: ``aborted``, ``lost before`` or ``lost after`` (the commit happens)."""
        self.stopped = False
        self.lost = False
        """True when the server looks lost to all others, and another is promoted in its place."""
        self.read_only = True
        """True on every server that is not a master."""
        self.lease_seconds = 0.0
        """Length of a lease; 0 where none is kept."""
        self._lease_ends = 0.0
        self.answers_after = (0.0, 0.0)
        """Least and most seconds by which the answer of a read is delayed after its rows have been read."""
        self.lag_seconds = 0.02
        """Longest delay of a transaction on its way to this replica."""
        self.stopped_until = 0.0
        """Time until which replication is stopped."""
        self.purged_before = 0
        """Number of transactions purged from the binlog."""
        self.listeners: Final[dict[object, Callable[[], None]]] = {}
        """Readers of the binlog, woken when there is more."""
        self.on_commit: Callable[[SimDatabase, RowChanges], None] = lambda _, __: None
        self.before_commit: Callable[[SimDatabase, RowChanges], None] = lambda _, __: None
        self._loop: Final = loop
        self._random: Final = rng
        self._server_id: Final = server_id
        self._applies_at = 0.0
        self._relay_log: Final[deque[Logged]] = deque()
        self._visible_until = 0.0
        self._purged = ""
        self._shown = ""
        self.restarts = 0
        """How often it was stopped or lost: sessions end with the process."""

    @property
    def down(self) -> bool:
        return self.stopped or self.lost

    @property
    def position(self) -> str:
        """The position at which the binlog ends."""
        return self.binlog[-1].gtid if self.binlog else self._purged

    @property
    def visible_position(self) -> str:
        """The position up to which a replica shows everything, and nothing later."""
        return self._shown

    def shows(self, position: str) -> bool:
        """Return whether a replica shows everything up to a position of its master."""
        return _number(self._shown) >= _number(position)

    def after(self, position: str) -> list[Logged] | None:
        """Return the transactions after a position, or None if it is unknown here or already purged."""
        if position == self._purged:
            return self.binlog
        at = _number(position) - self.purged_before
        if not 0 < at <= len(self.binlog) or self.binlog[at - 1].gtid != position:
            return None
        return self.binlog[at:]

    def purge(self) -> None:
        """Purge the binlog; a reader that has not read it yet never will."""
        self._purged = self.position
        self.purged_before = _number(self._purged)
        self.binlog.clear()

    def restore(self, rows: Rows) -> None:
        """Begin anew with these rows, as the server of another cluster."""
        self.purge()
        self._relay_log.clear()
        for own in (self.rows, self.truth):
            own.take_over(rows)
        self._shown = self.position

    # leases

    @property
    def now(self) -> float:
        """The time by the server's own clock."""
        return self._loop.now

    def keep_lease(self, lasts_seconds: float) -> None:
        """Keep leases of that length from now on, or none; an open server gets a first one."""
        kept, self.lease_seconds = self.lease_seconds, lasts_seconds
        if lasts_seconds and not self.read_only and not self._lease_ends:
            self._lease_ends = self.now + lasts_seconds
        if lasts_seconds and not kept:
            self._close_without_lease()

    def renew_lease(self, since: float) -> bool:
        """Extend a lease that has not run out, from a moment before now."""
        if self.read_only or self.now >= self._lease_ends:
            return False
        self._lease_ends = max(self._lease_ends, since + self.lease_seconds)
        return True

    def open(self, since: float) -> None:
        """Open the server to writes, under a lease from then on if it keeps leases."""
        self._lease_ends = since + self.lease_seconds
        self.read_only = False

    def lease_is_over(self) -> bool:
        """Return whether the server has to close itself."""
        return self.now >= self._lease_ends

    def _close_without_lease(self) -> None:
        """Close the server once its lease is over; an event calls this every second."""
        if self.lease_seconds:
            self.read_only = self.read_only or self.lease_is_over()
            self._loop.call_later(EVENT_SECONDS, self._close_without_lease, context=self.process.context.copy())

    # masters

    def forget_received(self, most: int) -> list[Logged]:
        """Drop up to ``most`` of the last received transactions that are not applied yet, and return them."""
        gone = [self._relay_log.pop() for _ in range(min(most, len(self._relay_log)))]
        return gone[::-1]

    @property
    def has_applied_all(self) -> bool:
        """True when everything received is visible."""
        return not self._relay_log and self._loop.now > self._visible_until

    def waiting(self) -> int:
        """Return the number of transactions in the relay log."""
        return len(self._relay_log)

    def become_master(self) -> None:
        """Become a master: what has been applied is the committed state from now on."""
        self.truth.take_over(self.rows)

    def follow(self, master: SimDatabase, *, anew: bool) -> None:
        """Become a replica of ``master``, all of whose transactions are here; with ``anew``, start from a copy of
        it."""
        if anew:
            self.rows.take_over(master.truth)
            self.binlog[:] = master.binlog
            self.purged_before, self._purged = master.purged_before, master._purged
            self._relay_log.clear()
        self.read_only = True
        self._shown = self.position
        master.replicas.append(self)

    def host(self, shards: Iterable[int], master: str) -> None:
        for rows in (self.rows, self.truth):
            rows.shards.update({shard: ShardRow(shard, master, 1, "", 0) for shard in shards})

    def log(
        self,
        changes: RowChanges,
        schema: Schema,
        shards: dict[int, ShardRow] | None = None,
        heartbeat: tuple[int, str, int] | None = None,
    ) -> float:
        """Commit on a master: write to the binlog now. Return when the commit becomes visible; call `show` then."""
        logged = Logged(
            self._next_gtid(),
            [_beat(*heartbeat)] if heartbeat else row_events(self.truth, changes, schema),
            changes,
            shards or {},
            unix_ms(self._loop.now),
        )
        self.before_commit(self, changes)
        self.truth.write(changes)
        edges = (*changes.put_edges, *changes.delete_edges)
        lists = {**changes.put_lists, **{ListKey(edge.id1, edge.atype): None for edge in edges}}
        self.past.keep(self.truth, [row.id for row in changes.put_objects], lists, self._loop.now)
        self.on_commit(self, changes)
        self.truth.shards.update(logged.shards)
        return self._send(logged)

    async def execute(self, statement: Statement, *invalid: int) -> None:
        """Carry out a statement on a master, and return when it is visible. ``invalid``: see `Logged`."""
        statement(self.truth)
        logged = Logged(self._next_gtid(), [], RowChanges(), {}, unix_ms(self._loop.now), statement, frozenset(invalid))
        await asyncio.sleep(self._send(logged))
        statement(self.rows)

    def _next_gtid(self) -> str:
        return f"0-{self._server_id}-{self.purged_before + len(self.binlog) + 1}"

    def _send(self, logged: Logged) -> float:
        self._append(logged)
        for replica in self.replicas:
            replica._receive(logged)
        return self._until_visible()

    def show(self, changes: RowChanges, shards: dict[int, ShardRow] | None = None) -> None:
        """Make a logged transaction visible."""
        self.rows.write(changes)
        self.rows.shards.update(shards or {})

    def _append(self, logged: Logged) -> None:
        self.binlog.append(logged)
        for wake in list(self.listeners.values()):
            wake()

    def _receive(self, logged: Logged) -> None:
        """Receive a transaction as a replica: in the master's order, after some time."""
        at = self._loop.now + 0.001 + self._random.random() * self.lag_seconds
        self._applies_at = max(self._applies_at, at)
        self._relay_log.append(logged)
        self._loop.call_at(self._applies_at, self._apply_next, context=self.process.context.copy())

    def _apply_next(self) -> None:
        if self._loop.now < self.stopped_until:
            self._loop.call_at(self.stopped_until, self._apply_next, context=self.process.context.copy())
            return
        if not self._relay_log:
            return  # it was never received
        logged = self._relay_log.popleft()
        self._append(logged)
        self._visible_until = max(self._visible_until, self._loop.now + self._until_visible())
        context = self.process.context.copy()
        self._loop.call_at(self._visible_until, self._show_received, logged, context=context)

    def _show_received(self, logged: Logged) -> None:
        self.show(logged.changes, logged.shards)
        if logged.statement is not None:
            logged.statement(self.rows)
        self._shown = logged.gtid

    def _until_visible(self) -> float:
        return self._random.random() * 0.01 if self._random.random() < 0.1 else 0.0


def _number(position: str) -> int:
    return int(position.rpartition("-")[2] or 0)


UNIX_MS_AT_START: Final = 1_750_000_000_000


def unix_ms(now: float) -> int:
    """Return the time of the simulation's wall clock."""
    return UNIX_MS_AT_START + int(now * 1000)


def _beat(shard: int, writer: str, unix_ms: int) -> RowEvent:
    return RowEvent(shard, "heartbeat", None, {"writer": writer, "written_unix_ms": unix_ms})


def object_image(row: ObjectRow) -> Row:
    return {"id": row.id, "otype": row.otype, "version": row.version, "deleted": int(row.deleted), "data": row.data}


def list_image(key: ListKey, row: ListRow) -> Row:
    return {"id1": key.id1, "atype": key.atype, "count": row.count, "version": row.version}


def edge_image(key: EdgeKey, edge: Edge) -> Row:
    return {"id1": key.id1, "atype": key.atype, "id2": key.id2, "time": edge.time, "version": 0, "data": edge.data}


def row_events(before: Rows, changes: RowChanges, schema: Schema) -> list[RowEvent]:
    """Return the binlog's row images of a transaction, in the order of a leader's statements."""
    events: list[RowEvent] = []

    def add(key: int, table: str, old: Row | None, new: Row | None) -> None:
        events.append(RowEvent(key >> SHARD_SHIFT, table, old, new))

    for row in changes.put_objects:
        old = before.objects.get(row.id)
        add(row.id, "objects", None if old is None else object_image(old), object_image(row))
    for key, edge in changes.put_edges.items():
        had = before.edge(key)
        table = schema.atype(key.atype).table or "assocs"
        add(key.id1, table, None if had is None else edge_image(key, had), edge_image(key, edge))
    for key in changes.put_registers:
        same = before.edge(key)
        if same is not None and key not in changes.put_edges:
            # Columns that caches hold nothing of: the row is the same before and after.
            add(key.id1, STATES_TABLE, edge_image(key, same), edge_image(key, same))
    for key in changes.delete_edges:
        gone = before.edge(key)
        if gone is not None:
            add(key.id1, schema.atype(key.atype).table or "assocs", edge_image(key, gone), None)
    for list_key, list_row in changes.put_lists.items():
        was = before.lists.get(list_key)
        add(
            list_key.id1,
            "assoc_lists",
            None if was is None else list_image(list_key, was),
            list_image(list_key, list_row),
        )
    return events
