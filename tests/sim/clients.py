"""SDK clients at work: they perform the operations of a plan and check the answers.

`WatchedGraph` is the SDK's own graph; it passes the bytes of every read and the result of every write to the checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce
from typing import Any, Final

import msgspec

from tao.client import Accepted, Assoc, Later
from tao.client.configuration import ClientConfiguration
from tao.client.consistency import Consistency, from_keywords
from tao.client.graph import Graph
from tao.client.operations import SomeFailed
from tao.client.own_writes import CRITICAL, MinimumVersions
from tao.feeds import Feeds
from tao.model.edge_states import NODE_STATES, EdgeRegisters, NodeState, State
from tao.model.errors import InvalidArgument, TaoError, WriteLost
from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import MAX_RESERVED_IDS, SHARD_SHIFT, make_id
from tao.model.jobs import NodeStateBody
from tao.model.tokens import PendingInverse, WriteToken
from tao.model.topology import Topology
from tao.sets.steps import FoundEdge
from tao.wire.identity import Credentials
from tao.wire.links import Links
from tao.wire.read_batch import QueryRow
from tao.wire.v1 import session_pb2 as pb
from tao.worker.kinds import PageWaits
from tao.worker.node_state import NodeStates
from tests.sim.checks import DONE, INVALID, Asked, Checks, Expected
from tests.sim.database import UNIX_MS_AT_START, unix_ms
from tests.sim.loop import Process, SimLoop
from tests.sim.plans import EDGE_TYPES, KEYS, Op
from tests.sim.roles import SDK
from tests.sim.sets import SEEN, FeedWalk, Seen, TwoHopAsked, expression_of
from tests.sim.single_failures import SingleFailures, Watched

TIMEOUT_SECONDS: Final = SDK.timeout_seconds
"""Deadline of one operation, in seconds."""
_ADDED_ANYWHERE: Final = 3
_KEPT_TOKENS: Final = 40
_STALENESS_MS: Final = (2_000, 15_000, 40_000)
"""Bounds on staleness at a pace of 1. Given the heartbeats of `tests.sim.roles`, one is hardly ever met, one now and
then, and one nearly always."""
_STATES: Final = tuple(State)
_CHANGED_TYPES: Final = {"likes": "follows", "follows": "likes", "comment": "likes", "friend": "likes"}


def key_id(number: int, shards: int) -> int:
    """Return the ids on all shards that the operations of a plan use."""
    return make_id(number % shards, UNIX_MS_AT_START - 1000, number // shards)


class WatchedGraph(Graph):
    """A `Graph` whose reads and writes are checked."""

    checks: Checks
    single_failures: SingleFailures
    process: Process
    watched_tier: str

    async def _read(self, kind: int, row: QueryRow, consistency: Consistency | None) -> bytes:
        (asked,) = self._asked([row], consistency)
        expected = self.checks.expect_read(kind, row, self.watched_tier, asked)
        watched = self._watch(row, asked)
        try:
            value = await super()._read(kind, row, consistency)
        except TaoError as error:
            self._ended(expected, watched, error)
            raise
        self._ended(expected, watched, value)
        _note_seen(kind, row, value)
        return value

    async def _read_many(
        self, kind: int, rows: Sequence[QueryRow], consistency: Consistency | None
    ) -> list[bytes | TaoError]:
        every = self._asked(rows, consistency)
        expected = [
            self.checks.expect_read(kind, row, self.watched_tier, asked) for row, asked in zip(rows, every, strict=True)
        ]
        watched = [self._watch(row, asked) for row, asked in zip(rows, every, strict=True)]
        values = await super()._read_many(kind, rows, consistency)
        for each in zip(expected, watched, values, strict=True):
            self._ended(*each)
        for row, value in zip(rows, values, strict=True):
            _note_seen(kind, row, value)
        return values

    def _asked(self, rows: Sequence[QueryRow], consistency: Consistency | None) -> list[Asked]:
        demand = self._demand_of(consistency)
        minimum_of = MinimumVersions(demand.token, dict(self._attached)).of
        return [
            Asked(
                demand.critical or self._is_settled_unnamed(row, demand),
                minimum_of(row),
                demand.max_staleness_ms,
                self._pending_in(row, demand),
            )
            for row in rows
        ]

    def _is_settled_unnamed(self, row: QueryRow, demand: Consistency) -> bool:
        """Return whether inverses that the token does not name are settled first, after which the master is read."""
        return len(row) > 1 and demand.token is not None and bool(demand.token.pending_at(row[0] >> SHARD_SHIFT))

    def _pending_in(self, row: QueryRow, demand: Consistency) -> tuple[PendingInverse, ...]:
        if len(row) == 1:
            return ()
        named = demand.token.pending_in(ListKey(row[0], row.atype)) if demand.token is not None else []
        return (*named, *self._own_pending.get(row[:2], ()))

    def _watch(self, row: QueryRow, asked: Asked) -> Watched | None:
        if asked.critical or asked.minimum == CRITICAL or asked.max_staleness_ms is not None or asked.pending:
            return None
        return self.single_failures.asked(self.process, row[0], 0 if len(row) == 1 else row.atype, asked.minimum)

    def _ended(self, expected: Expected, watched: Watched | None, result: bytes | TaoError) -> None:
        if isinstance(result, bytes):
            self.checks.read(expected, result)
        elif isinstance(result, WriteLost):
            self.checks.reported_lost(expected)
        if watched is not None:
            if isinstance(result, TaoError) and not isinstance(result, WriteLost):
                self.checks.read_failed(expected, self.single_failures.failed(watched, result.reason))
            else:
                self.single_failures.answered(watched)

    def _record_writes(self, results: Sequence[pb.WriteResult]) -> None:
        super()._record_writes(results)
        for result in results:
            self.checks.written(self.watched_tier, result)


class Client:
    """One process that uses the SDK."""

    def __init__(self, process: Process, tier: str, shards: int, pace: float, *, attaches: bool) -> None:
        self.process: Final = process
        self.tier: Final = tier
        self.attaches: Final = attaches
        self.graph: WatchedGraph | None = None
        self._shards: Final = shards
        self._pace: Final = pace
        self._made: list[int] = []
        self._writes = 0

    async def open(self, loop: SimLoop, topology: Topology, checks: Checks, single_failures: SingleFailures) -> None:
        """Connect in the client's process. Raises `TaoError`."""
        settings = replace(SDK, attach_own_writes=self.attaches)
        links = Links(settings.links, Credentials(self.process.name, "client"))
        configuration = await ClientConfiguration.fetch(topology, self.process.region, links, settings)
        self.graph = WatchedGraph(links, configuration, settings, self.tier, lambda: unix_ms(loop.now) / 1000)
        self.graph.checks, self.graph.watched_tier = checks, f"{self.process.region} {self.tier}"
        self.graph.single_failures, self.graph.process = single_failures, self.process

    async def do(self, op: Op, tokens: list[WriteToken]) -> str:
        """Perform one operation and return its result for the trace. Tokens of writes are added to ``tokens``."""
        if self.graph is None:
            return "not open"
        began = asyncio.get_running_loop().time()
        try:
            with self.graph.recording() as recording:
                await self._do(self.graph, op, tokens)
            if recording.token:
                tokens.append(recording.token)
                del tokens[:-_KEPT_TOKENS]
            return DONE
        except SomeFailed as error:
            return self._result(self.graph, op, error.errors, began)
        except TaoError as error:
            return self._result(self.graph, op, {0: error}, began)

    def _result(self, graph: WatchedGraph, op: Op, errors: Mapping[int, TaoError], began: float) -> str:
        """Return the result of an operation some of whose items failed: that of the first one, or that a valid one was
        refused as invalid."""
        refused = [index for index, error in errors.items() if error.reason == InvalidArgument.reason]
        if not all(self._is_invalid(graph, op, index, began) for index in refused):
            return InvalidArgument.reason
        first = next(iter(errors.values())).reason
        return INVALID if first == InvalidArgument.reason else first

    def _is_invalid(self, graph: WatchedGraph, op: Op, index: int, began: float) -> bool:
        """Return whether an item of an operation was to be refused with `InvalidArgument`."""
        match op.kind:
            case "obj_put":
                return graph.checks.may_exist(key_id(op.one, self._shards), began)
            case "obj_put_many":
                return graph.checks.may_exist(key_id((op.one + index) % KEYS, self._shards), began)
            case _:
                return False

    async def _do(self, graph: WatchedGraph, op: Op, tokens: list[WriteToken]) -> None:
        one, two = key_id(op.one, self._shards), key_id(op.two, self._shards)
        named = [each for token in tokens for each in token.named_pending]
        if op.how == "token" and named and op.value % 2:
            # A list that a token names as pending is hardly ever the one that a plan reads by chance.
            id1, number = named[-1 - op.value % min(len(named), 8)][:2]
            atype = graph.schema.atype(number)
            if op.kind != "assoc_range_of_state" or atype.states:
                one, op = id1, msgspec.structs.replace(op, atype=atype.name)
        self._writes += 1
        # Every value is written once, so that a content identifies its write.
        unique = f"{self.process.name} {self._writes} {op.at:.3f}"
        how = _how(op, ListKey(one, graph.schema.atype(op.atype).number), tokens, self._pace)
        match op.kind:
            case "obj_add":
                added = await graph.obj_add("user", {"name": unique}, near=one)
                graph.checks.given_out(added, 1)
                self._made = [*self._made[-5:], added]
            case "obj_add_reserved":
                await self._add_reserved(graph, op, one, unique)
            case "obj_put":
                await graph.obj_add("user", {"name": unique}, id=one)
            case "obj_update":
                await graph.obj_update(one, {"home": unique}, "user")
            case "obj_delete":
                await graph.obj_delete(self._made.pop() if self._made and op.value % 2 else one)
            case "assoc_add":
                await graph.assoc_add(one, op.atype, two, op.value, _fields(op.atype, unique, self._writes))
            case "assoc_delete":
                await graph.assoc_delete(one, op.atype, two)
            case "assoc_change_type":
                await graph.assoc_change_type(one, op.atype, two, _CHANGED_TYPES.get(op.atype, op.atype))
            case "assoc_set_state":
                await self._set_state(graph, op, one, two)
            case "later_set_state":
                accepted = await self._set_state(graph.later, op, one, two)
                if op.value % 4 == 1 and isinstance(accepted, Accepted):
                    await accepted.applied()
            case "node_set_state":
                await self._set_node_state(graph, op, one)
            case "assoc_range_of_state":
                state = _STATES[op.value % len(_STATES)]
                await graph.assoc_range(one, op.atype, 0, op.value % 7 + 1, state.label, **how)
            case "obj_get":
                await graph.obj_get(one, **how)
            case "assoc_get" if _asks_for_a_byte(op):
                await graph.assoc_exists(one, op.atype, two, **how)
            case "assoc_get":
                await graph.assoc_get(one, op.atype, [two, one], **how)
            case "assoc_count":
                await graph.assoc_count(one, op.atype, **how)
            case "assoc_range":
                await graph.assoc_range(one, op.atype, op.value % 3, op.value % 7 + 1, **how)
            case "assoc_time_range":
                await graph.assoc_time_range(one, op.atype, op.value + 5, op.value, 3, op.value % 3, **how)
            case "edge_set" if op.value % 4 == 3:  # sets and feeds need no random number of their own
                await self._read_feed(graph, op, how)
            case "edge_set":
                await self._read_set(graph, op, how)
            case "members":
                everybody = [key_id(number, self._shards) for number in range(KEYS)]
                await graph.assoc_get(one, op.atype, everybody, **how)
            case "two_hop":
                await self._read_two_hop(graph, op, how)
            case _:
                await self._do_many(graph, op, unique, how)

    async def _set_state(self, writes: WatchedGraph | Later, op: Op, one: int, two: int) -> object:
        """Do an operation on an edge with states, mostly at a time around now: later ones may come first. Return its
        result."""
        assert self.graph is not None
        state, has_payload = _STATES[op.value % len(_STATES)], op.value % 5 < 3
        time = op.value if has_payload else None
        at = unix_ms(op.at) * 1000 + (op.value - 20) * 100_000 if op.value % 3 else None
        if state is State.NORMAL and has_payload:
            result: object = await writes.assoc_add(one, op.atype, two, time, at=at)
        elif state is State.REMOVED and not has_payload:
            result = await writes.assoc_delete(one, op.atype, two, at)
        else:
            result = await writes.assoc_set_state(one, op.atype, two, state.label, at, time)
        if at is not None:
            operation = EdgeRegisters(state, at, at if has_payload else 0, time or 0)
            self.graph.checks.operated(EdgeKey(one, self.graph.schema.atype(op.atype).number, two), operation)
        return result

    async def _set_node_state(self, graph: WatchedGraph, op: Op, node: int) -> None:
        """Set the state of a node, and do the pages of its job; a page that fails is left to a later operation."""
        state, atype = NODE_STATES[op.value % len(NODE_STATES)], graph.schema.atype(op.atype)
        at = unix_ms(op.at) * 1000 + (op.value - 20) * 100_000 if op.value % 2 else None
        await graph.node_set_state(node, state.label, [op.atype], at)
        if at is not None:
            graph.checks.node_operated(ListKey(node, atype.number), NodeState(at, state))
        body, cursor, done = msgspec.msgpack.encode(NodeStateBody(node, (atype.number,))), b"", False
        with suppress(PageWaits):
            while not done:
                cursor, _, done = await NodeStates().page(graph, body, cursor, 1 + op.value % 3)

    async def _add_reserved(self, graph: WatchedGraph, op: Op, near: int, unique: str) -> None:
        """Reserve ids, often so many that they run seconds ahead of the clock, and add an object with one."""
        count = MAX_RESERVED_IDS if op.value % 2 else 1 + op.value
        ids: list[int] = []
        for _ in range(op.value):
            ids = await graph.reserve_ids(count, near=near)
            graph.checks.given_out(ids[0], len(ids))
        added = await graph.obj_add("user", {"name": unique}, id=ids[op.value % len(ids)])
        self._made = [*self._made[-5:], added]

    async def _do_many(self, graph: WatchedGraph, op: Op, unique: str, how: dict[str, Any]) -> None:
        """Perform an operation on several keys, beginning with the first, on shards of both databases."""
        numbers = [(op.one + index) % KEYS for index in range(2 + op.value % 6)]
        ids = [key_id(number, self._shards) for number in numbers]
        two = key_id(op.two, self._shards)
        match op.kind:
            case "obj_put_many":
                await graph.obj_add_many(
                    [("user", {"name": f"{unique} {each}"}, None, each) for each in ids],
                )
            case "assoc_add_many":
                fields = _fields(op.atype, unique, self._writes)
                await graph.assoc_add_many([(each, op.atype, two, op.value, fields) for each in ids if each != two])
            case "assoc_delete_many":
                await graph.assoc_delete_many([(each, op.atype, two) for each in ids if each != two])
            case "obj_get_many":
                await graph.obj_get_many(ids, **how)
            case "assoc_get_many" if _asks_for_a_byte(op):
                await graph.assoc_exists_many([(each, op.atype, two) for each in ids], **how)
            case "assoc_get_many":
                await graph.assoc_get_many([(each, op.atype, [two, ids[0]]) for each in ids], **how)
            case "assoc_count_many":
                await graph.assoc_count_many([(each, op.atype) for each in ids], **how)
            case "assoc_range_many":
                await graph.assoc_range_many([(each, op.atype, op.value % 3, op.value % 7 + 1) for each in ids], **how)
            case "assoc_time_range_many":
                queries = [(each, op.atype, op.value + 5, op.value, 3, index % 3) for index, each in enumerate(ids)]
                await graph.assoc_time_range_many(queries, **how)
            case _:
                raise ValueError(f"no operation is called {op.kind!r}")

    async def _read_set(self, graph: WatchedGraph, op: Op, how: dict[str, Any]) -> None:
        """Walk over a set of the lists of several keys in small pages, each evaluated by itself."""
        ids = [key_id((op.one + index) % KEYS, self._shards) for index in range(3 + op.value % 3)]
        expression = expression_of(ids, graph.schema.atype(op.atype).number, op.value)
        found: list[FoundEdge] = []
        cursor: str | None = None
        with _noting() as seen:
            while True:
                steps = graph._evaluation(expression, cursor).page(1 + op.value % 4)
                page = await graph._evaluate(steps, from_keywords(**how))
                found += page.edges
                cursor = page.cursor
                if cursor is None:
                    break
        graph.checks.set_read(expression, found, seen)

    async def _read_feed(self, graph: WatchedGraph, op: Op, how: dict[str, Any]) -> None:
        """Walk over the feed of a key in small pages."""
        own_posts = op.value % 8 == 3
        feeds = Feeds(graph, posted="likes", own_posts=own_posts)
        reader, edges, unread = key_id(op.one, self._shards), list[Assoc](), set[int]()
        is_whole, cursor = True, None
        with _noting() as seen:
            while True:
                page = await feeds.page(reader, 1 + op.value % 3, cursor, **how)
                edges += page.edges
                unread.update(page.unread)
                is_whole = is_whole and not page.missing
                cursor = page.cursor
                if cursor is None:
                    break
        follows, posted = (graph.schema.atype(name).number for name in ("follows", "likes"))
        own = ListKey(reader, posted) if own_posts else None
        walk = FeedWalk(ListKey(reader, follows), posted, own, edges, frozenset(unread), is_whole)
        graph.checks.feed_read(walk, seen)

    async def _read_two_hop(self, graph: WatchedGraph, op: Op, how: dict[str, Any]) -> None:
        """Ask who is two hops away from a key, without what another list has."""
        one, two = key_id(op.one, self._shards), key_id(op.two, self._shards)
        second, hides = EDGE_TYPES[op.value % len(EDGE_TYPES)], op.value % 4 > 0
        numbers = [graph.schema.atype(name).number for name in (op.atype, second, "friend")]
        excluded = ListKey(two, numbers[2]) if hides else None
        asked = TwoHopAsked(ListKey(one, numbers[0]), numbers[1], 1 + op.value % 5, 2 + op.value % 9, excluded)
        exclude = graph.edge_set(two, "friend") if hides else None
        with _noting() as seen:
            found = await graph.two_hop(
                one, (op.atype, second), limit=asked.limit, fan_out=asked.fan_out, exclude=exclude, **how
            )
        missing = frozenset(ListKey(each.id1, graph.schema.atype(each.atype).number) for each in found.missing)
        graph.checks.two_hop_read(asked, found.candidates, missing, seen)

    async def read_all_at_once(self, *, critical: bool = False) -> None:
        """Perform it and ignore the result."""
        assert self.graph is not None
        ids = [key_id(number, self._shards) for number in range(KEYS)]
        objects = [self.graph.obj_get(each, critical=critical) for each in ids]
        lists = [self.graph.assoc_range(each, atype, 0, 50, critical=critical) for each in ids for atype in EDGE_TYPES]
        await asyncio.gather(*objects, *lists, return_exceptions=True)

    async def read_objects(self) -> None:
        """Read the object of each key, and ignore the results."""
        assert self.graph is not None
        ids = [key_id(number, self._shards) for number in range(KEYS)]
        await asyncio.gather(*map(self.graph.obj_get, ids), return_exceptions=True)

    async def write_all_at_once(self, numbers: Iterable[int] = range(KEYS)) -> None:
        """Write the objects of all keys, or of these, and ignore the results."""
        assert self.graph is not None
        self._writes += 1
        names = {number: f"{self.process.name} {self._writes} all {number}" for number in numbers}
        writes = [
            self.graph.obj_add("user", {"name": name}, id=key_id(number, self._shards))
            for number, name in names.items()
        ]
        await asyncio.gather(*writes, return_exceptions=True)

    async def add_anywhere(self) -> str:
        """Add objects on any shards, and read them; return the first error, or `DONE`."""
        assert self.graph is not None
        self._writes += 1
        try:
            for number in range(_ADDED_ANYWHERE):
                name = f"{self.process.name} {self._writes} anywhere {number}"
                added = await self.graph.obj_add("user", {"name": name})
                self.graph.checks.given_out(added, 1)
                await self.graph.obj_get(added)
        except TaoError as error:
            return error.reason
        return DONE

    async def rush(self) -> None:
        """Write everything at once, some edges several times, and read it; ignore the results."""
        assert self.graph is not None
        ids = [key_id(number, self._shards) for number in range(KEYS)]
        edges = [self.graph.assoc_add(ids[0], "friend", ids[1 + number % 2], number) for number in range(8)]
        await asyncio.gather(self.write_all_at_once(), self.read_all_at_once(), *edges, return_exceptions=True)

    async def read_all(self) -> str:
        """Read every key; return the first error, or nothing."""
        assert self.graph is not None
        ids = [key_id(number, self._shards) for number in range(KEYS)]
        try:
            await self.graph.obj_get_many(ids)
            await self.graph.assoc_range_many(
                [(each, atype, 0, 50) for each in ids for atype in ("friend", "likes", "comment")]
            )
        except TaoError as error:
            return f"{error.reason}: {error.message}"
        return ""


