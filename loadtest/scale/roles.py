"""A real follower and a real leader among stubs: what they use, and what a topology change costs them.

Proofs of freshness are the only thing that an idle installation sends, and how many there are depends on what leaders
do. So the cost of one is measured here at a moderate rate, and multiplied by the number that real leaders send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from loadtest.conditions import until
from loadtest.rounds import cpu_seconds
from loadtest.scale.installation import (
    CHANGES,
    FOLLOWER,
    LEADER,
    LOST_LEADER,
    REGION,
    Addresses,
    InstallationShape,
    TopologyChange,
    moved_shards,
    store,
    subscribers_of,
    topology_of,
)
from loadtest.scale.processes import core_share, reserved_addresses, resident_mb, running
from loadtest.scale.stubs import ChangeMaker, StubLeaders, StubTailer, open_subscribers
from tao.admin.server_stats import Stats, server_stats
from tao.model.changes import ShardMessages
from tao.model.errors import Unavailable
from tao.model.topology import Topology
from tao.routing.routes import Routes

WRITES_PER_SECOND: Final = 1_000
_PROOFS_PER_SECOND: Final = 300
"""Deliveries of proofs to the measured follower: more than an idle installation needs, so that their cost shows."""
_RELAY_SECONDS: Final = 1.0
"""Pause between two relays of one stub tailer."""
_WRITE_RELAY_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.25
"""Pause between two looks at a server's `/stats`, which cost it something, too."""
_QUIET_SECONDS: Final = 1.5
"""Longer than a stub tailer waits for its next relay, whose answer says what the leader wants."""
_REPETITIONS: Final = 3
"""Repetitions of each change; the median is reported."""
_PATIENCE_SECONDS: Final = 30.0
"""A server that has not settled by then may never do so, and is taken for what it has done so far."""


class ChangeCost(msgspec.Struct, frozen=True, kw_only=True):
    """What topology changes of one kind cost a server, beyond what it uses in the same time without one."""

    cpu_seconds: float
    """The median of the repetitions; ``settled_seconds`` likewise."""
    settled_seconds: float
    """Time from the new document until the server had done everything about it; all the time that it was given, if it
    has not."""
    moved: int
    """The server's shards whose assignment has changed, of all repetitions; ``touched`` likewise."""
    touched: int
    """The shards that were subscribed again, or of which the leader asked the tailers where they continue."""
    unconfirmed: int
    """The most shards that the server said to be unconfirmed: without a subscription; or at a leader, not served yet,
    or not continued by their tailer."""


def combined(costs: Sequence[ChangeCost]) -> ChangeCost:
    """Return the cost of several changes of one kind."""
    return ChangeCost(
        cpu_seconds=median(each.cpu_seconds for each in costs),
        settled_seconds=median(each.settled_seconds for each in costs),
        moved=sum(each.moved for each in costs),
        touched=sum(each.touched for each in costs),
        unconfirmed=max(each.unconfirmed for each in costs),
    )


def unconfirmed_shards(stats: Stats) -> int:
    """Return how many shards a follower or a leader says to be unconfirmed; see `ChangeCost.unconfirmed`."""
    delivery = stats.get("delivery")
    if delivery is None:
        return int(stats["unsubscribed_shards"])
    served = stats["hosted_shards"] + stats["owned_shards"]
    return int(max(0, served - delivery["open_shards"]) + delivery["unlinked_shards"])


class RoleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one server uses. Shares are of a core."""

    resident_mb: float
    base_share: float
    """The share without proofs and changes."""
    proof_seconds: float
    """CPU time of one delivery of proofs at a follower; of one relay, and all deliveries it causes, at a leader."""
    deliveries_per_proof: float = 0.0
    """At a leader: deliveries of proofs to one subscriber for each relay."""
    writing_share: float = 0.0
    """The share beyond the base under a thousand changes a second."""
    changes: dict[str, ChangeCost] = {}


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how long the servers are measured."""

    folder: Path
    schema_file: Path
    seconds: float
    shape: InstallationShape
    whole: bool = True
    """Measure all loads and changes; otherwise only those whose growth is of interest."""

    @property
    def changes(self) -> tuple[TopologyChange, ...]:
        """The changes that are measured."""
        return CHANGES if self.whole else (LOST_LEADER,)

    @property
    def quiet_seconds(self) -> float:
        """How long a server has nothing to do about a change before it is taken for done."""
        return min(_QUIET_SECONDS, self.seconds)

    @property
    def topology_file(self) -> Path:
        """The document of the server that is measured now."""
        return self.folder / "topology.json"

    def settings(self, name: str, **more: object) -> dict[str, object]:
        """Return a server's settings."""
        files = {"topology_file": str(self.topology_file), "schema_file": str(self.schema_file)}
        return {"name": name, **files, **more}

    def leader_settings(self) -> dict[str, object]:
        """Return the settings of a leader that reaches no database."""
        logins = {"leader_user": "none", "leader_password": "none", "reader_user": "none", "reader_password": "none"}
        spool = {"spool": {"folder": str(self.folder / "spool")}}
        return self.settings(LEADER, **logins, **spool)


