"""The entries that an arena holds after any uses, stores and drops, against a model that spells the rules out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.cache import CacheSettings, GraphCache
from tao.cache.eviction import MOST_CREDIT, USE_CREDIT
from tao.cache.records import Ghosts
from tao.cache.tables import value_bytes
from tao.model.graph import OBJECT_HEADER_BYTES, encode_object
from tests.rigs.effort import examples
from tests.unit.cache.graphs import ID1, SHARD, Types, v

BUDGET = 4_000
REINSERTIONS = 5
KEY_BYTES = 42 + 17 + 32
KEYS = 30


@dataclass
class Model:
    """The model: lists in place of queues, sums in place of counters."""

    small: list[int] = field(default_factory=list)
    main: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # 0: dropped, its key is still there
    credit: dict[int, int] = field(default_factory=dict)
    ghosts: Ghosts = field(default_factory=lambda: Ghosts(BUDGET))

    @property
    def taken(self) -> int:
        return sum(KEY_BYTES + size for size in self.sizes.values())

    def use(self, key: int) -> None:
        if self.sizes.get(key) and self.credit.get(key, 0) < MOST_CREDIT:
            self.credit[key] = self.credit.get(key, 0) + USE_CREDIT

    def store(self, key: int, size: int) -> None:
        if key not in self.sizes:
            (self.main if self.ghosts.returned(key, 0) else self.small).append(key)
        self.sizes[key] = size
        while self.taken > BUDGET:
            self._evict()

    def drop(self, key: int) -> None:
        if key in self.sizes:
            self.sizes[key] = 0

    def _evict(self) -> None:
        taken, left, entries = self.taken, REINSERTIONS, len(self.small) + len(self.main)
        while True:
            queue = self.small if len(self.small) * 10 > entries or not self.main else self.main
            key = queue.pop(0)
            size = KEY_BYTES + self.sizes[key]
            price = max(1, min(MOST_CREDIT, ceil(USE_CREDIT * size * entries / taken)))
            if not self.sizes[key] or not left or self.credit.get(key, 0) < price:
                break
            self.credit[key] -= price
            self.main.append(key)
            left -= 1
        if self.sizes.pop(key):
            self.ghosts.leaves(key, 0, size)


def steps(chance: Random) -> Iterator[tuple[str, int, int]]:
    """Long enough that every entry has left and come back many times."""
    for _ in range(2_000):
        place = min(int(chance.paretovariate(0.5)), KEYS)
        step = chance.choices(["store", "use", "drop"], [10, 10, 1])[0]
        yield step, place, chance.choice([1, 40, 300]) if step == "store" else chance.choice([1, 1, 1, 2, 3, 20])


@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(20))
def test_an_arena_holds_what_the_model_holds(seed: int) -> None:
    sizes = CacheSettings(
        arena_bytes={"default": BUDGET}, max_reinsertions=REINSERTIONS, credit_slots=1009, packed_counts_fraction=0
    )
    cache, model = GraphCache(sizes, Types()), Model()
    cache.open_shard(SHARD, 1)
    for version, (step, place, number) in enumerate(steps(Random(seed)), 1):
        key = ID1 + place
        if step == "store":
            value = encode_object(v(version), 1, bytes(number))
            cache.store_object(cache.object_ticket(key, 0.0), value, 1, 0.0)
            model.store(key, value_bytes(bytes(OBJECT_HEADER_BYTES + number)))
        elif step == "use":
            for _ in range(number):
                cache.object(key)
                model.use(key)
        else:
            cache.raise_object_floor(key, v(version), 0.0)
            model.drop(key)
        held = {key for key in range(ID1, ID1 + KEYS + 1) if cache.peek_object(key) is not None}
        assert held == {key for key, size in model.sizes.items() if size}
        assert cache.arenas()[0].bytes == model.taken
