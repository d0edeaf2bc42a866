"""Failover: a query that one server cannot answer goes to another server, within bounds; a write that may have
happened does not."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tao.client import (
    ClientSettings,
    DeadlineExceeded,
    Fenced,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    TaoError,
    Unavailable,
)
from tao.client.router import Router
from tao.client.server_queues import ServerQueue
from tao.model.errors import AnswerFull, DatabaseDown, DatabaseFull
from tao.model.graph import encode_object
from tao.routing.budgets import RetrySettings
from tao.routing.routes import Routes
from tao.topology.edits import mark_server
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SHARDS, Behaviour, FakeCluster, FakeLink, failing, make_id, make_topology, until

QUICK = ClientSettings(retry_backoff_seconds=0.001)
NO_RETRIES = RetrySettings(share=0, burst=1, per_second=0)
"""A budget that one retry would use up."""
BUDGET_OF_TWO = ClientSettings(retries=RetrySettings(burst=2, per_second=0), retry_backoff_seconds=0.001)


@pytest.mark.parametrize("error", [Unavailable("away"), DeadlineExceeded("late"), Fenced("lost")])
async def test_a_read_goes_to_the_next_tier_when_the_nearest_cannot_answer(
    cluster: FakeCluster, error: TaoError
) -> None:
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(error)
        assert await graph.obj_get(1) is None
        assert (len(cluster.batches("near-1")), len(cluster.batches("far-1"))) == (1, 1)
        assert (graph.stats.retries, graph.stats.failovers) == (1, 1)


async def test_only_the_slots_that_failed_are_retried(cluster: FakeCluster) -> None:
    def second_fails(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        errors = [error_to_pb(Unavailable("the leader is away"))]
        values = link.values(request.read)
        on_answer(
            pb.Answer(read=pb.ReadAnswer(slots=[0, 2], values=[values[0], values[2]], failed_slots=[1], errors=errors))
        )

    async with await cluster.connect(QUICK) as graph:
        await graph.assoc_add(7, "follows", 8, time=5)
        cluster.link("near-1").behaviour = second_fails
        found = await asyncio.gather(
            graph.obj_get(1), graph.assoc_range(7, "follows", 0, 10), graph.assoc_get(7, "follows", [8])
        )
        assert [each.id2s for each in found[1:]] == [[8], [8]]
        again = cluster.batches("far-1")[0].read
        assert (list(again.obj_ids), list(again.range_id1s), list(again.get_id1s)) == ([], [7], [])


async def test_an_impaired_server_is_avoided_until_it_is_well(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").is_impaired = True
        await graph.obj_get(1)
        await graph.assoc_add(1, "follows", 2)
        assert (len(cluster.batches("near-1")), len(cluster.batches("far-1"))) == (0, 2)
        cluster.link("near-1").is_impaired = False
        await graph.obj_get(1)
        assert len(cluster.batches("near-1")) == 1


async def test_when_all_servers_are_impaired_one_that_is_not_down_is_asked(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        near, far = cluster.link("near-1"), cluster.link("far-1")
        near.is_impaired = far.is_impaired = True
        await graph.obj_get(1)
        near.is_down = True
        assert graph.servers() == {"near-1": {"health": "down"}, "far-1": {"health": "up"}}
        await graph.obj_get(1)
        far.is_down = True
        await graph.obj_get(1)
        assert (len(cluster.batches("near-1")), len(cluster.batches("far-1"))) == (2, 1)


async def test_a_server_that_is_marked_down_is_not_asked_first() -> None:
    cluster = FakeCluster()
    async with await cluster.connect() as graph:
        graph.use_routes(Routes(mark_server(cluster.topology, "near-1", down=True)))
        await graph.obj_get(1)
        assert (cluster.batches("near-1"), len(cluster.batches("far-1"))) == ([], 1)


async def test_attempts_are_bounded_and_the_caller_receives_the_last_error(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        for name in ("near-1", "far-1"):
            cluster.link(name).behaviour = failing(Unavailable(f"{name} is away"))
        with pytest.raises(Unavailable):
            await graph.obj_get(1)
        assert len(cluster.batches()) == QUICK.max_attempts


async def test_retries_are_bounded_by_a_budget(cluster: FakeCluster) -> None:
    async with await cluster.connect(BUDGET_OF_TWO) as graph:
        for name in ("near-1", "far-1"):
            cluster.link(name).behaviour = failing(Unavailable("away"))
        for _ in range(10):
            with pytest.raises(Unavailable):
                await graph.obj_get(1)
        assert len(cluster.batches()) == 10 + 2
        assert (graph.stats.retries, graph.stats.retries_refused) == (2, 9)


@pytest.mark.parametrize("fault", [DatabaseDown("db-1 is down"), DatabaseFull("the disk of db-1 is full")])
async def test_nothing_is_retried_while_the_database_is_down_or_full(cluster: FakeCluster, fault: TaoError) -> None:
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(fault)
        with pytest.raises(Unavailable, match="db-1"):
            await graph.obj_get(1)
        with pytest.raises(Unavailable, match="db-1"):
            await graph.assoc_add(1, "follows", 2)
        assert len(cluster.batches()) == 2


async def test_a_read_is_not_retried_when_the_server_is_overloaded(cluster: FakeCluster) -> None:
    async with await cluster.connect() as graph:
        cluster.link("near-1").behaviour = failing(Overloaded("full"))
        with pytest.raises(Overloaded):
            await graph.obj_get(1)
        with pytest.raises(Overloaded):
            await graph.assoc_add(1, "follows", 2)
        assert len(cluster.batches()) == 2


async def test_a_write_that_certainly_did_not_happen_goes_to_the_next_tier(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(Unavailable("refused"))
        assert await graph.obj_add("user", {"name": "a"}, near=1) == 1
        assert (graph.stats.failovers, len(cluster.batches("far-1"))) == (1, 1)


async def test_a_write_that_may_have_happened_is_not_retried(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(OutcomeUnknown("broke in commit"))
        with pytest.raises(OutcomeUnknown, match="broke"):
            await graph.assoc_add(1, "follows", 2)
        assert len(cluster.batches()) == 1


async def test_only_the_writes_that_failed_are_retried(cluster: FakeCluster) -> None:
    def first_fails(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        results = [link.result(each) for each in request.write.writes[1:]]
        refused = pb.WriteResult(error=error_to_pb(Fenced("another leader owns the shard")))
        on_answer(pb.Answer(write=pb.WriteAnswer(results=[refused, *results])))

    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = first_fails
        await graph.assoc_add_many([(1, "follows", 2), (1, "follows", 3)])
        assert [each.assoc_add.id2 for each in cluster.batches("far-1")[0].write.writes] == [2]


async def test_not_mine_fetches_the_newer_topology_and_follows_it(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        newer = make_topology(version=2, near=("near-1", "near-2"), moved={0: ("near-2",)})
        cluster.topology = newer
        cluster.link("near-1").behaviour = failing(NotMine("shard 0 has moved", 2))
        assert await asyncio.gather(*(graph.obj_get(n) for n in (1, 2, 3))) == [None] * 3
        assert (graph.topology.version, graph.stats.topology_version) == (2, 2)
        assert [list(sent.read.obj_ids) for sent in cluster.batches("near-2")] == [[1, 2, 3]]
        assert cluster.batches("near-2")[0].topology_version == 2
        fetches = [sent for sent in cluster.link("near-1").sent if sent.HasField("get_topology")]
        assert len(fetches) <= 2  # one to connect, when this was the follower asked, and one now


async def test_the_queries_of_a_refused_batch_are_routed_once_however_many_servers_they_go_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routed: list[int] = []
    route = Router.next

    def counted(router: Router, shard: int, tried: tuple[ServerQueue, ...]) -> ServerQueue:
        routed.append(shard)
        return route(router, shard, tried)

    cluster = FakeCluster(make_topology(far=()))
    async with await cluster.connect(QUICK) as graph:
        others = tuple(f"near-{number}" for number in range(2, 10))
        placed: dict[int, tuple[str, ...]] = {shard: (others[shard % len(others)],) for shard in range(SHARDS)}
        cluster.topology = make_topology(version=2, near=others, far=(), moved=placed)
        cluster.link("near-1").behaviour = failing(NotMine("moved", 2))
        monkeypatch.setattr(Router, "next", counted)
        await asyncio.gather(*(graph.obj_get(make_id(1, shard)) for shard in range(SHARDS)))
        assert [len(cluster.batches(name)) for name in ("near-1", *others)] == [1] * 9
        assert sorted(routed) == list(range(SHARDS))


async def test_not_mine_of_a_server_with_an_older_topology_goes_to_another_server(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(NotMine("not yet", 0))
        assert await graph.obj_get(1) is None
        assert len(cluster.batches("far-1")) == 1


async def test_not_mine_from_every_server_reaches_the_caller(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        for name in ("near-1", "far-1"):
            cluster.link(name).behaviour = failing(NotMine("nobody's", 1))
        with pytest.raises(NotMine):
            await graph.obj_get(1)


async def test_a_read_waits_for_a_server_that_has_an_older_topology() -> None:
    """The first retries cost neither an attempt nor the budget: the server is about to read the newer document."""
    cluster = FakeCluster(make_topology(version=5, far=()))
    settings = ClientSettings(timeout_seconds=60, retries=NO_RETRIES, retry_backoff_seconds=1e-9)
    async with await cluster.connect(settings) as graph:
        cluster.link("near-1").behaviour = failing(NotMine("not yet", 4), times=3)
        assert await graph.obj_get(1) is None
        assert {sent.topology_version for sent in cluster.batches()} == {5}, "by which the server knows what to read"
        assert (graph.stats.retries, graph.stats.retries_refused, graph.stats.errors) == (3, 0, 0)
        cluster.link("near-1").behaviour = failing(NotMine("not yet", 4), times=3)
        await graph.assoc_add(1, "follows", 3)  # nothing was written, so a write may be sent again
        assert (await graph.assoc_range(1, "follows", 0, 9)).id2s == [3]


@pytest.mark.parametrize("version", [4, 6])
async def test_versions_that_never_meet_cost_attempts_after_a_few_refusals(version: int) -> None:
    """The server cannot read the newer document, or the client cannot."""
    cluster = FakeCluster(make_topology(version=5, far=()))
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(NotMine("never", version))
        with pytest.raises(NotMine):
            await graph.obj_get(1)
        assert len(cluster.batches()) == QUICK.max_attempts + 3


async def test_versions_that_never_meet_cost_budget_after_a_few_refusals() -> None:
    cluster = FakeCluster(make_topology(version=5, far=()))
    settings = ClientSettings(retries=RetrySettings(burst=2, per_second=0), retry_backoff_seconds=1e-9)
    async with await cluster.connect(settings) as graph:
        cluster.link("near-1").behaviour = failing(NotMine("never", 4))
        for _ in range(5):
            with pytest.raises(NotMine):
                await graph.assoc_add(1, "follows", 2)
        assert len(cluster.batches()) == 5 * (1 + 3) + 2
        assert graph.stats.retries_refused == 4


async def test_two_servers_with_two_older_topologies_do_not_refuse_a_read_for_ever() -> None:
    cluster = FakeCluster(make_topology(version=5))
    async with await cluster.connect(QUICK) as graph:
        for version, name in enumerate(("near-1", "far-1")):
            cluster.link(name).behaviour = failing(NotMine("never", version))
        with pytest.raises(NotMine):
            await graph.obj_get(1)
        assert len(cluster.batches()) <= QUICK.max_attempts + 2 * 3


async def test_a_newer_topology_that_cannot_be_used_is_fetched_once() -> None:
    cluster = FakeCluster(make_topology(far=()))
    async with await cluster.connect(QUICK) as graph:
        link = cluster.link("near-1")
        elsewhere = make_topology(version=2).regions[0]
        renamed = msgspec.structs.replace(elsewhere, name="west")
        cluster.topology = msgspec.structs.replace(make_topology(version=2), regions=(renamed,))
        link.behaviour = failing(NotMine("moved", 2))
        for _ in range(2):
            with pytest.raises(NotMine):
                await graph.obj_get(1)
        assert graph.topology.version == 1
        assert sum(sent.HasField("get_topology") for sent in link.sent) == 1 + 1, "one to connect"


async def test_a_read_waits_up_to_its_deadline_while_servers_have_newer_topologies() -> None:
    """The topology goes on changing, each time before the query arrives."""
    cluster = FakeCluster(make_topology(far=()))
    settings = ClientSettings(timeout_seconds=60, retries=NO_RETRIES, retry_backoff_seconds=1e-9)
    versions = iter(range(2, 22))

    def moved_again(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        version = next(versions, 0)
        if version:
            cluster.topology = make_topology(version=version, far=())
            on_answer(pb.Answer(error=error_to_pb(NotMine("moved", version))))
        else:
            on_answer(link.answer(request))

    async with await cluster.connect(settings) as graph:
        cluster.link("near-1").behaviour = moved_again
        assert await graph.obj_get(1) is None
        assert [sent.topology_version for sent in cluster.batches()] == [*range(1, 22)]


class RefusingIds(FakeLink):
    """A link that refuses to reserve ids, by an older topology, a number of times."""

    refusals = 3

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        if request.HasField("reserve_ids") and self.refusals:
            self.refusals -= 1
            raise NotMine("not yet", 0)
        return await super().ask(request, timeout_seconds)


async def test_ids_are_reserved_when_the_server_has_read_the_newer_topology() -> None:
    cluster = FakeCluster(make_topology(far=()))
    link = cluster.links["near-1"] = RefusingIds("near-1", cluster)
    settings = ClientSettings(timeout_seconds=60, retries=NO_RETRIES, retry_backoff_seconds=1e-9)
    async with await cluster.connect(settings) as graph:
        assert len(await graph.reserve_ids(3, shard=0)) == 3
        assert link.refusals == 0


class NoTopology(FakeLink):
    """A link whose server sends its topology once, and then does not answer when it is asked for it."""

    asked = 0

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        if request.HasField("get_topology"):
            self.asked += 1
            if self.asked > 1:
                await asyncio.Event().wait()
        return await super().ask(request, timeout_seconds)


async def test_a_server_that_does_not_send_its_newer_topology_costs_a_part_of_the_time() -> None:
    cluster = FakeCluster(make_topology(far=()))
    cluster.links["near-1"] = NoTopology("near-1", cluster)
    settings = ClientSettings(timeout_seconds=60, first_attempt_share=0.001, retry_backoff_seconds=1e-9)
    async with await cluster.connect(settings) as graph:
        cluster.link("near-1").behaviour = failing(NotMine("moved", 2), times=2)
        assert await graph.obj_get(1) is None
        assert len(cluster.batches()) == 3


class Down(FakeLink):
    """A link that stays down, and counts how often somebody looks whether it does."""

    looks = 0

    @property
    def is_down(self) -> bool:
        self.looks += 1
        return True

    @is_down.setter
    def is_down(self, down: bool) -> None:
        pass


async def test_a_read_that_waits_for_a_server_that_is_down_goes_where_a_newer_topology_places_it() -> None:
    cluster = FakeCluster(make_topology(far=()))
    down = cluster.links["near-1"] = Down("near-1", cluster)
    down.behaviour = failing(Unavailable("it has left"))
    async with await cluster.connect(ClientSettings(timeout_seconds=60, retry_backoff_seconds=1e-9)) as graph:
        reading = asyncio.ensure_future(graph.obj_get(1))
        await until(lambda: len(cluster.batches("near-1")) == 1)
        looks = down.looks
        await until(lambda: down.looks > looks + 10)  # the read waits for it
        graph.use_routes(Routes(make_topology(version=2, near=("near-2",), far=())))
        assert await reading is None
        assert len(cluster.batches("near-2")) == 1


async def test_queries_that_are_refused_otherwise_are_bounded_beside_those_of_an_older_topology() -> None:
    """Both are of one batch: one slot is refused by an older topology, the other one is not answered."""
    cluster = FakeCluster(make_topology(far=()))

    def refuse(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        ids = list(request.read.obj_ids)
        errors = [NotMine("not yet", 0) if each == 1 else Unavailable("restarting") for each in ids]
        on_answer(pb.Answer(read=pb.ReadAnswer(failed_slots=range(len(ids)), errors=map(error_to_pb, errors))))

    settings = ClientSettings(timeout_seconds=60, retry_backoff_seconds=1e-9)
    async with await cluster.connect(settings) as graph:
        cluster.link("near-1").behaviour = refuse
        skewed = asyncio.ensure_future(graph.obj_get(1))
        with pytest.raises(Unavailable):
            await graph.obj_get(2)
        assert not skewed.done(), "it has more tries"
        cluster.link("near-1").behaviour = None
        assert await skewed is None


async def test_a_retry_at_the_only_server_waits_for_a_pause() -> None:
    cluster = FakeCluster(make_topology(far=()))
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(Unavailable("restarting"), times=1)
        assert await graph.obj_get(1) is None
        assert (graph.stats.retries, graph.stats.failovers) == (1, 0)
        assert cluster.link("near-1").timeouts[-1] <= QUICK.timeout_seconds


class BackAfterLooks(FakeLink):
    """A link that is down, and refuses at once, until its health was read a number of times."""

    looks = 50

    @property
    def is_down(self) -> bool:
        self.looks -= 1
        return self.looks > 0

    @is_down.setter
    def is_down(self, down: bool) -> None:
        pass

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        self.behaviour = failing(Unavailable("down")) if self.looks > 0 else None
        super().send(request, timeout_seconds, on_answer)


async def test_a_read_waits_up_to_its_deadline_for_an_only_server_that_is_down() -> None:
    cluster = FakeCluster(make_topology(far=()))
    cluster.links["near-1"] = BackAfterLooks("near-1", cluster)
    settings = ClientSettings(timeout_seconds=60, retry_backoff_seconds=1e-9)
    async with await cluster.connect(settings) as graph:
        assert await graph.obj_get(1) is None
        assert (len(cluster.batches()), graph.stats.retries) == (2, 1)


async def test_a_read_whose_only_server_stays_down_costs_one_retry_at_most() -> None:
    cluster = FakeCluster(make_topology(far=()))
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = failing(Unavailable("down"))
        cluster.link("near-1").is_down = True
        with pytest.raises(Unavailable, match="down"):
            await graph.obj_get(1)
        assert len(cluster.batches()) == 1
        with pytest.raises(Unavailable):  # a write fails after a few attempts
            await graph.obj_delete(1)
        assert len(cluster.batches()) == 1 + QUICK.max_attempts


async def test_the_first_of_several_servers_gets_a_share_of_the_time(cluster: FakeCluster) -> None:
    async with await cluster.connect() as graph:
        await graph.obj_get(1)
        await graph.assoc_add(1, "follows", 2)
        read, write = [t for t in cluster.link("near-1").timeouts if t < 100]
        assert read <= 1.0 < write <= 2.0


async def test_the_first_server_that_does_not_refuse_a_read_for_its_topology_gets_a_share_of_the_time(
    cluster: FakeCluster,
) -> None:
    async with await cluster.connect() as graph:
        cluster.link("near-1").behaviour = failing(NotMine("not yet", 0), times=1)
        await graph.obj_get(1)
        (timeout,) = [t for t in cluster.link("far-1").timeouts if t < 100]
        assert timeout <= 1.0


async def test_reads_spread_over_clones_and_writes_go_to_the_home() -> None:
    cluster = FakeCluster(make_topology(near=("n1", "n2"), moved={0: ("n2", "n1")}))
    async with await cluster.connect() as graph:
        for _ in range(4):
            await graph.obj_get(1)
        assert (len(cluster.batches("n1")), len(cluster.batches("n2"))) == (2, 2)
        for _ in range(4):
            await graph.assoc_add(1, "follows", 2)
        assert (len(cluster.batches("n1")), len(cluster.batches("n2"))) == (2, 6)


async def test_the_preferred_tier_is_asked_first(cluster: FakeCluster) -> None:
    async with await cluster.connect(tier_name="far") as graph:
        await graph.obj_get(make_id(1, 3))
        assert len(cluster.batches("far-1")) == 1


async def test_ids_are_reserved_through_the_next_server_when_one_is_down(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:

        async def away(request: pb.Request, timeout_seconds: float) -> pb.Answer:
            raise Unavailable("away")

        cluster.link("near-1").ask = away  # type: ignore[method-assign]
        assert await graph.reserve_ids(3, shard=2) == [make_id(n, 2) for n in (1, 2, 3)]


def with_room_for(room: int) -> Behaviour:
    """Answer the first queries of each message, and report the others as too many for the answer."""

    def behaviour(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        values = link.values(request.read)
        beyond = list(range(room, len(values)))
        errors = [error_to_pb(AnswerFull("the answer is full"))] * len(beyond)
        on_answer(pb.Answer(read=pb.ReadAnswer(values=values[:room], failed_slots=beyond, errors=errors)))

    return behaviour


async def test_queries_for_which_an_answer_has_no_room_go_to_the_same_server_again(cluster: FakeCluster) -> None:
    ids = [make_id(number) for number in range(1, 101)]
    cluster.objects = {each: encode_object(1, 1, b"") for each in ids}
    async with await cluster.connect(QUICK) as graph:
        cluster.link("near-1").behaviour = with_room_for(7)
        assert [each and each.id for each in await graph.obj_get_many(ids)] == ids
        sizes = [len(sent.read.obj_ids) for sent in cluster.batches("near-1")]
        assert sizes == list(range(100, 0, -7))
        assert graph.stats.failovers == 0


async def test_a_server_that_finds_room_for_no_answer_is_not_asked_for_ever(cluster: FakeCluster) -> None:
    async with await cluster.connect(QUICK) as graph:
        for name in ("near-1", "far-1"):
            cluster.link(name).behaviour = with_room_for(0)
        with pytest.raises(Overloaded, match="full"):
            await graph.obj_get(make_id(1))
        assert len(cluster.batches()) == QUICK.max_attempts
