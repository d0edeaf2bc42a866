"""Check that no queue, cache, log or retry grows beyond its setting (invariant 8).

Each line of `_all_bounds` names a class of the product, what grows in it, how large that may be under the settings of
the simulated roles (`tests.sim.roles`, small enough that plans reach them), and the methods after which it has just
grown. It is measured after those methods; a quantity without such a method is measured when an operation ends, and all
of them are measured when a fault or an act ends. The quantity is counted here by looking into the queue itself, because
an account that the product keeps of it may be what is wrong.

Everything else that grows is bounded by something that is measured here, or by the topology document:

- one entry for each shard: streams, coverages, marks, positions, freshness, generations, ownership, resets, what a
  tailer has delivered, shards that a sibling must drop (`SiblingInvalidation`), what a subscriber follows or waits for;
- one entry for each server or database: links, detectors, lanes, heartbeats, proofs, histories of a binlog;
- one entry for each unanswered request: answers being put together, watchers, writes by sequence number, waiters of a
  fetch;
- one entry for each fill under way: what `RemoteSource` and `TickBatcher` hold for a tick, and queries at a database;
- of a fixed size when it is made: marks, ghosts, departed versions; rates (twice their setting), traces;
- with tests of their own, since nothing here comes near: hot items, long lists, prefixes to be filled, membership
  filters, frames and gRPC, connections, the binlog reader's queue of transactions, the file of the spool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any, Final, NamedTuple

from tao.cache import GraphCache
from tao.client.dispatcher import Dispatcher
from tao.client.own_writes import OwnWrites
from tao.client.server_queues import is_abandoned
from tao.delivery.committed_messages import CommittedMessages
from tao.delivery.message_log import MessageLog
from tao.delivery.publisher import Publisher
from tao.follower.miss_path import MissPath
from tao.leader.consistency_checker import ConsistencyChecker
from tao.leader.inverse_path import InversePath
from tao.leader.pair_locks import PairLocks
from tao.leader.pending_pairs import MAX_PENDING_PAIRS
from tao.observability.key_history import KeyHistoryRecorder
from tao.planning.lanes import LaneScheduler
from tao.routing.budgets import RetryBudget
from tao.runtime.tasks import BackgroundTasks
from tao.serving.requests import PauseDetector
from tao.serving.server import MAX_TASKS
from tao.serving.single_flight import SingleFlight
from tao.serving.sources import DatabaseSource
from tao.tailer.delivery_path import DeliveryPath
from tao.wire.links import Links
from tests.sim import roles
from tests.sim.checks import Violation
from tests.sim.disks import SimSpool, SpoolFile
from tests.sim.loop import CURRENT, Process
from tests.sim.network import Listener

REACHED: Final = 0.9
"""Share of a bound from which it counts as reached."""
EXPECTED: Final = (
    *("delivery log bytes", "spool bytes", "undelivered bytes", "unacknowledged bytes", "key history"),
    *("waiting queries", "own writes", "cache bytes"),
)
"""Bounds that a sweep must reach; otherwise their checks prove nothing."""


class Bound(NamedTuple):
    """A bound on what one instance of a class may hold.

    ``held`` returns how much an instance of ``of`` holds. ``most`` is how much it may hold by its settings; ``slack``
    is allowed above that, because what comes in one piece is accepted whole. The quantity grows in the methods
    ``grows``.
    """

    name: str
    of: type
    held: Callable[[Any], float]  # Any: an instance of `of`
    most: float
    grows: tuple[str, ...] = ()
    slack: float = 0.0


def _longest(lengths: Iterable[float]) -> float:
    return max(lengths, default=0)


def _of_a_shard(log: MessageLog) -> float:
    held: Counter[int] = Counter()
    for run in log._runs.values():
        held[run.stream.shard] += len(run.messages)
    return _longest(held.values())


def _unacknowledged(publisher: Publisher) -> float:
    return _longest(sum(size for _, size in each._in_flight) for each in publisher._subscriptions.values())


def _read_at_once(publisher: Publisher) -> float:
    return _longest(
        sum(each.reading or bool(each.rows) for each in subscription._replays.values())
        for subscription in publisher._subscriptions.values()
    )


def _undelivered(path: DeliveryPath) -> float:
    """Return the queued bytes, without those of the last transaction: it was read because there was room."""
    last = path._receipts._waiting[-1] if path._receipts else None
    return sum(
        part.size_bytes
        for outbox in path._outboxes.values()
        for queue in (outbox.parts, *outbox.held.values(), filter(None, (outbox.proof,)))
        for part in queue
        if part.receipt is not last
    )


def _waiting_writes(lanes: LaneScheduler) -> float:
    """Return the largest number of writes that wait for one shard, counting callers' writes and sub-writes
    separately."""
    waiting = [entry for _, entry in lanes._entries.values() if not entry.batch]
    return _longest(Counter((shard, entry.sub_write) for entry in waiting for shard in entry.shards).values())


def _unanswered(links: Links) -> float:
    """Return the largest number of unanswered requests of a session; a rejected request is answered at once."""
    sessions: list[Any] = [link._session for link in links._links.values() if link._session is not None]
    return _longest(
        sum(tick >= 0 or sent_at != inf for _, tick, _, sent_at in each._pending.values()) for each in sessions
    )


def _waits(waiter: Any) -> bool:  # Any: a waiter for either kind of result
    if isinstance(waiter, tuple) and waiter[0].results[waiter[1]] is not None:
        return False
    return not is_abandoned(waiter)


class _Repeats:
    """Counts what cannot be seen from outside: queries that wait between two servers, and what has paid for retries."""

    def __init__(self) -> None:
        self._again: Final[dict[Dispatcher, list[list[Any]]]] = {}
        self._answers: Final[dict[RetryBudget, int]] = {}
        self._began: Final[dict[RetryBudget, float]] = {}

    def asked_again(self, dispatcher: Dispatcher, _: object, again: list[Any], __: int) -> None:
        self._again.setdefault(dispatcher, []).append(again)

    def waiting(self, dispatcher: Dispatcher) -> float:
        """Return the number of unanswered queries: those on their way and those that will be retried."""
        again = [each for each in self._again.get(dispatcher, ()) if any(_waits(one.waiter) for one in each)]
        self._again[dispatcher] = again
        waiters = [one.waiter for each in again for one in each]
        waiters += [waiter for call in dispatcher._in_flight for waiter in call.waiters]
        return len(
            {
                (id(waiter[0]), waiter[1]) if isinstance(waiter, tuple) else id(waiter)
                for waiter in waiters
                if _waits(waiter)
            }
        )

    def answered(self, budget: RetryBudget, answers: int = 1) -> None:
        self._answers[budget] = self._answers.get(budget, 0) + answers

    def saved_up(self, budget: RetryBudget) -> float:
        """Return the number of retries that neither answers nor time have paid for."""
        seconds = budget._updated_at - self._began.setdefault(budget, budget._updated_at)
        paid = roles.RETRIES.share * self._answers.get(budget, 0) + roles.RETRIES.per_second * seconds
        return max(0.0, budget.spent - paid)


class Bounds:
    """The bounds of one run. ``shards`` and ``arena_bytes`` are those of the world."""

    def __init__(self, shards: int, arena_bytes: int, found: Callable[[Violation], None]) -> None:
        self._found: Final = found
        self._repeats: Final = _Repeats()
        self._bounds: Final = _all_bounds(shards, arena_bytes, self._repeats)
        self._owners: list[tuple[Process, Any, list[Bound]]] = []
        self._near: Final[dict[tuple[str, int], Any]] = {}
        self.reached: Final = {bound.name: 0 for bound in self._bounds}
        """How often each bound has been reached from below."""

    def look(self, *, everywhere: bool = True) -> None:
        """Measure all living instances; without ``everywhere``, only the quantities that no method reports as grown."""
        self._owners = [each for each in self._owners if each[0].state in ("runs", "paused")]
        for process, owner, bounds in self._owners:
            for bound in bounds:
                if everywhere or not bound.grows:
                    self._measure(process, owner, bound)

    def _measure(self, process: Process, owner: Any, bound: Bound) -> None:
        held = bound.held(owner)
        if held < REACHED * bound.most:
            if self._near:
                self._near.pop((bound.name, id(owner)), None)
            return
        near = (bound.name, id(owner))
        if near not in self._near:
            self._near[near] = owner  # kept alive, so that no other object gets its address
            self.reached[bound.name] += 1
        if held > bound.most + bound.slack:
            text = f"{process.name} has {held:g} of {bound.name}, at most {bound.most:g}"
            self._found(Violation("8", f"{text} and {bound.slack:g}" if bound.slack else text))

    # finding the instances

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Register every instance that is made while the block runs, and measure it when it grows."""
        by_class: dict[type, list[Bound]] = {}
        for bound in self._bounds:
            by_class.setdefault(bound.of, []).append(bound)
        with ExitStack() as stack:
            for of, bounds in by_class.items():
                stack.enter_context(_after(of, "__init__", self._made(bounds)))
                for method in sorted({name for bound in bounds for name in bound.grows}):
                    grown = [bound for bound in bounds if method in bound.grows]
                    stack.enter_context(_after(of, method, self._grown(grown)))
            stack.enter_context(_after(Dispatcher, "_retry", self._repeats.asked_again))
            stack.enter_context(_after(RetryBudget, "earn", self._repeats.answered))
            yield

    def _made(self, bounds: list[Bound]) -> Callable[..., None]:
        def made(owner: Any, *_: object, **__: object) -> None:
            process = CURRENT.get()
            if process is not None:
                self._owners.append((process, owner, bounds))

        return made

    def _grown(self, bounds: list[Bound]) -> Callable[..., None]:
        def grown(owner: Any, *_: object, **__: object) -> None:
            process = CURRENT.get()
            if process is not None and process.state != "swept":
                for bound in bounds:
                    self._measure(process, owner, bound)

        return grown


