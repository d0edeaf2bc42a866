"""Edges with states whose ends disagree, and those of which one end is purged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import cast

import pytest

from tao.admin.edge_registers import find_unequal_ends
from tao.model.edge_states import EdgeRegisters, NodeState
from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.writes import AssocAdd, AssocDelete, PurgeEdge
from tao.routing.routes import Routes
from tao.storage.scans import Scans
from tests.rigs.leader_rig import make_topology
from tests.unit.leader.test_edge_states import HIGH, LOW, SUBSCRIBERS, SUBSCRIBES, TwoLeaders

DAY_NS = 86_400 * 10**9
FAR = EdgeKey(HIGH, 163, LOW)
ROUTES = Routes(make_topology())


class StoredEnds:
    """The scans of verification over the rows of two leaders."""

    def __init__(self, two: TwoLeaders) -> None:
        self._rows = two.store.rows

    async def scan_registers(self, shard: int, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, EdgeRegisters]]:
        found = sorted(key for key in self._rows.registers if key.id1 >> SHARD_SHIFT == shard and key > after)
        return [(key, self._rows.registers[key]) for key in found[:limit]]

    async def read_registers(self, shard: int, keys: Sequence[EdgeKey]) -> list[tuple[EdgeKey, EdgeRegisters]]:
        return [(key, self._rows.registers[key]) for key in keys if key in self._rows.registers]

    async def read_nodes(self, shard: int, keys: Collection[ListKey]) -> dict[ListKey, NodeState]:
        return {key: self._rows.nodes[key] for key in keys if key in self._rows.nodes}


@pytest.fixture
async def two() -> AsyncIterator[TwoLeaders]:
    leaders = TwoLeaders()
    await leaders.coordinator.take(0)
    await leaders.far.take(1)
    yield leaders
    await leaders.coordinator.close()
    await leaders.far.close()


async def faults(two: TwoLeaders, days: int) -> list[str]:
    """Return what verification finds so many days from now."""
    now_ns = two.now_us * 1000 + days * DAY_NS
    found = find_unequal_ends(
        ROUTES,
        two.coordinator.configuration.schema,
        cast(Scans, StoredEnds(two)),
        recheck_seconds=0,
        on_progress=lambda *_: None,
        time_ns=lambda: now_ns,
    )
    return [each.fault async for each in found]


async def test_an_edge_of_which_one_end_is_purged_is_no_fault(two: TwoLeaders) -> None:
    await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, HIGH, 7, b""))
    await two.coordinator.write(AssocDelete(LOW, SUBSCRIBES, HIGH))
    await two.settled()
    await two.far.write(PurgeEdge(HIGH, SUBSCRIBERS, LOW, two.store.rows.registers[FAR]))
    assert FAR not in two.store.rows.registers
    assert await faults(two, 31) == []
    assert await faults(two, 29) == ["the ends have other registers"], "nothing is purged so soon"


async def test_one_end_of_an_edge_that_is_not_removed_is_a_fault_however_old_it_is(two: TwoLeaders) -> None:
    await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, HIGH, 7, b""))
    await two.settled()
    del two.store.rows.registers[EdgeKey(HIGH, SUBSCRIBERS, LOW)]
    assert await faults(two, 400) == ["the ends have other registers"]
