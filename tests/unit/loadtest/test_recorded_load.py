"""The load of `chaos` finds a far end that answers the old state although the inverse of the write is pending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtest.faults.chaos import ChaosOptions
from loadtest.faults.history import ReadVerdict, RecordedOutcome, Register
from loadtest.faults.load import Demand, Key, KeyKind, Reader, RecordedLoad, RecordedOptions
from loadtest.faults.record import RunRecord
from tao.client import EdgeWrite, StaleRead, WriteToken
from tao.model.errors import DatabaseDown, OperatorError
from tao.model.ids import SHARD_SHIFT
from tests.unit.client.fakes import until

NEAR, FAR = 1 << 40, (1 << SHARD_SHIFT) + 1
DATABASES = [SimpleNamespace(name="db-1", master_region="east"), SimpleNamespace(name="db-2", master_region="west")]
REGIONS = cast(Any, SimpleNamespace(routes=SimpleNamespace(shards=2, database_of=DATABASES.__getitem__)))


class Graph:
    """Both lists of one edge, which was added at time 1; the far one lacks it until it is settled."""

    refuses = False
    settled = False

    def __init__(self) -> None:
        self.renewed: list[object] = []

    async def assoc_exists(self, *row: object, **demand: object) -> bool:
        return bool((await self.assoc_range(*row[:2], **demand)).times)  # type: ignore[arg-type]

    async def assoc_range(self, id1: int, atype: str, *_: object, **__: object) -> Any:
        assert (id1, atype) == (FAR, "liked_by")
        if self.refuses:
            raise StaleRead("the list lacks the inverse of an edge")
        return SimpleNamespace(times=[])

    def recording(self) -> AbstractContextManager[Any]:
        return nullcontext(SimpleNamespace(token=WriteToken(), renewed=self.renewed.append))

    async def assoc_add(self, *_: object) -> EdgeWrite:
        return EdgeWrite(False, True)

    async def assoc_get(self, id1: int, atype: str, *_: object, **__: object) -> Any:
        assert (id1, atype) in ((NEAR, "likes"), (FAR, "liked_by"))
        return SimpleNamespace(times=[1] if id1 == NEAR or self.settled else [])


@pytest.mark.parametrize("refuses", [False, True])
async def test_an_old_answer_of_the_far_end_is_a_violation_and_a_refusal_is_not(refuses: bool) -> None:
    record, graph = RunRecord(), Graph()
    graph.refuses = refuses
    key = Key(KeyKind.EDGE, NEAR, FAR, Register(None), token=WriteToken(), token_number=1, pending_number=1)
    key.register.end(key.register.begin(1, 0.0), RecordedOutcome.ACKNOWLEDGED, 0.0)
    writer = Reader("east", "east", cast(Any, graph), attaches=True, own={0: 1})
    other = Reader("west", "west", cast(Any, graph), attaches=True)
    load = RecordedLoad(REGIONS, record, Random(1), RecordedOptions(), [writer, other], [key])
    record.strike("link_cut", "line")
    try:
        for reader, demand in ((writer, Demand.PLAIN), (other, Demand.TOKEN), (other, Demand.PLAIN)):
            for _ in range(20):
                await load._read(reader, 0, demand, far_end=True)
    finally:
        await load.cancel()
    # Nothing demands that another client sees the write without its token.
    assert (record.far_end_reads_pending, record.far_end_reads) == (40, 60)
    expected = (record.far_end_reads, 0) if refuses else (0, record.far_end_reads_pending)
    assert (record.failed_reads, record.violations_of("inverse")) == expected
    assert record.violations_of("inverse") == sum(record.violations.values())
    # Nor has a read to be refused that demands nothing.
    assert record.unexplained.total() == (record.far_end_reads - record.far_end_reads_pending if refuses else 0)


class Lists:
    """One list of three edges. Answers say that the ``denied`` one does not exist, or that all others do
    (``invents``), and sets lack the one that is ``lost``."""

    ends = (101, 102, 103)

    def __init__(self, *, denied: int = 0, invents: bool = False, lost: int = 0) -> None:
        self._denied, self._invents = denied, invents
        self._times = [time for time, end in enumerate(self.ends, 1) if end != lost][::-1]

    async def assoc_exists(self, _id1: int, _atype: str, id2: int, **_: object) -> bool:
        return id2 != self._denied if id2 in self.ends else self._invents

    async def assoc_count(self, *_: object, **__: object) -> int:
        return 3

    async def assoc_range(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(times=[3, 2, 1])

    async def assoc_time_range(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(times=[3, 2, 1])

    def edge_set(self, *_: object) -> Lists:
        return self

    def __and__(self, _: Lists) -> Lists:
        return self

    async def page(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(cut_short=False, edges=[SimpleNamespace(time=time) for time in self._times])


@pytest.mark.parametrize(
    ("graph", "violations"),
    [
        (Lists(), set()),
        (Lists(denied=102), {(ReadVerdict.STALE, "own writes")}),
        (Lists(invents=True), {(ReadVerdict.WRONG, "own writes")}),
        (Lists(lost=103), {(ReadVerdict.STALE, "own writes")}),
        (Lists(lost=102), {(ReadVerdict.WRONG, "own writes")}),
    ],
    ids=["right", "an edge is denied", "an edge is invented", "a set lacks the newest edge", "a set has a hole"],
)
async def test_wrong_answers_to_existence_and_sets_are_noticed(
    graph: Lists, violations: set[tuple[ReadVerdict, str]]
) -> None:
    record, key = RunRecord(), Key(KeyKind.LIST, NEAR, 0, Register(None), ends=Lists.ends)
    for number in (1, 2, 3):
        key.register.end(key.register.begin(number, 0.0), RecordedOutcome.ACKNOWLEDGED, 0.0)
    reader = Reader("east", "east", cast(Any, graph), attaches=True, own={0: 3})
    load = RecordedLoad(REGIONS, record, Random(1), RecordedOptions(reads=0.01, writes=0.01), [reader], [key])
    try:
        for _ in range(200):
            await load._read(reader, 0, Demand.PLAIN, far_end=False)
    finally:
        await load.cancel()
    assert set(record.violations) == violations
    assert record.answers["existence"] > 10
    assert record.answers["set"] > 10


@pytest.mark.parametrize("attaches", [True, False])
async def test_a_refusal_is_explained_by_an_own_write_that_was_answered_while_the_read_began(attaches: bool) -> None:
    record, graph = RunRecord(), Graph()
    key = Key(KeyKind.EDGE, NEAR, FAR, Register(None), token=WriteToken())
    key.register.end(key.register.begin(1, 0.0), RecordedOutcome.ACKNOWLEDGED, 0.0)
    reader = Reader("east", "east", cast(Any, graph), attaches=attaches)

    async def refuse(*_: object, **__: object) -> Any:
        key.pending_number = reader.own[0] = 1
        raise StaleRead("the list lacks the inverse of an edge")

    graph.assoc_range = refuse  # type: ignore[method-assign]
    load = RecordedLoad(REGIONS, record, Random(1), RecordedOptions(reads=0.01, writes=0.01), [reader], [key])
    record.strike("link_cut", "line")
    try:
        await load._read(reader, 0, Demand.PLAIN, far_end=True)
    finally:
        await load.cancel()
    assert (record.failed_reads, record.unexplained.total()) == (1, 0 if attaches else 1)


@pytest.mark.parametrize("was_pending", [True, False])
async def test_the_far_end_of_an_own_write_that_was_pending_needs_its_master(was_pending: bool) -> None:
    record, graph = RunRecord(), Graph()
    key = Key(KeyKind.EDGE, NEAR, FAR, Register(None), token=WriteToken())
    reader = Reader("east", "east", cast(Any, graph), attaches=True)

    async def fail(*_: object, **__: object) -> Any:
        raise DatabaseDown("the master of the far end is lost")

    graph.assoc_range = fail  # type: ignore[method-assign]
    load = RecordedLoad(REGIONS, record, Random(1), RecordedOptions(reads=0.01, writes=0.01), [reader], [key])
    if was_pending:
        reader.pending_at[0] = record.now()
    database = REGIONS.routes.database_of(FAR >> SHARD_SHIFT)
    record.strike("master_kill", "west-db", database.name)
    try:
        await load._read(reader, 0, Demand.PLAIN, far_end=True)
    finally:
        await load.cancel()
    assert (record.failed_reads, record.unexplained.total()) == (1, 0 if was_pending else 1)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[RecordedLoad, RunRecord, Graph]]:
    """Yield the load of one edge between databases of two regions, with three clients."""
    record, graph = RunRecord(), Graph()
    clients = (("east", True), ("west", True), ("west", False))
    readers = [Reader(region, region, cast(Any, graph), attaches=attaches) for region, attaches in clients]
    keys = [Key(KeyKind.EDGE, NEAR, FAR, Register(None)), Key(KeyKind.OBJECT, NEAR, 0, Register(0))]
    load = RecordedLoad(REGIONS, record, Random(1), RecordedOptions(reads=0.01, writes=0.01), readers, keys)
    yield load, record, graph
    await load.cancel()


async def test_the_far_end_of_a_pending_inverse_is_read_at_once_by_every_client_and_until_it_is_settled(
    pair: tuple[RecordedLoad, RunRecord, Graph],
) -> None:
    load, record, graph = pair
    cut = record.strike("link_cut", "line")
    load.begin(load._write(load._readers[0], 0))
    await until(lambda: record.violations_of("inverse") == 4)
    assert (len(record.pending), record.far_end_reads_pending, cut.far_end_reads_while_pending) == (1, 4, 4)
    await load._write(load._readers[0], 0)
    assert record.acknowledged == 1, "no write follows a pending one"
    assert record.pending[0].settled == 0.0
    cut.healing = cut.mended = record.now()
    graph.settled = True
    await until(lambda: record.pending[0].settled and not load._keys[0].pending_number)
    assert graph.renewed, "the token of the write must not have the pair settled for ever"


async def test_edges_between_regions_are_under_way_when_the_line_is_cut_and_at_no_other_fault(
    pair: tuple[RecordedLoad, RunRecord, Graph],
) -> None:
    load, record, _ = pair
    await load.before_fault("leader_kill")
    assert len(load._keys) == 2
    await load.before_fault("link_cut")
    pairs = load._keys[2:]
    assert {(pair.kind, pair.id, pair.other >> SHARD_SHIFT) for pair in pairs} == {(KeyKind.EDGE, NEAR, 1)}
    assert all(pair.register.writes[1:] for pair in pairs)
    record.strike("link_cut", "line")


async def test_after_a_full_disk_every_shard_is_written_whatever_keys_rest(
    pair: tuple[RecordedLoad, RunRecord, Graph],
) -> None:
    load, record, _ = pair
    for key in load._keys:
        key.register.busy = True
    fault = record.strike("leader_disk_full", "leader-1")
    record.await_writes(fault, {0})
    writing = asyncio.create_task(load.after_fault(fault))
    await until(lambda: fault.written)
    writing.cancel()


def test_one_region_is_not_cut_off_from_another() -> None:
    assert "leader_kill" in ChaosOptions(regions=1).possible_kinds
    assert "link_cut" not in ChaosOptions(regions=1).possible_kinds
    with pytest.raises(OperatorError, match="--fault link_cut --regions 1"):
        ChaosOptions(regions=1, kinds=("link_cut",))
