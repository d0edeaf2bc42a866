"""What `tao verify` calls wrong, and what only in flight: by the versions of two looks (DESIGN §15)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from tao.cli.checking import caches
from tao.cli.checking.caches import ALL, Report, Sample, verify_caches
from tao.model.graph import encode_object
from tao.model.ports import OnRead
from tao.model.queries import Query
from tao.model.topology import CacheServer
from tao.peers.links import Links
from tao.routing.routes import Routes
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
        self.looked_at += len(queries)
        await super().read_each(queries, critical=critical, timeout_seconds=timeout_seconds, on_read=on_read)
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

    async def verify(self, sample: Sample = ALL) -> Report:
        return await verify_caches(ROUTES, cast(Links, self), self.store, sample=sample, recheck_seconds=0.0)


def figures(report: Report) -> tuple[int, int]:
    return sum(line.in_flight for line in report.servers), report.wrong


async def test_what_follows_a_key_that_keeps_changing_is_in_flight() -> None:
    rig = Rig()
    rig.near.hold(V1)
    rig.store.has(V2)

    def both_go_on() -> None:
        rig.near.hold(V2)
        rig.store.has(V3)

    rig.store.between = both_go_on
    assert figures(await rig.verify()) == (1, 0)


async def test_what_has_not_reached_by_the_second_look_what_was_stored_at_the_first_is_wrong() -> None:
    rig = Rig()
    rig.near.hold(V1)
    rig.store.has(V3)
    rig.store.between = lambda: rig.near.hold(V2)
    report = await rig.verify()
    assert figures(report) == (0, 1)
    assert (report.findings[0].verdict, report.consistency.wrong) == ("behind", 1)


async def test_what_is_ahead_of_a_database_that_was_read_first_is_in_flight_and_else_wrong() -> None:
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
async def test_a_sample_is_about_as_large_as_asked_however_small_the_pages(
    sample: Sample, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "PAGE_ENTRIES", 3)
    rig = Rig()
    for number in range(100):
        rig.near.hold(V1, key=make_id(1 + number))
        rig.store.has(V1, key=make_id(1 + number))
    report = await rig.verify(sample)
    assert report.clean
    assert least <= report.consistency.looks == rig.store.looked_at <= most


async def test_a_server_that_is_away_is_unchecked_and_the_others_are_looked_at() -> None:
    rig = Rig()
    rig.others.away = True
    rig.near.hold(V1)
    rig.store.has(V1)
    report = await rig.verify()
    assert (report.unchecked, report.wrong, report.consistency.looks) == (1, 0, 1)
    assert [line.server for line in report.servers if line.error] == ["leader-1"]
