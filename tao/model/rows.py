"""Rows of a shard's tables as values, and the reads and changes of a write transaction.

The store port uses these values; only `tao.storage` knows SQL.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tao.model.edge_states import EdgeRegisters, NodeState
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.jobs import JobRow, PausedKind


class ShardRow(msgspec.Struct, frozen=True):
    """The one row of table ``shard``: its owner, who may write, and its version epoch."""

    shard: int
    master_server: str
    version_epoch: int
    owner: str
    generation: int

    def taken_by(self, owner: str) -> ShardRow:
        """Return the row after ``owner`` has taken the shard, under the next generation."""
        return msgspec.structs.replace(self, owner=owner, generation=self.generation + 1)


class ObjectRow(msgspec.Struct, frozen=True):
    """A row of ``objects``. A deleted object keeps its row, so that its version never goes back."""

    id: int
    otype: int
    version: int
    deleted: bool
    data: bytes


class ListRow(msgspec.Struct, frozen=True, gc=False):
    """A row of ``assoc_lists``. It stays when the count is 0."""

    count: int
    version: int


class IntentKey(msgspec.Struct, frozen=True, gc=False, order=True):
    """The pair of ids whose edges are being written on two shards; ``low_id < high_id``."""

    low_id: int
    high_id: int


class IntentRow(msgspec.Struct, frozen=True):
    """An inverse edge that is still to be written: copy the coordinator's edges of these ``atypes`` (as seen from
    ``low_id``) to the other side. ``token`` grows with every write of the pair while the intent stands."""

    low_id: int
    high_id: int
    atypes: tuple[int, ...]
    token: int
    created_unix_ms: int


class OldestEdges(msgspec.Struct, frozen=True):
    """The oldest edges of a list, oldest first. ``are_all``: the list has no others."""

    edges: tuple[Edge, ...]
    are_all: bool


class EdgePage(msgspec.Struct, frozen=True, gc=False):
    """A page of the edges of a type with states: of each of these lists of ``id1``, the edges whose ``id2`` is above
    ``after``, ascending, at most ``limit``."""

    id1: int
    atypes: tuple[int, ...]
    after: int
    limit: int


class StateRows(msgspec.Struct, frozen=True):
    """Rows of edges of types with states."""

    edges: dict[EdgeKey, Edge]
    registers: dict[EdgeKey, EdgeRegisters]


@dataclass(slots=True)
class WriteKeys:
    """The rows that a batch of writes has to lock and read. ``lists``: rows of lists, which are not read with their
    edges. ``state_edges``: edges of types with states, under their type, with the types in whose lists they may be. The
    edges of ``recounts`` are counted, in the database, with the row of the list. ``reserved_times`` names shards.
    ``nodes``: a node and a type with states, of whose edges it may have a state."""

    objects: set[int] = field(default_factory=set)
    lists: set[ListKey] = field(default_factory=set)
    edges: set[EdgeKey] = field(default_factory=set)
    intents: set[IntentKey] = field(default_factory=set)
    recounts: set[ListKey] = field(default_factory=set)
    reserved_times: set[int] = field(default_factory=set)
    nodes: set[ListKey] = field(default_factory=set)
    jobs: set[int] = field(default_factory=set)
    paused_jobs: set[PausedKind] = field(default_factory=set)
    state_edges: dict[EdgeKey, tuple[int, ...]] = field(default_factory=dict)

    def rows_of_edges(self) -> set[EdgeKey]:
        """Return the keys of all rows of edges, of those with states one for each list."""
        return self.edges | {
            EdgeKey(key.id1, number, key.id2) for key, numbers in self.state_edges.items() for number in numbers
        }


@dataclass(slots=True)
class ExistingRows:
    """The locked rows; a row that is missing here does not exist. ``recounted``: the number of edges of a list, and the
    highest version that one of them was written at. ``reserved_times``: by shard, the highest time of an id that may
    have been given out, in milliseconds since 1970. ``oldest``: the oldest edges of lists, where a write needs them.
    ``registers``: those of edges of types with states. ``nodes``: the states of nodes. ``pages``: the rows of pages of
    edges, where a write needs them."""

    objects: dict[int, ObjectRow] = field(default_factory=dict)
    lists: dict[ListKey, ListRow] = field(default_factory=dict)
    edges: dict[EdgeKey, Edge] = field(default_factory=dict)
    intents: dict[IntentKey, IntentRow] = field(default_factory=dict)
    recounted: dict[ListKey, ListRow] = field(default_factory=dict)
    reserved_times: dict[int, int] = field(default_factory=dict)
    oldest: dict[ListKey, OldestEdges] = field(default_factory=dict)
    registers: dict[EdgeKey, EdgeRegisters] = field(default_factory=dict)
    nodes: dict[ListKey, NodeState] = field(default_factory=dict)
    pages: dict[EdgePage, StateRows] = field(default_factory=dict)
    jobs: dict[int, JobRow] = field(default_factory=dict)
    paused_jobs: set[PausedKind] = field(default_factory=set)


@dataclass(slots=True)
class RowChanges:
    """The rows that a transaction writes; every row at most once.

    ``put_registers``: the registers of put edges of types with states, and of edges of which nothing else changes;
    ``changed_unix_s``: when they change. ``put_paused_jobs``: whether each kind is paused from now on."""

    put_objects: list[ObjectRow] = field(default_factory=list)
    put_lists: dict[ListKey, ListRow] = field(default_factory=dict)
    put_edges: dict[EdgeKey, Edge] = field(default_factory=dict)
    delete_edges: list[EdgeKey] = field(default_factory=list)
    put_intents: list[IntentRow] = field(default_factory=list)
    delete_intents: list[IntentKey] = field(default_factory=list)
    put_reserved_times: dict[int, int] = field(default_factory=dict)
    put_registers: dict[EdgeKey, EdgeRegisters] = field(default_factory=dict)
    changed_unix_s: int = 0
    put_nodes: dict[ListKey, NodeState] = field(default_factory=dict)
    put_jobs: dict[int, JobRow] = field(default_factory=dict)
    delete_jobs: list[int] = field(default_factory=list)
    put_paused_jobs: dict[PausedKind, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.put_objects
            or self.put_lists
            or self.put_edges
            or self.delete_edges
            or self.put_intents
            or self.delete_intents
            or self.put_reserved_times
            or self.put_registers
            or self.put_nodes
            or self.put_jobs
            or self.delete_jobs
            or self.put_paused_jobs
        )