@contextmanager
def _after(of: type, method: str, notify: Callable[..., None]) -> Iterator[None]:
    """Call ``notify`` with the arguments of the method after each call of it (before it runs, if it is a coroutine)
    while the block runs."""
    original = getattr(of, method)

    def notifying(owner: Any, *arguments: Any, **named: Any) -> Any:
        result = original(owner, *arguments, **named)
        notify(owner, *arguments, **named)
        return result

    setattr(of, method, notifying)
    try:
        yield
    finally:
        setattr(of, method, original)


def _all_bounds(shards: int, arena_bytes: int, repeats: _Repeats) -> list[Bound]:
    return [
        *_delivery_bounds(shards),
        *_write_bounds(),
        *_read_bounds(arena_bytes),
        *_bounds_everywhere(repeats),
    ]


def _delivery_bounds(shards: int) -> list[Bound]:
    """Return the bounds of leaders for subscribers, and of tailers for leaders."""
    log, outbox = roles.LOG, roles.OUTBOX
    return [
        Bound(
            "delivery log bytes",
            MessageLog,
            lambda log: sum(run.size_bytes for run in log._runs.values()),
            log.log_bytes_total,
            ("append",),
        ),
        Bound("delivery log of a shard", MessageLog, _of_a_shard, log.log_messages_per_shard, ("append",)),
        Bound(
            "messages of own commits",
            CommittedMessages,
            lambda committed: sum(kept.size_bytes for kept in committed._kept.values()),
            log.committed_bytes,
            ("keep",),
        ),
        Bound("subscribers", Publisher, lambda made: len(made._subscriptions), log.max_subscribers, ("subscribe",)),
        Bound(
            "unacknowledged bytes",
            Publisher,
            _unacknowledged,
            log.window_unacknowledged_bytes,
            ("publish_all", "prove"),
            # One delivery, whose last row of the spool is taken whole, and the unacknowledged messages that say of each
            # shard that it is followed.
            slack=log.max_delivery_bytes + outbox.relay_bytes + 3 * 64 * (1 + shards),
        ),
        Bound("shards read from the spool", Publisher, _read_at_once, log.catching_up_shards, ("publish_all",)),
        Bound("spool bytes", SimSpool, _spooled, roles.SPOOL_BYTES, ("_commit",)),
        Bound(
            "undelivered bytes",
            DeliveryPath,
            _undelivered,
            outbox.unacknowledged_bytes,
            ("_settle",),
            slack=roles.REWIND.max_bytes,
        ),
    ]


