"""A model of delivery, for `tests.properties.test_continuation`.

It has two databases, each with a binlog of numbered commits and a tailer that delivers them to the shard's current
leader, some of them in parts (with the real `Continuity`), two leaders with real publishers and a spool that loses what
was not synced, and subscribers with real inboxes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tao.delivery.inbox import Inbox
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.delivery.subscription import Subscription
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Span
from tao.tailer.continuity import Continuity, SpansAgain
from tests.rigs.memory_spool import MemorySpool, SpoolDisk

DATABASES = {"db1": (0, 1), "db2": (2,)}
DATABASE_OF = {shard: database for database, shards in DATABASES.items() for shard in shards}
SHARDS = tuple(DATABASE_OF)
LEADERS = ("a", "b")
SETTINGS = DeliverySettings(
    log_messages_per_shard=4,
    log_bytes_total=240 * 8,
    window_unacknowledged_bytes=2_500,
    max_delivery_messages=3,
    max_delivery_bytes=700,
    catching_up_shards=1,
)
RUNS = count(1)
_Part = tuple[int, int]
"""The number of a transaction, and of a part of what it changed in a shard."""


class Leader:
    """One run of a leader."""

    def __init__(self, disk: SpoolDisk | None) -> None:
        self.timers: list[Callable[[], None]] = []
        """The timers of subscribers that wait."""
        self.proof_timers: list[Callable[[], None]] = []
        self.spool = None if disk is None else MemorySpool(disk)
        self.publisher = Publisher(SETTINGS, f"run-{next(RUNS)}", DATABASE_OF.__getitem__, self.spool, self._later)
        self.generations = count(1)
        self.committed: dict[tuple[int, int], ShardMessages] = {}
        """By shard and number: the messages of its own commits that no relay has named yet."""

    def commit(self, shard: int, number: int, parts: int) -> None:
        messages = ShardMessages(shard, 1, tuple(_message(shard, number, part) for part in range(parts)))
        if parts == 1:  # a transaction that fits no relay is not named
            self.committed[shard, number] = messages
        self.publisher.publish(messages)

    def relayed(self, shard: int, number: int, part: int) -> ShardMessages:
        """Return the messages of a part of a transaction that a relay names, or contains."""
        found = self.committed.pop((shard, number), None)
        return found or ShardMessages(shard, 1, (_message(shard, number, part),))

    def open(self, shards: Sequence[int]) -> None:
        for shard in shards:
            self.publisher.open_shard(shard, next(self.generations), 1)

    def _later(self, seconds: float, do: Callable[[], None]) -> object:
        (self.timers if seconds > SETTINGS.proofs_seconds else self.proof_timers).append(do)
        return None

    def deliver_proofs(self) -> None:
        """Let the time pass that proofs wait for each other."""
        while self.proof_timers:
            self.proof_timers.pop(0)()

    def fire_timers(self) -> None:
        timers, self.timers = self.timers, []
        for do in timers:
            do()


class Follower:
    """A follower's knowledge. ``known`` holds, by shard, the parts of transactions that it received, and those in the
    rows that it read after a reset."""

    def __init__(self) -> None:
        self.inbox = Inbox(DATABASE_OF.__getitem__)
        self.wires: dict[str, deque[Delivery]] = {name: deque() for name in LEADERS}
        self.subscriptions: dict[str, Subscription] = {}
        self.confirmed: dict[int, str] = {}
        self.known: dict[int, set[_Part]] = {shard: set() for shard in SHARDS}

    def take(self, leader: str, committed: Callable[[int], set[_Part]]) -> list[int]:
        """Return the positions to subscribe again. ``committed`` are the transactions that a shard knows once it is
        read anew."""
        delivery = self.wires[leader].popleft()
        received = self.inbox.receive(delivery)
        for shard in received.resets:
            self.known[shard] = committed(shard)
        for shard in received.confirmed:
            self.confirmed[shard] = leader
        for shard in (*received.gaps, *received.refused):
            self.confirmed.pop(shard, None)
            self.inbox.suspend([shard])
        for messages in received.messages:
            for message in messages.messages:
                assert isinstance(message, ObjectInvalidation)
                self.known[messages.shard].add((message.version, message.id & 0xF))
        for database, until in delivery.proven:  # times are numbers of transactions here
            for shard in DATABASES[database]:
                if self.confirmed.get(shard) == leader:
                    assert {part for part in committed(shard) if part[0] <= until} <= self.known[shard]
        self.inbox.confirm(leader, [shard for shard in received.confirmed if shard in self.confirmed])
        self.inbox.prove(leader, delivery)
        for shard in SHARDS:
            until = self.inbox.proven_unix_ms(shard)
            assert {part for part in committed(shard) if part[0] <= until} <= self.known[shard]
        self.subscriptions[leader].acknowledge(delivery.number)
        return [*received.gaps, *received.refused]


class Tailer:
    """The tailer of one database, with its binlog."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.shards = DATABASES[database]
        self.binlog: list[tuple[int, ...]] = []  # by number - 1: the shard of each part of the transaction
        self.continuity = Continuity(database, lambda: 1, self.shards.__contains__)
        self.continuity.begin("0-1-0")
        self.read = 0
        self.queued: dict[int, deque[tuple[_Part, Span]]] = {shard: deque() for shard in self.shards}

    def read_on(self) -> None:
        while self.read < len(self.binlog):
            self.read += 1
            shards = self.binlog[self.read - 1]
            spans = self.continuity.spans_of(f"0-1-{self.read}", shards)
            for at, (shard, span) in enumerate(zip(shards, spans, strict=True)):
                self.queued[shard].append(((self.read, shards[:at].count(shard)), span))

    def restart(self) -> None:
        """Restart from what all shards' leaders have acknowledged."""
        first = min([queue[0][0][0] for queue in self.queued.values() if queue], default=self.read + 1)
        self.read = first - 1
        for queue in self.queued.values():
            queue.clear()
        self.continuity.begin(f"0-1-{self.read}")


class ContinuationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tailers = {name: Tailer(name) for name in DATABASES}
        self.tailer_of = {shard: tailer for tailer in self.tailers.values() for shard in tailer.shards}
        self.disks = {"a": SpoolDisk(), "b": SpoolDisk()}
        self.home = dict.fromkeys(SHARDS, "a")
        self.leaders: dict[str, Leader] = {}
        self.followers = [Follower(), Follower()]
        for name in LEADERS:
            self.start(name)
        for follower in self.followers:
            self.connect(follower)

    # ---- the world --------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.leaders[name] = Leader(self.disks[name])
        self.leaders[name].open([shard for shard in SHARDS if self.home[shard] == name])

    def connect(self, follower: Follower) -> None:
        follower.confirmed.clear()
        follower.inbox.suspend(SHARDS)
        for name in LEADERS:
            follower.inbox.begin_stream(name)
            wire = follower.wires[name] = deque()
            shards = [shard for shard in SHARDS if self.home[shard] == name]
            positions = follower.inbox.positions_for(shards)
            index = self.followers.index(follower)
            publisher = self.leaders[name].publisher
            # One follower is of a version that knows nothing of repeats.
            subscription = publisher.subscribe(str(index), positions, wire.append, takes_repeats=not index)
            follower.subscriptions[name] = subscription

    def relay_queued(self, shard: int, most: int) -> None:
        """Send one relay of a shard."""
        tailer = self.tailer_of[shard]
        queue = tailer.queued[shard]
        parts = [queue[at] for at in range(min(most, len(queue)))]
        leader = self.leaders[self.home[shard]]
        self.relay(tailer, shard, [(leader.relayed(shard, *part), span) for part, span in parts])
        for _ in parts:
            tailer.continuity.acknowledge(queue.popleft()[1])

    def relay(self, tailer: Tailer, shard: int, parts: Sequence[tuple[ShardMessages, Span]]) -> None:
        if not parts:
            return
        publisher = self.leaders[self.home[shard]].publisher
        publisher.publish_relay([messages for messages, _ in parts], [span for _, span in parts], _nothing)
        self.answer(tailer, publisher.take_wanted(tailer.database))

    def answer(self, tailer: Tailer, wanted: Sequence[Span]) -> None:
        for want in wanted:
            link, again = tailer.continuity.answer(want)
            if link is not None:
                self.relay(tailer, link.shard, [(ShardMessages(link.shard, 1, ()), link)])
            if again is not None:
                shard, spans = again.shard, SpansAgain({again.shard: again})
                for number, part in sorted(self.committed(shard)):
                    span = spans.of_part(shard, number)
                    if span is not None:
                        self.relay(tailer, shard, [(ShardMessages(shard, 1, (_message(shard, number, part),)), span)])
                self.relay(tailer, shard, [(ShardMessages(shard, 1, ()), last) for last in spans.ends()])

    def prove(self, tailer: Tailer) -> None:
        """Send a heartbeat if everything has been sent."""
        tailer.read_on()
        for shard in tailer.shards:
            self.relay_queued(shard, 100)
        tailer.binlog.append(())
        tailer.read += 1
        source, number = tailer.continuity.proven(f"0-1-{tailer.read}")
        for name in LEADERS:
            publisher = self.leaders[name].publisher
            publisher.prove(tailer.database, number, source, number)
            self.answer(tailer, publisher.take_wanted(tailer.database))

    def take(self, follower: Follower, name: str) -> None:
        again = follower.take(name, self.committed)
        if again and not follower.subscriptions[name].closed:
            follower.subscriptions[name].add(follower.inbox.positions_for(again))

    def committed(self, shard: int) -> set[_Part]:
        return {
            (number, part)
            for number, shards in enumerate(self.tailer_of[shard].binlog, 1)
            for part in range(shards.count(shard))
        }

    # ---- events -----------------------------------------------------------------------------------------------------

    @rule(
        shards=st.lists(st.sampled_from(SHARDS), min_size=1, max_size=2, unique=True),
        quick=st.booleans(),
        times=st.integers(1, 5),
        parts=st.integers(1, 3),
    )
    def commit(self, shards: list[int], quick: bool, times: int, parts: int = 1) -> None:
        for _ in range(times):
            for tailer in self.tailers.values():
                changed = sorted(set(shards) & set(tailer.shards))
                tailer.binlog.append(tuple(changed * parts))
                for shard in changed if quick else ():
                    self.leaders[self.home[shard]].commit(shard, len(tailer.binlog), parts)

    @rule(shard=st.sampled_from(SHARDS), most=st.integers(1, 9))
    def tailer_relays(self, shard: int, most: int) -> None:
        self.tailer_of[shard].read_on()
        self.relay_queued(shard, most)

    @rule(database=st.sampled_from(list(DATABASES)))
    def heartbeat(self, database: str) -> None:
        self.prove(self.tailers[database])

    @rule(name=st.sampled_from(LEADERS))
    def proofs_are_due(self, name: str) -> None:
        self.leaders[name].deliver_proofs()

    @rule(follower=st.integers(0, 1), name=st.sampled_from(LEADERS), most=st.integers(1, 4))
    def follower_takes(self, follower: int, name: str, most: int) -> None:
        wire = self.followers[follower].wires[name]
        for _ in range(min(most, len(wire))):
            self.take(self.followers[follower], name)

    @rule(follower=st.integers(0, 1))
    def follower_connects_anew(self, follower: int) -> None:
        self.connect(self.followers[follower])

    @rule(name=st.sampled_from(LEADERS), disk=st.sampled_from(["kept", "torn", "gone"]))
    def leader_crashes_and_restarts(self, name: str, disk: str) -> None:
        spool = self.leaders[name].spool
        assert spool is not None
        if disk == "kept":
            spool.sync()
        elif disk == "gone":
            self.disks[name] = SpoolDisk()
        self.disks[name].crash()
        self.start(name)
        for follower in self.followers:
            self.connect(follower)

    @rule(name=st.sampled_from(LEADERS))
    def spool_syncs(self, name: str) -> None:
        spool = self.leaders[name].spool
        assert spool is not None
        spool.sync()

    @rule(name=st.sampled_from(LEADERS))
    def spool_fails(self, name: str) -> None:
        spool = self.leaders[name].spool
        assert spool is not None
        spool.fail()

    @rule(name=st.sampled_from(LEADERS), rows=st.integers(1, 4))
    def spool_makes_room(self, name: str, rows: int) -> None:
        spool = self.leaders[name].spool
        assert spool is not None
        spool.drop_oldest(rows)

    @rule(
        shards=st.lists(st.sampled_from(SHARDS), min_size=1, unique=True),
        follower=st.integers(0, 1),
        rows=st.integers(1, 40),
    )
    def spool_makes_room_while_it_is_read(self, shards: list[int], follower: int, rows: int) -> None:
        """Have a follower continue from the spool, further than one read reaches, and drop rows before the next."""
        self.commit(shards=shards, quick=False, times=20)
        for shard in shards:
            self.tailer_relays(shard=shard, most=20)
        self.connect(self.followers[follower])
        for name in LEADERS:
            self.spool_makes_room(name=name, rows=rows)

    @rule(shard=st.sampled_from(SHARDS), unnoticed=st.booleans(), relayed=st.integers(0, 9))
    def shard_moves(self, shard: int, unnoticed: bool, relayed: int) -> None:
        """Move a shard. ``unnoticed``: it moves away and back between two documents, and the leader sees only the
        second; the tailer relays up to ``relayed`` parts in between."""
        former = self.home[shard]
        other = "b" if former == "a" else "a"
        self.home[shard] = other
        for leader in self.leaders.values():
            leader.publisher.forget_proofs([shard])
        if unnoticed:
            self.leaders[other].open([shard])
            self.tailer_of[shard].read_on()
            self.relay_queued(shard, relayed)
            self.leaders[other].publisher.close_shard(shard)
            self.home[shard] = former
            for leader in self.leaders.values():
                leader.publisher.forget_proofs([shard])
        else:
            self.leaders[former].publisher.close_shard(shard)
            self.leaders[other].open([shard])
            for follower in self.followers:
                self.connect(follower)

    @rule(database=st.sampled_from(list(DATABASES)))
    def tailer_restarts(self, database: str) -> None:
        self.tailers[database].restart()

    @rule(name=st.sampled_from(LEADERS))
    def time_is_up(self, name: str) -> None:
        self.leaders[name].fire_timers()

    # ---- invariants -------------------------------------------------------------------------------------------------

    def claims(self, follower: Follower, shard: int) -> int:
        (position,) = follower.inbox.positions_for([shard])
        return position.reached if position.source else -1

    @invariant()
    def nobody_claims_what_it_does_not_know(self) -> None:
        for follower in self.followers:
            for shard in SHARDS:
                claimed = self.claims(follower, shard)
                assert {part for part in self.committed(shard) if part[0] <= claimed} <= follower.known[shard]

    @rule()
    def catch_up_everyone(self) -> None:
        """Once connected and served, every follower knows every transaction."""
        for _ in range(3):
            self.prove_everything()
        for leader in self.leaders.values():
            leader.fire_timers()
        self.prove_everything()
        for follower in self.followers:
            for shard in SHARDS:
                assert follower.confirmed.get(shard) == self.home[shard]
                assert self.committed(shard) <= follower.known[shard]

    def prove_everything(self) -> None:
        for tailer in self.tailers.values():
            self.prove(tailer)
        for leader in self.leaders.values():
            leader.deliver_proofs()
        self.take_everything()

    def take_everything(self) -> None:
        for follower in self.followers:
            for name in LEADERS:
                while follower.wires[name]:
                    self.take(follower, name)

    def teardown(self) -> None:
        for follower in self.followers:
            self.connect(follower)
        self.catch_up_everyone()


def _message(shard: int, number: int, part: int) -> ObjectInvalidation:
    return ObjectInvalidation(shard << 47 | part, number)


def _nothing() -> None:
    return