@dataclass(slots=True)
class _Subject:
    """The server that is measured, and what its neighbours see of it."""

    bench: Bench
    pid: int
    admin: str
    topology: Topology
    shards_of: Callable[[Topology], set[int]]
    touched: Callable[[], int]

    async def share(self, load: Coroutine[Any, Any, None] | None = None, seconds: float | None = None) -> float:
        """Return the share of a core under a load, which is cancelled then. ``seconds``: if not those of the bench."""
        task = None if load is None else asyncio.create_task(load)
        try:
            return await core_share(self.pid, seconds or self.bench.seconds)
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def changes(self, on_changed: Callable[[Topology], None] = lambda _: None) -> dict[str, ChangeCost]:
        """Change the topology in each way, again and again, and return the costs by the name of the change.

        ``on_changed`` is called once the server uses a new topology."""
        return {
            each.name: combined([await self._change(each, on_changed) for _ in range(_REPETITIONS)])
            for each in self.bench.changes
        }

    async def _look_on(self) -> None:
        while True:
            with suppress(Unavailable):
                await server_stats(self.admin)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _change(self, change: TopologyChange, on_changed: Callable[[Topology], None]) -> ChangeCost:
        """Change the topology, and return what it cost when everything is quiet, or when patience is at its end.

        What the server uses under looks at it, and under whatever load there is, is measured right before, for about
        as long, and is no cost of the change."""
        share = await self.share(self._look_on(), 2 * self.bench.quiet_seconds)
        before, touched = self.topology, self.touched()
        after = self.topology = change.make(before)
        moved = moved_shards(before, after, self.shards_of(before) | self.shards_of(after))
        began, used = time.monotonic(), cpu_seconds(self.pid)
        settled, last_touched, unconfirmed = began, touched, 0
        store(after, self.bench.topology_file)

        async def quiet() -> bool:
            nonlocal settled, last_touched, unconfirmed
            try:
                stats = await server_stats(self.admin)
            except Unavailable:
                settled = time.monotonic()  # the server's event loop is blocked
                return False
            now, found = time.monotonic(), unconfirmed_shards(stats)
            if stats["topology_version"] < after.version or found or self.touched() != last_touched:
                settled, last_touched, unconfirmed = now, self.touched(), max(unconfirmed, found)
            if stats["topology_version"] == after.version:
                on_changed(after)
            return now - settled > self.bench.quiet_seconds

        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await until(quiet, _LOOK_SECONDS)
        used = cpu_seconds(self.pid) - used - share * (time.monotonic() - began)
        return ChangeCost(
            cpu_seconds=max(0.0, used),
            settled_seconds=settled - began,
            moved=moved,
            touched=self.touched() - touched,
            unconfirmed=unconfirmed,
        )


async def measure_follower(bench: Bench) -> RoleFigures:
    """Measure the follower that hosts all shards. Raises `OperatorError`."""
    async with AsyncExitStack() as stack:
        addresses = {FOLLOWER: await stack.enter_async_context(reserved_addresses())}
        routes = Routes(topology_of(bench.shape, addresses))
        names = [server.name for server in routes.leaders(REGION).servers]
        databases = [database.name for database in routes.topology.databases]
        stubs = StubLeaders(names, databases, lambda shard: routes.database_of(shard).name)
        addresses |= {name: Addresses(frames=address) for name, address in (await stubs.start()).items()}
        stack.push_async_callback(stubs.close)
        topology = topology_of(bench.shape, addresses)
        store(topology, bench.topology_file)
        admin = addresses[FOLLOWER].admin
        pid = await stack.enter_async_context(running("follower", bench.settings(FOLLOWER), admin, bench.folder))
        subject = _Subject(bench, pid, admin, topology, lambda now: set(range(now.shards)), lambda: stubs.positions)
        await _calm(lambda: stubs.positions)
        base = await subject.share()
        sent, began = stubs.sent, time.monotonic()
        proving = await subject.share(stubs.prove(_PROOFS_PER_SECOND))
        rate = (stubs.sent - sent) / (time.monotonic() - began)
        changes = await subject.changes()
        writing = await subject.share(stubs.change(WRITES_PER_SECOND)) if bench.whole else 0.0
        return RoleFigures(
            resident_mb=resident_mb(pid),
            base_share=base,
            proof_seconds=max(0.0, proving - base) / max(1.0, rate),
            writing_share=max(0.0, writing - base),
            changes=changes,
        )


