"""What watchers do in the simulation, and what is checked of it.

The watchers are the product's own: probes, marks, the lock of the one that acts, renewals and decisions. Replaced are
the statements that they send to database servers, and a promotion, whose steps are those of `tests.sim.promotion`. A
simulated database server keeps its lease by itself, as a real one does by an event.

Three rules are checked. One watcher acts at a time. A master is opened only when no other server of its database takes
writes. And while nothing but one server has failed, and watchers run, writes succeed again within `REPLACED_SECONDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Final

from tao.model.errors import OperatorError, TaoError
from tao.model.ports import TopologyStore
from tao.model.topology import Database
from tao.replication.accounts import Account
from tao.replication.gtid import GtidSet
from tao.replication.lease import (
    LastRenewal,
    LeaseTerms,
    install_lease,
    lease_terms,
    remove_lease,
    renew_lease,
    server_unix_ms,
)
from tao.replication.locks import (
    SESSION_IDLE_SECONDS,
    LockFiles,
    LockHold,
    Locks,
    hold_exclusively,
    mastership_lock,
)
from tao.replication.promotion import Promoter, PromotionResult
from tao.replication.promotion_plan import (
    MasterAnswers,
    PromotionRefused,
    PromotionRequest,
    SetMember,
    check_reported,
)
from tao.replication.replication_set import ReplicationSet
from tao.replication.server_statements import MemberState, ReplicationStatus
from tao.storage.dialect import Dialect
from tao.storage.session import ServerAccount
from tao.topology import edits
from tests.sim.database import SimDatabase
from tests.sim.locks import SimLockFiles
from tests.sim.loop import CURRENT
from tests.sim.plans import REPLACED_SECONDS
from tests.sim.promotion import SETTLE_SECONDS, applied, enthrone
from tests.sim.sessions import SimSession
from tests.sim.substitutes import Substitution
from tests.sim.world import World

_STATEMENT_SECONDS: Final = 1.0
ACCOUNT: Final = Account("tao", "simulated")
_NOTHING: Final = GtidSet(Dialect.MARIADB, "")


class SimReplicationSet:
    """Replaces `tao.replication.replication_set.ReplicationSet` for watchers."""

    def __init__(
        self, world: World, database: Database, *_: object, hold: LockHold | None = None, **__: object
    ) -> None:
        self._world: Final = world
        self._hold: Final = hold
        self.database: Final = database

    @property
    def shards(self) -> list[int]:
        return sorted(edits.shards_of(self.database))

    def login(self, region: str, account: Account | None = None) -> ServerAccount:
        return (account or ACCOUNT).at(self.database.servers[region])

    @property
    def master(self) -> SimDatabase:
        return self.server(self.database.master_region)

    def server(self, region: str) -> SimDatabase:
        """Return the server of a region."""
        return self._world.databases[self.database.servers[region].name]

    def statement_deadline(self) -> float:
        return self._world.loop.now + _STATEMENT_SECONDS

    @asynccontextmanager
    async def session(self, region: str) -> AsyncIterator[SimSession]:
        session = SimSession(
            self._world, self.server(region), 0.0 if self._hold is None else float(SESSION_IDLE_SECONDS)
        )
        await session.run(lambda server: None)
        if self._hold is not None:
            self._hold.check()
        yield session

    async def members(self) -> list[SetMember]:
        return list(await asyncio.gather(*map(self.member, self.database.servers)))

    async def member(self, region: str, _: float | None = None) -> SetMember:
        is_master = region == self.database.master_region
        name = self.database.servers[region].name
        try:
            state = await SimSession(self._world, self.server(region)).run(self._state)
        except TaoError as error:
            return SetMember(name, region, None, error.message, is_master=is_master)
        return SetMember(name, region, state, is_master=is_master)

    def _state(self, server: SimDatabase) -> MemberState:
        return MemberState(server.read_only, self._following(server), _NOTHING, _NOTHING)

    def _following(self, server: SimDatabase) -> ReplicationStatus | None:
        world = self._world
        source = next((each for each in world.databases.values() if server in each.replicas), None)
        if source is None:
            return None
        receives = not source.down and not world.network.is_cut(source.process, server.process)
        return ReplicationStatus(
            source=source.name,
            receiving=receives and world.loop.now >= server.stopped_until,
            applying=True,
            stopped=False,
            lag_seconds=0,
            received="",
            executed="",
            error="",
        )

    def follows(self, member: SetMember, master_region: str) -> bool:
        following = None if member.state is None else member.state.following
        return following is not None and following.source == self.server(master_region).name

    def acknowledging(self, _: Iterable[SetMember]) -> list[str]:
        return []

    def has_lost_acknowledgements(self, _: Iterable[SetMember]) -> bool:
        return False


async def sim_lease_terms(session: SimSession, *, deadline: float) -> LeaseTerms:
    """Replaces `tao.replication.lease.lease_terms`."""
    return LeaseTerms(await session.run(lambda server: server.lease_seconds))


async def sim_install_lease(session: SimSession, terms: LeaseTerms, *, deadline: float) -> None:
    """Replaces `tao.replication.lease.install_lease`."""
    await session.run(lambda server: server.keep_lease(terms.seconds))


async def sim_remove_lease(session: SimSession, *, deadline: float) -> None:
    """Replaces `tao.replication.lease.remove_lease`."""
    await session.run(lambda server: server.keep_lease(0.0))


async def sim_server_unix_ms(session: SimSession, *, deadline: float) -> int:
    """Replaces `tao.replication.lease.server_unix_ms`."""
    return int(await session.run(lambda server: int(server.now * 1000)))


async def sim_renew_lease(session: SimSession, from_unix_ms: int, _: LeaseTerms, *, deadline: float) -> bool:
    """Replaces `tao.replication.lease.renew_lease`."""
    return bool(await session.run(lambda server: server.renew_lease(from_unix_ms / 1000)))


class SimPromoter:
    """Replaces `tao.replication.promotion.Promoter` for watchers: under the same locks, after the same lease."""

    def __init__(self, world: World, store: TopologyStore, locks: Locks, *_: object, **__: object) -> None:
        self._world: Final = world
        self._store: Final = store
        self._locks: Final = locks

    async def promote(
        self, name: str, request: PromotionRequest, *, last_renewal: LastRenewal, **_: object
    ) -> PromotionResult:
        """See `Promoter.promote`: of a master that is lost."""
        world = self._world
        async with hold_exclusively(self._locks, mastership_lock(name), 10.0) as hold:
            replicas = self._set(name)
            check_reported(request, replicas.master.name)
            await self._check_lost(replicas)
            new = next(
                replicas.server(region)
                for region in replicas.database.servers
                if region != replicas.database.master_region
            )
            over = await last_renewal() + LeaseTerms(new.lease_seconds).over_after_seconds
            await asyncio.sleep(max(0.0, over - world.loop.now))
            await applied(new)
            await self._check_lost(replicas)
            if world.documents is not None:
                await self._store.load()  # else the topology cannot be changed
            hold.check()
            old = replicas.master
            epoch = enthrone(world, replicas.database, old, new, lacks_commits=True)
            world.change_topology(edits.promote(world.topology, name, new.region, epoch, old.name))
            world.trace.note("promoted", new.name, epoch, "by a watcher")
            await asyncio.sleep(SETTLE_SECONDS)
            return await self._open(self._set(name), hold)

    async def restore(self, name: str) -> PromotionResult:
        """See `Promoter.restore`: open a master that restarted."""
        async with hold_exclusively(self._locks, mastership_lock(name), 10.0) as hold:
            return await self._open(self._set(name), hold)

    async def wait_for_replicas(self, name: str) -> None:
        """Refuse: nothing is semi-synchronous here."""
        raise OperatorError(f"{name} is not semi-synchronous")

    async def rejoin(self, name: str, server: str) -> None:
        """Refuse: an operator does this here."""
        raise OperatorError(f"{server} of {name} is left to an operator")

    async def _check_lost(self, replicas: SimReplicationSet) -> None:
        for member in await replicas.members():
            if member.is_master and member.state is not None:
                raise MasterAnswers(f"{member.name} answers")
            if not member.is_master and (member.state is None or member.receives):
                raise PromotionRefused(f"{member.name} does not answer, or receives")

    async def _open(self, replicas: SimReplicationSet, hold: LockHold) -> PromotionResult:
        world, database = self._world, replicas.database
        hold.check()
        async with replicas.session(database.master_region) as session:
            await session.run(lambda server: server.open(world.loop.now))
        world.check_masters(database)
        return PromotionResult(
            database=database.name,
            master=replicas.master.name,
            region=database.master_region,
            version_epoch=database.version_epoch,
            topology_version=world.topology.version,
            following=[],
            left={},
            waits_for_replica=False,
        )

    def _set(self, name: str) -> SimReplicationSet:
        found = next(database for database in self._world.topology.databases if database.name == name)
        return SimReplicationSet(self._world, found)


def watcher_substitutes(world: World) -> list[Substitution]:
    """Return the substitutes beneath watchers, and beneath everybody who takes a lock."""
    return [
        Substitution(LockFiles, partial(SimLockFiles, world.locks)),
        Substitution(ReplicationSet, partial(SimReplicationSet, world)),
        Substitution(Promoter, partial(SimPromoter, world)),
        Substitution(install_lease, sim_install_lease),
        Substitution(remove_lease, sim_remove_lease),
        Substitution(lease_terms, sim_lease_terms),
        Substitution(renew_lease, sim_renew_lease),
        Substitution(server_unix_ms, sim_server_unix_ms),
    ]


def failed_too_late(world: World, began: float) -> str:
    """Return why a write that began then must not fail, or nothing: its leader has been dead for long enough."""
    if not world.shape.watchers or world.shape.leaders < 2 or CURRENT.get() is None:
        return ""
    kind, since = world.single_failures.only_fault() or ("", inf)
    if kind != "kill" or began < since + REPLACED_SECONDS:
        return ""
    return f"{began - since:.2f} s after {kind}, with watchers that replace what is gone"
