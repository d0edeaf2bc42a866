"""Caches, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from tao.cache import FillTicket, GraphCache
from tao.cache.kept_answers import Asked, KeptAnswers
from tao.cache.outcomes import Applied
from tao.cache.pair_filters import PairFilter
from tao.cache.shard import CachedShard
from tao.cache.version_floors import VersionFloors
from tao.model.changes import ListChange, ObjectChange
from tao.model.graph import encode_count, encode_object
from tao.model.ids import SHARD_SHIFT


def version_check_removed() -> AbstractContextManager[None]:
    """Apply a change whatever version is held."""

    def apply_object(shard: CachedShard, change: ObjectChange, now: float, insert: bool) -> Applied:
        if not insert and not shard.held_object(change.id):
            return Applied.NOT_CACHED
        shard._put_object(change.id, encode_object(change.after, change.otype, change.data or b""), change.otype)
        return Applied.APPLIED

    def apply_list(shard: CachedShard, change: ListChange, now: float, insert: bool) -> Applied:
        if not insert and not shard.held_count(change.id1, change.atype):
            return Applied.NOT_CACHED
        shard._put_count(change.id1, change.atype, encode_count(change.after, change.count))
        return Applied.APPLIED

    return patch.multiple(CachedShard, apply_object=apply_object, apply_list=apply_list)


@contextmanager
def floor_ignored() -> Iterator[None]:
    """Keep a fill although something newer is known."""
    with patch.multiple(VersionFloors, get=lambda *_: 0), patch.multiple(CachedShard, floor=lambda *_: 0):
        yield


@contextmanager
def pair_filter_without_changes() -> Iterator[None]:
    """Advance the versions of a pair filter without the edges of the changes."""

    def apply(held: PairFilter, change: ListChange) -> None:
        held._versions.put(change.id1, max(change.after, held._versions.get(change.id1)))

    with patch.multiple(PairFilter, apply=apply):
        yield


@contextmanager
def ticket_epoch_ignored() -> Iterator[None]:
    """Keep and await after a bulk invalidation what was read before it."""
    store_checked = GraphCache._store

    def store_all(cache: GraphCache, store: Any, ticket: FillTicket, *rest: Any) -> Any:
        shard = cache._shards.get(ticket.id >> SHARD_SHIFT)
        shard_epoch = ticket.shard_epoch if shard is None else shard.shard_epoch
        return store_checked(cache, store, msgspec.structs.replace(ticket, shard_epoch=shard_epoch), *rest)

    with patch.multiple(GraphCache, _store=store_all, is_invalid=lambda *_: False):
        yield


@contextmanager
def answers_outlive_their_list() -> Iterator[None]:
    """Let caches answer a query for edges as they did before, whatever has become of the list."""

    def find(kept: KeptAnswers, _: bytes, id1: int, atype: int, asked: Asked) -> bytes | None:
        of_list = kept._lists.get((id1, atype))
        return None if of_list is None else of_list.answers.get(asked)

    with patch.multiple(KeptAnswers, find=find):
        yield
