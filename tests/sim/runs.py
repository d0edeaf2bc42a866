"""One run: a plan played on a world, and its outcome."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tao.cache import GraphCache
from tao.model.errors import TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import WriteToken
from tao.worker.kinds import kinds_by_name
from tao.worker.node_state import NodeStates
from tao.worker.server import known_kinds
from tests.sim.checks import DONE, Violation
from tests.sim.clients import Client, key_id
from tests.sim.counters import NAME, fold
from tests.sim.faults import Faults
from tests.sim.growth import Growth, growth_substitutes
from tests.sim.jobs import KIND, Walk, WalkBody
from tests.sim.journals import check_journals_calm, journal_substitutes
from tests.sim.loop import CURRENT, SimLoop
from tests.sim.plans import ADD_JOB, ADD_SHARDS, COUNTER_KINDS, KILL_WORKER, WRITES, Op, Plan
from tests.sim.shard_copies import copy_substitutes
from tests.sim.substitutes import Substitution, substituted
from tests.sim.watchers import failed_too_late, watcher_substitutes
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run. ``violation`` is None if everything held."""

    plan: Plan
    violation: Violation | None
    acts: int
    """The number of acts that have begun."""
    digest: str
    events: int
    simulated_seconds: float
    cpu_seconds: float
    looked_at: dict[str, int]
    reached: dict[str, int]
    results: dict[str, int]
    recent: list[tuple[Any, ...]]


def run(plan: Plan, broken: Callable[[], AbstractContextManager[object]] = nullcontext) -> Outcome:
    """Play a plan to its end, or to the first violation. ``broken`` breaks the product while the run lasts."""
    began = time.process_time()
    kept = random.getstate()
    random.seed(plan.seed)
    loop = SimLoop()
    player = _Player(loop, plan)
    # A garbage collection during the run costs a third of its time.
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(
                substituted(
                    player.world,
                    [
                        *watcher_substitutes(player.world),
                        *copy_substitutes(player.world),
                        *growth_substitutes(player.world),
                        *journal_substitutes(player.world),
                        *(() if player.world.documents is None else player.world.documents.substitutes()),
                        Substitution(known_kinds, lambda _: kinds_by_name([Walk(player.world.jobs), NodeStates()])),
                    ],
                )
            )
            stack.enter_context(_caches_known(player.world))
            stack.enter_context(player.world.checks.watching_caches())
            stack.enter_context(player.world.bounds.watching())
            stack.enter_context(_logged_errors_found(player.world))
            stack.enter_context(broken())
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(player.play())
    finally:
        gc.enable()
        random.setstate(kept)
    world = player.world
    return Outcome(
        plan,
        player.violation,
        player.acts,
        player.digest,
        world.trace.events,
        player.ended_at,
        time.process_time() - began,
        world.checks.looked_at,
        world.bounds.reached,
        player.results,
        list(world.trace.recent),
    )


