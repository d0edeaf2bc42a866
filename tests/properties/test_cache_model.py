"""The cache against a naive graph with history: reordered, repeated and late messages, stale fills, evictions, bulk
invalidations.

These conditions hold after every step: an answer is exactly what was true at its version; a key is never answered with
a lower version than before, or than is known, except after a bulk invalidation; the budget and the accounts are right.
Once every message is delivered, every answer is the current one.

The model makes the assumption that `CacheSettings.floor_seconds` states: a replica lags less than that. The entries of
a write are inserted, as `GraphCache.apply` demands, within that time, and into a shard that has been open since before.
A later insertion would not be corrected by the changes after it, which were delivered and forgotten
(`tests/races/test_leader_restart.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tao.cache import Applied, CacheSettings, FillTicket, GraphCache, Stored
from tao.cache.tables import CountTable, EntryTable, value_bytes
from tao.model.changes import ListChange, ListInvalidation, Message, ObjectChange, ObjectInvalidation, ShardInvalidation
from tao.model.edge_block import COMPLETE, PREFIX, check_block, decode_block, encode_block, header
from tao.model.graph import ABSENT, MAX_TIME, Edge, ListKey, decode_count, version_of
from tao.model.queries import EdgesQuery, start_at
from tests.properties.cache_truth import Snapshot, Truth
from tests.rigs.effort import examples

SHARD = 9000  # ids above 2^60: three-digit integers
OBJECTS = [(SHARD << 47) + place for place in (64,)]
LISTS = [ListKey(id1, atype) for id1 in OBJECTS for atype in (1, 2)]
LIMITS = {1: 3, 2: 1000}
FLOOR_SECONDS = 10.0
REPLICA_LAG_SECONDS = 8.0

ASKED = ((1, 2, 2), (9, 3), tuple(range(1, 30)))
WINDOWS = ((MAX_TIME, 0, 9), (4, 2, 9), (3, 3, 1), (MAX_TIME, 5, 2), (2, 4, 3))
QUESTIONS = [(id2s, high, low) for id2s in ASKED for high, low, _ in WINDOWS]

ids = st.integers(1, 9)
times = st.integers(0, 6)
edits = st.lists(
    ids.flatmap(
        lambda id2: st.tuples(
            st.just(id2), st.none() | st.builds(Edge, st.just(id2), times, st.sampled_from([b"", b"a", b"bcd"]))
        )
    ),
    min_size=1,
    max_size=4,
)


class Types:
    def object_arena(self, otype: int) -> str:
        return {1: "default", 2: "other"}[otype]

    def list_arena(self, atype: int) -> str:
        return {1: "default", 2: "unknown to the settings"}[atype]

    def list_limit(self, atype: int) -> int:
        return LIMITS[atype]


@dataclass(frozen=True)
class Sent:
    message: Message
    epoch: int
    commit: int
    time: float


class CacheMachine(RuleBasedStateMachine):
    max_floors: ClassVar[int] = 1000
    answers_never_go_back: ClassVar[bool] = True
    kept_bytes: ClassVar[int] = 3_000
    tickets: Bundle[FillTicket] = Bundle("tickets")

    @initialize(budget=st.sampled_from([350, 500, 1 << 20, 1 << 20]), reinsertions=st.integers(0, 2))
    def start(self, budget: int, reinsertions: int) -> None:
        self.now = 1000.0
        self.truth = Truth()
        self.cache = GraphCache(
            CacheSettings(
                arena_bytes={"default": budget, "other": budget},
                floor_seconds=FLOOR_SECONDS,
                max_floors_per_shard=self.max_floors,
                departed_slots=509,
                credit_slots=101,
                max_reinsertions=reinsertions,
                largest_entry_fraction=1.0,
                keep_count_of_list_bytes=200,
                reclaim_entries_per_step=2,
                kept_answers_bytes=self.kept_bytes,
            ),
            Types(),
        )
        self.cache.open_shard(SHARD)
        self.known_epoch = 0
        self.sent: list[Sent] = []
        self.replica_has = self.opened_at_commit = 0
        self.answered: dict[int | ListKey, int] = {}

    # the world

    @rule(seconds=st.sampled_from([0.5, 3.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.cache.forget_old_floors(self.now)

    @rule(key=st.sampled_from(LISTS), edits=edits, own=st.booleans(), carried=st.booleans())
    def write_list(self, key: ListKey, edits: list[tuple[int, Edge | None]], own: bool, carried: bool) -> None:
        change = self.truth.write_list(key, edits, self.now)
        self.committed(change, ListInvalidation(key.id1, key.atype, change.after), own, carried)

    @rule(
        key=st.sampled_from(OBJECTS),
        otype=st.sampled_from([ABSENT, 1, 2]),
        data=st.binary(max_size=4),
        own=st.booleans(),
        carried=st.booleans(),
        large=st.booleans(),
    )
    def write_object(self, key: int, otype: int, data: bytes, own: bool, carried: bool, large: bool) -> None:
        change = self.truth.write_object(key, otype, data, self.now)
        if large and otype:
            change = ObjectChange(key, change.before, change.after, otype, None)
        self.committed(change, ObjectInvalidation(key, change.after), own, carried)

    def committed(
        self, change: ObjectChange | ListChange, short: ObjectInvalidation | ListInvalidation, own: bool, carried: bool
    ) -> None:
        epoch = self.truth.now.epoch
        self.send(change if carried else short)
        if own:
            self.learn(epoch)
            self.cache.apply(change, epoch, self.now, insert=True)
            self.heard(change, change.after)

    def promote(self) -> None:
        self.truth.promote(self.now)
        self.send(ShardInvalidation(SHARD))

    def send(self, message: Message) -> None:
        self.sent.append(Sent(message, self.truth.now.epoch, len(self.truth.snapshots) - 1, self.now))

    # maintenance

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), again=st.booleans(), insert=st.booleans())
    def deliver(self, data: st.DataObject, again: bool, insert: bool) -> None:
        at = data.draw(st.integers(0, len(self.sent) - 1))
        again = again and not isinstance(self.sent[at].message, ShardInvalidation)  # otherwise nothing would last
        sent = self.sent[at] if again else self.sent.pop(at)
        self.take(sent, insert)

    def take(self, sent: Sent, insert: bool = False) -> None:
        self.learn(sent.epoch)
        insert = insert and sent.commit > self.opened_at_commit and self.now - sent.time <= FLOOR_SECONDS
        applied = self.cache.apply(sent.message, sent.epoch, self.now, insert)
        if isinstance(sent.message, ShardInvalidation):
            assert applied is Applied.EPOCH_BUMPED
            self.answered.clear()
        elif sent.epoch == self.known_epoch:
            if isinstance(sent.message, ObjectChange | ListChange):
                self.heard(sent.message, sent.message.after)
            else:
                self.heard(sent.message, sent.message.version)

    def heard(self, message: ObjectChange | ListChange | ObjectInvalidation | ListInvalidation, version: int) -> None:
        """From here on nothing older may be answered, so that a client reads its own writes in its tier (invariant
        3)."""
        if isinstance(message, ObjectChange | ObjectInvalidation):
            key: int | ListKey = message.id
        else:
            key = ListKey(message.id1, message.atype)
        self.answered[key] = max(self.answered.get(key, 0), version)

    def messages_are_lost_and_the_shard_is_bumped(self) -> None:
        """Reset the stream behind what was lost; a server that answers fills now has at least that."""
        self.replica_has = max([self.replica_has, *(sent.commit for sent in self.sent)])
        epoch = max([1, *(sent.epoch for sent in self.sent)])
        self.learn(epoch)
        self.cache.open_shard(SHARD, epoch)
        self.sent.clear()
        self.cache.bump_shard(SHARD)
        self.answered.clear()

    def reopen(self) -> None:
        self.replica_has = self.opened_at_commit = len(self.truth.snapshots) - 1
        self.cache.close_shard(SHARD)
        self.cache.open_shard(SHARD, self.truth.now.epoch)
        self.known_epoch = self.truth.now.epoch
        self.answered.clear()

    @rule(event=st.integers(0, 1000))
    def something_rare(self, event: int) -> None:
        """Happens rarely, because it invalidates what the other rules have built. Drawn numbers favour the ends of the
        range."""
        rare = {0: self.promote, 1: self.messages_are_lost_and_the_shard_is_bumped, 2: self.reopen}
        rare.get(event % 31 - 7, self.cache.reclaim_step)()

    @rule(key=st.sampled_from(LISTS))
    def token_of_a_list(self, key: ListKey) -> None:
        version = self.truth.now.lists.get(key, (0, ()))[0]
        self.learn(version >> 48)
        self.cache.raise_list_floor(key.id1, key.atype, version, self.now)

    # fills

    def ticket_for(self, key: int | ListKey) -> FillTicket:
        if isinstance(key, ListKey):
            return self.cache.list_ticket(key.id1, key.atype, self.now)
        return self.cache.object_ticket(key, self.now)

    @rule(target=tickets, key=st.sampled_from([*LISTS, *OBJECTS]))
    def begin_fill(self, key: int | ListKey) -> FillTicket:
        return self.ticket_for(key)

    @rule(ticket=consumes(tickets), data=st.data())
    def end_fill(self, ticket: FillTicket, data: st.DataObject) -> None:
        self.fill(ticket, data)

    @rule(key=st.sampled_from([*LISTS, *OBJECTS]), data=st.data())
    def fill_at_once(self, key: int | ListKey, data: st.DataObject) -> None:
        self.fill(self.ticket_for(key), data)

    def fill(self, ticket: FillTicket, data: st.DataObject) -> None:
        """The read is of any moment between what the replica had when the fill began, and now."""
        surely_replicated = ticket.started - REPLICA_LAG_SECONDS
        had = [at for at, shot in enumerate(self.truth.snapshots) if at == 0 or shot.time <= surely_replicated]
        oldest = max(self.replica_has, had[-1])
        shot = self.truth.snapshots[data.draw(st.integers(oldest, len(self.truth.snapshots) - 1))]
        key = ListKey(ticket.id, ticket.atype)
        self.learn(shot.epoch)
        if ticket.kind == "object":
            value = shot.object_value(ticket.id)
            stored = self.cache.store_object(ticket, value, shot.epoch, self.now)
        elif (kind := data.draw(st.integers(0, 5))) == 0:
            value = shot.count_value(key)
            stored = self.cache.store_count(ticket, value, shot.epoch, self.now)
        elif kind < 3:
            self.fetch_edges(ticket, shot, data.draw(st.sampled_from(QUESTIONS)))
            return
        else:
            pos = data.draw(st.sampled_from([0, 0, 0, 1]))
            value = shot.block(key, pos, data.draw(st.integers(1, 8)))
            stored = self.cache.store_list(ticket, value, shot.epoch, self.now)
        if stored is Stored.STORED:
            self.answer(ticket.id if ticket.kind == "object" else key, version_of(value))

    def fetch_edges(self, ticket: FillTicket, shot: Snapshot, question: tuple[tuple[int, ...], int, int]) -> None:
        """Answer a query for edges from a snapshot, and keep the answer, as the path of a miss does."""
        id2s, high, low = question
        key = ListKey(ticket.id, ticket.atype)
        version, edges = shot.lists.get(key, (0, ()))
        found = [edge for edge in edges if edge.id2 in id2s and high >= edge.time >= low]
        value = encode_block(version, len(edges), found, 0)
        if self.cache.pass_over(ticket, value, shot.epoch, self.now) is not Stored.BELOW_FLOOR:
            self.cache.raise_list_floor(key.id1, key.atype, version, self.now)
            self.answer(key, version)
            self.cache.keep_edges(EdgesQuery(key.id1, key.atype, id2s, high, low), value, ticket.shard_epoch)

    # what must hold

    def learn(self, epoch: int) -> None:
        if epoch > self.known_epoch:
            self.known_epoch = epoch
            self.answered.clear()

    def answer(self, key: int | ListKey, version: int) -> None:
        if self.answers_never_go_back:
            assert version >= self.answered.get(key, 0)
        self.answered[key] = version

    @invariant()
    def answers_were_true_at_their_version(self) -> None:
        for key in OBJECTS:
            value = self.cache.object(key)
            if value is not None:
                self.answer(key, version_of(value))
                assert value == self.truth.object_at(key, version_of(value))
                assert self.cache.object(key, version_of(value) + 1) is None
        for list_key in LISTS:
            self.check_list(list_key)

    def check_list(self, key: ListKey) -> None:
        id1, atype = key.id1, key.atype
        count = self.cache.count(id1, atype)
        if count is None:
            assert self.cache.range(id1, atype, 0, 1) is None
            return
        version, length = decode_count(count)
        self.answer(key, version)
        edges = self.truth.edges_at(key, version)
        assert length == len(edges)
        held = self.cache.peek_list(id1, atype)
        prefix = decode_block(check_block(held)) if held else []
        assert len(prefix) <= LIMITS[atype]
        complete = length == 0 or len(prefix) == length
        if held:
            assert prefix == list(edges[: len(prefix)])
            assert bool(header(held)[3] & COMPLETE) == (len(prefix) == length)
        for pos, limit in ((0, 1), (0, 2), (0, 9), (1, 2), (2, 9), (8, 2)):
            block = self.cache.range(id1, atype, pos, limit)
            assert (block is not None) == (complete or pos + limit <= len(prefix) or pos >= length)
            self.check_block(block, key, version, edges[pos : pos + limit])
        for high, low, limit in WINDOWS:
            wanted = tuple(edge for edge in edges if high >= edge.time >= low)
            block = self.cache.time_range(id1, atype, high, low, limit)
            within = [edge for edge in prefix if high >= edge.time >= low]
            decided = complete or bool(prefix and low > prefix[-1].time) or len(within) >= limit
            assert (block is not None) == decided
            self.check_block(block, key, version, wanted[:limit])
            for below in (1, 4, 20):
                last = (high, below)
                after_it = tuple(edge for edge in edges if last > (edge.time, edge.id2) and edge.time >= low)
                block = self.cache.time_range(id1, atype, high, low, limit, 0, below)
                within = [edge for edge in prefix if last > (edge.time, edge.id2) and edge.time >= low]
                decided = complete or bool(prefix and low > prefix[-1].time) or len(within) >= limit
                assert (block is not None) == decided
                self.check_block(block, key, version, after_it[:limit])
            for pos in (1, 2, 9):
                block = self.cache.time_range(id1, atype, high, low, limit, 0, start_at(pos))
                newer = sum(edge.time > high for edge in prefix)
                within = [edge for edge in prefix if high >= edge.time >= low]
                decided = complete or bool(prefix and low > prefix[-1].time) or len(within) >= pos + limit
                assert (block is not None) == (decided or newer + pos >= length)
                self.check_block(block, key, version, wanted[pos : pos + limit])
            for id2s in ASKED:
                self.check_edges(key, version, edges, prefix, complete, id2s, high, low)

    def check_edges(
        self,
        key: ListKey,
        version: int,
        edges: tuple[Edge, ...],
        prefix: list[Edge],
        complete: bool,
        id2s: tuple[int, ...],
        high: int,
        low: int,
    ) -> None:
        answer = self.cache.edges(key.id1, key.atype, id2s, high, low)
        known = {edge.id2 for edge in prefix}
        decided = complete or bool(prefix and low > prefix[-1].time)
        missing = () if decided else tuple(dict.fromkeys(id2 for id2 in id2s if id2 not in known))
        if answer is None:
            assert missing == tuple(dict.fromkeys(id2s))
            return
        if missing and not answer.missing:  # kept
            assert (id2s, high, low) in QUESTIONS
            missing = ()
        assert answer.missing == missing
        asked = set(id2s) - set(missing)
        wanted = tuple(edge for edge in edges if edge.id2 in asked and high >= edge.time >= low)
        self.check_block(answer.block, key, version, wanted)

    def check_block(self, block: bytes | None, key: ListKey, version: int, wanted: tuple[Edge, ...]) -> None:
        if block is None:
            return
        edges = self.truth.edges_at(key, version)
        answered_version, count, n, flags = header(check_block(block))
        assert (answered_version, count) == (version, len(edges))
        assert decode_block(block) == list(wanted)
        if flags & COMPLETE:
            assert wanted == edges
        if flags & PREFIX:
            assert wanted == edges[:n]

    @invariant()
    def the_accounts_are_right(self) -> None:
        tables = [table for shard in self.cache._shards.values() for table in shard.tables()]
        plain = [table.wide if isinstance(table, CountTable) else table for table in tables]
        for arena in self.cache._arenas.all().values():
            assert arena.bytes <= arena.budget_bytes
            mine = [table for table in plain if table.arena is arena]
            retired = [table for table in arena._retired if isinstance(table, EntryTable)]
            assert len(retired) == len(arena._retired)
            live = sum(
                table._key_bytes + (value_bytes(value) if value else 0)
                for table in [*mine, *retired]
                for value in table.entries.values()
            )
            assert arena.bytes == live + arena.packed.size_bytes
            assert arena.records == sum(map(len, mine)) + arena._dead_records
            assert all(table.live == sum(map(bool, table.entries.values())) for table in mine)
        kept = self.cache.kept_answers
        assert kept.size_bytes == sum(each.size_bytes for each in kept._lists.values()) <= self.kept_bytes

    def teardown(self) -> None:
        if not hasattr(self, "truth"):
            return
        for sent in self.sent:
            self.take(sent)
        self.answers_were_true_at_their_version()
        for key in OBJECTS:
            value = self.cache.object(key)
            assert value is None or value == self.truth.now.object_value(key)
        for list_key in LISTS:
            count = self.cache.count(list_key.id1, list_key.atype)
            assert count is None or count == self.truth.now.count_value(list_key)
        for _ in range(1000):
            if not self.cache.reclaim_step():
                break
        assert not any(arena._retired for arena in self.cache._arenas.all().values())


class OverflowingCacheMachine(CacheMachine):
    """With room for a single floor, cached entries stay right, though an answer that is not cached may be older."""

    max_floors = 1
    answers_never_go_back = False


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=examples(80), stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOverflowingCache = OverflowingCacheMachine.TestCase
TestOverflowingCache.settings = settings(
    max_examples=examples(30), stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
