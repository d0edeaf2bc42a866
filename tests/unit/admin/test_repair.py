"""Wrong counts are found by comparison with a plain count, for any pages, tables and gaps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.admin import repair
from tao.admin.repair import WrongCount, find_wrong_counts, repair_counts
from tao.model.errors import Unavailable
from tao.model.graph import ListKey
from tao.model.rows import ListRow
from tao.model.topology import CacheServer
from tao.routing.routes import Routes
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.scans import Scans
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FRIEND, NOTE, SCHEMA, make_id, make_topology

ROUTES = Routes(make_topology())
NOTE_TABLE = SCHEMA.atype(NOTE).table or ""
TABLE_OF = {FRIEND: DEFAULT_EDGE_TABLE, COMMENT: DEFAULT_EDGE_TABLE, NOTE: NOTE_TABLE}
keys = st.builds(ListKey, st.integers(1, 6), st.sampled_from(sorted(TABLE_OF)))
amounts = st.dictionaries(keys, st.integers(0, 3))


@dataclass
class Tables:
    """Shard 0 of a database; other shards are empty."""

    lists: dict[ListKey, int] = field(default_factory=dict)
    edges: Counter[ListKey] = field(default_factory=Counter)

    async def scan_lists(self, shard: int, after: ListKey, limit: int) -> list[tuple[ListKey, ListRow]]:
        rows = [(key, ListRow(self.lists[key], 9)) for key in sorted(self.lists) if key > after and shard == 0]
        return rows[:limit]

    async def count_edges(self, shard: int, table: str, after: ListKey, limit: int) -> list[tuple[ListKey, int]]:
        found = [
            (key, self.edges[key])
            for key in sorted(self.edges)
            if key > after and shard == 0 and TABLE_OF[key.atype] == table and self.edges[key]
        ]
        return found[:limit]

    async def count_again(self, shard: int, table: str, key: ListKey) -> tuple[ListRow, int]:
        assert TABLE_OF[key.atype] == table
        return ListRow(self.lists.get(key, 0), 9 if key in self.lists else 0), self.edges[key]


async def found_in(tables: Tables) -> list[WrongCount]:
    return await find_wrong_counts(ROUTES, SCHEMA, cast(Scans, tables))


@given(lists=amounts, edges=amounts, page=st.integers(1, 4))
async def test_exactly_the_lists_whose_count_differs_from_their_edges_are_wrong(
    lists: dict[ListKey, int], edges: dict[ListKey, int], page: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair, "PAGE_LISTS", page)
        found = await found_in(Tables(lists, Counter(edges)))
    expected = {key for key in lists.keys() | edges.keys() if lists.get(key, 0) != edges.get(key, 0)}
    assert [(each.id1, each.atype) for each in found] == sorted((key.id1, key.atype) for key in expected)
    for each in found:
        key = ListKey(each.id1, each.atype)
        assert (each.stored, each.counted) == (lists.get(key, 0), edges.get(key, 0))


async def test_a_list_that_changes_between_two_pages_is_counted_again_and_right() -> None:
    class Written(Tables):
        async def count_edges(self, shard: int, table: str, after: ListKey, limit: int) -> list[tuple[ListKey, int]]:
            self.edges[ListKey(1, FRIEND)] = self.lists[ListKey(1, FRIEND)] = 5
            return await super().count_edges(shard, table, after, limit)

    assert await found_in(Written({ListKey(1, FRIEND): 4}, Counter({ListKey(1, FRIEND): 4}))) == []


async def test_owners_get_the_wrong_counts_shard_by_shard_with_the_versions_seen() -> None:
    asked: list[tuple[str, list[int]]] = []

    class Leaders:
        def to(self, server: CacheServer) -> Leaders:
            self.name = server.name
            return self

        async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
            touches = request.touch_keys.touches
            assert {touch.version for touch in touches} == {9}
            asked.append((self.name, [touch.id for touch in touches]))
            return pb.Answer(touched_keys=pb.TouchedKeys(keys=len(touches)))

    wrong = [WrongCount(make_id(number, shard), FRIEND, 1, 2, 9) for shard in (0, 1) for number in range(1, 120)]
    (result,) = await repair_counts(ROUTES, cast(Links, Leaders()), wrong)
    assert (result.asked, result.repaired, result.error) == (len(wrong), len(wrong), "")
    assert [len(ids) for _, ids in asked] == [100, 19, 100, 19]


async def test_a_silent_leader_is_named_and_the_others_repair_their_shards() -> None:
    routes = Routes(make_topology(leaders={1: ("leader-2",), 3: ("leader-2",)}))
    asked: list[str] = []

    class Leaders:
        def to(self, server: CacheServer) -> Leaders:
            self.name = server.name
            return self

        async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
            asked.append(self.name)
            if self.name == "leader-1":
                raise Unavailable("it is away")
            return pb.Answer(touched_keys=pb.TouchedKeys(keys=len(request.touch_keys.touches)))

    wrong = [WrongCount(make_id(1, shard), FRIEND, 1, 2, 9) for shard in range(4)]
    first, second = await repair_counts(routes, cast(Links, Leaders()), wrong)
    assert (first.server, first.asked, first.repaired, first.error) == ("leader-1", 2, 0, "it is away")
    assert (second.server, second.asked, second.repaired, second.error) == ("leader-2", 2, 2, "")
    assert asked == ["leader-1", "leader-2", "leader-2"], "once, and not for each shard"
