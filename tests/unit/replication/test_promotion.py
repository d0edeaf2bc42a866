"""How long a promotion waits for the lease of a lost master, and what the others have done by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partialmethod
from pathlib import Path
from typing import cast

import pytest

from tao.model.errors import OperatorError, TopologyError, Unavailable
from tao.model.ports import TopologyStore
from tao.model.topology import CacheServer, Region, Tier, Topology
from tao.replication import promotion
from tao.replication.accounts import Account
from tao.replication.concurrent_steps import both
from tao.replication.lease import LeaseTerms, lease_over_at
from tao.replication.locks import FileLocks, mastership_lock
from tao.replication.lost_master import LostMaster
from tao.replication.promotion import (
    OnStep,
    Promoter,
    PromotionSettings,
    PromotionStep,
    _Installed,
    _Loss,
)
from tao.replication.promotion_plan import MasterAnswers, PromotionRefused, PromotionRequest, SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.topology import edits
from tao.topology.document import dump_topology
from tao.topology.file_store import TopologyFile
from tests.rigs.pacing import ManualClock, loop_clock
from tests.unit.replication.members import master, replica
from tests.unit.replication.test_replication_set import replication_set_of

ACCOUNTS = SetAccounts(Account("tao_admin", "secret"), Account("tao_replicator", "secret"))


def promoter_of(folder: Path, on_step: OnStep | None = None) -> Promoter:
    locks = FileLocks(folder / "topology.json")
    return Promoter(cast("TopologyStore", None), locks, ACCOUNTS, PromotionSettings(), on_step=on_step)


@pytest.mark.parametrize(
    ("can_be_away", "semi_sync", "asked"),
    [
        (True, True, ["before", "after"]),
        (True, False, ["before"]),
        (False, True, ["before"]),
    ],
)
async def test_it_asks_for_renewals_again_when_the_others_have_stopped_receiving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_be_away: bool, semi_sync: bool, asked: list[str]
) -> None:
    members = [master(None), replica("west", "1-1-1", receiving=True, acknowledges=True)]
    when, steps, stopped = list[str](), list[PromotionStep](), list[str]()

    async def last_renewal() -> float:
        when.append("after" if stopped else "before")
        return -100.0

    async def lease_terms(_: ReplicationSet, region: str) -> LeaseTerms:
        return LeaseTerms(5.0)

    async def stop_receiving(_: ReplicationSet, region: str) -> SetMember:
        stopped.append(region)
        return members[1]

    async def on_step(step: PromotionStep) -> None:
        steps.append(step)

    async def stop_receiving_again(replicas: ReplicationSet, region: str) -> tuple[SetMember, bool]:
        return await stop_receiving(replicas, region), False

    for each in (lease_terms, stop_receiving, stop_receiving_again):
        monkeypatch.setattr(ReplicationSet, each.__name__, each)
    promoter = promoter_of(tmp_path, on_step)
    monkeypatch.setattr(promoter._locks, "can_be_away", can_be_away)
    replicas = replication_set_of("east", "west", semi_sync=semi_sync)
    loss = _Loss(LostMaster(replicas), last_renewal, 0.0, False, lambda: False)
    chosen = await promoter._choose(replicas, members, PromotionRequest(master_lost=True), loss)
    assert chosen.region == "west"
    assert when == asked
    assert stopped == ["west"] * len(asked), "a replica that restarts meanwhile receives by itself"
    assert steps == [PromotionStep.FENCE, PromotionStep.STOP_RECEIVING, PromotionStep.COMPARE]


@pytest.fixture
def topology_file(tmp_path: Path) -> Path:
    """A database whose replica in the west is marked down."""

    def tier(name: str) -> Tier:
        return Tier(name=name, servers=(CacheServer(name=f"{name}-1", grpc="127.0.0.1:1"),))

    regions = tuple(
        Region(name=each, leaders=tier(f"{each}-leaders"), followers=(tier(f"{each}-web"),))
        for each in ("east", "west", "north")
    )
    database = replication_set_of("east", "west", "north", marked="west").database
    path = tmp_path / "topology.json"
    path.write_text(dump_topology(Topology(version=1, shards=2, regions=regions, databases=(database,))))
    return path


def promoter_at(file: Path) -> Promoter:
    def fail(error: TopologyError) -> None:
        raise error

    return Promoter(TopologyFile(file, on_error=fail), FileLocks(file), ACCOUNTS, PromotionSettings())


class Rejoin:
    """A server that is attached and catches up, without any database: what it does is noted."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(error: TopologyError) -> None:
            raise error

        self.store = TopologyFile(file, on_error=fail)
        self.locks = FileLocks(file)
        self.done = list[str]()
        self.promoter = Promoter(self.store, self.locks, ACCOUNTS, PromotionSettings())
        self.promotes_meanwhile = False
        for name in ("close", "follow", "until_applied", "beside_master"):
            monkeypatch.setattr(ReplicationSet, name, partialmethod(getattr(type(self), f"_{name}"), rejoin=self))
        monkeypatch.setattr(Promoter, "_acknowledged", partialmethod(type(self)._acknowledged, rejoin=self))

    @staticmethod
    async def _close(_: ReplicationSet, region: str, *, rejoin: Rejoin) -> None:
        rejoin.done.append(f"close {region}")

    @staticmethod
    async def _follow(_: ReplicationSet, region: str, master_region: str, *, rejoin: Rejoin) -> None:
        rejoin.done.append(f"{region} follows {master_region}")

    @staticmethod
    async def _until_applied(replicas: ReplicationSet, region: str, _: float, *, rejoin: Rejoin) -> None:
        replicas.check_hold()
        async with rejoin.locks.held(mastership_lock("db"), exclusive=False):
            rejoin.done.append(f"{region} catches up, and the lease is renewed")
        if rejoin.promotes_meanwhile:
            found = await rejoin.store.load()
            await rejoin.store.change(found.version, edits.promote(found, "db", "north", 2))

    @staticmethod
    async def _beside_master(_: ReplicationSet, region: str, *, rejoin: Rejoin) -> tuple[SetMember, SetMember]:
        return replica(region, "1-1-1", receiving=True), master("1-1-1")

    @staticmethod
    async def _acknowledged(_: Promoter, replicas: ReplicationSet, expected: bool, *, rejoin: Rejoin) -> bool:
        return True


