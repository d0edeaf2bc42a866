"""Variants of `tests.sim.variants`: a topology in etcd without one of the rules for an etcd that is away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final
from unittest.mock import patch

from tao.etcd.client import EtcdClient, WatchBroken
from tao.follower.miss_path import MissPath
from tao.model.errors import TaoError, Unavailable
from tao.serving.requests import CacheService
from tao.serving.sources import FetchRequest
from tao.topology import etcd_document
from tao.topology.etcd_document import EtcdDocument, Keys, Snapshot
from tests.sim.broken import Variant
from tests.sim.loop import CURRENT, Process
from tests.sim.plans import Shape


@contextmanager
def _topology_void_while_etcd_is_away() -> Iterator[None]:
    """Let followers fetch nothing from the time when etcd cannot be read until it can be read again."""
    emptied = set[Process | None]()
    fetch, take_snapshot, report = MissPath.fetch, EtcdDocument._take, EtcdDocument._report_any

    def fetch_by_topology(path: MissPath, asked: FetchRequest) -> None:
        if CURRENT.get() in emptied:
            asked.fail(Unavailable("there is no topology"))
        else:
            fetch(path, asked)

    async def take_up(document: EtcdDocument[Any, Any], snapshot: Snapshot) -> object:
        emptied.discard(CURRENT.get())
        return await take_snapshot(document, snapshot)

    def drop(document: EtcdDocument[Any, Any], error: TaoError) -> None:
        emptied.add(CURRENT.get())
        report(document, error)

    with (
        patch.object(MissPath, "fetch", fetch_by_topology),
        patch.multiple(EtcdDocument, _take=take_up, _report_any=drop),
    ):
        yield


@contextmanager
def _broken_watch_not_begun_anew() -> Iterator[None]:
    """Let a server hear of no other topology once its watch is broken, and not look either."""
    follow_once = etcd_document._follow_once

    async def follow(
        client: EtcdClient,
        keys: Keys,
        use: Callable[[Snapshot], Awaitable[None]],
        report: Callable[[TaoError], None],
    ) -> None:
        with suppress(WatchBroken):
            await follow_once(client, keys, use, report)

    with patch.object(etcd_document, "follow", follow):
        yield


def _added_shards_refused_for_good() -> AbstractContextManager[object]:
    """Let a server with an older topology refuse requests for an added shard as mistakes, also of newer senders."""
    return patch.object(CacheService, "_serve_newer", lambda _, path, request, reply: path(request, reply))


_ETCD: Final = Shape(leaders=2, reads_databases=True, etcd=True)
ETCD_VARIANTS: Final = (
    Variant(
        "topology dropped while etcd is away",
        _topology_void_while_etcd_is_away,
        frozenset({"7"}),
        {"etcd away": 1},
        _ETCD,
        single_share=1.0,
        first=1,
    ),
    Variant(
        "watch not begun anew after compaction",
        _broken_watch_not_begun_anew,
        frozenset({"topology"}),
        {"etcd compacted": 1},
        _ETCD,
    ),
    Variant(
        "added shards refused for good",
        _added_shards_refused_for_good,
        frozenset({"7"}),
        {"etcd cut off": 1},
        _ETCD,
        with_growth=True,
        first=136,
    ),
)
