"""Requests to the server above are repeated while that may help, within the time given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tao.model.edge_block import encode_block
from tao.model.errors import DatabaseDown, InternalError, NotMine, ProtocolError, TaoError, Unavailable
from tao.model.graph import Edge, encode_count, encode_object
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.model.topology import CacheServer, Topology
from tao.observability.logs import logger
from tao.routing.budgets import RetryBudget, RetrySettings
from tao.serving.configuration import Configuration
from tao.serving.sources import RemoteSettings, RemoteSource, fetch_and_wait
from tao.wire.session import AnswerHandler, failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import LIKES, SCHEMA, USER, make_id, make_topology
from tests.rigs.pacing import PATIENT_SECONDS, Tasks
from tests.rigs.server_context import SilentTopology, make_context

A = make_id(64)
OBJECT = ObjectQuery(A)
VALUE = encode_object(1, USER, b"")
BLOCK = encode_block(7, 3, [Edge(2, 9, b"one"), Edge(1, 8, b"other")], 0)
SETTINGS = RemoteSettings(max_attempts=4, first_pause_seconds=0.001)


class Links:
    """Raises the faults in turn, then answers; records the time left at each request."""

    def __init__(self, *faults: TaoError, value: bytes = VALUE) -> None:
        self.faults = list(faults)
        self.value = value
        self.times: list[float] = []
        self.requests: list[pb.Request] = []
        self.written = 0
        self._is_held = False

    def to(self, _: CacheServer) -> Links:
        return self

    def hold(self) -> None:
        self._is_held = True

    def flush(self) -> None:
        self.written += self._is_held
        self._is_held = False

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        assert self._is_held
        self.times.append(timeout_seconds)
        self.requests.append(request)
        if self.faults:
            on_answer(failure(self.faults.pop(0)))
        else:
            on_answer(pb.Answer(read=pb.ReadAnswer(values=[self.value] * max(1, len(request.read.obj_ids)))))


def source(
    links: Links,
    settings: RemoteSettings = SETTINGS,
    *,
    gives_up: bool = False,
    budget: RetryBudget | None = None,
    load: Callable[[], Awaitable[Topology]] | None = None,
) -> RemoteSource:
    tasks = Tasks()
    configuration = Configuration(make_topology(), SCHEMA, logger("test"), load)
    leaders = configuration.routes.leaders("east")
    context = make_context(configuration, links, tasks, budget=budget)
    return RemoteSource(context, leaders.home, settings, gives_up=lambda _: gives_up)


async def test_the_queries_of_one_turn_are_written_in_the_next_one_in_one_message() -> None:
    links = Links()
    asking = [asyncio.ensure_future(fetch(source_of_all)) for source_of_all in [source(links)] * 3]
    await asyncio.sleep(0)
    assert links.written == 0
    await asyncio.sleep(0)
    assert (links.written, len(links.requests)) == (1, 1)
    assert await asyncio.gather(*asking) == [VALUE] * 3


async def fetch(found: RemoteSource, timeout_seconds: float = 5.0, query: Query = OBJECT) -> bytes:
    return (await fetch_and_wait(found, query, 0, critical=False, timeout_seconds=timeout_seconds)).value


async def test_each_further_attempt_has_only_the_time_that_is_left() -> None:
    links = Links(NotMine("not yet"), Unavailable("away"))
    assert await fetch(source(links)) == VALUE
    assert len(links.times) == 3
    assert sorted(links.times, reverse=True) == links.times
    assert links.times[0] <= 5.0


async def test_no_attempt_is_made_when_its_pause_would_exceed_the_time_left() -> None:
    links = Links(*[Unavailable("away")] * 4)
    with pytest.raises(Unavailable):
        await fetch(source(links, RemoteSettings(max_attempts=4, first_pause_seconds=60.0)), 30.0)
    assert len(links.times) == 1


async def test_a_server_known_to_be_down_is_not_asked_again() -> None:
    links = Links(Unavailable("away"))
    with pytest.raises(Unavailable):
        await fetch(source(links, gives_up=True))
    assert len(links.times) == 1


async def test_a_topology_that_cannot_be_read_takes_no_attempt_its_time() -> None:
    """A silent etcd must not keep a follower from a leader that is back, and is not asked again and again."""
    silent = SilentTopology()
    links = Links(Unavailable("restarting"), NotMine("not yet"), Unavailable("restarting"))
    async with asyncio.timeout(PATIENT_SECONDS):
        assert await fetch(source(links, load=silent), timeout_seconds=10 * PATIENT_SECONDS) == VALUE
    assert (len(links.times), silent.reads) == (4, 1)


async def test_an_exception_while_reading_the_topology_fails_the_query() -> None:
    async def broken() -> Topology:
        raise ZeroDivisionError

    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await fetch(source(Links(NotMine("not yet")), load=broken))


@pytest.mark.parametrize("is_located", [False, True])
async def test_a_leader_that_cannot_be_asked_costs_the_queries_of_the_others_nothing(is_located: bool) -> None:
    class BrokenLinks(Links):
        def to(self, leader: CacheServer) -> Links:
            if leader.name == "broken":
                raise ZeroDivisionError
            return self

    links, configuration = BrokenLinks(), Configuration(make_topology(), SCHEMA, logger("test"))
    leaders = {shard: configuration.routes.leaders("east").home(shard) for shard in (0, 1)}
    leaders[0] = msgspec.structs.replace(leaders[0], name="broken")

    def locate(shard: int) -> CacheServer:
        if shard == 0 and not is_located:
            raise ZeroDivisionError
        return leaders[shard]

    found = RemoteSource(make_context(configuration, links, Tasks()), locate, SETTINGS)
    ids = [make_id(64, shard=0), make_id(64, shard=1)]
    asking = [fetch(found, query=ObjectQuery(each)) for each in ids]
    failed, value = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(failed, InternalError)
    assert value == VALUE


async def test_repeats_end_with_their_budget() -> None:
    links = Links(*([Unavailable("away")] * 20))
    found = source(links, budget=RetryBudget(RetrySettings(burst=2, per_second=0), 0.0))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await fetch(found)
    assert len(links.faults) == 20 - 3 - 2


async def test_a_leader_whose_database_is_down_is_not_asked_again() -> None:
    links = Links(DatabaseDown("db-1 is down"))
    with pytest.raises(DatabaseDown):
        await fetch(source(links))
    assert len(links.times) == 1


@pytest.mark.parametrize(
    ("query", "value"),
    [
        (ObjectQuery(A), VALUE),
        (CountQuery(A, LIKES), encode_count(3, 5)),
        (RangeQuery(A, LIKES, 0, 50), BLOCK),
        (TimeRangeQuery(A, LIKES, 9, 0, 50), BLOCK),
        (EdgesQuery(A, LIKES, (1, 2), 9, 0), BLOCK),
    ],
)
async def test_an_invalid_value_is_rejected_before_it_is_cached(query: Query, value: bytes) -> None:
    assert await fetch(source(Links(value=value)), query=query) == value
    with pytest.raises(ProtocolError):
        await fetch(source(Links(value=value[:-1])), query=query)


async def test_critical_reads_of_different_callers_travel_in_messages_that_name_them() -> None:
    links = Links()
    found = source(links)
    asked = [
        fetch_and_wait(found, ObjectQuery(make_id(64 + number)), 0, critical=critical, timeout_seconds=5, caller=caller)
        for number, (critical, caller) in enumerate([(True, "a"), (False, None), (True, "b"), (True, "a")])
    ]
    await asyncio.gather(*asked)
    sent = [(each.read.critical, each.caller or None, len(each.read.obj_ids)) for each in links.requests]
    assert sorted(sent, key=str) == [(False, None, 1), (True, "a", 2), (True, "b", 1)]


async def test_each_pause_is_asked_for_and_one_that_is_refused_ends_with_the_error_of_the_attempt() -> None:
    links, failures = Links(Unavailable("first"), NotMine("second"), Unavailable("third")), list[str]()

    def at_most_twice(failure: TaoError) -> bool:
        failures.append(failure.message)
        return len(failures) <= 2

    with pytest.raises(Unavailable, match="third"):
        await fetch_and_wait(
            source(links), OBJECT, 0, critical=False, timeout_seconds=5.0, caller=None, on_pause=at_most_twice
        )
    assert failures == ["first", "second", "third"]
    assert len(links.times) == 3