async def measure_leader(bench: Bench, *, all_subscribe_again: bool) -> RoleFigures:
    """Measure a leader of a region without masters, with all of its subscribers and tailers.

    ``all_subscribe_again``: whether followers subscribe all shards again after any topology change. Raises
    `OperatorError`."""
    async with AsyncExitStack() as stack:
        addresses = {LEADER: await stack.enter_async_context(reserved_addresses())}
        topology = topology_of(bench.shape, addresses)
        store(topology, bench.topology_file)
        own = addresses[LEADER]
        pid = await stack.enter_async_context(running("leader", bench.leader_settings(), own.admin, bench.folder))
        subscribers, sessions = await open_subscribers(own.frames, subscribers_of(topology, LEADER))
        tailers = [StubTailer(database.name) for database in topology.databases]
        sessions += [await tailer.open(own.frames) for tailer in tailers]
        for session in sessions:
            stack.push_async_callback(session.close)
        routes = Routes(topology)
        subject = _Subject(
            bench,
            pid,
            own.admin,
            topology,
            lambda now: set(Routes(now).shards_of(LEADER)),
            lambda: sum(each.wanted for each in tailers),
        )
        async with _relaying(tailers, _RELAY_SECONDS):
            await asyncio.sleep(2 * _RELAY_SECONDS)  # the tailers say where all shards continue
        await _calm(lambda: _sum(subscribers, "deliveries"))
        base = await subject.share()
        async with _relaying(tailers, _RELAY_SECONDS):
            relays, deliveries = _sum(tailers, "relays"), _sum(subscribers, "deliveries")
            proving = await subject.share()
            relays, deliveries = _sum(tailers, "relays") - relays, _sum(subscribers, "deliveries") - deliveries

        def follow(now: Topology) -> None:
            if tailers[0].topology_version != now.version:
                for tailer in tailers:
                    tailer.topology_version = now.version
                for subscriber in subscribers if all_subscribe_again else ():
                    subscriber.subscribe()

        async with _relaying(tailers, _RELAY_SECONDS):
            changes = await subject.changes(follow)
        writing = 0.0
        if bench.whole:
            by_database: dict[str, list[int]] = {}
            for shard in routes.shards_of(LEADER):
                by_database.setdefault(routes.database_of(shard).name, []).append(shard)
            each = round(WRITES_PER_SECOND * _WRITE_RELAY_SECONDS / len(by_database))
            async with _relaying(tailers, _WRITE_RELAY_SECONDS, _changes(by_database, max(1, each))):
                writing = await subject.share()
        return RoleFigures(
            resident_mb=resident_mb(pid),
            base_share=base,
            proof_seconds=max(0.0, proving - base) * bench.seconds / max(1, relays),
            deliveries_per_proof=deliveries / max(1, len(subscribers)) / max(1, relays),
            writing_share=max(0.0, writing - base),
            changes=changes,
        )


async def _calm(activity: Callable[[], int]) -> None:
    """Wait until a counter stands still, so that what came before is not measured, or until patience is at its end."""
    last = -1

    async def stands_still() -> bool:
        nonlocal last
        before, last = last, activity()
        return before == last

    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await until(stands_still, _QUIET_SECONDS)


def _sum(stubs: list[Any], counter: str) -> int:  # Any: tailers or subscribers
    return sum(getattr(each, counter) for each in stubs)


def _changes(shards: dict[str, list[int]], each: int) -> Callable[[str], list[ShardMessages]]:
    """Return what makes so many changes of a database's shards, one of each shard at most."""
    maker = ChangeMaker()
    return lambda database: [maker.change(shard) for shard in shards.get(database, ())[:each]]


@asynccontextmanager
async def _relaying(
    tailers: list[StubTailer], seconds_between: float, changes: Callable[[str], list[ShardMessages]] = lambda _: []
) -> AsyncIterator[None]:
    """Have the tailers relay while the context lasts, each at a moment of its own."""
    tasks = []
    try:
        for tailer in tailers:
            tasks.append(asyncio.create_task(tailer.run(seconds_between, changes)))
            await asyncio.sleep(seconds_between / len(tailers))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
