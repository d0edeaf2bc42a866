"""Reverse look-up: which `assoc_get` queries the inverse lists answer, what they send, and what happens on failures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tao.client import ClientSettings, ClientStats, Graph, Unavailable, WriteToken
from tao.model.graph import Edge
from tao.model.ids import SHARD_SHIFT
from tao.schema.registry import load_schema
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SHARDS, FakeCluster, FakeLink, make_id

FANS, FAN_OF, LIMIT = 1, 2, 3
SCHEMA = load_schema(
    f"""
format: 1
associations:
  fans: {{number: {FANS}, inverse: fan_of, reverse_lookup: true, limit: {LIMIT},
         fields: {{note: {{number: 1, type: str}}}}}}
  fan_of: {{number: {FAN_OF}, inverse: fans, limit: {LIMIT}}}
""",
    "test",
)
PAGE = make_id(64, 1)
PEOPLE = [make_id(100 + number, number % 4) for number in range(8)]
NOBODY = make_id(999, 2)
NOTE = b"\x81\x01\xa2hi"


def befriend(cluster: FakeCluster, page: int, people: list[int]) -> None:
    """Both lists of every edge. The first person is the newest, and the third edge has data."""
    edges = [Edge(id2, 1000 - place, NOTE if place == 2 else b"") for place, id2 in enumerate(people)]
    cluster.lists[page, FANS] = edges
    for edge in edges:
        cluster.lists.setdefault((edge.id2, FAN_OF), []).append(Edge(page, edge.time, edge.data))


@pytest.fixture
async def graph(cluster: FakeCluster) -> AsyncIterator[Graph]:
    """A graph that has learned that the page's list is long."""
    cluster.schema = SCHEMA
    befriend(cluster, PAGE, PEOPLE)
    async with await cluster.connect() as opened:
        await opened.assoc_get(PAGE, "fans", [NOBODY])
        assert opened.stats.reverse_lookups == 0, "the length of the list was learned from its own answer"
        asked(cluster)
        yield opened


def asked(cluster: FakeCluster) -> set[tuple[int, int]]:
    """The lists of the `assoc_get` queries that were sent since the last call."""
    lists: set[tuple[int, int]] = set()
    for link in cluster.links.values():
        for request in link.sent:
            lists.update(zip(request.read.get_id1s, request.read.get_atypes, strict=True))
        link.sent.clear()
    return lists


async def test_the_inverse_lists_give_the_same_answer_as_the_list(graph: Graph, cluster: FakeCluster) -> None:
    ids = [PEOPLE[5], NOBODY, PEOPLE[2], PEOPLE[6]]
    async with await cluster.connect(ClientSettings(reverse_lookup_id2s=None)) as direct:
        for high, low in ((None, None), (998, None), (None, 995), (994, 994)):
            asked(cluster)
            found = await graph.assoc_get(PAGE, "fans", ids, high, low)
            assert asked(cluster) == {(id2, FAN_OF) for id2 in ids}
            wanted = await direct.assoc_get(PAGE, "fans", ids, high, low)
            assert asked(cluster) == {(PAGE, FANS)}
            assert found == wanted
            assert (found.id1, found.atype, found.list_count) == (PAGE, "fans", len(PEOPLE))
            assert [edge.fields for edge in found] == [edge.fields for edge in wanted]
    assert (graph.stats.reverse_lookups, graph.stats.reverse_lookup_fallbacks) == (4, 0)


async def test_a_set_asks_the_list_itself_because_an_inverse_may_be_pending(graph: Graph, cluster: FakeCluster) -> None:
    newest = PEOPLE[0]
    cluster.lists[newest, FAN_OF].clear()
    fans = graph.edge_set(PAGE, "fans")
    assert set(await fans.among(PEOPLE[:3])) == set(PEOPLE[:3])
    assert asked(cluster) == {(PAGE, FANS)}
    assert graph.stats.reverse_lookups == 0


