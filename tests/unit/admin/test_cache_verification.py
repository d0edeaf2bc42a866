"""A cache entry is wrong or only in flight, depending on the versions of two looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from tao.admin import cache_verification
from tao.admin.cache_verification import ALL, CachesReport, Sample, verify_caches
from tao.model.errors import DeadlineExceeded
from tao.model.graph import encode_object
from tao.model.ports import OnRead
from tao.model.queries import ObjectQuery, Query
from tao.model.topology import CacheServer
from tao.routing.routes import Routes
from tao.wire.links import Links
from tests.rigs.leader_rig import make_id, make_topology
from tests.unit.leader.test_consistency_checker import V1, V2, V3, A, Cache, Store

ROUTES = Routes(make_topology())


class CountedStore(Store):
    """``between``: what happens before the second look at the database."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], None] = lambda: None
        self.looked_at = 0

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        await super().read_each(queries, critical=critical, timeout_seconds=timeout_seconds, on_read=on_read)
        if queries[0] == ObjectQuery(0):
            return  # the row that is read of each database at first, to see whether it answers
        self.looked_at += len(queries)
        self.between()
        self.between = lambda: None

    def has(self, version: int, data: bytes = b"", key: int = A) -> None:
        self.objects[key] = encode_object(version, 1, data)


@dataclass
class Rig:
    """Caches of which near-1 holds something."""

    store: CountedStore = field(default_factory=CountedStore)
    near: Cache = field(default_factory=Cache)
    others: Cache = field(default_factory=Cache)

    def to(self, server: CacheServer) -> Cache:
        return self.near if server.name == "near-1" else self.others

    async def verify(self, sample: Sample = ALL) -> CachesReport:
        return await verify_caches(ROUTES, cast(Links, self), self.store, sample=sample, recheck_seconds=0.0)


def figures(report: CachesReport) -> tuple[int, int]:
    return sum(line.in_flight for line in report.servers), report.wrong


async def test_an_entry_that_follows_a_key_that_keeps_changing_is_in_flight() -> None:
    rig = Rig()
    rig.near.hold(V1)
    rig.store.has(V2)

    def both_go_on() -> None:
        rig.near.hold(V2)
        rig.store.has(V3)

    rig.store.between = both_go_on
    assert figures(await rig.verify()) == (1, 0)


async def test_an_entry_that_has_not_reached_the_stored_version_by_the_second_look_is_wrong() -> None:
    rig = Rig()
    rig.near.hold(V1)
    rig.store.has(V3)
    rig.store.between = lambda: rig.near.hold(V2)
    report = await rig.verify()
    assert figures(report) == (0, 1)
    assert (report.findings[0].verdict, report.consistency.wrong) == ("behind", 1)


async def test_an_entry_ahead_of_the_database_is_in_flight_only_if_the_database_follows() -> None:
    rig = Rig()
    rig.near.hold(V2)
    rig.store.has(V1)
    rig.store.between = lambda: rig.store.has(V2)
    assert figures(await rig.verify()) == (1, 0)
    rig.store.has(V1)
    assert figures(await rig.verify()) == (0, 1)


async def test_other_content_of_one_version_is_wrong_unless_a_later_version_follows() -> None:
    rig = Rig()
    rig.near.hold(V1, b"cached")
    rig.store.has(V1, b"stored")
    assert figures(await rig.verify()) == (0, 1)
    rig.store.between = lambda: rig.store.has(V2, b"stored")
    assert figures(await rig.verify()) == (0, 1)
    rig.store.has(V1, b"stored")

    def touched() -> None:
        rig.near.hold(V2, b"stored")
        rig.store.has(V3, b"newer")

    rig.store.between = touched
    assert figures(await rig.verify()) == (1, 0)


@pytest.mark.parametrize(("sample", "least", "most"), [(Sample(10), 10, 12), (Sample(share=0.2), 20, 20)])
async def test_a_sample_has_about_the_wanted_size_for_any_page_size(
    sample: Sample, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_verification, "PAGE_ENTRIES", 3)
    rig = Rig()
    for number in range(100):
        rig.near.hold(V1, key=make_id(1 + number))
        rig.store.has(V1, key=make_id(1 + number))
    report = await rig.verify(sample)
    assert report.clean
    assert least <= report.consistency.looks == rig.store.looked_at <= most


async def test_a_server_that_does_not_answer_is_unchecked_and_the_others_are_compared() -> None:
    rig = Rig()
    rig.others.away = True
    rig.near.hold(V1)
    rig.store.has(V1)
    report = await rig.verify()
    assert (report.unchecked, report.wrong, report.consistency.looks) == (1, 0, 1)
    assert [line.server for line in report.servers if line.error] == ["leader-1"]


async def test_a_database_that_does_not_answer_is_named_even_if_no_cache_has_an_entry_of_it() -> None:
    rig = Rig()
    rig.store.fault = DeadlineExceeded("db-1 hangs")
    report = await rig.verify()
    assert (report.wrong, report.consistency.looks, report.clean) == (0, 0, False)
    assert [(each.error, each.entries) for each in report.databases] == [("db-1 hangs", 0)] * len(report.databases)
    assert report.unchecked_databases == [each.name for each in ROUTES.topology.databases]
    serving = [line for line in report.servers if ROUTES.shards_of(line.server)]
    assert report.unchecked == len(serving) > 0


async def test_the_entries_compared_are_counted_by_database() -> None:
    rig = Rig()
    rig.near.hold(V1)
    rig.store.has(V1)
    report = await rig.verify()
    assert (report.clean, sum(each.entries for each in report.databases)) == (True, 1)
