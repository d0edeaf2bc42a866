"""Whatever is collapsed for a slow leader: once it has taken everything, its cache holds nothing old.

The cache is a naive one: it knows a version of each key, takes changes in any order by their versions, and drops a
shard that is invalidated. The tailer's continuity of positions must hold across collapses, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.changes import ObjectChange
from tao.model.relay import Relay
from tao.tailer.settings import OutboxSettings
from tests.rigs.effort import examples
from tests.unit.tailer.test_slow_leaders import PacedRig

SHARDS = (0, 1, 2, 3)
STEPS = st.lists(
    st.one_of(st.lists(st.sampled_from(SHARDS), min_size=1, max_size=4, unique=True), st.just("relay")),
    max_size=60,
)
"""Transactions that change a key in some shards, and permits for one relay of the slow leader."""


@dataclass
class Cache:
    """The caches of all leaders, which have read everything at the start."""

    versions: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SHARDS, 0))
    reached: dict[int, int] = field(default_factory=dict)

    def take(self, relay: Relay) -> None:
        for messages in relay.changes:
            for message in messages.messages:
                assert isinstance(message, ObjectChange)
                known = self.versions.get(messages.shard)
                if known is not None:
                    self.versions[messages.shard] = max(known, message.after)
        for shard in relay.bulk_shards:
            self.versions.pop(shard, None)
        for span in relay.spans:
            assert span.after <= self.reached.get(span.shard, span.after), "a span leaves something out"
            self.reached[span.shard] = span.number


@given(steps=STEPS, leader_bytes=st.integers(0, 1_500), slow_seconds=st.sampled_from([1e-6, 3_600.0]))
@settings(max_examples=examples(60), deadline=None)
def test_a_cache_holds_nothing_old_once_its_slow_leader_has_taken_everything(
    steps: list[list[int] | str], leader_bytes: int, slow_seconds: float
) -> None:
    bounds = OutboxSettings(gather_parts=1, relay_bytes=600, leader_bytes=leader_bytes + 250, slow_seconds=slow_seconds)
    asyncio.run(play(steps, bounds))


async def play(steps: list[list[int] | str], bounds: OutboxSettings) -> None:
    rig = PacedRig(bounds)
    newest = dict.fromkeys(SHARDS, 0)

    async def submit_all() -> None:
        for number, step in enumerate(steps, start=1):
            if isinstance(step, str):
                rig.paced.permits.release()
                await asyncio.sleep(0)
            else:
                await rig.change_shards(number, step)
                newest.update(dict.fromkeys(step, number))

    submitting = asyncio.ensure_future(submit_all())
    while not submitting.done():
        for _ in range(300):
            await asyncio.sleep(0)
        rig.paced.permits.release()
    submitting.result()
    await rig.take_all()
    cache = Cache()
    for _, relay in rig.leaders.relayed:
        cache.take(relay)
    assert {shard: version for shard, version in cache.versions.items() if version != newest[shard]} == {}
    assert rig.path.unacknowledged_bytes == sum(rig.path.leader_bytes().values()) == 0
    await asyncio.gather(*rig.tasks)
