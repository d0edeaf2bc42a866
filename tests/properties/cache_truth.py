"""A naive graph with its whole history, for the model test of the cache: the state after each commit, and its
changes."""

from __future__ import annotations

from dataclasses import dataclass

from tao.model.changes import GoneEdge, ListChange, ObjectChange, sort_edges
from tao.model.edge_block import COMPLETE, PREFIX, encode_block
from tao.model.graph import ABSENT, Edge, ListKey, encode_count, encode_object
from tao.model.versions import next_version

ListState = tuple[int, tuple[Edge, ...]]
ObjectState = tuple[int, int, bytes]
NO_LIST: ListState = (0, ())
NO_OBJECT: ObjectState = (0, ABSENT, b"")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The graph after one commit, as a replica would show it."""

    time: float
    epoch: int
    objects: dict[int, ObjectState]
    lists: dict[ListKey, ListState]

    def object_value(self, key: int) -> bytes:
        return encode_object(*self.objects.get(key, NO_OBJECT))

    def count_value(self, key: ListKey) -> bytes:
        version, edges = self.lists.get(key, NO_LIST)
        return encode_count(version, len(edges))

    def block(self, key: ListKey, pos: int, limit: int) -> bytes:
        version, edges = self.lists.get(key, NO_LIST)
        flags = (PREFIX if pos == 0 else 0) | (COMPLETE if pos == 0 and limit >= len(edges) else 0)
        return encode_block(version, len(edges), edges[pos : pos + limit], flags)


class Truth:
    """The master: commits, each with its snapshot; and every state a list or object ever had, by version."""

    def __init__(self) -> None:
        self.snapshots = [Snapshot(0.0, 1, {}, {})]
        self.list_history: dict[tuple[ListKey, int], tuple[Edge, ...]] = {}
        self.object_history: dict[tuple[int, int], bytes] = {}

    @property
    def now(self) -> Snapshot:
        return self.snapshots[-1]

    def promote(self, time: float) -> None:
        last = self.now
        self.snapshots.append(Snapshot(time, last.epoch + 1, last.objects, last.lists))

    def write_object(self, key: int, otype: int, data: bytes, time: float) -> ObjectChange:
        last = self.now
        before = last.objects.get(key, NO_OBJECT)[0]
        after = next_version(before, last.epoch)
        state = (after, otype, data if otype else b"")
        self.snapshots.append(Snapshot(time, last.epoch, last.objects | {key: state}, last.lists))
        self.object_history[key, after] = encode_object(*state)
        return ObjectChange(key, before, after, otype, state[2])

    def write_list(self, key: ListKey, edits: list[tuple[int, Edge | None]], time: float) -> ListChange:
        """Commit one transaction: each edit puts an edge, or deletes the one to that id2."""
        last = self.now
        before, old = last.lists.get(key, NO_LIST)
        edges = {edge.id2: edge for edge in old}
        for id2, edge in edits:
            if edge is None:
                edges.pop(id2, None)
            else:
                edges[id2] = edge
        new = tuple(sort_edges(edges.values()))
        after = next_version(before, last.epoch)
        self.snapshots.append(Snapshot(time, last.epoch, last.objects, last.lists | {key: (after, new)}))
        self.list_history[key, after] = new
        places = {(edge.id2, edge.time) for edge in new}
        gone = tuple(GoneEdge(edge.id2, edge.time) for edge in old if (edge.id2, edge.time) not in places)
        put = tuple(edge for edge in new if edge not in old)
        return ListChange(key.id1, key.atype, before, after, len(new), gone, put)

    def edges_at(self, key: ListKey, version: int) -> tuple[Edge, ...]:
        return () if version == 0 else self.list_history[key, version]

    def object_at(self, key: int, version: int) -> bytes:
        return encode_object(*NO_OBJECT) if version == 0 else self.object_history[key, version]
