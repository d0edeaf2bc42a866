"""Looking over the keys of a shard, whose counts lie among those of other shards."""

from __future__ import annotations

import pytest

from tao.cache import CachedKey, GraphCache
from tao.model.graph import encode_count
from tests.unit.cache.graphs import ATYPE, ID1, SHARD, open_cache, store_object, v


def filled() -> GraphCache:
    cache = open_cache()
    cache.open_shard(SHARD + 1, 1)
    for place in range(300):
        store_object(cache, v(1), id_=ID1 + place)
        for key, atype in ((ID1 + place, ATYPE), (ID1 + place + (1 << 47), ATYPE), (ID1 + place, ATYPE + 2)):
            count = 1 << 30 if place == 7 else place % 3  # one that does not fit
            cache.store_count(cache.list_ticket(key, atype, 0.0), encode_count(v(1), count), 1, 0.0)
    return cache


@pytest.mark.parametrize(("limit", "stride"), [(1000, 1), (7, 1), (1, 1), (7, 3), (50, 11), (1, 40)])
def test_pages_together_hold_every_key_that_the_stride_names_once(limit: int, stride: int) -> None:
    cache = filled()
    every = cache.sample_keys(SHARD, 10_000)
    assert every.total == len(every.keys) == len(set(every.keys))
    assert {key.id >> 47 for key in every.keys} == {SHARD}
    assert len(every.keys) > 870
    found: list[CachedKey] = []
    after = 0
    while True:
        page = cache.sample_keys(SHARD, limit, after, stride)
        assert len(page.keys) <= limit
        found += page.keys
        if page.after is None:
            break
        after = page.after
    assert found == list(every.keys[::stride])
