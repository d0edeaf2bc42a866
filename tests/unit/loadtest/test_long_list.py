"""A long list that is written by the API is the one that a bulk load would leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from loadtest.whale import EDGES_PER_TIME, write_list
from tao.model.ids import SHARD_SHIFT


async def test_edges_are_written_oldest_first_and_named_newest_first() -> None:
    written: list[tuple[int, str, int, int]] = []

    async def assoc_add_many(edges: list[tuple[int, str, int, int]]) -> None:
        written.extend(edges)

    graph: Any = SimpleNamespace(topology=SimpleNamespace(shards=4), assoc_add_many=assoc_add_many)
    ids = await write_list(graph, 5, "fans", 4_500)
    assert [id2 for _, _, id2, _ in reversed(written)] == ids
    assert len(set(ids)) == 4_500
    assert {id2 >> SHARD_SHIFT for id2 in ids} == {0, 1, 2, 3}
    times = [at for *_, at in written]
    assert times == sorted(times)
    assert times[-1] == 4_500 // EDGES_PER_TIME
    assert {(id1, atype) for id1, atype, *_ in written} == {(5, "fans")}