@contextmanager
def _noting() -> Iterator[Seen]:
    """Note what this task reads while the block runs."""
    seen = Seen()
    before = SEEN.set(seen)
    try:
        yield seen
    finally:
        SEEN.reset(before)


def _note_seen(kind: int, row: QueryRow, value: bytes | TaoError) -> None:
    seen = SEEN.get()
    if seen is not None and isinstance(value, bytes):
        seen.note(kind, row, value)


def _asks_for_a_byte(op: Op) -> bool:
    """Return whether an `assoc_get` of a plan is made as `assoc_exists`. The plans need not draw it by itself."""
    return op.value % 3 == 0


def _how(op: Op, key: ListKey, tokens: list[WriteToken], pace: float) -> dict[str, Any]:
    """Return the read options, by name, for a read of ``key``. Any: the values are of different types."""
    match op.how:
        case "critical":
            return {"critical": True}
        case "stale":
            return {"max_staleness_ms": round(pace * _STALENESS_MS[op.value % len(_STALENESS_MS)])}
        case "token" if tokens:
            # Prefer a token about the key, because the others demand nothing of it.
            about = [each for each in tokens if _names(each, key)] or tokens
            return {"after": about[op.value % len(about)]}
        case "tokens" if tokens:
            # As much as a session may collect: more keys than a token names.
            return {"after": reduce(WriteToken.merged, tokens)}
        case _:
            return {}


def _names(token: WriteToken, key: ListKey) -> bool:
    versions = token.minimum_of_list(key) or token.minimum_of_object(key.id1)
    return bool(versions or token.pending_in(key) or token.pending_at(key.id1 >> SHARD_SHIFT))


def _fields(atype: str, unique: str, number: int) -> dict[str, object] | None:
    match atype:
        case "friend":
            return {"since": number}
        case "note":
            return {"text": unique}
        case _:
            return None
