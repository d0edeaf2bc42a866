"""Journaled writes on both sides of a cut line, to the same edges: afterwards both regions equal the join of all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tao.client import Accepted, Graph, connect
from tao.devcluster.layout import Shape
from tao.model.edge_states import NO_OPERATION, EdgeRegisters, State
from tests.e2e.cluster_access import PATIENT
from tests.e2e.region_access import Regions, plain, running_regions
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.database,
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
]

SHAPE = Shape(regions=2, tiers=1, followers=1, leaders=2, databases=2, mixed_mastership=True, shards=4)
LABELS = ("normal", "negative", "archived", "removed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    async with running_regions(tmp_path_factory.mktemp("regions"), SHAPE) as found:
        yield found


async def test_journaled_writes_on_both_sides_of_a_cut_end_in_the_join_of_all(regions: Regions) -> None:
    async with (
        connect(regions.target, region="east", settings=PATIENT) as east,
        connect(regions.target, region="west", settings=PATIENT) as west,
    ):
        users = [(await east.reserve_ids(1, shard=shard))[0] for shard in (0, 3)]
        pages = [(await east.reserve_ids(1, shard=shard))[0] for shard in (1, 2)]
        await east.assoc_archive(users[0], "subscribes", pages[0])
        known = await east.assoc_state(users[0], "subscribes", pages[0])
        assert known is not None
        expected = {(user, page): NO_OPERATION for user in users for page in pages}
        rng = random.Random(5)
        receipts: list[Accepted] = []
        await regions.cut(silent=False)
        try:
            for number in range(1, 81):
                user, page, state = rng.choice(users), rng.choice(pages), rng.choice(LABELS)
                at, time = known.state_us + rng.randrange(1, 1_000), rng.choice([None, number])
                graph: Graph = rng.choice((east, west))
                receipts.append(await graph.later.assoc_set_state(user, "subscribes", page, state, at, time))
                payload_us = 0 if time is None else at
                operation = EdgeRegisters(State[state.upper()], at, payload_us, time or 0)
                expected[user, page] = expected[user, page].joined(operation)
        finally:
            await regions.heal()
        await asyncio.gather(*(receipt.applied(timeout=PATIENT_SECONDS) for receipt in receipts))
        for (user, page), registers in expected.items():
            label, edge = registers.effective_state(State.NORMAL).label, [(page, registers.time)]
            assert plain(await east.assoc_get(user, "subscribes", [page], state=label, critical=True)) == edge
        await regions.assert_converges()
        for (user, page), registers in expected.items():
            for graph in (east, west):
                found = await graph.assoc_state(page, "subscribers", user)
                assert found is not None
                assert (found.own, found.state_us) == (State(registers.own_state).label, registers.state_us)
