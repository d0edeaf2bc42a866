"""The product, broken on purpose: the simulator must notice each of these variants.

A variant takes one rule out of the product's own classes while a run lasts, and names the faults under which that rule
is needed. `find` plays seeds until a check fails; how many it may take is part of the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from itertools import islice
from typing import Any, Final

import msgspec

from tao.cache import GraphCache
from tao.client import dispatcher
from tao.client.consistency import Consistency
from tao.client.own_writes import OwnWrites
from tao.client.pending_inverses import PendingInverses
from tao.client.router import Router
from tao.client.server_queues import ServerQueue
from tao.delivery.committed_messages import CommittedMessages
from tao.delivery.coverage import Coverage
from tao.delivery.inbox import Inbox, _Proofs
from tao.follower.miss_path import MissPath
from tao.leader.inverse_path import InversePath
from tao.leader.relay_path import RelayPath
from tao.leader.remote_inverses import InverseFence
from tao.leader.replica_shards import ForwardedWrites
from tao.leader.write_path import WritePath
from tao.model.changes import Change, ListChange, ShardInvalidation, ShardMessages
from tao.model.delivery import Position, ShardDelivery
from tao.model.ids import EPOCH_UNIX_MS, IdSequence
from tao.model.ports import Clock
from tao.model.relay import Relay
from tao.model.rows import IntentKey
from tao.model.topology import Database
from tao.model.writes import SettleEdge
from tao.observability.key_history import KeyHistoryRecorder, KeyHistorySettings
from tao.planning import write_plan
from tao.planning.net_changes import net_changes
from tao.planning.row_events import Translated
from tao.routing import topology_changes
from tao.serving import forward_path
from tao.serving.configuration import Configuration
from tao.serving.misses import Miss
from tao.serving.sources import Databases, FetchRequest
from tao.tailer.delivery_path import DeliveryPath
from tao.tailer.leader_outbox import LeaderOutbox, Part
from tao.watcher import server
from tao.wire.read_batch import QueryRow
from tests.sim import (
    broken_caches,
    broken_counters,
    broken_intents,
    broken_journals,
    broken_questions,
    broken_refusals,
    broken_states,
    promotion,
    stores,
)
from tests.sim.broken import Variant
from tests.sim.broken_etcd import ETCD_VARIANTS
from tests.sim.broken_moves import MOVE_VARIANTS
from tests.sim.broken_restores import RESTORE_VARIANTS
from tests.sim.database import SimDatabase
from tests.sim.disks import SimSpool
from tests.sim.locks import SimLockFiles
from tests.sim.plans import Shape, make_plan
from tests.sim.runs import Outcome, run

_APPLIED_LATE_SECONDS: Final = 3.0
"""Longer than the delay of publishing: enough for a restarted follower to be asked for what was written."""

_PAIRS_CUT: Final = {"commit fault": 1, "cut pair": 2, "database down": 1}
"""Faults that leave inverses pending."""
_JOURNALS_LOST: Final = {"database down": 2, "kill": 3}
"""Faults that leave accepted writes waiting, and take the followers that have them."""
_LISTS_UNREAD: Final = {"kill": 2, "cut server": 2, "database down": 1}
"""Faults for which some lists cannot be read while others can."""
_PLACES_HELD: Final = {"database down": 2, "kill": 4, "cut pair": 2}
_ONE_LEADER: Final = Shape(regions=1, leaders=1, tiers=1, followers=2)
"""A shape in which most such faults do so."""
_READING_DATABASES: Final = Shape(leaders=2, reads_databases=True)
_WATCHED: Final = Shape(leaders=2, watchers=1)
ONE_TIER: Final = Shape(regions=1, leaders=2, tiers=1, followers=3, shards=8)
"""A shape in which no other tier answers what one follower refuses."""
MOVES: Final = {"move between followers": 1}
"""Changes that leave clients and followers with different topologies for a moment."""


@contextmanager
def _replaced(owner: object, **instead: object) -> Iterator[None]:
    kept = {name: getattr(owner, name) for name in instead}
    for name, value in instead.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


@contextmanager
def _version_epoch_not_raised() -> Iterator[None]:
    """Let a new master go on under the version epoch of the lost one."""
    kept = promotion.next_epoch
    promotion.next_epoch = lambda database, known: max(database.version_epoch, known)
    try:
        yield
    finally:
        promotion.next_epoch = kept


@contextmanager
def _spool_not_synced() -> Iterator[None]:
    """Acknowledge what is only in a leader's memory and reaches its disk later."""
    with _replaced(SimSpool, synced=False):
        yield


