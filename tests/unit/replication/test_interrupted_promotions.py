"""What becomes of a promotion that was interrupted when its epoch had been raised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tao.model.errors import TopologyConflict, TopologyError, Unavailable
from tao.replication import promotion
from tao.replication.mastership_changes import name_master
from tao.replication.promotion import Promoter
from tao.replication.promotion_plan import PromotionRefused, SetMember
from tao.replication.replication_set import ReplicationSet
from tao.topology import edits
from tao.topology.document import dump_topology, parse_topology
from tests.unit.replication.members import master, replica
from tests.unit.replication.test_promotion import promoter_at, topology_file

__all__ = ["topology_file"]


def _have_commits_wait(topology_file: Path) -> None:
    stored = parse_topology(topology_file.read_bytes(), "topology")
    waits = replace(stored.databases[0], semi_sync=True)
    topology_file.write_text(dump_topology(replace(stored, databases=(waits,))))


class Interrupted:
    """A promotion of the west that was interrupted when its epoch had been raised to 9, without any database. ``done``:
    what is done next."""

    def __init__(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, *members: SetMember, later: Sequence[SetMember] = ()
    ) -> None:
        """``later``: how servers are that are asked anew, one by one."""
        self.done = list[str]()
        self.file = file

        async def all_members(_: ReplicationSet) -> object:
            return members

        async def member(_: ReplicationSet, region: str) -> SetMember:
            return next(each for each in (*later, *members) if each.region == region)

        async def epochs_as_masters(*_: object) -> object:
            return {"west-db": 9}, {}

        async def close(_: ReplicationSet, region: str) -> None:
            self.done.append(f"close {region}")

        async def is_not_opened(*_: object) -> bool:
            return False

        async def as_successor(_: ReplicationSet, member: SetMember) -> SetMember:
            return member

        async def apply_and_detach(_: Promoter, __: ReplicationSet, chosen: SetMember) -> None:
            self.done.append(f"finish {chosen.region}")
            raise Unavailable("the rest is not of interest")

        async def open_master(_: Promoter, replicas: ReplicationSet, **__: object) -> None:
            self.done.append(f"open {replicas.master.name} under {replicas.database.version_epoch}")
            raise Unavailable("the rest is not of interest")

        for name, instead in (
            ("members", all_members),
            ("member", member),
            ("epochs_as_masters", epochs_as_masters),
            ("close", close),
            ("was_opened", is_not_opened),
            ("as_successor", as_successor),
        ):
            monkeypatch.setattr(ReplicationSet, name, instead)
        monkeypatch.setattr(Promoter, "_apply_and_detach", apply_and_detach)
        monkeypatch.setattr(Promoter, "_open", open_master)


@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("semi_sync", [False, True])
@pytest.mark.parametrize("bring", [Promoter.restore, Promoter.finish])
async def test_an_interrupted_promotion_is_undone_once_the_old_master_has_gone_on_without_it(
    topology_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    overtaken: bool,
    semi_sync: bool,
    bring: Callable[[Promoter, str], Awaitable[object]],
) -> None:
    """The server whose epoch was raised did not answer for a while, so the old master was opened again."""
    if semi_sync:
        _have_commits_wait(topology_file)
    has = "1-1-2" if overtaken else "1-1-1"
    members = (
        master(has, closed=True),
        replica("west", "1-1-1,2-2-9", alone=True),
        replica("north", has, receiving=True),
    )
    interrupted = Interrupted(topology_file, monkeypatch, *members)
    with pytest.raises(Unavailable):
        await bring(promoter_at(topology_file), "db")
    assert interrupted.done == ["close east", "open east-db under 10" if overtaken else "finish west"]


async def test_the_run_that_was_interrupted_cannot_make_its_server_master_any_more_once_the_old_one_goes_on(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compare-and-set was on its way, and is repeated when it has lost against another one."""
    began = promoter_at(topology_file)
    replicas = await began._set("db")
    late = await began._store.load()
    members = master("1-1-2", closed=True), replica("west", "1-1-1,2-2-9", alone=True), replica("north", None)
    Interrupted(topology_file, monkeypatch, *members)
    with pytest.raises(Unavailable):
        await promoter_at(topology_file).restore("db")
    with pytest.raises(TopologyConflict):
        await began._store.change(late.version, edits.promote(late, "db", "west", 9))
    with pytest.raises(TopologyError, match="not above 10"):
        await name_master(began._store, replicas, "west", 9, "")