def _write_bounds() -> list[Bound]:
    """Return the bounds of leaders for writers."""
    writes = roles.WRITES
    return [
        Bound(
            "writes in line",
            LaneScheduler,
            _waiting_writes,
            writes.max_waiting_per_shard,
            ("offer", "requeue"),
            slack=writes.lanes_per_server * writes.max_batch_writes,
        ),
        Bound(
            "open transactions",
            LaneScheduler,
            lambda lanes: _longest(len(server.open) for server in lanes._servers.values()),
            writes.lanes_per_server,
            ("next_batch",),
        ),
        Bound(
            "writes of a pair",
            PairLocks,
            lambda pairs: _longest(map(len, pairs._held.values())),
            roles.INVERSES.max_waiting_per_pair,
            ("holds",),
        ),
        Bound(
            "keys to look at",
            ConsistencyChecker,
            lambda checker: _longest(map(len, checker._waiting)),
            roles.CHECKER.max_waiting,
            slack=roles.CHECKER.max_samples_per_second * 50.0,  # of the longest time between two measurements
        ),
        Bound("pending inverses", InversePath, lambda path: path.pairs_pending, MAX_PENDING_PAIRS),
    ]


def _read_bounds(arena_bytes: int) -> list[Bound]:
    """Return the bounds of servers for readers."""
    return [
        Bound(
            "fills",
            SingleFlight,
            lambda fetches: fetches.under_way,
            roles.FILLS.max_fetches,
            ("fetch_for", "begin_alone"),
        ),
        Bound(
            "gathered misses",
            DatabaseSource,
            lambda source: _longest(len(line.gathered) for line in source._lines.values() if not line.is_starting),
            roles.MISSES.max_gathered - 1,  # this many are read in the next turn
            ("_line_up",),
        ),
        Bound("direct reads", MissPath, lambda path: path._under_way, roles.DIRECT_READS.max_under_way),
        Bound("requests held", PauseDetector, lambda guard: len(guard._held), roles.STALLS.max_held, ("handle",)),
        Bound(
            "cache bytes",
            GraphCache,
            lambda cache: _longest(arena.bytes for arena in cache._arenas.all().values()),
            arena_bytes,
            ("store_object", "store_list", "store_count"),
        ),
        Bound(
            "kept answers",
            GraphCache,
            lambda cache: cache.kept_answers.size_bytes,
            roles.KEPT_ANSWERS_BYTES,
            ("keep_edges",),
        ),
        Bound(
            "floors of a shard",
            GraphCache,
            lambda cache: _longest(len(shard.floors) for shard in cache._shards.values()),
            roles.MAX_FLOORS,
        ),
    ]


