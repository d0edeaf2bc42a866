"""The conditions that must hold, checked while a plan runs and when everything is calm.

*When an entry is put into a cache*: no version falls, and the entry is what the database had at that version. *When an
answer arrives*: the same, and it is as new as its reader may ask. *When a transaction commits*: an edge has its inverse
or an intent. *When calm*: every cache equals its database, replicas equal their masters, both sides of every pair
agree, nothing is left to repair, and every server is ready.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

from tao.cache import GraphCache
from tao.cache.shard import CachedShard
from tao.client import Candidate
from tao.client.own_writes import CRITICAL
from tao.model.changes import ListChange, ObjectChange, ShardMessages
from tao.model.edge_block import COMPLETE, decode_block, header
from tao.model.edge_states import NO_OPERATION, UNSET_NODE, EdgeRegisters, NodeState, State
from tao.model.errors import InvalidArgument
from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey, decode_count, decode_object, deleted_data, version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import EdgesQuery, Query, RangeQuery, TimeRangeQuery
from tao.model.rows import IntentKey, ListRow, RowChanges
from tao.model.tokens import PendingInverse
from tao.model.versions import epoch_of
from tao.schema.registry import Schema
from tao.serving.forward_path import WriteThrough
from tao.sets.expression import Expression
from tao.sets.steps import FoundEdge
from tao.wire.convert import exists_in, pending_of, shard_messages_from_pb
from tao.wire.read_batch import COUNT, EXISTS, OBJECT, EdgesRow, ExistsRow, QueryRow, RangeRow, TimeRangeRow
from tao.wire.v1 import session_pb2 as pb
from tests.sim.database import SimDatabase
from tests.sim.loop import CURRENT
from tests.sim.rows import Past, join, part_of
from tests.sim.sets import (
    FeedWalk,
    Seen,
    TwoHopAsked,
    Windows,
    unexplained_feed,
    unexplained_set,
    unexplained_two_hop,
)

DONE: Final = "done"
INVALID: Final = "invalid"
"""The result of a request that was refused with `InvalidArgument`, and rightly so (`tests.sim.clients`)."""
MISTAKES: Final = (INVALID, "INVALID_FIELD", "LIST_FULL", "OBJECT_DELETED", "WRITE_LOST")
"""Errors that a plan itself causes: it changes a type into one that has no place for the edge's fields, adds an edge to
a full list or an object under an id that another one has or had, or uses a token of an act in which a master was
lost."""


class Violation(Exception):
    """An invariant did not hold. ``invariant`` is its number in docs/explanation/invariants.md, or a word."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(invariant, text)
        self.invariant = invariant
        self.text = text

    def __str__(self) -> str:
        return f"invariant {self.invariant}: {self.text}"


CLOCKS_DIFFER_SECONDS: Final = 0.75
"""Largest difference between a server's clock and the others; bounds on staleness compare clocks."""


class Asked(NamedTuple):
    """The consistency that a read asked for. ``minimum`` is the version that its token or the SDK's own writes demand,
    or `CRITICAL`; ``pending`` are the inverses that they name as pending in the list."""

    critical: bool = False
    minimum: int = 0
    max_staleness_ms: int | None = None
    pending: tuple[PendingInverse, ...] = ()


class Expected(NamedTuple):
    """The least that a read may answer: ``version`` or newer, for the reason ``why``. ``asked`` is the minimum that had
    to be met or rejected. ``pending`` are the inverses that had to be written, and how many of the writes that left
    each pending were acknowledged."""

    kind: int
    row: QueryRow
    version: int
    why: str
    invariant: str
    asked: int
    pending: tuple[tuple[PendingInverse, int], ...] = ()


@dataclass(slots=True)
class Calmness:
    """The time since which nothing has gone wrong, in seconds; infinite while something does.

    ``undisturbed``: for so long nothing has happened except what an operator had planned that no request may fail.
    """

    since: float = 0.0
    undisturbed: bool = True