@pytest.mark.parametrize("answers", [False, True])
async def test_a_late_promotion_of_a_silent_server_is_rejected_before_the_old_master_goes_on(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The run that raised its epoch has given up, because the store did not answer its compare-and-set."""
    store = promoter_at(topology_file)._store
    late = await store.load()
    goes_on = list[str]()

    async def members(_: ReplicationSet) -> object:
        return [master("1-1-1" if answers else None), replica("west", None), replica("north", "1-1-1", stopped=True)]

    async def epochs_as_masters(*_: object) -> object:
        return {}, {}

    async def go_on(*_: object, **__: object) -> dict[str, str]:
        with pytest.raises(TopologyConflict):
            await store.change(late.version, edits.promote(late, "db", "west", 9))
        goes_on.append("the old master")
        raise Unavailable("the rest is not of interest")

    monkeypatch.setattr(ReplicationSet, "members", members)
    monkeypatch.setattr(ReplicationSet, "epochs_as_masters", epochs_as_masters)
    monkeypatch.setattr(Promoter, "_open", go_on)
    monkeypatch.setattr(promotion, "give_back", go_on)
    with pytest.raises(Unavailable):
        await promoter_at(topology_file).restore("db")
    assert goes_on == ["the old master"]


async def test_what_a_replica_receives_while_servers_are_asked_is_not_taken_for_something_that_its_master_lacks(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old master is open and writes go on, so the replica, which is asked at the same time, may be ahead of it."""
    members = master("1-1-6"), replica("west", "1-1-5,2-2-9", alone=True), replica("north", "1-1-7", receiving=True)
    interrupted = Interrupted(topology_file, monkeypatch, *members, later=[master("1-1-8")])
    with pytest.raises(Unavailable):
        await promoter_at(topology_file).restore("db")
    assert interrupted.done == ["close east", "open east-db under 10"]


@pytest.mark.parametrize(
    ("then", "north_has", "why"),
    [
        (master(None), "1-1-5", ""),
        (master(None), "1-1-6", "north-db has 1-1-6, which west-db lacks"),
        (master("1-1-5"), "1-1-5", "answers again"),
        (master("1-1-6"), "1-1-6", "answers again, and"),
    ],
)
async def test_a_silent_master_is_fenced_by_its_replicas_before_an_interrupted_promotion_is_finished(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch, then: SetMember, north_has: str, why: str
) -> None:
    """Without leases it may be open, and a commit may be on its way. One that answers meanwhile is not closed yet."""
    _have_commits_wait(topology_file)
    west, north = replica("west", "1-1-5,2-2-9", alone=True), replica("north", "1-1-5", receiving=True)
    interrupted = Interrupted(topology_file, monkeypatch, master(None), west, north)
    done = interrupted.done

    async def wait_for_lease(*_: object) -> float:
        return 0.0

    async def beside_master(*_: object) -> object:
        return west, master(None)

    async def stop_receiving(_: ReplicationSet, region: str) -> None:
        done.append(f"stop {region}")

        async def members(_: ReplicationSet) -> object:
            return [then, west, replica("north", north_has, stopped=True)]

        async def member(_: ReplicationSet, region: str) -> SetMember:
            return {"east": then, "west": west}[region]

        monkeypatch.setattr(ReplicationSet, "members", members)
        monkeypatch.setattr(ReplicationSet, "member", member)

    async def give_back(*_: object) -> dict[str, str]:
        done.append("give back")
        return {}

    monkeypatch.setattr(ReplicationSet, "follows", lambda _, member, __: member.receives)
    monkeypatch.setattr(ReplicationSet, "beside_master", beside_master)
    monkeypatch.setattr(ReplicationSet, "stop_receiving", stop_receiving)
    monkeypatch.setattr(Promoter, "_wait_for_lease", wait_for_lease)
    monkeypatch.setattr(promotion, "give_back", give_back)
    promoter = promoter_at(topology_file)
    late = await promoter._store.load()
    with pytest.raises(PromotionRefused if why else Unavailable, match=why or "not of interest"):
        await promoter.restore("db")
    assert done == ["stop north", "give back" if why else "finish west"]
    if why:  # the run that was interrupted may have left its compare-and-set with the store
        with pytest.raises(TopologyConflict):
            await promoter._store.change(late.version, edits.promote(late, "db", "west", 9))


async def test_replicas_are_given_back_to_a_master_out_of_reach_that_has_overtaken_an_interrupted_promotion(
    topology_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be there, and its commits wait for one of them."""
    _have_commits_wait(topology_file)
    members = master(None), replica("west", "1-1-5,2-2-9", alone=True), replica("north", "1-1-6", stopped=True)
    done = Interrupted(topology_file, monkeypatch, *members).done

    async def give_back(*_: object) -> dict[str, str]:
        done.append("give back")
        return {}

    monkeypatch.setattr(promotion, "give_back", give_back)
    promoter = promoter_at(topology_file)
    before = (await promoter._store.load()).version
    for _ in range(3):
        with pytest.raises(PromotionRefused, match="does not answer"):
            await promoter.restore("db")
    assert done == ["give back"] * 3
    assert (await promoter._store.load()).version == before + 1, "all servers load each version"
