"""Journaled writes: accepted on the disk of a follower, and made later.

A write is accepted when it is synced to that disk. Until it is made, no reader sees it, its writer included; `applied`
waits for that. `Later` accepts single writes. In a `journaled` block every write of the task is accepted.
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tao.client.jobs import encoded_body, job_priority
from tao.client.operations import PRIORITY
from tao.client.request_builder import build_each
from tao.client.server_queues import PRIORITIES, WriteRow
from tao.client.values import Accepted
from tao.client.writes import Fields, WriteOperations
from tao.model.edge_states import State
from tao.model.errors import InvalidArgument


class Later:
    """The writes that a journal accepts, each answered with its receipt once it is on the disk of a follower. The
    arguments are those of the operations of `Graph`.

    Besides what those raise, each raises `NotCommutative` for a write that must not be made late or twice, `NoJournal`
    when the follower keeps no journal, and `Overloaded` when the journal is full."""

    def __init__(self, graph: WriteOperations) -> None:
        self._graph = graph

    async def obj_add(self, otype: str, fields: Fields | None, id: int) -> Accepted:
        """Create an object under an id reserved before (`reserve_ids`)."""
        return await self._accept(self._graph._builder.obj_add(otype, fields, None, id))

    async def obj_add_many(self, objects: Iterable[tuple[str, Fields | None, int]]) -> list[Accepted]:
        """Do `obj_add` for each ``(otype, fields, id)``. Raises `SomeFailed`."""
        items = [(otype, fields, None, object_id) for otype, fields, object_id in objects]
        return await self._accept_many(build_each(self._graph._builder.obj_add, items, 4, 4))

    async def assoc_add(
        self,
        id1: int,
        atype: str,
        id2: int,
        time: int | None = None,
        fields: Fields | None = None,
        at: int | None = None,
    ) -> Accepted:
        """Add an edge of a type with states, or overwrite it."""
        return await self._accept(self._graph._builder.assoc_add(id1, atype, id2, time, fields, at))

    async def assoc_add_many(self, edges: Iterable[Sequence[Any]]) -> list[Accepted]:
        """Do `assoc_add` for each ``(id1, atype, id2[, time[, fields[, at]]])``. Raises `SomeFailed`."""
        return await self._accept_many(build_each(self._graph._builder.assoc_add, edges, 3, 6))

    async def assoc_delete(self, id1: int, atype: str, id2: int, at: int | None = None) -> Accepted:
        """Delete an edge of a type with states."""
        return await self._accept(self._graph._builder.assoc_delete(id1, atype, id2, at))

    async def assoc_delete_many(self, edges: Iterable[Sequence[Any]]) -> list[Accepted]:
        """Do `assoc_delete` for each ``(id1, atype, id2[, at])``. Raises `SomeFailed`."""
        return await self._accept_many(build_each(self._graph._builder.assoc_delete, edges, 3, 4))

    async def assoc_archive(self, id1: int, atype: str, id2: int, at: int | None = None) -> Accepted:
        """Move an edge to the list of archived edges."""
        return await self.assoc_set_state(id1, atype, id2, State.ARCHIVED.label, at)

    async def assoc_restore(self, id1: int, atype: str, id2: int, at: int | None = None) -> Accepted:
        """Make an edge normal again."""
        return await self.assoc_set_state(id1, atype, id2, State.NORMAL.label, at)

    async def assoc_set_state(
        self,
        id1: int,
        atype: str,
        id2: int,
        state: str,
        at: int | None = None,
        time: int | None = None,
        fields: Fields | None = None,
    ) -> Accepted:
        """Set the state of an edge; with ``time`` or ``fields``, also these."""
        return await self._accept(self._graph._builder.assoc_set_state(id1, atype, id2, state, at, time, fields))

    async def assoc_set_state_many(self, edges: Iterable[Sequence[Any]]) -> list[Accepted]:
        """Do `assoc_set_state` for each ``(id1, atype, id2, state[, at[, time[, fields]]])``. Raises `SomeFailed`."""
        return await self._accept_many(build_each(self._graph._builder.assoc_set_state, edges, 4, 7))

    async def node_set_state(
        self, id: int, state: str, types: Iterable[str] | None = None, at: int | None = None
    ) -> Accepted:
        """Set the state of a node. The job that moves its edges is added when the write is made."""
        return await self._accept(self._graph._builder.node_set_state(id, state, types, at))

    async def add_job(
        self, kind: str, body: Mapping[str, object], *, near: int, id: int, priority: str = "normal"
    ) -> Accepted:
        """Add a job under an id reserved before (`reserve_ids`); follow it with ``graph.job(id)`` once it is added. A
        job is kept for a week after its end. Until then adding it again changes nothing."""
        row = self._graph._builder.add_job(kind, encoded_body(body), job_priority(priority), near, id)
        return await self._accept(row)

    async def _accept(self, row: WriteRow) -> Accepted:
        return self._graph._receipt_of(row, await self._graph._write(row, self._priority()))

    async def _accept_many(self, rows: list[WriteRow]) -> list[Accepted]:
        return await self._graph._results(rows, self._graph._receipt_of, self._priority())

    @staticmethod
    def _priority() -> int:
        return PRIORITY.get() or PRIORITIES["normal"]


class JournaledOperations(WriteOperations):
    """The writes that are made later, beside those that are made at once."""

    @property
    def later(self) -> Later:
        """Return the writes that a follower's journal accepts and makes later: ``await graph.later.assoc_add(…)``
        returns a receipt."""
        return Later(self)

    @contextmanager
    def journaled(self, priority: str = "normal") -> Iterator[None]:
        """Have every write of this task, and of the tasks it starts, accepted by a journal and made later while the
        block runs: ``with graph.journaled(priority="low"): …``. A result then has a ``receipt``, and nothing else of
        it is known. Writes that do not commute raise `NotCommutative`. ``priority`` is high, normal or low."""
        with journaled_writes(priority):
            yield


@contextmanager
def journaled_writes(priority: str) -> Iterator[None]:
    """Have the writes of this context journaled while the block runs. Raises `InvalidArgument`."""
    number = PRIORITIES.get(priority)
    if number is None:
        raise InvalidArgument(f"there is no priority {priority!r}; there are {', '.join(PRIORITIES)}")
    entered = PRIORITY.set(number)
    try:
        yield
    finally:
        PRIORITY.reset(entered)
