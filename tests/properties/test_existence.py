"""`assoc_exists` against `assoc_get`: one byte says what the edges say, whatever the cache holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.cache import CacheSettings, GraphCache
from tao.model.changes import GoneEdge, ListChange, sort_edges
from tao.model.edge_block import COMPLETE, PREFIX, encode_block, header
from tao.model.graph import EXISTS, EXISTS_NOT, Edge, encode_count
from tests.properties.test_cache_model import Types
from tests.rigs.effort import examples
from tests.rigs.leader_rig import make_id
from tests.rigs.versions import make_version

LISTS = [make_id(64 + number) for number in range(3)]
ATYPE = 1
MEMBERS = st.integers(1, 12)
step = st.tuples(st.sampled_from(["fill", "prefix", "count", "add", "delete", "drop"]), st.sampled_from(LISTS), MEMBERS)


class Lists:
    """A cache, and the lists that it is filled from."""

    def __init__(self) -> None:
        self.cache = GraphCache(CacheSettings(), Types())
        self.cache.open_shard(0, 1)
        self.edges: dict[int, dict[int, int]] = {id1: {} for id1 in LISTS}
        self.versions = dict.fromkeys(LISTS, 1)

    def play(self, kind: str, id1: int, member: int) -> None:
        version, held = make_version(1, self.versions[id1]), self.edges[id1]
        edges = sort_edges(Edge(id2, time) for id2, time in held.items())
        if kind in {"fill", "prefix"}:
            kept = edges if kind == "fill" else edges[:member]
            flags = PREFIX | (COMPLETE if len(kept) == len(edges) else 0)
            ticket = self.cache.list_ticket(id1, ATYPE, 0.0)
            self.cache.store_list(ticket, encode_block(version, len(edges), kept, flags), 1, 0.0)
        elif kind == "count":
            ticket = self.cache.list_ticket(id1, ATYPE, 0.0)
            self.cache.store_count(ticket, encode_count(version, len(edges)), 1, 0.0)
        elif kind == "drop":
            self.cache.bump_shard(0)
        else:
            gone = (GoneEdge(member, held.pop(member)),) if member in held else ()
            put = (Edge(member, self.versions[id1]),) if kind == "add" else ()
            held.update({edge.id2: edge.time for edge in put})
            self.versions[id1] += 1
            after = make_version(1, self.versions[id1])
            self.cache.apply(ListChange(id1, ATYPE, version, after, len(held), gone, put), 1, 0.0)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(step, max_size=20), st.lists(st.tuples(st.sampled_from(LISTS), MEMBERS), max_size=30), st.booleans())
def test_exists_and_get_agree(
    steps: list[tuple[str, int, int]], checks: list[tuple[int, int]], asks_for_the_version: bool
) -> None:
    lists = Lists()
    for each in steps:
        lists.play(*each)
    cache = lists.cache
    for id1, id2 in checks:
        minimum = make_version(1, lists.versions[id1]) if asks_for_the_version else 0
        edge = cache.edge(id1, ATYPE, id2, minimum=minimum)
        value = cache.exists(id1, ATYPE, id2, minimum)
        assert value == (None if edge is None else EXISTS if header(edge)[2] else EXISTS_NOT)
        assert value is None or (value == EXISTS) == (id2 in lists.edges[id1])
    columns = [list(column) for column in zip(*((id1, ATYPE, id2) for id1, id2 in checks), strict=True)] or [[], [], []]
    assert cache.exist_all(*columns) == [cache.exists(id1, ATYPE, id2) for id1, id2 in checks]