class Checks:
    """All checks of one run. ``found`` is called with the first violation, at the moment at which it happens."""

    def __init__(
        self,
        master_of: Callable[[int], SimDatabase],
        schema: Schema,
        now: Callable[[], float],
        found: Callable[[Violation], None],
    ) -> None:
        self._master_of: Final = master_of
        self._schema: Final = schema
        self._now: Final = now
        self._found: Final = found
        # tier and key → acknowledged version and its time
        self._in_tier: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._right: set[tuple[int, int, bytes]] = set()
        # by pending inverse, for each acknowledged write that left it pending: the version of the list that has it
        self._pending: dict[PendingInverse, list[int | None]] = {}
        self._given_out: list[tuple[int, int]] = []  # (first id, last id), in their order
        self._node_operations: dict[ListKey, NodeState] = {}
        self._operations: dict[EdgeKey, EdgeRegisters] = {}  # by edge with states: the join of those acknowledged
        self.calm: Final = Calmness()
        self.looked_at: dict[str, int] = dict.fromkeys(
            (
                *("entries", "answers", "existences", "sets", "writes", "commits", "losses", "pending"),
                *("replaced_writes", "ids", "joins", "left_out", "filtered", "feeds", "full_lists", "nodes"),
                *("two_hops", "restores", "restores_of_promoted", "repaired_pairs", "counters"),
            ),
            0,
        )

    # contents

    def _past_of(self, key: int) -> Past:
        return self._master_of(key >> SHARD_SHIFT).past

    def _wrong_object(self, key: int, value: bytes) -> str:
        version, otype, data = decode_object(value)
        if (version == 0 and otype == ABSENT) or key in self._past_of(key).foreign:
            return ""
        if (otype, data) not in self._past_of(key).objects[key].get(version, []):
            return f"object {_name(key)} was never ({otype}, {data!r}) at version {version}"
        return ""

    def _contents(self, key: ListKey, version: int) -> list[tuple[int, tuple[Edge, ...]]]:
        known = self._past_of(key.id1).lists[key].get(version, [])
        return [(0, ()), *known] if version == 0 else known

    def _wrong_count(self, key: ListKey, value: bytes) -> str:
        if key in self._past_of(key.id1).foreign:
            return ""
        version, count = decode_count(value)
        if count not in [each for each, _ in self._contents(key, version)]:
            return f"list {_name(key.id1)}/{key.atype} never had {count} edges at version {version}"
        return ""

    def _wrong_prefix(self, key: ListKey, block: bytes) -> str:
        if key in self._past_of(key.id1).foreign:
            return ""
        version, count, n, flags = header(block)
        edges = tuple(decode_block(block))
        if flags & COMPLETE and n != count:
            return f"list {_name(key.id1)}/{key.atype} of {n} edges is called complete and counts {count}"
        if (count, edges) not in [(each, all_[:n]) for each, all_ in self._contents(key, version)]:
            return f"list {_name(key.id1)}/{key.atype} never was {count}, {_shown(edges)} at version {version}"
        return ""

    def _wrong_part(self, key: ListKey, query: Query, block: bytes) -> str:
        if key in self._past_of(key.id1).foreign:
            return ""
        version, count, _, _ = header(block)
        edges = decode_block(block)
        for each, all_ in self._contents(key, version):
            if each == count and part_of(query, each, list(all_))[0] == edges:
                return ""
        return f"{query} was never answered by {count}, {_shown(edges)} at version {version}"

    # entries

    @contextmanager
    def watching_caches(self) -> Iterator[None]:
        """Check every entry that is put into any cache while the block runs."""
        kept = {name: getattr(CachedShard, name) for name in ("_put_object", "_put_list", "_put_count")}

        def watched(name: str, held: Callable[[CachedShard, int, int], bytes]) -> Callable[..., Any]:
            put = kept[name]

            def watch(shard: CachedShard, key: int, *rest: Any) -> Any:
                if name == "_put_object":
                    value, atype = rest[0], 0
                else:
                    atype, value = rest
                self._entry(shard, held(shard, key, atype), key, atype, value, is_list=name == "_put_list")
                return put(shard, key, *rest)

            return watch

        decode = WriteThrough.decode_write

        def decoded(changes: WriteThrough, encoded: pb.ShardMessages) -> ShardMessages:
            fresh = decode(changes, encoded)
            self._left_out(changes._cache, shard_messages_from_pb(encoded), fresh)
            return fresh

        for name in kept:
            setattr(CachedShard, name, watched(name, CachedShard.held))
        setattr(WriteThrough, "decode_write", decoded)  # noqa: B010 - mypy refuses an assignment to a method
        try:
            yield
        finally:
            setattr(WriteThrough, "decode_write", decode)  # noqa: B010
            for name, put in kept.items():
                setattr(CachedShard, name, put)

    def _left_out(self, cache: GraphCache, messages: ShardMessages, fresh: ShardMessages) -> None:
        """Check that of a write's answer a server leaves out only what it has applied: the writer reads it here."""
        process = CURRENT.get()
        if process is None or process.state == "swept":
            return
        for message in messages.messages:
            if isinstance(message, ObjectChange):
                key, atype, held = message.id, 0, cache.peek_object(message.id)
            elif isinstance(message, ListChange):
                key, atype, held = message.id1, message.atype, cache.peek_count(message.id1, message.atype)
            else:
                continue
            if message in fresh.messages:
                continue
            self.looked_at["left_out"] += 1
            if not held or version_of(held) < message.after:
                text = f"{process.name} has skipped the change of {_name(key)}/{atype} to {message.after}"
                self._found(Violation("3", f"{text}, which it has not applied"))

    def _entry(self, shard: CachedShard, held: bytes, key: int, atype: int, value: bytes, *, is_list: bool) -> None:
        process = CURRENT.get()
        if process is None or process.state == "swept":
            return
        self.looked_at["entries"] += 1
        if held and version_of(held) > version_of(value):
            text = f"{process.name} held {_name(key)}/{atype} at {version_of(held)}, now at {version_of(value)}"
            self._found(Violation("4", text))
        lost = self._past_of(key).lost.get((key, atype))
        if lost and version_of(value) in lost and shard.version_epoch > epoch_of(version_of(value)):
            text = f"{process.name} knows epoch {shard.version_epoch}, and keeps {_name(key)}/{atype}"
            self._found(Violation("lost", f"{text} at the lost version {version_of(value)}"))
        seen = (key, atype, value)
        if seen in self._right:
            return
        if not atype:
            wrong = self._wrong_object(key, value)
        elif is_list:
            wrong = self._wrong_prefix(ListKey(key, atype), value)
        else:
            wrong = self._wrong_count(ListKey(key, atype), value)
        if wrong:
            self._found(Violation("5", f"in the cache of {process.name}: {wrong}"))
        else:
            self._right.add(seen)

    # answers and writes

    def expect_read(self, kind: int, row: QueryRow, tier: str, asked: Asked) -> Expected:
        """Return what a read must answer; call it before the read is sent."""
        expected = self._expect_read(kind, row, tier, asked)
        return expected._replace(pending=tuple((each, len(self._pending.get(each, ()))) for each in asked.pending))

    def _expect_read(self, kind: int, row: QueryRow, tier: str, asked: Asked) -> Expected:
        minimum = max(asked.minimum, 0)
        key, atype = row[0], _atype_of(row)
        version, why, invariant = minimum, "its token or own writes", "3"
        if asked.critical or asked.minimum == CRITICAL:
            visible = self._master_of(key >> SHARD_SHIFT).rows.version_of(key, atype)
            if visible >= version:
                version, why, invariant = visible, "the master, when it was asked,", "critical"
            return Expected(kind, row, version, why, invariant, minimum)
        in_tier, at = self._in_tier.get((tier, key, atype), (0, 0.0))
        if at > self.calm.since + 20.0 and in_tier > version:
            version, why = in_tier, f"written in {tier} in calm"
        if asked.max_staleness_ms is not None:
            long_ago = self._now() - asked.max_staleness_ms / 1000 - CLOCKS_DIFFER_SECONDS
            bound = self._past_of(key).version_at(key, atype, long_ago)
            if bound > version:
                version, why, invariant = bound, f"the master, {asked.max_staleness_ms} ms before,", "staleness"
        return Expected(kind, row, version, why, invariant, minimum)

    def read(self, expected: Expected, value: bytes) -> None:
        """Check an answer."""
        self.looked_at["answers"] += 1
        kind, row = expected.kind, expected.row
        atype = _atype_of(row)
        if isinstance(row, ExistsRow):
            self.looked_at["existences"] += 1
            if ListKey(row.id1, atype) in self._past_of(row.id1).foreign:
                return
            version = self._newest_with(row, exists=exists_in(value))
        else:
            version = version_of(value)
        answer = f"{_name(row[0])} {row[1:]} is answered at {version}"
        if version < expected.asked:
            # This holds also when that version is lost: an answer that reports the loss is an error.
            self._found(Violation("3", f"{answer}, asked for is {expected.asked}"))
        elif version < self._past_of(row[0]).least(row[0], atype, expected.version):
            self._found(Violation(expected.invariant, f"{answer}, {expected.why} has {expected.version}"))
        for pending, writes in expected.pending:
            self.looked_at["pending"] += 1
            self._check_pending(pending, writes, version, answer)
        if kind == EXISTS:
            wrong = "" if version >= 0 else f"{_name(row[0])} {row[1:]} never was {value.hex()}"
        elif kind == OBJECT:
            wrong = self._wrong_object(row[0], value)
        elif kind == COUNT:
            wrong = self._wrong_count(ListKey(row[0], atype), value)
        else:
            wrong = self._wrong_part(ListKey(row[0], atype), _query(row), value)
        if wrong:
            self._found(Violation("5", f"answered: {wrong}"))

    def _newest_with(self, row: ExistsRow, *, exists: bool) -> int:
        """Return the newest version at which the answer, which has none itself, is right; -1 for none."""
        contents: dict[int, list[tuple[int, tuple[Edge, ...]]]] = {0: [(0, ())]}
        contents |= self._past_of(row.id1).lists[ListKey(row.id1, row.atype)]
        return max(
            (
                version
                for version, known in contents.items()
                if any(exists == any(edge.id2 == row.id2 for edge in edges) for _, edges in known)
            ),
            default=-1,
        )

    def _check_pending(self, pending: PendingInverse, writes: int, version: int, answer: str) -> None:
        key = ListKey(pending.id1, pending.atype)
        if not writes or self._is_half_by_loss(pending) or key in self._past_of(pending.id1).foreign:
            return
        needed = self._pending[pending][writes - 1]
        if needed is None:
            self._found(Violation("3", f"{answer}, where the edge of {_name(pending.coordinator_id)} is pending"))
        elif version < self._past_of(pending.id1).least(pending.id1, pending.atype, needed):
            edge = f"the edge of {_name(pending.coordinator_id)}, which its token names as pending,"
            self._found(Violation("3", f"{answer}, {edge} is there since {needed}"))

    def _is_half_by_loss(self, pending: PendingInverse) -> bool:
        pair = IntentKey(pending.coordinator_id, pending.id1)
        return any(pair in self._past_of(each).lost_pairs for each in (pair.low_id, pair.high_id))

    def feed_read(self, walk: FeedWalk, seen: Seen) -> None:
        """Check a walk over a feed by the histories of its lists."""
        if self._has_foreign(seen):
            return
        self.looked_at["feeds"] += 1
        if wrong := unexplained_feed(walk, seen, self._windows(seen)):
            self._found(Violation("sets", wrong))

    def set_read(self, expression: Expression, found: Sequence[FoundEdge], seen: Seen) -> None:
        """Check the result of a set expression by the histories of its lists."""
        if self._has_foreign(seen):
            return
        self.looked_at["sets"] += 1
        if wrong := unexplained_set(expression, found, self._windows(seen)):
            self._found(Violation("sets", wrong))

    def two_hop_read(
        self, asked: TwoHopAsked, found: Sequence[Candidate], missing: frozenset[ListKey], seen: Seen
    ) -> None:
        """Check an answer to two hops by the histories of its lists."""
        if self._has_foreign(seen):
            return
        self.looked_at["two_hops"] += 1
        if wrong := unexplained_two_hop(asked, found, missing, self._windows(seen)):
            self._found(Violation("sets", wrong))

    def _has_foreign(self, seen: Seen) -> bool:
        of_lists = any(key in self._past_of(key.id1).foreign for key in seen.lists)
        return of_lists or any(key in self._past_of(key).foreign for key in seen.objects)

    def _windows(self, seen: Seen) -> Windows:
        """Return the contents that each list had between the versions that answered."""
        return {
            key: [
                edges
                for version in ({0} | set(self._past_of(key.id1).lists[key]))
                if min(versions) <= version <= max(versions)
                for _, edges in self._contents(key, version)
            ]
            for key, versions in seen.lists.items()
        }

    def reported_lost(self, expected: Expected) -> None:
        """Check that the write of a token is really lost, after a reader got the error that says so."""
        self.looked_at["losses"] += 1
        key, atype = expected.row[0], _atype_of(expected.row)
        if self._past_of(key).least(key, atype, expected.asked) == expected.asked:
            write = f"{_name(key)}/{atype} at {expected.asked}"
            self._found(Violation("1", f"{write} is reported lost, and it is not"))

    def may_exist(self, object_id: int, since: float) -> bool:
        """Return whether an object had this id at some time from ``since`` on: adding another one is invalid then."""
        past = self._past_of(object_id)
        before = past.version_at(object_id, 0, since)
        contents = [each for version, found in past.objects[object_id].items() if version >= before for each in found]
        return any(otype != ABSENT for otype, _ in contents)

    def read_failed(self, expected: Expected, wrong: str) -> None:
        """Check a failed read. ``wrong`` says why it must not fail; empty if it may."""
        if wrong:
            self._found(Violation("7", f"the read of {_name(expected.row[0])} {expected.row[1:]} {wrong}"))

    def done(self, what: str, result: str) -> None:
        """Check how an operation ended. ``result`` is the reason of its error, `INVALID`, or `DONE`."""
        if result == InvalidArgument.reason:
            self._found(Violation("valid", f"{what} is a valid request, and was refused as an invalid one"))
        if self.calm.undisturbed and result not in (DONE, *MISTAKES):
            self._found(Violation("7", f"{what} failed where nothing does: {result}"))

    def written_too_late(self, what: str, result: str, why: str) -> None:
        """Check how a write ended that another leader should have done by then. ``why``: why it must not fail."""
        self.looked_at["replaced_writes"] += 1
        if result not in (DONE, *MISTAKES):
            self._found(Violation("replacement", f"{what} failed with {result}, {why}"))

    def written(self, tier: str, result: pb.WriteResult) -> None:
        """Check an acknowledged write: everything that it reports as changed is in the database."""
        self.looked_at["writes"] += 1
        for key, atype, version in zip(
            result.changed_ids, result.changed_atypes, result.changed_versions, strict=False
        ):
            past = self._past_of(key)
            versions = past.lists[ListKey(key, atype)] if atype else past.objects[key]
            if version not in versions or self._version_now(key, atype) < past.least(key, atype, version):
                self._found(Violation("1", f"{_name(key)}/{atype} at {version} is acknowledged and not there"))
            known = self._in_tier.get((tier, key, atype), (0, 0.0))
            self._in_tier[tier, key, atype] = max(known, (version, self._now()))
        for each in pending_of(result.pending):
            self._pending.setdefault(each, []).append(None)
            self._note_settled(each)

    def given_out(self, first: int, count: int) -> None:
        """Check ids that a caller was given: nobody was given one of them before."""
        self.looked_at["ids"] += count
        last = first + count - 1
        place = bisect.bisect(self._given_out, (first, last))
        if place < len(self._given_out) and self._given_out[place][0] <= last:
            self._found(Violation("9", f"ids from {_name(first)} on are given out again, up to {_name(last)}"))
        if place and self._given_out[place - 1][1] >= first:
            self._found(Violation("9", f"ids from {_name(first)} on are given out again"))
        self._given_out.insert(place, (first, last))

    def _note_settled(self, pending: PendingInverse) -> None:
        """Note the version of the list, if it has now what its coordinator has."""
        key, atype, coordinator = pending
        near_type = self._inverse(atype)
        near = self._master_of(coordinator >> SHARD_SHIFT).truth.edge(EdgeKey(coordinator, near_type, key))
        far = self._master_of(key >> SHARD_SHIFT).truth.edge(EdgeKey(key, atype, coordinator))
        if (near and (near.time, near.data)) == (far and (far.time, far.data)):
            version = self._version_now(key, atype)
            self._pending[pending] = [version if each is None else each for each in self._pending[pending]]

    def _version_now(self, key: int, atype: int) -> int:
        return self._master_of(key >> SHARD_SHIFT).truth.version_of(key, atype)

    # commits

    def committing(self, server: SimDatabase, changes: RowChanges) -> None:
        """Check that the registers of each edge are joined with what they were: a newer operation is never undone."""
        for key, registers in changes.put_registers.items():
            if self._schema.atype(key.atype).counter is not None:
                continue  # a fold writes the last flush of a slot again; see `tests.sim.counters`
            self.looked_at["joins"] += 1
            stored = server.truth.joined(key.id1, self._schema.atype(key.atype).state_numbers, key.id2)
            unchanged = server.truth.registers.get(key) == registers
            if unchanged and changes.put_edges.get(key) == server.truth.edge(key):
                edge = f"{_name(key.id1)} {key.atype} {_name(key.id2)}"
                self._found(Violation("join", f"{edge} is written again with what it has: {registers}"))
            if registers != join([stored, registers]):
                edge = f"{_name(key.id1)} {key.atype} {_name(key.id2)}"
                self._found(Violation("join", f"{edge} had {stored}, and an older operation wins: {registers}"))
            declared = ListKey(key.id1, self._schema.declared((key.atype,))[0])
            # A commit may have the operation on the node behind a write of its edge: then the job moves the edge.
            stored_node = server.truth.nodes.get(declared, UNSET_NODE)
            nodes = {stored_node, changes.put_nodes.get(declared, stored_node)}
            states = {State(max(registers.own_state, node.state, registers.id2_state)) for node in nodes}
            places = states if registers.payload_us else {State.REMOVED}
            if key in changes.put_edges and self._schema.atype(key.atype).state not in places:
                edge = f"{_name(key.id1)} {key.atype} {_name(key.id2)}"
                labels = sorted(each.label for each in places)
                self._found(Violation("join", f"{edge} with {registers} under {nodes} belongs to {labels}"))
        for node_key, written in changes.put_nodes.items():
            if written < server.truth.nodes.get(node_key, UNSET_NODE):
                name = f"{_name(node_key.id1)} {node_key.atype}"
                self._found(Violation("join", f"{name}: an older operation wins: {written}"))

    def operated(self, key: EdgeKey, operation: EdgeRegisters) -> None:
        """Record an operation that is acknowledged. ``key``: of the edge under its type with states."""
        self._operations[key] = join([operation, self._operations.get(key, NO_OPERATION)])

    def node_operated(self, key: ListKey, operation: NodeState) -> None:
        """Record an operation on a node that is acknowledged."""
        self._node_operations[key] = max(operation, self._node_operations.get(key, UNSET_NODE))

    def _check_operations(self) -> None:
        """Check that both ends of each edge have every acknowledged operation, and the same registers."""
        for key, operation in self._operations.items():
            atype = self._schema.atype(key.atype)
            inverse = self._schema.inverse_of(atype)
            assert inverse is not None, "clients write edges with an inverse"
            masters = [self._master_of(each >> SHARD_SHIFT) for each in (key.id1, key.id2)]
            if any(IntentKey(*sorted((key.id1, key.id2))) in master.past.lost_pairs for master in masters):
                continue
            near = _shared(masters[0].truth.joined(key.id1, atype.state_numbers, key.id2))
            far = _shared(masters[1].truth.joined(key.id2, inverse.state_numbers, key.id1))
            if near != far or near != join([near, operation]):
                edge = f"{_name(key.id1)} {atype.name} {_name(key.id2)}"
                raise Violation("join", f"{edge}: {near} here, {far} there; {operation} was acknowledged")
        for node, state in self._node_operations.items():
            master = self._master_of(node.id1 >> SHARD_SHIFT)
            kept = max(master.truth.nodes.get(node, UNSET_NODE), master.past.lost_nodes.get(node, UNSET_NODE))
            if kept < state:
                raise Violation("join", f"{_name(node.id1)} {node.atype}: {state} was acknowledged")

    def committed(self, _: SimDatabase, changes: RowChanges) -> None:
        """Check that every changed edge has its inverse, or an intent that says what is still to be written."""
        self.looked_at["commits"] += 1
        pairs = {IntentKey(row.low_id, row.high_id) for row in changes.put_intents} | set(changes.delete_intents)
        edges = [*changes.put_edges, *changes.delete_edges]
        pairs |= {IntentKey(*sorted((key.id1, key.id2))) for key in edges if self._inverse(key.atype)}
        for key in edges:
            near, far = (
                PendingInverse(key.id2, self._inverse(key.atype), key.id1),
                PendingInverse(key.id1, key.atype, key.id2),
            )
            for pending in (near, far):
                if pending in self._pending:
                    self._note_settled(pending)
        for pair in sorted(pairs):
            wrong = self._half_pair(pair)
            if wrong and pair not in self._master_of(pair.low_id >> SHARD_SHIFT).truth.intents:
                self._found(Violation("6", f"{wrong}, and no intent says so"))

    def _inverse(self, atype: int) -> int:
        return self._schema.atype(atype).inverse or 0

    def _half_pair(self, pair: IntentKey) -> str:
        masters = [self._master_of(each >> SHARD_SHIFT) for each in (pair.low_id, pair.high_id)]
        if any(pair in master.past.lost_pairs - master.past.repaired_pairs for master in masters):
            return ""  # the transaction of one side is lost; what others had received of it is left to `tao repair`
        low, high = (master.truth for master in masters)
        for atype in self._schema.assocs:
            if not atype.inverse or pair.low_id == pair.high_id or atype.state is not State.NORMAL:
                continue
            if atype.states:
                # A node's state moves its edges at one end after the other, without an intent.
                near_row = _shared(low.joined(pair.low_id, atype.state_numbers, pair.high_id))
                far_types = self._schema.atype(atype.inverse).state_numbers
                far_row = _shared(high.joined(pair.high_id, far_types, pair.low_id))
                if near_row != far_row:
                    return f"{_name(pair.low_id)} {atype.name} {_name(pair.high_id)}: {near_row} here, {far_row} there"
                continue
            near = low.edge(EdgeKey(pair.low_id, atype.number, pair.high_id))
            far = high.edge(EdgeKey(pair.high_id, atype.inverse, pair.low_id))
            if (near and (near.time, near.data)) != (far and (far.time, far.data)):
                return f"{_name(pair.low_id)} {atype.name} {_name(pair.high_id)}: {near} here, {far} there"
        return ""

    # calm

    def calmer(self) -> None:
        """Note that an operation which began in a storm has ended."""
        if self.calm.since != inf:
            self.calm.since = self._now()

    def converged(self, masters: list[SimDatabase], caches: dict[str, GraphCache], replicas: int) -> None:
        """Check that caches, databases and both sides of all pairs are equal. Raises `Violation`. ``replicas``: of each
        master."""
        for master in masters:
            if len(master.replicas) != replicas:
                raise Violation("unforeseen", f"{master.name} has {len(master.replicas)} replicas")
            for server in (master, *master.replicas):
                for table in ("objects", "lists", "intents", "shards", "reserved_times", "registers", "nodes", "jobs"):
                    if getattr(server.rows, table) != getattr(master.truth, table):
                        raise Violation("2", f"{server.name} and {master.name} differ in {table}")
            left = [key for key in master.truth.intents if self._master_of(key.low_id >> SHARD_SHIFT) is master]
            if left:
                raise Violation("6", f"intents are left over at {master.name}: {left}")
            for key, edges in master.truth.edges.items():
                if self._inverse(key.atype) and self._master_of(key.id1 >> SHARD_SHIFT) is master:
                    for id2 in edges:
                        if wrong := self._half_pair(IntentKey(*sorted((key.id1, id2)))):
                            raise Violation("6", wrong)
            for list_key, row in master.truth.lists.items():
                is_here = self._master_of(list_key.id1 >> SHARD_SHIFT) is master
                if is_here and row.count != len(master.truth.edges.get(list_key, ())):
                    raise Violation("5", f"{list_key} counts {row.count}")
                most = self._schema.atype(list_key.atype).max_edges
                if is_here and most and row.count > most and list_key not in master.past.foreign:
                    raise Violation("8", f"{list_key} has {row.count} edges, and its type {most} at most")
                self.looked_at["full_lists"] += row.count == most
        self._check_operations()
        for name, cache in caches.items():
            for shard in cache.open_shards():
                self._equal(name, cache, shard)

    def _equal(self, name: str, cache: GraphCache, shard: int) -> None:
        rows = self._master_of(shard).truth
        for entry in cache.sample_keys(shard, 1_000_000).keys:
            if entry.kind == "object":
                value = cache.peek_object(entry.id)
                found = rows.objects.get(entry.id)
                there: object = (0, ABSENT, b"")
                if found is not None:
                    there = (
                        found.version,
                        *((ABSENT, deleted_data(found.otype)) if found.deleted else (found.otype, found.data)),
                    )
                here: object = decode_object(value) if value else there
            else:
                key = ListKey(entry.id, entry.atype)
                listed = rows.lists.get(key, ListRow(0, 0))
                block = cache.peek_list(entry.id, entry.atype)
                count = cache.peek_count(entry.id, entry.atype)
                edges = decode_block(block) if block else []
                there = (listed.version, listed.count, rows.sorted_edges(key)[: len(edges)])
                here = (*decode_count(count), edges) if count else there
            if here != there:
                text = f"{name} holds {entry.kind} {_name(entry.id)}/{entry.atype} as {here}, the database has {there}"
                raise Violation("2", text)
        place = cache.filter_shard(shard)
        if place is None or not list(place.pairs.held()):
            return
        for key, ids in rows.edges.items():
            if key.id1 >> SHARD_SHIFT == shard:
                self.looked_at["filtered"] += len(ids)
                for id2 in ids:
                    if place.denies(key.id1, key.atype, id2, 0):
                        raise Violation("2", f"{name} denies the edge of {_name(key.id1)}/{key.atype} to {_name(id2)}")


def _shared(registers: EdgeRegisters) -> EdgeRegisters:
    """Return the registers of an edge that are the same at both ends."""
    return registers.with_id2(UNSET_NODE)


def _atype_of(row: QueryRow) -> int:
    """Return the association type of the list that a row reads, 0 for an object."""
    return 0 if len(row) == 1 else row.atype


def _query(row: QueryRow) -> Query:
    match row:
        case RangeRow():
            return RangeQuery(*row)
        case TimeRangeRow():
            return TimeRangeQuery(*row)
        case EdgesRow():
            return EdgesQuery(row.id1, row.atype, tuple(row.id2s), row.high, row.low)
        case _:
            raise AssertionError(row)


def _name(key: int) -> str:
    return f"{key >> SHARD_SHIFT}:{key & 0xFFFFFF:x}"


def _shown(edges: list[Edge] | tuple[Edge, ...]) -> str:
    return "[" + ", ".join(f"{_name(edge.id2)}@{edge.time}" for edge in edges) + "]"