async def test_a_many_form_sends_one_message_to_each_server_whichever_lists_it_asks(
    graph: Graph, cluster: FakeCluster
) -> None:
    short = make_id(65, 1)
    befriend(cluster, short, PEOPLE[:2])
    found = await graph.assoc_get_many(
        [(PAGE, "fans", PEOPLE[3:5]), (short, "fans", PEOPLE[:4]), (PEOPLE[0], "fan_of", [PAGE]), (PAGE, "fans", [])]
    )
    assert [each.id2s for each in found] == [PEOPLE[3:5], PEOPLE[:2], [PAGE], []]
    assert [each.list_count for each in found] == [len(PEOPLE), 2, 2, len(PEOPLE)]
    assert len(cluster.batches()) == 1
    assert graph.stats.reverse_lookups == 1


async def test_an_id2_with_a_long_list_is_looked_up_in_reverse_only_once(graph: Graph, cluster: FakeCluster) -> None:
    for number in range(LIMIT + 1):
        befriend(cluster, make_id(70 + number), PEOPLE[:1])
    lists = []
    for _ in range(3):
        assert (await graph.assoc_get(PAGE, "fans", PEOPLE[:2])).id2s == PEOPLE[:2]
        lists.append(asked(cluster))
    assert lists == [{(PEOPLE[0], FAN_OF), (PEOPLE[1], FAN_OF)}, {(PAGE, FANS)}, {(PAGE, FANS)}]


async def test_a_list_that_has_become_short_is_asked_itself(graph: Graph, cluster: FakeCluster) -> None:
    del cluster.lists[PAGE, FANS][LIMIT:]
    await graph.assoc_get(PAGE, "fans", PEOPLE[:1])
    asked(cluster)
    await graph.assoc_get(PAGE, "fans", PEOPLE[:1])
    assert asked(cluster) == {(PAGE, FANS)}


async def test_reads_with_a_demand_on_the_list_itself_go_to_the_list(graph: Graph, cluster: FakeCluster) -> None:
    named = WriteToken([(PAGE, FANS, 1)])
    of_person = WriteToken([(PEOPLE[0], FAN_OF, 1)])
    of_shard = WriteToken([], {PEOPLE[0] >> SHARD_SHIFT})
    for options in (
        {"critical": True},
        {"max_staleness_ms": 5_000},
        {"after": named},
        {"after": named.text()},
        {"after": named.merged(of_person)},
        {"after": of_shard},  # the person's list would be read from the master database
    ):
        asked(cluster)
        await graph.assoc_get(PAGE, "fans", PEOPLE[:1], **options)
        assert asked(cluster) == {(PAGE, FANS)}, options
        await graph.assoc_get_many([(PAGE, "fans", PEOPLE[:1])], **options)
        assert asked(cluster) == {(PAGE, FANS)}, options


async def test_a_token_that_names_the_inverse_list_is_a_minimum_there(graph: Graph, cluster: FakeCluster) -> None:
    await graph.assoc_get(PAGE, "fans", PEOPLE[:1], after=WriteToken([(PEOPLE[0], FAN_OF, 7)]))
    (sent,) = cluster.batches()
    assert list(sent.read.get_id1s) == PEOPLE[:1]
    assert list(sent.read.minimum_versions) == [7]