def _bounds_everywhere(repeats: _Repeats) -> list[Bound]:
    """Return the bounds of every server, and of the SDK."""
    story, sdk = roles.STORY, roles.SDK
    session = sdk.links.session
    return [
        Bound("key history", KeyHistoryRecorder, lambda recorder: recorder.of_keys, story.key_events),
        Bound("story of shards", KeyHistoryRecorder, lambda recorder: recorder.of_shards, story.shard_events),
        Bound("tasks", BackgroundTasks, len, MAX_TASKS),
        Bound("repeats saved up", RetryBudget, repeats.saved_up, roles.RETRIES.burst, ("spend",)),
        Bound("requests unanswered", Links, _unanswered, session.max_unanswered),
        Bound(
            "requests for a connection",
            Links,
            lambda links: _longest(len(link._waiting) for link in links._links.values()),
            sdk.links.max_waiting,
        ),
        Bound(
            "requests of a peer",
            Listener,
            lambda listener: _longest(each.unanswered + each.series for each in listener.connections),
            roles.SERVING.max_unanswered,
        ),
        Bound("waiting queries", Dispatcher, repeats.waiting, sdk.max_waiting_queries, ("_send",)),
        Bound(
            "own writes",
            OwnWrites,
            lambda own: max(len(own.versions), len(own._written_at), len(own.inverse_pending)),
            sdk.own_writes_keys,
            ("record",),
        ),
        Bound(
            "age of own writes",
            OwnWrites,
            lambda own: _longest(own._loop.time() - at for at in own._written_at.values()),
            sdk.own_writes_seconds,
        ),
    ]


def _spooled(spool: SimSpool) -> float:
    file: SpoolFile = spool._file
    return sum(file.sizes)
