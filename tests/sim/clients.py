"""SDK clients at work: the operations of a plan, and what the answers must have been.

`WatchedGraph` is the SDK's own graph; it shows every read's bytes and every write's result to the checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tao.client.columns import Row
from tao.client.configuration import Configuration
from tao.client.graph import Graph
from tao.client.own_writes import After, Minimums
from tao.client.settings import ClientSettings
from tao.model.errors import TaoError
from tao.model.ids import make_id
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.peers.links import Links, LinkSettings
from tao.wire.identity import Credentials
from tao.wire.v1 import session_pb2 as pb
from tests.sim.checks import Checks
from tests.sim.database import UNIX_MS_AT_START, unix_ms
from tests.sim.loop import Process, SimLoop
from tests.sim.network import SESSION
from tests.sim.plans import EDGE_TYPES, KEYS, Op

_CHANGED_TYPES: Final = {"likes": "follows", "follows": "likes", "comment": "likes", "friend": "likes"}


def key_id(number: int, shards: int) -> int:
    """The ids that a plan's operations are about, on all shards."""
    return make_id(number % shards, UNIX_MS_AT_START - 1000, number // shards)


class WatchedGraph(Graph):
    """A `Graph` whose reads and writes are checked."""

    checks: Checks
    watched_tier: str
    attaches: bool

    async def _read(self, kind: int, row: Row, critical: bool, after: After, max_staleness_ms: int | None) -> bytes:
        known = dict(self._attached)
        expected = self.checks.expect_read(
            kind, row, self.watched_tier, critical=critical, minimum=Minimums(after, known).of(row)
        )
        value = await super()._read(kind, row, critical, after, max_staleness_ms)
        self.checks.read(expected, value)
        return value

    def _note(self, results: Sequence[pb.WriteResult]) -> None:
        super()._note(results)
        for result in results:
            self.checks.written(self.watched_tier, result)


class Client:
    """One SDK process."""

    def __init__(self, process: Process, tier: str, shards: int, *, attaches: bool) -> None:
        self.process: Final = process
        self.tier: Final = tier
        self.attaches: Final = attaches
        self.graph: WatchedGraph | None = None
        self._shards: Final = shards
        self._made: list[int] = []
        self._writes = 0

    async def open(self, loop: SimLoop, topology: Topology, checks: Checks) -> None:
        """Connect, in the client's process. Raises `TaoError`."""
        settings = ClientSettings(
            timeout_seconds=4.0, links=LinkSettings(session=SESSION), attach_own_writes=self.attaches
        )
        links = Links(settings.links, Credentials(self.process.name, "client"))
        configuration = await Configuration.fetch(topology, self.process.region, links, settings)
        self.graph = WatchedGraph(links, configuration, settings, self.tier, lambda: unix_ms(loop.now) / 1000)
        self.graph.checks, self.graph.watched_tier = checks, f"{self.process.region} {self.tier}"
        self.graph.attaches = self.attaches

    async def do(self, op: Op, tokens: list[WriteToken]) -> str:
        """One operation; returns what came of it, for the trace. Tokens of writes are added to ``tokens``."""
        if self.graph is None:
            return "not open"
        try:
            with self.graph.recording() as recording:
                result = await self._do(self.graph, op, tokens)
            if recording.token:
                tokens.append(recording.token)
                del tokens[:-20]
            return result
        except TaoError as error:
            return error.reason

    async def _do(self, graph: WatchedGraph, op: Op, tokens: list[WriteToken]) -> str:
        one, two = key_id(op.one, self._shards), key_id(op.two, self._shards)
        self._writes += 1
        # Every value is written once, so that a content tells its write.
        unique = f"{self.process.name} {self._writes} {op.at:.3f}"
        critical = op.how == "critical"
        after = tokens[op.value % len(tokens)] if op.how == "token" and tokens else None
        match op.kind:
            case "obj_add":
                self._made = [*self._made[-5:], await graph.obj_add("user", {"name": unique}, near=one)]
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
            case "obj_get":
                await graph.obj_get(one, critical=critical, after=after)
            case "assoc_get":
                await graph.assoc_get(one, op.atype, [two, one], critical=critical, after=after)
            case "assoc_count":
                await graph.assoc_count(one, op.atype, critical=critical, after=after)
            case "assoc_range":
                limit = op.value % 7 + 1
                await graph.assoc_range(one, op.atype, op.value % 3, limit, critical=critical, after=after)
            case "assoc_time_range":
                await graph.assoc_time_range(one, op.atype, op.value + 5, op.value, 3, critical=critical, after=after)
        return "done"

    async def read_all_at_once(self) -> None:
        """Whatever comes of it."""
        assert self.graph is not None
        ids = [key_id(number, self._shards) for number in range(KEYS)]
        objects = [self.graph.obj_get(each) for each in ids]
        lists = [self.graph.assoc_range(each, atype, 0, 50) for each in ids for atype in EDGE_TYPES]
        await asyncio.gather(*objects, *lists, return_exceptions=True)

    async def write_all_at_once(self) -> None:
        """Whatever comes of it."""
        assert self.graph is not None
        self._writes += 1
        names = {number: f"{self.process.name} {self._writes} all {number}" for number in range(KEYS)}
        writes = [
            self.graph.obj_add("user", {"name": name}, id=key_id(number, self._shards))
            for number, name in names.items()
        ]
        await asyncio.gather(*writes, return_exceptions=True)

    async def read_all(self) -> str:
        """Every key, one by one; the first error, or nothing."""
        assert self.graph is not None
        try:
            for number in range(KEYS):
                one = key_id(number, self._shards)
                await self.graph.obj_get(one)
                for atype in ("friend", "likes", "comment"):
                    await self.graph.assoc_range(one, atype, 0, 50)
        except TaoError as error:
            return f"{error.reason}: {error.message}"
        return ""


def _fields(atype: str, unique: str, number: int) -> dict[str, object] | None:
    match atype:
        case "friend":
            return {"since": number}
        case "note":
            return {"text": unique}
        case _:
            return None