async def test_own_writes_are_a_minimum_at_the_inverse_list(graph: Graph, cluster: FakeCluster) -> None:
    def both_sides(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        answer = link.answer(request)
        for result in answer.write.results:
            result.changed_ids.append(PEOPLE[0])
            result.changed_atypes.append(FAN_OF)
            result.changed_versions.append(41)
        on_answer(answer)

    cluster.link("near-1").behaviour = both_sides
    await graph.assoc_add(PAGE, "fans", PEOPLE[0])
    asked(cluster)
    await graph.assoc_get(PAGE, "fans", PEOPLE[:2])
    (sent,) = cluster.batches()
    slot = list(sent.read.get_id1s).index(PEOPLE[0]) + len(sent.read.count_id1s)
    assert dict(zip(sent.read.minimum_slots, sent.read.minimum_versions, strict=True)) == {0: 1, slot: 41}


async def test_the_list_itself_is_asked_after_a_write_whose_inverse_is_pending(
    graph: Graph, cluster: FakeCluster
) -> None:
    """The graph would miss its own write otherwise."""

    def pending(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        answer = link.answer(request)
        for result in answer.write.results:
            result.inverse_pending = True
        on_answer(answer)

    cluster.link("near-1").behaviour = pending
    await graph.assoc_add(PAGE, "fans", NOBODY)
    assert (await graph.assoc_get(PAGE, "fans", [NOBODY])).id2s == [NOBODY]
    assert graph.stats.reverse_lookups == 0


async def test_more_id2s_than_the_setting_allows_are_asked_of_the_list(cluster: FakeCluster) -> None:
    cluster.schema = SCHEMA
    befriend(cluster, PAGE, PEOPLE)
    async with await cluster.connect(ClientSettings(reverse_lookup_id2s=2)) as graph:
        await graph.assoc_get(PAGE, "fans", PEOPLE[:1])
        for count, expected in ((2, 1), (3, 1)):
            assert (await graph.assoc_get(PAGE, "fans", PEOPLE[:count])).id2s == PEOPLE[:count]
            assert graph.stats.reverse_lookups == expected


async def test_an_id2_of_a_shard_that_does_not_exist_is_no_error(graph: Graph) -> None:
    assert (await graph.assoc_get(PAGE, "fans", [make_id(5, SHARDS), PEOPLE[1]])).id2s == [PEOPLE[1]]


async def test_the_number_of_long_lists_remembered_is_bounded(cluster: FakeCluster) -> None:
    cluster.schema = SCHEMA
    pages = [make_id(500 + number) for number in range(3)]
    for page in pages:
        befriend(cluster, page, PEOPLE)
    async with await cluster.connect(ClientSettings(long_lists=2)) as graph:
        for page in pages:
            await graph.assoc_get(page, "fans", [NOBODY])
        for page in pages[:0:-1]:
            await graph.assoc_get(page, "fans", [NOBODY])
        assert graph.stats.reverse_lookups == 2
        await graph.assoc_get(pages[0], "fans", [NOBODY])
        assert graph.stats.reverse_lookups == 2


async def test_a_reverse_look_up_that_fails_is_answered_by_the_list(graph: Graph, cluster: FakeCluster) -> None:
    """A query that the list's own server can answer must not fail because of another server."""

    def far_end_is_away(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        answer = link.answer(request)
        failed = [slot for slot, id1 in enumerate(request.read.get_id1s, len(request.read.count_id1s)) if id1 != PAGE]
        if failed:
            kept = [slot for slot in range(len(answer.read.values)) if slot not in failed]
            values = [answer.read.values[slot] for slot in kept]
            answer = pb.Answer(read=pb.ReadAnswer(slots=kept, values=values, failed_slots=failed))
            answer.read.errors.extend([error_to_pb(Unavailable("away"))] * len(failed))
        on_answer(answer)

    for name in ("near-1", "far-1"):
        cluster.link(name).behaviour = far_end_is_away
    assert (await graph.assoc_get(PAGE, "fans", PEOPLE[4:6])).id2s == PEOPLE[4:6]
    assert (graph.stats.reverse_lookups, graph.stats.reverse_lookup_fallbacks) == (1, 1)


async def test_the_caller_receives_the_error_when_both_ends_fail(graph: Graph, cluster: FakeCluster) -> None:
    def nobody_answers(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        on_answer(pb.Answer(error=error_to_pb(Unavailable("away"))))

    for name in ("near-1", "far-1"):
        cluster.link(name).behaviour = nobody_answers
    with pytest.raises(Unavailable, match="away"):
        await graph.assoc_get(PAGE, "fans", PEOPLE[4:6])


async def test_an_edge_that_only_the_inverse_list_has_so_far_is_returned(graph: Graph, cluster: FakeCluster) -> None:
    cluster.lists[NOBODY, FAN_OF] = [Edge(PAGE, 1)]
    assert (await graph.assoc_get(PAGE, "fans", [NOBODY])).id2s == [NOBODY]


def checked(cluster: FakeCluster) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The lists of the checks and of the counts that were sent since the last call."""
    checks: set[tuple[int, int]] = set()
    counts: set[tuple[int, int]] = set()
    for link in cluster.links.values():
        for request in link.sent:
            checks.update(zip(request.read.exist_id1s, request.read.exist_atypes, strict=True))
            counts.update(zip(request.read.count_id1s, request.read.count_atypes, strict=True))
        link.sent.clear()
    return checks, counts


async def test_a_check_of_a_long_list_asks_the_inverse_list(graph: Graph, cluster: FakeCluster) -> None:
    for id2, exists in ((PEOPLE[5], True), (NOBODY, False)):
        assert await graph.assoc_exists(PAGE, "fans", id2) is exists
        assert checked(cluster) == ({(id2, FAN_OF)}, set())
    assert await graph.assoc_exists_many([(PAGE, "fans", PEOPLE[1]), (PEOPLE[0], "fan_of", PAGE)]) == [True, True]
    assert checked(cluster) == ({(PEOPLE[1], FAN_OF), (PEOPLE[0], FAN_OF)}, set())
    assert await graph.assoc_exists(PAGE, "fans", PEOPLE[1], critical=True)
    assert checked(cluster) == ({(PAGE, FANS)}, set())
    assert graph.stats.reverse_lookups == 3


async def test_the_first_check_of_a_list_learns_its_length_and_short_lists_are_measured_again(
    cluster: FakeCluster,
) -> None:
    cluster.schema = SCHEMA
    befriend(cluster, PAGE, PEOPLE[:2])
    async with await cluster.connect() as graph:
        measured = 0
        for _ in range(130):
            assert await graph.assoc_exists(PAGE, "fans", PEOPLE[0])
            checks, counts = checked(cluster)
            assert checks == {(PAGE, FANS)}
            measured += counts == {(PAGE, FANS)}
        assert measured == 3
        befriend(cluster, PAGE, PEOPLE)
        found = set[tuple[int, int]]()
        for _ in range(66):
            assert await graph.assoc_exists(PAGE, "fans", PEOPLE[1])
            found |= checked(cluster)[0]
        assert (PEOPLE[1], FAN_OF) in found


async def test_a_reversed_check_that_fails_is_answered_by_the_list(graph: Graph, cluster: FakeCluster) -> None:
    def far_end_is_away(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        answer = link.answer(request)
        if PAGE not in request.read.exist_id1s:
            answer = pb.Answer(error=error_to_pb(Unavailable("away")))
        on_answer(answer)

    for name in ("near-1", "far-1"):
        cluster.link(name).behaviour = far_end_is_away
    assert await graph.assoc_exists(PAGE, "fans", PEOPLE[4])
    assert (graph.stats.reverse_lookups, graph.stats.reverse_lookup_fallbacks) == (1, 1)


def test_the_former_names_are_accepted() -> None:
    with pytest.warns(FutureWarning, match="turned_id2s is now called reverse_lookup_id2s"):
        settings = ClientSettings(turned_id2s=3)
    assert settings.reverse_lookup_id2s == 3
    assert replace(settings, timeout_seconds=1.0).reverse_lookup_id2s == 3
    stats = ClientStats(reverse_lookups=5, reverse_lookup_fallbacks=2)
    assert (stats.turned, stats.turned_back) == (5, 2)
