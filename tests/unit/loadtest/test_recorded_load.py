"""The load of `chaos` finds a far end that answers the old state although the inverse of the write is pending."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtest.faults.chaos import ChaosOptions
from loadtest.faults.history import RecordedOutcome, Register
from loadtest.faults.load import Demand, Key, KeyKind, Reader, RecordedLoad, RecordedOptions
from loadtest.faults.record import RunRecord
from tao.client import EdgeWrite, StaleRead, WriteToken
from tao.model.errors import OperatorError

NEAR, FAR = 1 << 40, 2 << 40


class Graph:
    """Both lists of one edge, which was added at time 1; the far one lacks it."""

    refuses = False

    async def assoc_range(self, id1: int, atype: str, *_: object, **__: object) -> Any:
        assert (id1, atype) == (FAR, "liked_by")
        if self.refuses:
            raise StaleRead("the list lacks the inverse of an edge")
        return SimpleNamespace(times=[])

    def recording(self) -> AbstractContextManager[Any]:
        return nullcontext(SimpleNamespace(token=WriteToken()))

    async def assoc_add(self, *_: object) -> EdgeWrite:
        return EdgeWrite(False, True)

    async def assoc_get(self, id1: int, atype: str, *_: object, **__: object) -> Any:
        assert (id1, atype) == (NEAR, "likes")
        return SimpleNamespace(times=[1])


@pytest.mark.parametrize("refuses", [False, True])
async def test_an_old_answer_of_the_far_end_is_a_violation_and_a_refusal_is_not(refuses: bool) -> None:
    record, graph = RunRecord(), Graph()
    graph.refuses = refuses
    key = Key(KeyKind.EDGE, NEAR, FAR, Register(None), token=WriteToken(), token_number=1, pending_number=1)
    key.register.end(key.register.begin(1, 0.0), RecordedOutcome.ACKNOWLEDGED, 0.0)
    writer = Reader("east", "east", cast(Any, graph), attaches=True, own={0: 1})
    other = Reader("west", "west", cast(Any, graph), attaches=True)
    database = SimpleNamespace(name="db-1", master_region="east")
    routes = SimpleNamespace(shards=4, database_of=lambda shard: database)
    load = RecordedLoad(
        cast(Any, SimpleNamespace(routes=routes)), record, Random(1), RecordedOptions(), [writer, other], [key]
    )
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


async def test_the_far_end_of_a_pending_inverse_is_read_at_once_by_every_client() -> None:
    record, graph = RunRecord(), Graph()
    key = Key(KeyKind.EDGE, NEAR, FAR, Register(None))
    readers = [Reader(region, region, cast(Any, graph), attaches=True) for region in ("east", "west")]
    load = RecordedLoad(
        cast(Any, SimpleNamespace(routes=SimpleNamespace(shards=4))),
        record,
        Random(1),
        RecordedOptions(),
        readers,
        [key],
    )
    try:
        await load._write(readers[0])
    finally:
        await load.cancel()
    assert (record.pending_inverses, record.far_end_reads_pending) == (1, 3)
    assert record.violations_of("inverse") == 3


def test_one_region_is_not_cut_off_from_another() -> None:
    assert "leader_kill" in ChaosOptions(regions=1).possible_kinds
    assert "link_cut" not in ChaosOptions(regions=1).possible_kinds
    with pytest.raises(OperatorError, match="--fault link_cut --regions 1"):
        ChaosOptions(regions=1, kinds=("link_cut",))