@contextmanager
def _reference_not_spooled() -> Iterator[None]:
    """Enter the messages of a reference into a leader's log, and not into its spool."""
    enter, append = RelayPath._enter, SimSpool.append

    def without_rows(spool: SimSpool, _: object, *rest: Any) -> None:
        append(spool, (), *rest)

    def enter_unspooled(path: RelayPath, relay: Relay, *rest: Any) -> None:
        with _replaced(SimSpool, append=without_rows if relay.references else append):
            enter(path, relay, *rest)

    with _replaced(RelayPath, _enter=enter_unspooled):
        yield


def _missing_reference_acknowledged() -> AbstractContextManager[None]:
    """Let a leader acknowledge every transaction that is named to it, whether or not it has the messages."""
    find = CommittedMessages.find

    def find_any(committed: CommittedMessages, source: str, number: int, shard: int) -> ShardMessages:
        return find(committed, source, number, shard) or ShardMessages(shard, 0, ())

    return _replaced(CommittedMessages, find=find_any)


@contextmanager
def _reference_of_another() -> Iterator[None]:
    """Keep the messages of a commit under the number of the leader's next commit to the shard."""
    keep = CommittedMessages.keep
    before: dict[tuple[CommittedMessages, int], ShardMessages] = {}

    def keep_former(committed: CommittedMessages, source: str, number: int, batches: Any, now: float) -> None:
        kept = list(batches)
        keep(committed, source, number, [before.get((committed, batch.shard), batch) for batch in kept], now)
        before.update({(committed, batch.shard): batch for batch in kept})

    with _replaced(CommittedMessages, keep=keep_former):
        yield


@contextmanager
def _follower_notified_before_leader() -> Iterator[None]:
    """Send a leader's changes, its tailer's or its own, to subscribers, and apply them to its own cache a moment later.

    Bulk invalidations come in their order.
    """
    enter, publish_changes, apply_all = RelayPath._enter, WritePath._publish_changes, GraphCache.apply_all

    def later(apply: Callable[..., object], *what: Any, **how: Any) -> None:
        asyncio.get_running_loop().call_later(_APPLIED_LATE_SECONDS, partial(apply, *what, **how))

    def relay_late(path: RelayPath, *what: Any) -> None:
        now = path._apply

        def apply(messages: ShardMessages) -> None:
            bulk = any(isinstance(message, ShardInvalidation) for message in messages.messages)
            (now if bulk else partial(later, now))(messages)

        with _replaced(path, _apply=apply):
            enter(path, *what)

    def commit_late(path: WritePath, *what: Any) -> None:
        with _replaced(GraphCache, apply_all=partialmethod(partial(later, apply_all))):
            publish_changes(path, *what)

    with _replaced(RelayPath, _enter=relay_late), _replaced(WritePath, _publish_changes=commit_late):
        yield


@contextmanager
def _checkpoint_before_acknowledgement() -> Iterator[None]:
    """Count a transaction as done when the tailer has read it."""
    submit = DeliveryPath.submit

    async def count_first(path: DeliveryPath, gtid: str, translated: Translated, *rest: Any) -> None:
        if gtid:
            path._acknowledged(gtid)
        await submit(path, gtid, translated, *rest)

    with _replaced(DeliveryPath, submit=count_first):
        yield


async def _admit_anybody(*_: object) -> None:
    """Accept every leader that claims to be the coordinator."""


@contextmanager
def _generation_not_checked() -> Iterator[None]:
    """Let a deposed leader go on writing, and accept its copies."""
    with (
        _replaced(WritePath, _check_owned=lambda *_: None),
        _replaced(InverseFence, admit=_admit_anybody, admit_known=lambda *_: True),
    ):
        yield


