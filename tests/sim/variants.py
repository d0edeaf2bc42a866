"""The product, broken on purpose: the simulator must notice each of these (DESIGN.md §15).

A variant takes one rule out of the product's own classes for the time of a run, and names the faults under which that
rule is needed. `find` plays seeds until a check fails; how many it may take is part of the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from tao.cache.floors import ShardFloors
from tao.cache.graph_cache import GraphCache
from tao.cache.outcomes import Applied, Ticket
from tao.cache.shard import CachedShard
from tao.delivery.inbox import Inbox, Received
from tao.leader.inverse_path import InversePath
from tao.leader.relay_path import RelayPath
from tao.leader.settling import CopyFence
from tao.leader.write_path import WritePath
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.delivery import Delivery
from tao.model.graph import encode_object
from tao.model.rows import IntentKey
from tao.model.writes import SettleEdge
from tao.planning.row_events import Translated
from tao.tailer.delivery_path import DeliveryPath
from tests.sim.plans import Shape, make_plan
from tests.sim.runs import Outcome, run


@dataclass(frozen=True, slots=True)
class Variant:
    """``broken`` breaks the product for the time of a block; ``faults`` and ``shape`` bring out what that does;
    within ``seeds`` runs of ``acts`` it must be found."""

    name: str
    broken: Callable[[], AbstractContextManager[None]]
    faults: Mapping[str, int]
    shape: Shape = field(default_factory=lambda: Shape(leaders=2))
    seeds: int = 20
    acts: int = 2


@contextmanager
def _replaced(owner: type, **instead: object) -> Iterator[None]:
    kept = {name: getattr(owner, name) for name in instead}
    for name, value in instead.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def _version_check_removed() -> AbstractContextManager[None]:
    """A change is applied to an object whatever version is held."""

    def apply_object(shard: CachedShard, change: ObjectChange, now: float, insert: bool) -> Applied:
        if not insert and not shard.held_object(change.id):
            return Applied.NOT_CACHED
        shard._put_object(change.id, encode_object(change.after, change.otype, change.data or b""), change.otype)
        return Applied.APPLIED

    return _replaced(CachedShard, apply_object=apply_object)


@contextmanager
def _floor_ignored() -> Iterator[None]:
    """A fill is kept although something newer has been heard of."""
    with _replaced(ShardFloors, get=lambda *_: 0), _replaced(CachedShard, floor=lambda *_: 0):
        yield


@contextmanager
def _ticket_epoch_ignored() -> Iterator[None]:
    """A fill that began before a bulk invalidation is kept after it."""
    accept = GraphCache._accept

    def forgetful(cache: GraphCache, ticket: Ticket, *rest: Any) -> Any:
        shard = cache._shards.get(ticket.id >> 47)
        if shard is not None:
            ticket = msgspec.structs.replace(ticket, generation=shard.generation)
        return accept(cache, ticket, *rest)

    with _replaced(GraphCache, _accept=forgetful, is_void=lambda *_: False):
        yield


class _LateCache:
    """A cache that takes changes in a moment after it was told."""

    def __init__(self, cache: GraphCache) -> None:
        self._cache = cache

    def apply_message(self, *change: Any, **how: Any) -> None:
        asyncio.get_running_loop().call_later(1.0, partial(self._cache.apply_message, *change, **how))


@contextmanager
def _follower_told_before_leader() -> Iterator[None]:
    """A leader tells its subscribers, and its own cache a moment later."""
    handle, tell = RelayPath.handle, WritePath._tell_caches

    def handle_late(path: RelayPath, *request: Any) -> None:
        now = path._apply

        def later(messages: ShardMessages) -> None:
            asyncio.get_running_loop().call_later(1.0, now, messages)

        path._apply = later  # type: ignore[misc]
        try:
            handle(path, *request)
        finally:
            path._apply = now  # type: ignore[misc]

    def tell_late(path: WritePath, *told: Any) -> None:
        now = path._cache
        path._cache = _LateCache(now)  # type: ignore[misc, assignment]
        try:
            tell(path, *told)
        finally:
            path._cache = now  # type: ignore[misc]

    with _replaced(RelayPath, handle=handle_late), _replaced(WritePath, _tell_caches=tell_late):
        yield


@contextmanager
def _checkpoint_before_acknowledgement() -> Iterator[None]:
    """A tailer counts a transaction as done when it has read it."""
    submit = DeliveryPath.submit

    async def count_first(path: DeliveryPath, gtid: str, translated: Translated, *rest: Any) -> None:
        if gtid:
            path._acknowledged(gtid)
        await submit(path, gtid, translated, *rest)

    with _replaced(DeliveryPath, submit=count_first):
        yield


async def _admit_anybody(*_: object) -> None:
    """Whoever calls himself coordinator is."""


@contextmanager
def _generation_not_checked() -> Iterator[None]:
    """A leader that was deposed writes on, and its copies are taken."""
    with (
        _replaced(WritePath, _check_owned=lambda *_: None),
        _replaced(CopyFence, admit=_admit_anybody),
    ):
        yield


@contextmanager
def _inverse_replayed() -> Iterator[None]:
    """What an intent owes is what its write said, not what the coordinator's rows say by now."""
    settle = InversePath._settle
    said: dict[IntentKey, tuple[SettleEdge, ...]] = {}

    async def replay(path: InversePath, written: Any, hold: Any, coordinator: Any) -> bool:
        intent = written.intent
        pair = IntentKey(intent.low_id, intent.high_id)
        if written.settles is not None:
            said.setdefault(pair, written.settles)
        written.settles = said.get(pair)
        settled = await settle(path, written, hold, coordinator)
        if settled:
            said.pop(pair, None)
        return settled

    with _replaced(InversePath, _settle=replay):
        yield


@contextmanager
def _position_gap_ignored() -> Iterator[None]:
    """A follower goes on with what it has when its leader cannot continue the stream."""
    receive = Inbox.receive

    def heedless(inbox: Inbox, delivery: Delivery) -> Received:
        received = receive(inbox, delivery)
        received.resets.clear()
        return received

    with _replaced(Inbox, receive=heedless):
        yield


VARIANTS: Final[Sequence[Variant]] = (
    Variant("version check removed", _version_check_removed, {"lag": 1, "slow": 1, "break": 1}),
    Variant("floor ignored", _floor_ignored, {"lag": 2, "slow": 2, "replication stops": 1}),
    Variant(
        "ticket's epoch ignored",
        _ticket_epoch_ignored,
        {"there and back": 1},
        Shape(leaders=2, arena_bytes=4096),
        seeds=60,
    ),
    Variant("follower told before its leader", _follower_told_before_leader, {"kill": 2, "break": 1}, seeds=40),
    Variant(
        "checkpoint before acknowledgement",
        _checkpoint_before_acknowledgement,
        {"tailer cut off": 1},
        seeds=30,
    ),
    Variant("generation not checked", _generation_not_checked, {"depose": 1}, seeds=60),
    Variant(
        "inverse replayed instead of copied",
        _inverse_replayed,
        {"commit fault": 3, "cut pair": 1, "kill": 2, "database down": 1},
        seeds=40,
    ),
    Variant("position gap ignored", _position_gap_ignored, {"kill": 2, "break": 2, "pause": 1}, seeds=40),
)


def find(variant: Variant) -> tuple[Outcome | None, int]:
    """Play seeds until the broken rule is noticed: the outcome, or None, and how many seeds it took."""
    for seed in range(variant.seeds):
        outcome = run(make_plan(seed, variant.acts, variant.shape, variant.faults), variant.broken)
        if outcome.violation is not None:
            return outcome, seed + 1
    return None, variant.seeds
