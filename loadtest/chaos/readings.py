"""The reads of a run, by what they demand: each knows its floor when it begins, and is judged when it is answered.

Plain reads must see what the same client has written (the SDK attaches its own writes); a token's reader what the token
names; a critical reader everything acknowledged before it asked; and whoever bounds staleness, everything that was
acknowledged that long ago. Outside of failures a client's reads of one key never go back, and a client that attaches
nothing still sees its own writes in its tier (DESIGN.md §6, §8, §15).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Final

from loadtest.chaos.excuses import Whereabouts
from loadtest.chaos.history import Register, Verdict
from loadtest.chaos.record import FailedRead, Record
from tao.client import Graph, TaoError
from tao.client.own_writes import After
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import WriteToken
from tao.routing.routes import Routes

HEAD: Final = 10
"""Edges of a list that are read: enough to see a hole."""
STALENESS_MS: Final = 3_000


class Demand(StrEnum):
    """What a read asks for besides an answer."""

    PLAIN = "plain"
    CRITICAL = "critical"
    TOKEN = "token"  # noqa: S105 - a demand
    BOUNDED = "max_staleness"


DEMANDS: Final = (*[Demand.PLAIN] * 85, *[Demand.CRITICAL] * 4, *[Demand.TOKEN] * 7, *[Demand.BOUNDED] * 4)


class Kind(StrEnum):
    """What is written to."""

    OBJECT = "object"
    EDGE = "edge"
    LIST = "list"


@dataclass(slots=True)
class Key:
    """One thing that is written and read. ``other``: of an edge, its other end; ``ends``: of a list, those of the edges
    that are added to it in turn."""

    kind: Kind
    id: int
    other: int
    register: Register
    ends: Sequence[int] = ()
    token: WriteToken = field(default_factory=WriteToken)
    """Of the write numbered ``token_number``."""
    token_number: int = 0
    rests_until: float = 0.0
    """When a write of unknown outcome can be settled; 0 when none waits."""


@dataclass(slots=True)
class Reader:
    """One client: a graph of a region and tier. ``attaches``: its reads carry its own writes' versions."""

    name: str
    region: str
    graph: Graph
    attaches: bool
    own: dict[int, int] = field(default_factory=dict)
    """Key's place → number of the last write that was acknowledged to this client."""
    own_at: dict[int, float] = field(default_factory=dict)
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Key's place → number of the write seen last, and when."""


class Reading:
    """Reads of many clients, and their judgement."""

    def __init__(
        self,
        keys: Sequence[Key],
        absent: Sequence[int],
        record: Record,
        chance: Random,
        routes: Callable[[], Routes],
    ) -> None:
        """``absent``: ids that nobody writes to, each read once or hardly more often: misses. ``routes``: as they are
        now, since masters change."""
        self._keys: Final = keys
        self._absent: Final = absent
        self._record: Final = record
        self._chance: Final = chance
        self._routes: Final = routes
        self._next_absent = 0

    async def batch(self, reader: Reader, size: int) -> None:
        """So many reads at once; one in ten of what nobody has read before."""
        async with asyncio.TaskGroup() as group:
            for _ in range(size):
                if self._chance.random() < 0.1:
                    group.create_task(self._miss(reader))
                else:
                    place = self._chance.randrange(len(self._keys))
                    group.create_task(self.one(reader, place, self._chance.choice(DEMANDS)))

    async def one(self, reader: Reader, place: int, demand: Demand) -> None:
        """One read, judged."""
        key, record = self._keys[place], self._record
        register, now, calm = key.register, record.now(), record.calm_since
        floor, after = reader.own.get(place, 0) if reader.attaches else 0, None
        if not reader.attaches and calm is not None and reader.own_at.get(place, -1.0) > calm:
            floor = reader.own[place]
        own_floor = floor
        if demand is Demand.CRITICAL:
            floor = register.acknowledged_before(now)
        elif demand is Demand.TOKEN:
            floor, after = max(floor, key.token_number), key.token
        elif demand is Demand.BOUNDED:
            floor = max(floor, register.acknowledged_before(now - STALENESS_MS / 1000))
        record.reads += 1
        try:
            verdict, number = await self._ask(reader.graph, key, demand, after, floor)
        except TaoError as error:
            where = self._where(reader, key.id)
            record.failed_read(FailedRead.of(error, now, key.kind, demand, reader.name, where, attached=own_floor > 0))
            return
        if verdict is not Verdict.RIGHT:
            what = f"{reader.name} read write {number} of {key.kind} {key.id}, {demand}, which had to see {floor}"
            kind = demand if floor > own_floor or demand is Demand.CRITICAL else "own writes"
            record.violation(verdict, kind, what)
        elif demand is Demand.PLAIN and number >= 0:
            last, at = reader.seen.get(place, (0, -1.0))
            if number < last and calm is not None and at > calm and calm == record.calm_since:
                record.violation(
                    Verdict.STALE, "monotone", f"{reader.name}: {key.kind} {key.id}, {last}, then {number}"
                )
            reader.seen[place] = (number, now)

    async def _ask(self, graph: Graph, key: Key, demand: Demand, after: After, floor: int) -> tuple[Verdict, int]:
        """The verdict, and the number of the write seen; -1 when the answer does not tell."""
        register, record = key.register, self._record
        critical = demand is Demand.CRITICAL
        staleness = STALENESS_MS if demand is Demand.BOUNDED else None
        if key.kind is Kind.OBJECT:
            found = await graph.obj_get(key.id, critical=critical, after=after, max_staleness_ms=staleness)
            value = None if found is None else int(str(found.fields["home"] or 0))
            return register.judge(value, floor, record.now()), register.number_of(value)
        if key.kind is Kind.EDGE:
            edges = await graph.assoc_get(
                key.id, "likes", [key.other], critical=critical, after=after, max_staleness_ms=staleness
            )
            value = edges[0].time if edges else None
            return register.judge(value, floor, record.now()), register.number_of(value)
        way = self._chance.random()
        if way < 0.3:
            count = await graph.assoc_count(
                key.id, "follows", critical=critical, after=after, max_staleness_ms=staleness
            )
            return register.judge_count(count, floor, record.now()), -1
        if way < 0.6:
            edges = await graph.assoc_time_range(
                key.id, "follows", None, 1, HEAD, critical=critical, after=after, max_staleness_ms=staleness
            )
        else:
            edges = await graph.assoc_range(
                key.id, "follows", 0, HEAD, critical=critical, after=after, max_staleness_ms=staleness
            )
        values = list(edges.times)
        return register.judge_head(values, floor, record.now()), register.number_of(values[0] if values else None)

    async def _miss(self, reader: Reader) -> None:
        """A read of what nobody has cached, or will: it goes to the region's database."""
        record, now = self._record, self._record.now()
        self._next_absent = (self._next_absent + 1) % len(self._absent)
        object_id = self._absent[self._next_absent]
        record.reads += 1
        try:
            found = await reader.graph.assoc_count(object_id, "follows")
        except TaoError as error:
            where = self._where(reader, object_id)
            record.failed_read(FailedRead.of(error, now, "miss", Demand.PLAIN, reader.name, where, attached=False))
            return
        if found:
            record.violation(Verdict.WRONG, "plain", f"{reader.name}: {found} edges of {object_id}, which has none")

    def _where(self, reader: Reader, object_id: int) -> Whereabouts:
        database = self._routes().database_of(object_id >> SHARD_SHIFT)
        return Whereabouts(reader.region, database.name, database.master_region)