def _reserved_time_ignored() -> AbstractContextManager[None]:
    """Let a new owner of a shard begin at its clock, whatever owners before it have given out."""
    made = IdSequence.__init__
    return _replaced(IdSequence, __init__=lambda ids, shard, _: made(ids, shard, EPOCH_UNIX_MS))


@contextmanager
def _inverse_replayed() -> Iterator[None]:
    """Settle an intent with the edges of its write, not with the coordinator's rows at the time of settling."""
    settle = InversePath._settle
    written_edges: dict[IntentKey, tuple[SettleEdge, ...]] = {}

    async def replay(path: InversePath, written: Any, *how: Any, **more: Any) -> bool:
        intent = written.intent
        pair = IntentKey(intent.low_id, intent.high_id)
        if written.settles is not None:
            written_edges.setdefault(pair, written.settles)
        written.settles = written_edges.get(pair)
        settled = await settle(path, written, *how, **more)
        if settled:
            written_edges.pop(pair, None)
        return settled

    with _replaced(InversePath, _settle=replay):
        yield


@contextmanager
def _position_gap_ignored() -> Iterator[None]:
    """Let a follower go on from where it is when a delivery begins further on.

    It still drops what its leader has reset for another reason.
    """
    take = Inbox._take

    def take_on(inbox: Inbox, part: ShardDelivery, held: Position, outcomes: Any) -> None:
        position = part.position
        start = position.sequence - (len(part.messages.messages) if part.messages is not None else 0)
        if part.reset:
            further_on = position.source == held.source and position.reached > held.reached
            gap = bool(held.source) and (further_on or not position.source)
        else:
            gap = held.stream == position.stream and held.sequence < start
        if gap:
            part = msgspec.structs.replace(part, reset=False)
            held = msgspec.structs.replace(held, stream=position.stream, sequence=start)
        take(inbox, part, held, outcomes)

    with _replaced(Inbox, _take=take_on):
        yield


def _backup_tier_not_asked() -> AbstractContextManager[None]:
    """Let the SDK retry at the nearest tier only."""

    def same(router: Router, shard: int, _: tuple[ServerQueue, ...]) -> ServerQueue:
        return router.writer(shard)

    def preferred(_: Router, server_queue: ServerQueue, __: tuple[ServerQueue, ...]) -> ServerQueue:
        return server_queue

    return _replaced(Router, next=same, _healthiest=preferred)


@contextmanager
def _topology_skew_ignored() -> Iterator[None]:
    """Let a server that is asked by a newer topology wait until it finds the document by itself, and let the SDK count
    what is refused meanwhile as attempts."""
    with _replaced(dispatcher, _skew_of=lambda *_: None), _replaced(Configuration, note_version=lambda *_: None):
        yield


def _leader_alone_asked() -> AbstractContextManager[None]:
    """Let a follower ask only the leader of its region, whatever the result."""

    def ask_leader(path: MissPath, asked: FetchRequest) -> None:
        path._leaders.fetch(asked)

    return _replaced(MissPath, fetch=ask_leader)


def _other_region_not_asked() -> AbstractContextManager[None]:
    """Ask nobody for what the region's own database cannot answer."""
    return _replaced(Databases, other_region=lambda *_: None)


def _spool_makes_no_room() -> AbstractContextManager[None]:
    """Keep everything in the spool, however large it is."""
    return _replaced(SimSpool, _make_room=lambda _: {})


def _tailer_reads_on() -> AbstractContextManager[None]:
    """Keep everything that no leader has taken, however large it is."""
    return _replaced(DeliveryPath, _make_room=lambda *_: True)


@contextmanager
def _collapse_forgets() -> Iterator[None]:
    """Drop the messages for a leader that is away or slow, and invalidate nothing in their place."""
    collapse = LeaderOutbox.collapse

    def forget(outbox: LeaderOutbox, **how: bool) -> tuple[list[Part], int]:
        dropped = collapse(outbox, **how)
        for queue in (outbox.parts, *outbox.held.values()):
            for part in islice(queue, outbox.sending_count if queue is outbox.sending else 0, None):
                if isinstance(part.content, int):
                    part.content = ShardMessages(part.shard, 0, ())
        return dropped

    with _replaced(LeaderOutbox, collapse=forget):
        yield


@contextmanager
def _story_never_ends() -> Iterator[None]:
    """Keep the whole history of a server's keys."""
    made = KeyHistoryRecorder.__init__

    def make(story: KeyHistoryRecorder, settings: KeyHistorySettings, clock: Clock) -> None:
        made(story, replace(settings, key_events=1 << 40), clock)

    with _replaced(KeyHistoryRecorder, __init__=make):
        yield


@contextmanager
def _own_writes_never_make_room() -> Iterator[None]:
    """Keep all keys that an SDK has written within the time, however many."""
    made = OwnWrites.__init__

    def make(own: OwnWrites, loop: asyncio.AbstractEventLoop, _: int, seconds: float) -> None:
        made(own, loop, 1 << 60, seconds)

    with _replaced(OwnWrites, __init__=make):
        yield


def pending_inverse_ignored() -> AbstractContextManager[None]:
    """Let the SDK read a list without what its token names as pending there."""

    async def settle(_: PendingInverses, __: Sequence[QueryRow], consistency: Consistency, ___: Any) -> Any:
        return consistency, {}

    return _replaced(PendingInverses, settle=settle)


def _trim_misreported() -> AbstractContextManager[None]:
    """Let the changeset of a trim keep an edge that is gone in place of the one that is new."""

    def misreported(*rows: Any) -> tuple[Change, ...]:
        return tuple(
            msgspec.structs.replace(each, gone=each.gone[1:], put=())
            if isinstance(each, ListChange) and len(each.gone) > len(each.put) == 1
            else each
            for each in net_changes(*rows)
        )

    return _replaced(write_plan, net_changes=misreported)


def _pair_called_settled() -> AbstractContextManager[None]:
    """Let a coordinator answer at once that a pair is settled."""

    async def settle_pair(*_: Any) -> list[ShardMessages]:
        return []

    return _replaced(InversePath, settle_pair=settle_pair)


@contextmanager
def _part_kept_before_its_transaction() -> Iterator[None]:
    """A leader keeps a part of a transaction under the position before it, where a subscriber at that position misses
    it."""
    with _replaced(Coverage, arriving=property(lambda coverage: coverage.head)):
        yield


@contextmanager
def _proofs_hold_for_every_shard() -> Iterator[None]:
    """Let the proofs of any leader hold for all shards of the database, even when it does not send their changes."""
    proofs: dict[Inbox, _Proofs] = {}

    def begin_stream(inbox: Inbox, leader: str) -> None:
        inbox._proofs[leader] = proofs.setdefault(inbox, _Proofs())

    with _replaced(Inbox, begin_stream=begin_stream, suspend=lambda *_: None):
        yield


def _lock_of_watchers_ignored() -> AbstractContextManager[None]:
    """Give every watcher the lock of the one that acts."""
    return _replaced(SimLockFiles, lock=lambda *_, **__: True)


def _lease_believed_after_its_end() -> AbstractContextManager[None]:
    """Let a master take writes although its lease is over."""
    return _replaced(SimDatabase, lease_is_over=lambda _: False)


def _lone_database_keeps_a_lease() -> AbstractContextManager[None]:
    """Have every master keep a lease, whether or not another server could be promoted."""
    return _replaced(Database, keeps_lease=property(lambda _: True))


def _skipped_change_ignored() -> AbstractContextManager[None]:
    """Let servers that see two changes of the topology at once compare the documents, and not replay the changes."""
    return _replaced(topology_changes, _changes_since=lambda *_: ())


def _dead_servers_not_marked() -> AbstractContextManager[None]:
    """Probe servers, and mark none."""
    return _replaced(server, wanted_marks=lambda *_: [])


def _former_master_read() -> AbstractContextManager[None]:
    """Let a server answer critical reads whatever it says of itself after the rows."""
    return _replaced(stores, master_refusal=lambda *_: None)


def _unapplied_change_skipped() -> AbstractContextManager[None]:
    """Take each change in the answer to a write for one that the leader has delivered before."""
    return _replaced(GraphCache, has_applied=lambda *_: True)


def _request_passed_on_again() -> AbstractContextManager[None]:
    """Let a leader pass on what another region has sent it."""
    return _replaced(ForwardedWrites, may_pass_on=lambda *_: True)


@contextmanager
def _places_kept() -> Iterator[None]:
    """Hold a place in the share of a caller while a failed attempt is followed by a pause."""
    with _replaced(forward_path, set_aside=lambda _: True), _replaced(Miss, put_aside=lambda _: True):
        yield


VARIANTS: Final[Sequence[Variant]] = (
    Variant(
        "version check removed",
        broken_caches.version_check_removed,
        frozenset({"2", "4"}),
        {"lag": 1, "slow": 1, "break": 1},
        first=1,
    ),
    Variant(
        "floor ignored",
        broken_caches.floor_ignored,
        frozenset({"2", "3", "4"}),
        {"lag": 2, "slow": 2, "replication stops": 1},
        first=108,
    ),
    Variant(
        "pair filter without changes",
        broken_caches.pair_filter_without_changes,
        frozenset({"2", "3", "5"}),
        {"lag": 1},
        first=1,
    ),
    Variant(
        "ticket's epoch ignored", broken_caches.ticket_epoch_ignored, frozenset({"2", "staleness"}), {"binlog lost": 1}
    ),
    Variant(
        "version epoch not raised",
        _version_epoch_not_raised,
        frozenset({"2", "5", "lost"}),
        {"master lost": 1},
        first=11,
    ),
    Variant("spool not synced", _spool_not_synced, frozenset({"2"}), {"spool needed": 1}, first=20),
    Variant("reference not spooled", _reference_not_spooled, frozenset({"2"}), {"spool needed": 1}, first=3),
    Variant("missing reference acknowledged", _missing_reference_acknowledged, frozenset({"2"}), {"foreign write": 1}),
    Variant("reference of another transaction", _reference_of_another, frozenset({"2"}), {"spool needed": 1}, first=21),
    Variant(
        "follower notified before its leader",
        _follower_notified_before_leader,
        frozenset({"2"}),
        {"restart between writes": 1},
    ),
    Variant(
        "checkpoint before acknowledgement",
        _checkpoint_before_acknowledgement,
        frozenset({"2"}),
        {"tailer cut off": 1},
        first=16,
    ),
    Variant("generation not checked", _generation_not_checked, frozenset({"6", "critical"}), {"depose": 1}, first=35),
    Variant("takeover ignores the reserved time", _reserved_time_ignored, frozenset({"9"}), {"move shard": 1}, first=7),
    Variant(
        "inverse replayed instead of copied",
        _inverse_replayed,
        frozenset({"6"}),
        {"commit fault": 3, "cut pair": 1, "kill": 2, "database down": 1},
        first=74,
    ),
    Variant(
        "position gap ignored",
        _position_gap_ignored,
        frozenset({"2"}),
        {"spool needed": 2, "disk full": 1},
        first=84,
    ),
    Variant(
        "backup tier not asked",
        _backup_tier_not_asked,
        frozenset({"7"}),
        {"kill": 1, "pause": 1, "cut server": 1},
        single_share=1.0,
    ),
    Variant("topology skew ignored", _topology_skew_ignored, frozenset({"7"}), MOVES, ONE_TIER, single_share=1.0),
    Variant(
        "leader alone asked for misses",
        _leader_alone_asked,
        frozenset({"7"}),
        {"kill": 1, "pause": 1, "cut server": 1},
        _READING_DATABASES,
        single_share=1.0,
    ),
    Variant(
        "other region not asked",
        _other_region_not_asked,
        frozenset({"7"}),
        {"database down": 1},
        _READING_DATABASES,
        single_share=1.0,
    ),
    Variant("intents overwritten unread", broken_intents.overwritten_unread, frozenset({"6"}), _PAIRS_CUT, first=119),
    Variant("intents not searched", broken_intents.not_searched, frozenset({"6"}), {**_PAIRS_CUT, "kill": 2}, first=16),
    Variant("trim misreported", _trim_misreported, frozenset({"2", "4", "5"}), {"kill": 1}, first=6),
    Variant("pair called settled", _pair_called_settled, frozenset({"3", "6"}), _PAIRS_CUT, first=7),
    Variant("spool makes no room", _spool_makes_no_room, frozenset({"8"}), {"rush": 1}, first=1),
    Variant("tailer reads on", _tailer_reads_on, frozenset({"8"}), {"rush": 1}, acts=1, first=4),
    Variant("collapse forgets", _collapse_forgets, frozenset({"2"}), {"rush": 1}, acts=1, first=4, single_share=0.4),
    Variant(
        "proofs hold for every shard",
        _proofs_hold_for_every_shard,
        frozenset({"2", "staleness"}),
        {"kill": 1, "cut server": 1},
        first=141,
    ),
    Variant(
        "part kept before its transaction",
        _part_kept_before_its_transaction,
        frozenset({"2"}),
        {"spool needed": 1, "disk full": 1},
        first=36,
    ),
    Variant("story never ends", _story_never_ends, frozenset({"8"}), {"rush": 1}, first=1),
    Variant(
        "two watchers act at once",
        _lock_of_watchers_ignored,
        frozenset({"watchers"}),
        {"kill": 1},
        _WATCHED,
        acts=1,
        first=1,
    ),
    Variant(
        "lease believed after its end", _lease_believed_after_its_end, frozenset({"1"}), {"master cut off": 1}, _WATCHED
    ),
    Variant(
        "database without a second server keeps a lease",
        _lone_database_keeps_a_lease,
        frozenset({"7"}),
        {"kill watcher": 1, "watcher hangs": 1},
        Shape(regions=1, leaders=2, watchers=1),
        first=2,
    ),
    Variant(
        "dead servers not marked",
        _dead_servers_not_marked,
        frozenset({"replacement"}),
        {"kill": 1},
        Shape(regions=1, leaders=2, watchers=2),
        single_share=1.0,
    ),
    Variant("former master read", _former_master_read, frozenset({"critical"}), {"topology late": 1}),
    Variant("unapplied change skipped", _unapplied_change_skipped, frozenset({"3"}), {"slow": 1}),
    Variant("request passed on again", _request_passed_on_again, frozenset({"hops"}), {"topology late": 1}, first=1),
    Variant(
        "skipped change ignored",
        _skipped_change_ignored,
        frozenset({"2", "4", "staleness"}),
        {"replaced unseen": 1},
        first=7,
    ),
    Variant(
        "an older operation wins",
        broken_states.older_operation_wins,
        frozenset({"join"}),
        {"kill": 1},
        with_states=True,
    ),
    Variant(
        "new edge ignores its node's state",
        broken_states.new_edge_ignores_its_node,
        frozenset({"join"}),
        {"kill": 1},
        first=6,
        with_states=True,
    ),
    Variant(
        "pages of a node send no copies",
        broken_states.pages_send_no_copies,
        frozenset({"node"}),
        {"kill": 1},
        with_states=True,
        with_jobs=True,
    ),
    Variant(
        "job done although its last page was not",
        broken_states.failed_page_ends_its_job,
        frozenset({"jobs"}),
        {"kill": 1, "database down": 1},
        with_jobs=True,
    ),
    Variant(
        "flush sends deltas",
        broken_counters.flush_sends_deltas,
        frozenset({"counters"}),
        {"kill": 1},
        with_counters=True,
    ),
    Variant(
        "tombstone forgets what was folded",
        broken_counters.tombstone_forgets_what_was_folded,
        frozenset({"counters"}),
        {"kill": 1},
        with_counters=True,
    ),
    Variant(
        "accepted before it is synced",
        broken_journals.accepted_before_it_is_synced,
        frozenset({"join", "journal"}),
        _JOURNALS_LOST,
        _ONE_LEADER,
        first=63,
        with_journals=True,
    ),
    Variant(
        "entry removed before its outcome is known",
        broken_journals.entry_removed_before_its_outcome,
        frozenset({"join"}),
        _JOURNALS_LOST,
        _ONE_LEADER,
        first=60,
        with_journals=True,
    ),
    Variant(
        "accepted although no copy was taken",
        broken_journals.accepted_without_a_copy,
        frozenset({"join"}),
        _JOURNALS_LOST,
        _ONE_LEADER,
        first=60,
        with_journals=True,
    ),
    Variant(
        "copy deleted before it is applied",
        broken_journals.copy_deleted_before_it_is_applied,
        frozenset({"join"}),
        _JOURNALS_LOST,
        _ONE_LEADER,
        first=60,
        with_journals=True,
    ),
    Variant(
        "pausing work keeps its place", _places_kept, frozenset({"7"}), _PLACES_HELD, _ONE_LEADER, acts=3, first=242
    ),
    Variant(
        "unread list of a set is empty",
        broken_questions.unread_list_is_empty,
        frozenset({"sets"}),
        _LISTS_UNREAD,
        _ONE_LEADER,
        first=2,
    ),
    Variant(
        "answers outlive their list",
        broken_caches.answers_outlive_their_list,
        frozenset({"3", "5", "critical", "sets", "staleness"}),
        {"lag": 1},
        Shape(leaders=2, has_short_prefixes=True),
        members_share=0.5,
        first=1,
    ),
    Variant(
        "cursor of a feed names the last post found",
        broken_questions.feed_cursor_of_last_found,
        frozenset({"sets"}),
        {"lag": 1},
        _ONE_LEADER,
        first=126,
    ),
    Variant(
        "feed skips an author without naming the list",
        broken_questions.feed_without_missing_authors,
        frozenset({"sets"}),
        _LISTS_UNREAD,
        _ONE_LEADER,
        first=38,
    ),
    Variant(
        "two hops skip a list without naming it",
        broken_questions.two_hops_without_missing_lists,
        frozenset({"sets"}),
        _LISTS_UNREAD,
        _ONE_LEADER,
        two_hop_share=0.5,
        first=1,
    ),
    Variant(
        "unread exclusion excludes nobody",
        broken_questions.unread_exclusion_excludes_nobody,
        frozenset({"sets"}),
        _LISTS_UNREAD,
        _ONE_LEADER,
        two_hop_share=0.5,
        first=30,
    ),
    Variant("unused ids are refused", broken_refusals.unused_ids_are_refused, frozenset({"valid"}), {}, acts=1),
    Variant(
        "far ends do not change their type",
        broken_refusals.far_ends_do_not_change_their_type,
        frozenset({"valid"}),
        {},
        acts=1,
    ),
    Variant(
        "missing edges are not deleted", broken_refusals.missing_edges_are_not_deleted, frozenset({"valid"}), {}, acts=1
    ),
    *MOVE_VARIANTS,
    *RESTORE_VARIANTS,
    *ETCD_VARIANTS,
    Variant("own writes never make room", _own_writes_never_make_room, frozenset({"8"}), {"rush": 1}, acts=1, first=6),
)


def find(variant: Variant) -> tuple[Outcome | None, int]:
    """Play seeds until the broken rule is noticed. Returns the outcome, or None, and the number of seeds played."""
    for seed in range(variant.first, variant.first + variant.seeds):
        plan = make_plan(
            seed,
            variant.acts,
            variant.shape,
            variant.faults,
            single_share=variant.single_share,
            with_states=variant.with_states,
            with_jobs=variant.with_jobs,
            with_journals=variant.with_journals,
            with_growth=variant.with_growth,
            with_counters=variant.with_counters,
            two_hop_share=variant.two_hop_share,
            members_share=variant.members_share,
        )
        outcome = run(plan, variant.broken)
        if outcome.violation is not None:
            return outcome, seed + 1 - variant.first
    return None, variant.seeds
