"""Servers that are compared while their master goes on committing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tao.model.errors import Unavailable
from tao.model.topology import Database, DatabaseServer
from tao.replication import replication_set
from tao.replication.accounts import Account
from tao.replication.promotion_plan import SetMember, check_rejoin
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.replication.server_statements import MemberState
from tests.rigs.pacing import loop_clock
from tests.unit.replication.members import following, gtids, master, replica


async def test_a_replica_that_follows_all_along_is_not_taken_for_one_that_has_diverged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked after its master, it has what that has committed in between."""
    committed = 7

    @asynccontextmanager
    async def session(_: ReplicationSet, region: str, *, deadline: float) -> AsyncIterator[str]:
        yield region

    async def member_state(region: str, *, deadline: float) -> MemberState:
        nonlocal committed
        if region == "west":
            await asyncio.sleep(0)  # the master answers first
            committed += 1
        has = gtids(f"1-1-{committed}")
        return MemberState(region == "west", following(receiving=True) if region == "west" else None, has, has)

    monkeypatch.setattr(ReplicationSet, "session", session)
    monkeypatch.setattr(replication_set, "member_state", member_state)
    check_rejoin(*await replication_set_of("east", "west").beside_master("west"))


async def test_a_question_with_a_time_limit_of_its_own_has_it_also_at_a_server_that_was_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no later statement has it: a lease of a distant master could not be renewed within a short one."""
    clock, deadlines = loop_clock(monkeypatch), list[float]()

    async def state(_: ReplicationSet, region: str, deadline: float) -> MemberState:
        deadlines.append(deadline - clock.now)
        raise Unavailable("it does not answer")

    monkeypatch.setattr(ReplicationSet, "_state", state)
    replicas = replication_set_of("east", "west")
    for seconds in (5.0, None, 5.0):
        await replicas.member("east", seconds)
    assert deadlines == [5.0, 0.25, 5.0]
    assert replicas.statement_deadline() - clock.now == 1.0


@pytest.mark.parametrize("restarted", [True, False])
async def test_a_replica_that_restarted_has_begun_to_receive_again(
    monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    stopped = not restarted

    @asynccontextmanager
    async def session(_: ReplicationSet, region: str) -> AsyncIterator[str]:
        yield region

    async def member_state(_: str, *, deadline: float) -> MemberState:
        return MemberState(True, following(stopped=stopped), gtids("1-1-1"), gtids("1-1-1"))

    async def stop_receiving(region: str, *, deadline: float) -> MemberState:
        nonlocal stopped
        stopped = True
        return await member_state(region, deadline=deadline)

    monkeypatch.setattr(ReplicationSet, "session", session)
    for each in (member_state, stop_receiving):
        monkeypatch.setattr(replication_set, each.__name__, each)
    member, has_begun = await replication_set_of("east", "west").stop_receiving_again("west")
    assert (member.name, has_begun) == ("west-db", restarted)
    assert member.state is not None
    assert member.state.following == following(stopped=True)


def replication_set_of(*regions: str, marked: str = "", semi_sync: bool = False) -> ReplicationSet:
    """The first region has the master, at the port that `following` says."""
    servers = {
        region: DatabaseServer(name=f"{region}-db", host="127.0.0.1", port=port, down=region == marked)
        for port, region in enumerate(regions, start=1)
    }
    database = Database(name="db", master_region=regions[0], servers=servers, shards=((0, 1),), semi_sync=semi_sync)
    account = Account("tao_admin", "secret")
    return ReplicationSet(database, SetAccounts(account, account), seen_from="", statement_seconds=1.0)


def acknowledging(*replicas: SetMember, marked: str = "") -> list[str]:
    of_set = replication_set_of("east", *(each.region for each in replicas), marked=marked)
    return of_set.acknowledging([master("1-1-1"), *replicas])


def test_commits_may_wait_for_a_replica_that_acknowledges_is_whole_and_in_use() -> None:
    well = replica("west", "1-1-1", receiving=True, acknowledges=True)
    assert acknowledging(well, replica("north", None)) == ["west-db"]
    assert acknowledging(well, marked="west") == [], "it may be about to be stopped"
    assert acknowledging(replica("west", "1-1-1", receiving=True)) == []
    assert acknowledging(replica("west", "1-1-1", acknowledges=True)) == [], "a server says so after its master is gone"
    assert acknowledging(replica("west", "1-1-1", receiving=True, acknowledges=True, seeding=True)) == []
    moved = replication_set_of("east", "west")
    moved.database.servers["east"] = DatabaseServer(name="east-db", host="127.0.0.1", port=7)
    assert moved.acknowledging([master("1-1-1"), well]) == [], "it follows another one"


def test_a_lease_needs_no_lock_while_all_other_servers_receive_from_a_master_that_waits() -> None:
    west = replica("west", "1-1-1", receiving=True, acknowledges=True)
    north = replica("north", "1-1-1", receiving=True)
    waiting = master("1-1-1", waits=True)
    of_set = replication_set_of("east", "west", "north")
    assert of_set.is_followed_by_all([waiting, west, north])
    assert not of_set.is_followed_by_all([master("1-1-1"), west, north]), "it may acknowledge writes by itself"
    assert not of_set.is_followed_by_all([master(None), west, north])
    for promoted in (replica("north", None), replica("north", "1-1-1"), replica("north", "1-1-1", alone=True)):
        assert not of_set.is_followed_by_all([waiting, west, promoted]), "it may be the next master"


def test_an_acknowledgement_is_lost_when_a_replica_that_acknowledges_has_all_that_its_master_waits_for() -> None:
    def lost(waiting: int, west: SetMember, *, semi_sync: bool = True) -> bool:
        of_set = replication_set_of("east", "west", semi_sync=semi_sync)
        return of_set.has_lost_acknowledgements([master("1-1-7", waits=True, waiting=waiting), west])

    def west(received: str, *, connected: bool = True) -> SetMember:
        return replica("west", "1-1-5", received=received, receiving=connected, acknowledges=True)

    assert lost(1, west("1-1-7"))
    assert not lost(0, west("1-1-7")), "nothing waits"
    assert not lost(1, west("1-1-6")), "the replica has yet to receive it"
    assert not lost(1, west("1-1-7", connected=False)), "what it has is acknowledged, or not, once it is connected"
    assert not lost(1, west("1-1-7"), semi_sync=False)
    assert not replication_set_of("east", "west", semi_sync=True).has_lost_acknowledgements(
        [SetMember("east-db", "east", None, "refused", is_master=True), west("1-1-7")]
    )