async def test_the_masters_lease_is_renewed_while_a_server_that_rejoins_catches_up(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejoin = Rejoin(topology_file, monkeypatch)
    await rejoin.promoter.rejoin("db", "west-db")
    assert rejoin.done == ["close west", "west follows east", "west catches up, and the lease is renewed"]
    assert not (await rejoin.store.load()).databases[0].servers["west"].down


async def test_a_server_whose_master_is_replaced_while_it_catches_up_stays_marked(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejoin = Rejoin(topology_file, monkeypatch)
    rejoin.promotes_meanwhile = True
    with pytest.raises(OperatorError, match="west-db does not follow east-db any more"):
        await rejoin.promoter.rejoin("db", "west-db")
    assert (await rejoin.store.load()).databases[0].servers["west"].down


async def test_a_promotion_fails_only_when_no_server_is_being_detached_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows attaches them again."""
    detaching, detached = asyncio.Event(), list[str]()

    async def forget_master(_: ReplicationSet, region: str, chosen: SetMember) -> None:
        if region == "north":
            raise Unavailable("its connection broke")
        await detaching.wait()
        detached.append(region)

    monkeypatch.setattr(ReplicationSet, "forget_master", forget_master)
    others = [replica(region, "1-1-1") for region in ("west", "north", "south")]
    replicas = replication_set_of("east", "west", "north", "south", semi_sync=True)
    outlast = promoter_of(tmp_path)._outlast(replicas, others[0], others, 0.0, asyncio.Event())
    failing = asyncio.ensure_future(outlast)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not failing.done()
    detaching.set()
    with pytest.raises(Unavailable):
        await failing
    assert detached == ["south"]


async def test_a_promotion_fails_only_when_no_replica_is_being_stopped_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, stopped = asyncio.Event(), list[str]()

    async def stop_receiving(_: ReplicationSet, region: str) -> SetMember:
        if region == "north":
            raise Unavailable("its connection broke")
        await stopping.wait()
        stopped.append(region)
        return replica(region, "1-1-1")

    monkeypatch.setattr(ReplicationSet, "stop_receiving", stop_receiving)
    others = [replica(region, "1-1-1") for region in ("north", "south")]
    replicas = replication_set_of("east", "north", "south", semi_sync=True)
    failing = asyncio.ensure_future(promoter_of(tmp_path)._stop_receiving(replicas, others, waits_long=False))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not failing.done()
    stopping.set()
    with pytest.raises(Unavailable):
        await failing
    assert stopped == ["south"]


@pytest.mark.parametrize("answers", [False, True])
async def test_an_interrupted_promotion_is_finished_only_when_the_lease_of_a_silent_master_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The lease may have been renewed since the run that raised the epoch."""
    members = [master("1-1-1" if answers else None), replica("west", "1-1-1", alone=True)]
    done = list[str]()

    async def all_members(_: ReplicationSet) -> object:
        return members

    async def epochs_as_masters(*_: object) -> object:
        return {"west-db": 9}, {}

    async def close(_: ReplicationSet, region: str) -> None:
        done.append(f"close {region}")

    async def beside_master(_: ReplicationSet, region: str) -> object:
        return members[1], members[0]

    async def member(_: ReplicationSet, region: str) -> SetMember:
        return next(each for each in members if each.region == region)

    async def wait_for_lease(*_: object) -> None:
        done.append("wait")

    async def apply_and_detach(*_: object) -> None: ...

    async def prepare(*_: object) -> None: ...

    async def install(*_: object, **__: object) -> None:
        done.append("install")
        raise Unavailable("the rest is not of interest")

    async def as_successor(_: ReplicationSet, member: SetMember) -> SetMember:
        return member

    async def was_opened(*_: object) -> bool:
        return False

    for name, instead in (
        ("members", all_members),
        ("epochs_as_masters", epochs_as_masters),
        ("close", close),
        ("member", member),
        ("beside_master", beside_master),
        ("as_successor", as_successor),
        ("was_opened", was_opened),
    ):
        monkeypatch.setattr(ReplicationSet, name, instead)
    promoter = promoter_of(tmp_path)
    for name, replaced in (
        ("_wait_for_lease", wait_for_lease),
        ("_apply_and_detach", apply_and_detach),
        ("_prepare", prepare),
        ("_install", install),
    ):
        monkeypatch.setattr(promoter, name, replaced)
    with pytest.raises(Unavailable):
        await promoter._restore(replication_set_of("east", "west", semi_sync=True), None)
    assert done == (["close east", "install"] if answers else ["wait", "install"])


@pytest.mark.parametrize(("renewed_at", "over_at"), [(4.0, 6.5), (50.0, 12.5), (None, 12.5)])
async def test_the_lease_is_over_no_later_than_after_the_moment_from_which_nobody_could_renew_it(
    renewed_at: float | None, over_at: float
) -> None:
    """A watcher that does not say when it renewed last counts as one that has done so just now."""

    async def last_renewal() -> float:
        assert renewed_at is not None
        return renewed_at

    assert await lease_over_at(2.5, None if renewed_at is None else last_renewal, 10.0) == over_at


async def test_a_promotion_goes_on_only_when_both_of_two_concurrent_steps_have_ended() -> None:
    ended = asyncio.Event()

    async def fail() -> None:
        raise Unavailable("its connection broke")

    steps = asyncio.ensure_future(both(fail(), ended.wait()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not steps.done()
    ended.set()
    with pytest.raises(Unavailable):
        await steps


@pytest.mark.parametrize("waited", [True, False])
async def test_a_lost_master_that_answers_before_its_lease_is_over_keeps_its_place(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch, waited: bool
) -> None:
    """It is asked all the time, and its answer ends the wait."""
    done = list[str]()
    resumed = asyncio.Event()

    async def stop_receiving(_: ReplicationSet, region: str) -> SetMember:
        return replica(region, "1-1-1")

    async def member(_: ReplicationSet, region: str, *__: float) -> SetMember:
        if region != "east":
            return replica(region, "1-1-1")
        if waited or done:
            await resumed.wait()
            return master("1-1-1")
        done.append("it does not answer")
        return master(None)

    async def over(*parameters: object) -> None:
        unless = parameters[-1]
        assert isinstance(unless, asyncio.Event)
        resumed.set()
        await unless.wait()
        done.append("the wait for its lease has ended")

    async def restore(*_: object) -> None:
        done.append("it is restored")

    async def nothing(*_: object) -> float:
        return 0.0

    for name, instead in (("stop_receiving", stop_receiving), ("member", member)):
        monkeypatch.setattr(ReplicationSet, name, instead)

    promoter = promoter_at(topology_file)
    for name, replaced in (
        ("_wait_for_lease", over),
        ("_outlast", over),
        ("_restore", restore),
        *((each, nothing) for each in ("_apply_and_detach", "_prepare", "_reads_over_at", "_lease_terms")),
    ):
        monkeypatch.setattr(promoter, name, replaced)
    monkeypatch.setattr(promotion, "is_fenced_by_replicas", lambda *_, **__: waited)
    with pytest.raises(MasterAnswers):
        await promoter.promote("db", PromotionRequest(master_lost=True))
    assert done[-2:] == ["the wait for its lease has ended", "it is restored"]


async def test_second_sessions_are_opened_while_the_replicas_of_a_master_that_hangs_stop_receiving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round trips of their opening would follow that second, and writers wait for them."""
    opened = asyncio.Event()

    async def stop_receiving(_: ReplicationSet, region: str) -> SetMember:
        await opened.wait()
        return replica(region, "1-1-1")

    async def lease_terms(*_: object) -> LeaseTerms:
        opened.set()
        return LeaseTerms()

    for each in (stop_receiving, lease_terms):
        monkeypatch.setattr(ReplicationSet, each.__name__, each)
    replicas, members = replication_set_of("east", "west", semi_sync=True), [master(None), replica("west", "1-1-1")]
    loss = _Loss(LostMaster(replicas), None, 0.0, True, lambda: False)
    chosen = await promoter_of(tmp_path)._choose(replicas, members, PromotionRequest(master_lost=True), loss)
    assert chosen.region == "west"


@pytest.mark.parametrize("answered", [True, False])
async def test_a_lost_master_that_has_answered_somebody_else_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    async def nothing(*_: object) -> None: ...

    async def member(_: ReplicationSet, region: str, *__: float) -> SetMember:
        return master(None)

    monkeypatch.setattr(ReplicationSet, "member", member)
    promoter, replicas = promoter_of(tmp_path), replication_set_of("east", "west", semi_sync=True)
    for name in ("_apply_and_detach", "_prepare"):
        monkeypatch.setattr(promoter, name, nothing)
    lost = LostMaster(replicas)
    loss = _Loss(lost, None, 0.0, False, lambda: answered)
    members = [master(None), replica("west", "1-1-1")]
    async with lost.asked():
        with pytest.raises(MasterAnswers, match="slow") if answered else nullcontext():
            ready = await promoter._make_ready(replicas, members[1], members, PromotionRequest(master_lost=True), loss)
            assert ready[1] == "east-db"


async def test_a_master_that_was_promoted_while_the_run_waited_for_the_lock_is_not_taken_for_the_lost_one(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen of its predecessor says nothing of it."""
    store = TopologyFile(topology_file, on_error=lambda _: None)
    found = await store.load()
    await store.change(found.version, edits.promote(found, "db", "north", 2, "east-db"))
    asked = list[str]()

    async def member(_: ReplicationSet, region: str, *__: float) -> SetMember:
        asked.append(region)
        raise Unavailable("nobody is to be asked")

    monkeypatch.setattr(ReplicationSet, "member", member)
    request = PromotionRequest(master_lost=True, waited_for_replica=True, master="east-db")
    with pytest.raises(PromotionRefused, match="north-db is the master by now"):
        await promoter_at(topology_file).promote("db", request)
    assert asked == []


@pytest.mark.parametrize(
    ("seconds", "only_fenced", "promotes"), [(5.0, True, True), (0.0, True, False), (0.0, False, True)]
)
async def test_a_watcher_replaces_no_master_that_neither_a_lease_nor_its_replicas_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, only_fenced: bool, promotes: bool
) -> None:
    """Its commits perhaps wait for none by now. An operator knows whether it is lost."""
    west = replica("west", "1-1-1")

    async def lease_terms(_: ReplicationSet, region: str) -> LeaseTerms:
        return LeaseTerms(seconds)

    async def last_renewal() -> float:
        return -100.0

    async def stop_receiving(_: ReplicationSet, region: str) -> SetMember:
        return west

    for each in (lease_terms, stop_receiving):
        monkeypatch.setattr(ReplicationSet, each.__name__, each)
    replicas = replication_set_of("east", "west", semi_sync=True)
    loss = _Loss(LostMaster(replicas), last_renewal, 0.0, False, lambda: False)
    request = PromotionRequest(master_lost=True, only_fenced=only_fenced)
    with nullcontext() if promotes else pytest.raises(PromotionRefused, match="keeps no lease"):
        assert await promoter_of(tmp_path)._choose(replicas, [master(None), west], request, loss) == west


@pytest.mark.parametrize("still", [True, False])
async def test_what_was_seen_of_the_commits_of_a_lost_master_has_to_hold_once_the_lock_is_held(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch, still: bool
) -> None:
    waited = list[bool]()

    async def members_of_lost(_: ReplicationSet, request: PromotionRequest, __: LostMaster) -> None:
        waited.append(request.waited_for_replica)
        raise Unavailable("the rest is not of interest")

    async def member(_: ReplicationSet, region: str, *__: float) -> SetMember:
        return master(None)

    monkeypatch.setattr(ReplicationSet, "member", member)
    promoter = promoter_at(topology_file)
    monkeypatch.setattr(promoter, "_members_of_lost", members_of_lost)
    request = PromotionRequest(master_lost=True, waited_for_replica=True, master="east-db")
    with pytest.raises(Unavailable):
        await promoter.promote("db", request, still_waits=lambda: still)
    assert waited == [still]


async def test_a_new_master_asks_no_lost_one_whether_it_acknowledges(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes would wait for the silence of one that hangs."""
    asked = list[str]()

    async def member(replicas: ReplicationSet, region: str, *_: float) -> SetMember:
        asked.append(region)
        return replica(region, "1-1-1", receiving=True, acknowledges=True)

    async def acknowledged(*_: object) -> bool:
        return True

    monkeypatch.setattr(ReplicationSet, "member", member)
    monkeypatch.setattr(ReplicationSet, "follows", lambda *_: True)
    promoter = promoter_at(topology_file)
    monkeypatch.setattr(promoter, "_acknowledged", acknowledged)
    replicas = replication_set_of("north", "west", "east", semi_sync=True, marked="east")
    assert await promoter._acknowledged_in_use(replicas, ["west-db"])
    assert asked == ["west"]


@pytest.mark.parametrize("epoch", [0, 9])
async def test_only_a_promotion_whose_epoch_was_raised_is_finished(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    done = list[str]()

    async def members(_: ReplicationSet) -> object:
        return [master("1-1-1"), replica("west", "1-1-1,2-2-9", alone=True), replica("north", "1-1-1", stopped=True)]

    async def epochs_as_masters(*_: object) -> object:
        return {"west-db": epoch}, {}

    async def restore(*_: object) -> None:
        done.append("it is finished")

    monkeypatch.setattr(ReplicationSet, "members", members)
    monkeypatch.setattr(ReplicationSet, "epochs_as_masters", epochs_as_masters)
    promoter = promoter_at(topology_file)
    monkeypatch.setattr(promoter, "_restore", restore)
    with nullcontext() if epoch else pytest.raises(PromotionRefused, match="tao reseed"):
        await promoter.finish("db")
    assert done == (["it is finished"] if epoch else [])


async def test_a_watcher_that_looks_for_a_promotion_to_finish_in_vain_does_not_hold_the_lock_for_it(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again every second, and a server is marked only while nobody holds the lock."""

    async def members(_: ReplicationSet) -> object:
        return [master("1-1-1"), replica("west", "1-1-1,2-2-9", alone=True)]

    async def epochs_as_masters(*_: object) -> object:
        return {"west-db": 0}, {}

    monkeypatch.setattr(ReplicationSet, "members", members)
    monkeypatch.setattr(ReplicationSet, "epochs_as_masters", epochs_as_masters)
    async with FileLocks(topology_file).held(mastership_lock("db"), exclusive=True):
        with pytest.raises(PromotionRefused, match="tao reseed"):
            await promoter_at(topology_file).finish("db")


@pytest.mark.parametrize("step", [PromotionStep.FENCE, PromotionStep.STOP_RECEIVING, PromotionStep.RAISE_EPOCH])
@pytest.mark.parametrize(
    "error", [Unavailable("an answer is missing"), OSError("the disk is full"), asyncio.CancelledError()], ids=repr
)
async def test_a_promotion_is_undone_whatever_breaks_it_off(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch, step: PromotionStep, error: BaseException
) -> None:
    undone = list[str]()

    async def members(_: ReplicationSet) -> object:
        return [master("1-1-1"), replica("west", "1-1-1", receiving=True), replica("north", "1-1-1", receiving=True)]

    async def go_on(*_: object) -> object:
        return master("1-1-1"), ""

    async def begin(_: Promoter, __: ReplicationSet, at: PromotionStep) -> None:
        if at is step:
            raise error

    async def choose(promoter: Promoter, replicas: ReplicationSet, *_: object) -> object:
        for each in (PromotionStep.FENCE, PromotionStep.STOP_RECEIVING):
            await begin(promoter, replicas, each)
        return await go_on()

    async def restore(_: Promoter, replicas: ReplicationSet, *__: object) -> None:
        undone.append(replicas.master.name)
        raise OperatorError("a server is silent")

    monkeypatch.setattr(ReplicationSet, "members", members)
    for name, instead in (("_choose", choose), ("_make_ready", go_on), ("_begin", begin), ("_restore", restore)):
        monkeypatch.setattr(Promoter, name, instead)
    with pytest.raises(type(error)) as raised:
        await promoter_at(topology_file).promote("db", PromotionRequest("north"))
    assert raised.value is error, "and not the error of the undoing, which is noted there"
    assert raised.value.__notes__[-1] == "The promotion is not undone yet: a server is silent"
    assert undone == ["east-db"]


async def test_a_promotion_is_undone_that_is_cancelled_while_it_ends_its_questions_to_the_old_master(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the last thing before the epoch is raised, and the replicas are stopped."""
    undone = list[str]()

    async def members(*_: object) -> object:
        return [replica("west", "1-1-1"), replica("north", "1-1-1"), master(None)], True

    async def go_on(*_: object) -> object:
        return master(None), ""

    @asynccontextmanager
    async def asked(_: LostMaster) -> AsyncIterator[None]:
        yield
        raise asyncio.CancelledError

    async def restore(_: Promoter, replicas: ReplicationSet, *__: object) -> None:
        undone.append(replicas.master.name)

    monkeypatch.setattr(LostMaster, "asked", asked)
    for name, instead in (("_members_of_lost", members), ("_choose", go_on), ("_make_ready", go_on)):
        monkeypatch.setattr(Promoter, name, instead)
    monkeypatch.setattr(Promoter, "_restore", restore)
    with pytest.raises(asyncio.CancelledError):
        await promoter_at(topology_file).promote("db", PromotionRequest(master_lost=True))
    assert undone == ["east-db"]


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    return loop_clock(monkeypatch)


@pytest.mark.parametrize("third_server_hangs", [True, False])
async def test_the_lease_of_a_new_master_is_not_half_over_when_it_is_opened(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock, third_server_hangs: bool
) -> None:
    """Nobody follows it; a server that did not answer was waited for all the same."""
    granted = list[int]()

    def now_ms() -> int:
        return round(1000 * clock.now)

    @asynccontextmanager
    async def session(_: ReplicationSet, region: str) -> AsyncIterator[str]:
        yield region

    async def member(_: ReplicationSet, region: str, *__: float) -> SetMember:
        if region == "west":
            return master("1-1-1", region=region)
        if third_server_hangs:
            clock.now += 5.0
        return replica(region, None)

    async def server_unix_ms(*_: object, **__: object) -> int:
        return now_ms()

    async def grant_lease(_: object, since: int, **__: object) -> None:
        granted.append(since)

    async def open_to_writes(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(ReplicationSet, "session", session)
    monkeypatch.setattr(ReplicationSet, "member", member)
    for each in (server_unix_ms, grant_lease, open_to_writes):
        monkeypatch.setattr(promotion, each.__name__, each)
    promoter = promoter_at(topology_file)
    installed = _Installed(LeaseTerms(2.5, 2.5), now_ms(), clock.now, "east-db")
    clock.now += 0.1
    replicas = replication_set_of("west", "north", "east", semi_sync=True)
    await promoter._open(replicas, settle=False, installed=installed)
    assert granted == [now_ms() if third_server_hangs else installed.unix_ms]


@pytest.mark.parametrize(("fenced", "restarts"), [(True, 0), (False, 0), (False, 1), (False, 3)])
async def test_an_unknown_last_renewal_may_have_been_when_the_replicas_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock, fenced: bool, restarts: int
) -> None:
    """A watcher that is cut off from the locks may have renewed the lease until then, and again when a replica that
    restarts receives for a moment."""
    terms, waited_until, stopped_at = LeaseTerms(2.5, 2.5), list[float](), list[float]()

    async def lease_terms(_: ReplicationSet, region: str) -> LeaseTerms:
        return terms

    async def stop_receiving(_: ReplicationSet, region: str) -> SetMember:
        clock.now += 1.0
        stopped_at.append(clock.now)
        return replica(region, "1-1-1")

    async def stop_receiving_again(replicas: ReplicationSet, region: str) -> tuple[SetMember, bool]:
        return await stop_receiving(replicas, region), len(stopped_at) <= 1 + restarts

    async def wait(_: ReplicationSet, seconds: float, unless: asyncio.Event) -> None:
        clock.now += seconds
        waited_until.append(clock.now)

    async def last_renewal() -> float:
        return clock.now

    for each in (lease_terms, stop_receiving, stop_receiving_again, wait):
        monkeypatch.setattr(ReplicationSet, each.__name__, each)
    promoter = promoter_of(tmp_path)
    monkeypatch.setattr(promoter._locks, "can_be_away", True)
    members, request = [master(None), replica("west", "1-1-1")], PromotionRequest(master_lost=True)
    replicas = replication_set_of("east", "west", semi_sync=True)
    locked_at = clock.now
    with pytest.raises(PromotionRefused, match="again 3 times") if restarts == 3 else nullcontext():
        loss = _Loss(LostMaster(replicas), last_renewal, locked_at, fenced, lambda: False)
        await promoter._choose(replicas, members, request, loss)
    if fenced:
        over_at = await promoter._reads_over_at(replicas, members[1:], last_renewal)
        assert (waited_until, over_at) == ([], stopped_at[0] + terms.reads_over_after_seconds)
    else:
        waits_from = (locked_at, *stopped_at[: min(3, 1 + restarts)])
        assert waited_until == [each + terms.over_after_seconds for each in waits_from]