class _Player:
    def __init__(self, loop: SimLoop, plan: Plan) -> None:
        self._loop: Final = loop
        self._plan: Final = plan
        self.world: Final = World(loop, plan, self._found)
        self.violation: Violation | None = None
        self.acts = 0
        self.digest = ""
        self.ended_at = 0.0
        self.results: dict[str, int] = {}
        self._stopped = asyncio.Event()
        self._growth: Final = Growth(self.world)
        self._tokens: list[WriteToken] = []
        self._doing: list[asyncio.Task[None]] = []

    def _found(self, violation: Violation) -> None:
        if self.violation is None:
            self.violation = violation
            self.world.trace.note("violation", str(violation))
            self._stopped.set()

    async def play(self) -> None:
        playing = asyncio.ensure_future(self._play())
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait((playing, stopped), return_when=asyncio.FIRST_COMPLETED)
        self.digest = self.world.trace.digest
        self.ended_at = self._loop.now
        failure = playing.exception() if playing.done() else None
        if isinstance(failure, Violation):
            self._found(failure)
            failure = None
        playing.cancel()
        stopped.cancel()
        await self.world.close()
        if failure is not None:
            raise failure
        if self._loop.errors and self.violation is None:
            self.violation = Violation("unforeseen", "; ".join(self._loop.errors))

    async def _play(self) -> None:
        world, plan = self.world, self._plan
        await world.start()
        faults = Faults(world)
        origin = self._loop.now
        for op in plan.ops:
            self._loop.call_at(origin + op.at, self._start, op)
        for fault in plan.faults:
            self._loop.call_at(origin + fault.at, faults.begin, fault)
        for act in range(plan.acts):
            self.acts += 1
            world.journals.may_lose = world.has_copies
            await self._until(origin + act * plan.tempo.act_seconds + plan.tempo.busy_seconds)
            faults.mend()
            await self._until(origin + (act + 1) * plan.tempo.act_seconds)
            await self._check_calm()

    async def _until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self._loop.now))

    def _start(self, op: Op) -> None:
        if op.kind == KILL_WORKER:
            self._kill_worker(op)
            return
        if op.kind == ADD_SHARDS:
            self._growth.begin(op)
            return
        client = self.world.clients[op.client]
        self.world.spawn(self._do(op), client.process)

    def _kill_worker(self, op: Op) -> None:
        """Kill a worker, and start it again after a while."""
        workers = self.world.names("worker")
        name = workers[op.one % len(workers)]
        if self.world.is_up(name):
            self.world.kill(name)
            self._loop.call_later(op.value * 0.3, self.world.start_server, name)

    async def _do(self, op: Op) -> None:
        client, began = self.world.clients[op.client], self._loop.now
        if op.kind in COUNTER_KINDS:
            result = await self._count(client, op)
        else:
            result = await (self._add_job(client, op) if op.kind == ADD_JOB else client.do(op, self._tokens))
        self.world.trace.note("op", client.process.name, op.kind, op.one, op.two, op.atype, result)
        self.results[result] = self.results.get(result, 0) + 1
        self.world.bounds.look(everywhere=False)
        self.world.checks.done(f"{client.process.name}: {op.kind}", result)
        if op.kind in WRITES and (too_late := failed_too_late(self.world, began)):
            self.world.checks.written_too_late(f"{client.process.name}: {op.kind}", result, too_late)

    async def _add_job(self, client: Client, op: Op) -> str:
        if client.graph is None:
            return "not open"
        body = WalkBody(f"{client.process.name} {op.at}", op.value, key_id(op.one, self.world.shape.shards))
        try:
            job = await client.graph.add_job(KIND, msgspec.structs.asdict(body), near=body.near)
        except TaoError as error:
            return error.reason
        self.world.jobs.added(job.id, body)
        return DONE

    async def _check_calm(self) -> None:
        world = self.world
        why = world.not_ready()
        if why:
            raise Violation("7", f"long after the last fault: {why}")
        if why := world.uses_former_topology():
            raise Violation("topology", f"long after the last fault: {why}")
        world.bounds.look()
        world.checks.converged(world.masters, world.caches, world.shape.regions - 1)
        world.jobs.check_calm()
        if world.has_journals:
            check_journals_calm({name: world.servers[name] for name in world.names("follower")})
        await self._loop.create_task(self._check_counters(), context=world.clients[0].process.context.copy())
        world.checks.looked_at["nodes"] += world.jobs.check_nodes(world.masters)
        for client in world.clients:
            reading = self._loop.create_task(client.read_all(), context=client.process.context.copy())
            if error := await reading:
                raise Violation("7", f"{client.process.name} cannot read long after the last fault: {error}")
        world.checks.calm.undisturbed = True

    async def _check_counters(self) -> None:
        graph = self.world.clients[0].graph
        if graph is not None:
            self.world.checks.looked_at["counters"] += await self.world.counters.check_calm(graph)

    async def _count(self, client: Client, op: Op) -> str:
        """Add to a counter, read it, or have the leader of its shard fold it."""
        world, counted_id = self.world, key_id(op.one, self.world.shape.shards)
        if client.graph is None:
            return "not open"
        try:
            if op.kind == COUNTER_KINDS[0]:
                await world.counters.add(client.graph, counted_id, op.value)
            elif op.kind == COUNTER_KINDS[1]:
                await client.graph.counter_get(counted_id, NAME, critical=op.value % 3 == 0)
            else:
                await self._fold(counted_id, op.value)
        except TaoError as error:
            return error.reason
        return DONE

    async def _fold(self, counted_id: int, value: int) -> None:
        """Fold a third of the slots, or all of them, also those that are in use."""
        slots = self.world.counters.slots(counted_id)
        slots = slots[value % 3 :: 3] if value % 2 else slots
        for name in self.world.names("leader") if slots else ():
            leader = self.world.servers.get(name)
            if leader is not None and counted_id >> SHARD_SHIFT in leader._ownership.owned:
                context = self.world.processes[name].context.copy()
                await self._loop.create_task(fold(leader, counted_id, slots), context=context)


@contextmanager
def _caches_known(world: World) -> Iterator[None]:
    """Register every cache that a server makes with the world."""
    made = GraphCache.__init__

    def make(cache: GraphCache, *arguments: Any, **named: Any) -> None:
        made(cache, *arguments, **named)
        process = CURRENT.get()
        if process is not None:
            world.caches[process.name] = cache

    GraphCache.__init__ = make  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GraphCache.__init__ = made  # type: ignore[method-assign]


class _LoggedErrors(logging.Handler):
    """Treat an exception in the standard library's log of `tao` as a bug."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        if record.exc_info and record.exc_info[1] is not None and (process is None or process.state != "swept"):
            error = record.exc_info[1]
            if not isinstance(error, TaoError):
                self._world.found(Violation("unforeseen", f"{record.getMessage()}: {error!r}"))


@contextmanager
def _logged_errors_found(world: World) -> Iterator[None]:
    log = logging.getLogger("tao")
    handler, propagated = _LoggedErrors(world), log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagated
