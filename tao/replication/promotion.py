"""Promotion of another server of a replication set to master, step by step.

Every step may be repeated, and the process may end after any of them. One compare-and-set of the topology decides who
is master. Everything before it can be undone (`Promoter.restore`); after it the new master has only to be opened, which
`restore` does as well. The one thing that cannot be undone is a new version epoch in shard rows of a server that is not
master yet: the next run finishes such a promotion.

Writes and critical reads fail with `MASTER_READ_ONLY` from the first step to the last. Other reads continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from tao.model.errors import OperatorError, TaoError
from tao.model.ids import LostTimes
from tao.model.ports import TopologyStore
from tao.model.topology import Database, Topology
from tao.replication.concurrent_steps import all_of, both
from tao.replication.followers import follow_master, give_back
from tao.replication.kept_sessions import KeptSessions
from tao.replication.lease import LastRenewal, LeaseTerms, grant_lease, lease_over_at, lease_terms, server_unix_ms
from tao.replication.locks import LockHold, Locks, hold_exclusively, mastership_lock
from tao.replication.lost_master import LostMaster
from tao.replication.mastership_changes import ChangesUnderWay, keep_master, name_master, reject_late_promotion
from tao.replication.promotion_plan import (
    MasterAnswers,
    PromotionRefused,
    PromotionRequest,
    SetMember,
    check_before,
    check_fenced,
    check_goes_on,
    check_kept,
    check_lost,
    check_rejoin,
    check_reported,
    check_seeded,
    choose,
    choose_catch_up_target,
    is_fenced_by_replicas,
    overtaking,
    promoted_only_in_rows,
    unfinished,
)
from tao.replication.replication_set import ReplicationSet, SetAccounts, find_database
from tao.replication.server_statements import (
    LostIds,
    acknowledging_replicas,
    apply_received,
    detach,
    end_wait,
    highest_epoch,
    member_state,
    open_to_writes,
    raise_epoch,
    schemas_with_reserved_ids,
    set_semi_sync,
    stop_receiving,
    waiting_statements,
)
from tao.topology import edits

_PAUSE_SECONDS: Final = 0.05
_RECENT_SECONDS: Final = 0.5
"""Time for which a clock that was read is used again. Writers wait for each round trip, and the shortest lease lasts
2.5 s."""
_MAX_WAITS: Final = 3
"""Most waits for a lease. A replica that restarts during one makes another one necessary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionSettings:
    """Time limits of a promotion, by an operator or by the watcher."""

    statement_seconds: float = 4.0
    """Time limit for a connection and for each statement: above the second for which a server waits for a lock."""

    lock_seconds: float = 10.0
    """Time limit for the lock of the database. Renewals of its master's lease hold it for a few round trips each
    second, and a holder that hangs loses it after eight seconds."""

    catch_up_seconds: float = 30.0
    """Time in which a replica has to receive and apply what it lacks. Writes fail meanwhile, so a planned switch that
    takes longer is undone. Check the replication lag first."""

    settle_seconds: float = 1.0
    """Delay between the new topology and the first write at the new master: twice the time that servers need to notice
    the topology. By then servers have stopped asking the old master for critical reads; without leases nothing else
    keeps a master that is cut off from answering them. After the lease of a lost master there is no such delay."""

    acknowledging_seconds: float = 3.0
    """Time in which a replica has to connect to the new master under semi-synchronous replication. Without any, the
    master is opened all the same and waits for no replica until one is back; the result and the logs report it."""


class PromotionStep(StrEnum):
    """The steps of a promotion, in order."""

    FENCE = "closing the old master to writes"
    CATCH_UP = "waiting until the new master has everything of the old one"
    STOP_RECEIVING = "stopping all replicas from receiving"
    COMPARE = "comparing what the servers have received"
    APPLY = "applying what the new master has received"
    DETACH = "having the new master follow nobody"
    OUTLAST = "waiting until the old master answers no critical reads"
    RAISE_EPOCH = "raising the version epoch of its shards"
    TOPOLOGY = "changing the topology"
    REPOINT = "having the others follow the new master"
    SETTLE = "giving the servers time to see it"
    OPEN = "opening the new master to writes"


class PromotionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a promotion. ``following``: servers that follow the master now. ``left``: name → why the server
    does not. ``waits_for_replica``: each commit is received by a replica before it is acknowledged. ``without_tables``:
    name → the error of a server without shard rows, which therefore cannot hold an interrupted promotion."""

    database: str
    master: str
    region: str
    version_epoch: int
    topology_version: int
    following: list[str]
    left: dict[str, str]
    waits_for_replica: bool
    without_tables: dict[str, str] = {}


OnStep = Callable[[PromotionStep], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Run:
    """One change of a database's servers, under the lock of the database."""

    hold: LockHold
    sessions: KeptSessions
    locked_at: float
    """When the lock was held, on the loop's clock."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """What is known of a master that is lost."""

    master: LostMaster
    last_renewal: LastRenewal | None
    locked_at: float
    """As in `_Run`."""
    is_fenced: bool
    """It acknowledges nothing once all replicas have stopped receiving (`is_fenced_by_replicas`)."""
    has_answered: Callable[[], bool]
    """As in `Promoter.promote`."""


class _Prepared(NamedTuple):
    """Values read from the chosen server once it follows no master: they do not change any more, so they can be read
    while the old master's lease ends."""

    epoch: int
    """The version epoch under which it becomes master."""
    reserving: frozenset[str]
    """Its schemas that have a table of reserved ids."""
    other_servers: list[str]
    """The servers of all other databases."""
    terms: LeaseTerms
    """The terms of its leases."""
    unix_ms: int
    """Its clock, at ``read_at`` on the loop's."""
    read_at: float


class _Installed(NamedTuple):
    """A master of which the topology has just learned."""

    terms: LeaseTerms
    """The terms of its leases."""
    unix_ms: int
    """Its clock when the topology was changed, at ``read_at`` on the loop's or later."""
    read_at: float
    lost: str
    """The name of the former master when it does not answer, or an empty string."""


class Promoter:
    """Changes the masters of databases, each under the mastership lock of its database."""

    def __init__(
        self,
        store: TopologyStore,
        locks: Locks,
        accounts: SetAccounts,
        settings: PromotionSettings,
        *,
        seen_from: str = "",
        on_step: OnStep | None = None,
    ) -> None:
        """``on_step`` is called before each step, to show progress."""
        self._store: Final = store
        self._locks: Final = locks
        self._accounts: Final = accounts
        self._settings: Final = settings
        self._seen_from: Final = seen_from
        self._on_step: Final = on_step
        self._silent: Final = set[str]()
        self._runs: Final[dict[str, _Run]] = {}
        self._under_way: Final = ChangesUnderWay(store)

    async def observe(self, database: str) -> list[SetMember]:
        """Return the current state of the servers of a database. Raises `TopologyError` when there is no such
        database."""
        return await (await self._set(database)).members()

    async def is_master(self, database: str, server: str) -> bool:
        """Return whether the stored topology names the server as master of the database. The answer holds for as long
        as the caller holds the lock of the database."""
        return (await self._set(database)).master.name == server

    async def promote(
        self,
        database: str,
        request: PromotionRequest,
        *,
        last_renewal: LastRenewal | None = None,
        still_waits: Callable[[], bool] = lambda: True,
        has_answered: Callable[[], bool] = lambda: False,
    ) -> PromotionResult:
        """Make another server master. A master that is reported lost is replaced only while it does not answer.

        ``last_renewal`` is called once no further renewal can begin. It returns when, on the loop's clock, the old
        master's lease was renewed last; None means that it may have been a moment ago. ``still_waits`` is asked once
        the lock is held, for which seconds may have passed: does ``request.waited_for_replica`` hold now?
        ``has_answered`` is asked at the last moment: has a lost master answered somebody else since the call?

        Raises `PromotionRefused` with nothing changed, or another `TaoError` when a step failed; the next run then
        finishes or undoes what was done. Raises `LockTaken` when another run is under way, and `LockLost` when this
        process was paused and another one may have taken over.
        """
        async with self._exclusively(database) as run, AsyncExitStack() as asking:
            replicas = await self._set(database)
            if request.region == replicas.database.master_region:
                return await self._restore(replicas, last_renewal)
            check_reported(request, replicas.master.name)
            loss: _Loss | None = None
            if request.master_lost:
                request = replace(request, waited_for_replica=request.waited_for_replica and still_waits())
                self._silent.add(replicas.master.name)  # the caller has waited for an answer already
                master = LostMaster(replicas)
                await asking.enter_async_context(master.asked())
                members, is_fenced = await self._members_of_lost(replicas, request, master)
                loss = _Loss(master, last_renewal, run.locked_at, is_fenced, has_answered)
            else:
                members = await replicas.members()
            check_before(members, request)
            try:
                chosen = await self._choose(replicas, members, request, loss)
                prepared, lost = await self._make_ready(replicas, chosen, members, request, loss)
                await self._begin(replicas, PromotionStep.RAISE_EPOCH)
                await asking.aclose()
            except (Exception, asyncio.CancelledError) as error:
                # Whatever it was: as long as the replicas are stopped, commits of the old master wait.
                await asking.aclose()
                await self._undo(replicas, last_renewal, members, error)
                raise
            return await self._install(replicas, chosen, prepared, lost, lacks_commits=bool(lost))

    async def restore(self, database: str) -> PromotionResult:
        """Bring the servers into the state that the topology describes: finish or undo an interrupted promotion, and
        open a master that restarted. Raises as `promote`."""
        async with self._exclusively(database):
            return await self._restore(await self._set(database), None)

    async def finish(self, database: str) -> PromotionResult:
        """Finish a promotion that was interrupted when it could not be undone any more. Raises as `promote`, and
        `PromotionRefused` when there is none. The lock is taken only when there is one: a watcher looks every second,
        and while the lock is held no server of the database is marked."""
        replicas = await self._set(database)
        members = await replicas.members()
        epochs, _ = await replicas.epochs_as_masters(members)
        region = unfinished(members, epochs, replicas.database.version_epoch)
        if region is None:
            raise PromotionRefused(
                f"{replicas.master.name} waits for a replica, and no server can follow it: they have transactions "
                "that it lacks. Seed one anew (tao reseed)"
            )
        return await self.restore(database)

    async def wait_for_replicas(self, database: str) -> None:
        """Make commits of the master wait for a replica again, as the topology says. Raises `OperatorError` when no
        replica in use acknowledges."""
        async with self._exclusively(database):
            # Read the topology under the lock: a command that takes a replica out of use marks it first, and then takes
            # this lock.
            replicas = await self._set(database)
            if not replicas.database.semi_sync or not replicas.acknowledging(await replicas.members()):
                raise OperatorError(f"{replicas.master.name} has no replica in use that acknowledges")
            await self._wait_for_replicas_again(replicas)

    async def end_lost_waits(self, database: str) -> None:
        """End the waits of commits for acknowledgements that were lost on the way: a replica has what they wrote.

        Does nothing when no acknowledgement is lost (`ReplicationSet.has_lost_acknowledgements`) any more.
        """
        async with self._exclusively(database):
            replicas = await self._set(database)
            async with replicas.session(replicas.database.master_region) as session:
                # Before the replicas are asked: what these statements have written is then among what is compared.
                waiting = await waiting_statements(session, deadline=replicas.statement_deadline())
                if replicas.has_lost_acknowledgements(await replicas.members()):
                    for statement in waiting:
                        replicas.check_hold()
                        await end_wait(session, statement, deadline=replicas.statement_deadline())

    async def rejoin(self, database: str, server: str) -> None:
        """Make a server follow the master of its set again, and wait until it has caught up.

        The lock is free while the server catches up: renewals of the master's lease need it, and without them the
        master would answer no critical reads.

        Raises `ServerDiverged` when it cannot follow; then it is closed to writes, and nothing else has changed. Raises
        `NotCaughtUp` after ``catch_up_seconds``, and `OperatorError` when the server does not follow the master any
        more once it has caught up; its mark is then unchanged.
        """
        async with self._exclusively(database):
            replicas = await self._set(database)
            region = replicas.region_of(server)
            if region == replicas.database.master_region:
                raise PromotionRefused(f"{server} is the master of {database} by the topology: it follows nobody")
            # Check before closing the server: on MySQL, closing it would end the load of a seed.
            check_seeded((await replicas.beside_master(region))[0])
            # Close the server first, so that the comparison covers every transaction that it will ever have had.
            await replicas.close(region)
            member, master = await replicas.beside_master(region)
            check_rejoin(member, master)
            await replicas.follow(region, master.region)
        replicas = await self._set(database)
        await replicas.until_applied(region, self._settings.catch_up_seconds)
        if replicas.database.semi_sync:
            await self._check_acknowledged(replicas)
        async with self._exclusively(database):
            before, replicas = replicas, await self._set(database)
            member, _ = await replicas.beside_master(region)
            if replicas.master != before.master or not replicas.follows(member, replicas.database.master_region):
                raise OperatorError(f"{server} does not follow {before.master.name} any more: somebody changed the set")
            check_seeded(member)
            if replicas.database.semi_sync:
                # If commits waited earlier, they would wait until the replica has received all that it lacks.
                await self._wait_for_replicas_again(replicas)
            topology = await self._store.load()
            if find_database(topology, database).places[region].down:
                await self._store.change(topology.version, edits.mark_database_server(topology, server, down=False))

    async def _undo(
        self,
        replicas: ReplicationSet,
        last_renewal: LastRenewal | None,
        before: Sequence[SetMember],
        error: BaseException,
    ) -> None:
        """Undo what was done before an error, after which nothing irrevocable has happened: open the old master if it
        can be reached by now. What cannot be undone is noted at the error; the next run undoes it."""
        try:
            await self._restore(replicas, last_renewal, before)
        except TaoError as failure:
            error.add_note(f"The promotion is not undone yet: {failure.message}")

    # ---- until a server is chosen, everything can be undone ----------------------------------------------------------

    async def _members_of_lost(
        self, replicas: ReplicationSet, request: PromotionRequest, master: LostMaster
    ) -> tuple[list[SetMember], bool]:
        """Return the states of all servers, and whether the master acknowledges nothing once the others have stopped
        receiving. Then all can be undone within round trips, so its silence is waited for only before the decision."""
        places, master_region = replicas.database.places, replicas.database.master_region
        asked = await asyncio.gather(*(replicas.member(place) for place in places if place != master_region))
        others = list(asked)
        if replicas.master.name not in request.without:
            others = list(await asyncio.gather(*map(replicas.as_successor, asked)))
        marked = {server.name for server in places.values() if server.down}
        fenced = is_fenced_by_replicas(others, request, semi_sync=replicas.database.semi_sync, marked=marked)
        return [*others, master.found if fenced else await master.until_certain()], fenced

    async def _choose(
        self, replicas: ReplicationSet, members: list[SetMember], request: PromotionRequest, loss: _Loss | None
    ) -> SetMember:
        """Have all replicas stop receiving, and choose one. ``loss``: None in a planned switch."""
        master = next(member for member in members if member.is_master)
        others = [member for member in members if not member.is_master and member.is_complete]
        if loss is None or not loss.is_fenced:
            await self._begin(replicas, PromotionStep.FENCE)
        if loss is None:
            await replicas.close(master.region)
            await self._begin(replicas, PromotionStep.CATCH_UP)
            await replicas.catch_up(choose_catch_up_target(others, request), self._settings.catch_up_seconds)
        elif not loss.is_fenced:
            lasts = await self._wait_for_lease(
                replicas, others, loss.last_renewal, loss.locked_at, loss.master.answered
            )
            check_fenced(master.name, request, lasts)
            check_lost(loss.master.found, request)
        await self._begin(replicas, PromotionStep.STOP_RECEIVING)
        stopped = await self._stop_receiving(replicas, others, waits_long=loss is not None and loss.is_fenced)
        if loss is not None and not loss.is_fenced and self._locks.can_be_away and replicas.database.semi_sync:
            stopped = await self._outlast_renewals_without_lock(replicas, others, loss)
        await self._begin(replicas, PromotionStep.COMPARE)
        if loss is None:
            stopped[master.region] = await replicas.member(master.region)
        return choose([stopped.get(member.region, member) for member in members], request)

    async def _make_ready(
        self,
        replicas: ReplicationSet,
        chosen: SetMember,
        members: list[SetMember],
        request: PromotionRequest,
        loss: _Loss | None,
    ) -> tuple[_Prepared, str]:
        """Do everything else that can be undone. Returns what `_install` needs, and the name of the old master when it
        does not answer, or an empty string. Raises `MasterAnswers` when a lost one does."""
        if loss is not None and loss.is_fenced:
            others = [member for member in members if not member.is_master]
            # Wait until all have stopped receiving: until then a watcher that is cut off from the locks may renew
            # (`ReplicationSet.is_followed_by_all`), and install other terms before it does.
            over = self._reads_over_at(replicas, others, loss.last_renewal)
            _, over_at = await both(self._apply_and_detach(replicas, chosen), over)
            outlast = self._outlast(replicas, chosen, others, over_at, loss.master.answered)
            prepared, _ = await both(self._prepare(replicas, chosen), outlast)
            master = await loss.master.until_certain()
        else:
            await self._apply_and_detach(replicas, chosen)
            asked = replicas.member(replicas.database.master_region) if loss is None else loss.master.until_certain()
            prepared, master = await both(self._prepare(replicas, chosen), asked)
        # From here on reads may find no server with the versions they require until the topology is changed.
        check_lost(master, request)
        if loss is not None and loss.has_answered():
            raise MasterAnswers(f"the master {master.name} is slow, and not lost: it has answered a watcher meanwhile")
        return prepared, "" if master.state is not None else master.name

    async def _stop_receiving(
        self, replicas: ReplicationSet, others: list[SetMember], *, waits_long: bool
    ) -> dict[str, SetMember]:
        """Have the replicas stop receiving, and return by region what each has then.

        ``waits_long``: the master perhaps hangs, and then each needs a second. Meanwhile a second session is opened at
        each, which takes four round trips, and which later steps use beside the first."""
        stop = all_of(*(replicas.stop_receiving(member.region) for member in others))
        stopped = (await both(stop, self._lease_terms(replicas, others)))[0] if waits_long else await stop
        return {member.region: member for member in stopped}

    async def _outlast_renewals_without_lock(
        self, replicas: ReplicationSet, others: list[SetMember], loss: _Loss
    ) -> dict[str, SetMember]:
        """Wait for a lease that a watcher that is cut off from the locks may have renewed (`is_followed_by_all`) until
        the replicas had stopped. Returns as `_stop_receiving`, and raises `PromotionRefused` when they do not stay so.
        """
        for _ in range(_MAX_WAITS):
            now = asyncio.get_running_loop().time()
            await self._wait_for_lease(replicas, others, loss.last_renewal, now, loss.master.answered)
            # When it restarts, a replica receives by itself, and the lease may have been renewed since.
            stopped = await all_of(*(replicas.stop_receiving_again(member.region) for member in others))
            if not any(has_begun for _, has_begun in stopped):
                return {member.region: member for member, _ in stopped}
        raise PromotionRefused(f"replicas of {replicas.master.name} began to receive again {_MAX_WAITS} times")

    async def _wait_for_lease(
        self,
        replicas: ReplicationSet,
        others: list[SetMember],
        last_renewal: LastRenewal | None,
        latest: float,
        unless: asyncio.Event,
    ) -> float:
        """Wait until a master that cannot be reached has closed itself, or ``unless`` is set. ``latest``: as in
        `lease_over_at`. Returns how many seconds after a renewal it does so, 0 for one that keeps no lease."""
        lasts = max(each.over_after_seconds for each in await self._lease_terms(replicas, others))
        over_at = await lease_over_at(lasts, last_renewal, latest)
        await replicas.wait(over_at - asyncio.get_running_loop().time(), unless)
        return lasts

    async def _reads_over_at(
        self, replicas: ReplicationSet, others: list[SetMember], last_renewal: LastRenewal | None
    ) -> float:
        """Return when a master whose replicas have all stopped receiving answers no critical read any more."""
        latest = asyncio.get_running_loop().time()
        terms = await self._lease_terms(replicas, others)
        return await lease_over_at(max(each.reads_over_after_seconds for each in terms), last_renewal, latest)

    async def _outlast(
        self,
        replicas: ReplicationSet,
        chosen: SetMember,
        others: list[SetMember],
        over_at: float,
        unless: asyncio.Event,
    ) -> None:
        """Wait until a master that can acknowledge no write answers no critical read either, at ``lease_over_at``, or
        ``unless`` is set.

        It may be open for longer, so the other servers forget it first: one that restarts would receive from it again.
        They do so only now that the chosen one has applied everything: until then its relay log is lost when it
        restarts, and theirs may have what it had.
        """
        rest = [each for each in others if each.name != chosen.name]
        await all_of(*(replicas.forget_master(each.region, chosen) for each in rest))
        await self._begin(replicas, PromotionStep.OUTLAST)
        await replicas.wait(over_at - asyncio.get_running_loop().time(), unless)

    async def _lease_terms(self, replicas: ReplicationSet, members: list[SetMember]) -> list[LeaseTerms]:
        """Return the terms of the servers' leases. All servers of a set keep leases, or none does."""
        return list(await asyncio.gather(*(replicas.lease_terms(member.region) for member in members)))

    async def _apply_and_detach(self, replicas: ReplicationSet, chosen: SetMember) -> None:
        """Make the server apply everything that it has received, and detach it from its master."""
        async with replicas.session(chosen.region) as session:
            await self._begin(replicas, PromotionStep.APPLY)
            # Again: when it restarts, a replica receives by itself.
            state = await stop_receiving(session, deadline=replicas.statement_deadline())
            if not state.has_applied_all:
                deadline = asyncio.get_running_loop().time() + self._settings.catch_up_seconds
                await apply_received(session, deadline=deadline)
                state = await member_state(session, deadline=replicas.statement_deadline())
            check_kept(chosen, state)
            await self._begin(replicas, PromotionStep.DETACH)
            await detach(session, deadline=replicas.statement_deadline())

    async def _prepare(self, replicas: ReplicationSet, chosen: SetMember) -> _Prepared:
        """Read what `_install` needs of a server that follows nobody any more."""
        other_servers = await self._other_servers(replicas.database)

        async def epoch_and_clock() -> tuple[int, int, float]:
            async with replicas.session(chosen.region) as session:
                known = await highest_epoch(session, replicas.shards, deadline=replicas.statement_deadline())
                unix_ms = await server_unix_ms(session, deadline=replicas.statement_deadline())
                return known, unix_ms, asyncio.get_running_loop().time()

        async def tables_and_terms() -> tuple[frozenset[str], LeaseTerms]:
            async with replicas.session(chosen.region) as session:
                reserving = await schemas_with_reserved_ids(session, deadline=replicas.statement_deadline())
                return reserving, await lease_terms(session, deadline=replicas.statement_deadline())

        (known, unix_ms, read_at), (reserving, terms) = await both(epoch_and_clock(), tables_and_terms())
        # The epoch has to be above the document's and above those of shards that were moved here, under which the old
        # master may have assigned versions that no server here has received. After an interrupted run, whose master was
        # never opened, it is one higher than need be.
        epoch = max(replicas.database.version_epoch, known) + 1
        return _Prepared(epoch, reserving, other_servers, terms, unix_ms, read_at)

    # ---- from here on, a promotion can only be finished --------------------------------------------------------------

    async def _install(
        self, replicas: ReplicationSet, chosen: SetMember, prepared: _Prepared, lost: str, *, lacks_commits: bool
    ) -> PromotionResult:
        """Raise the version epoch, which the caller has begun, change the topology and open the new master.

        ``lost``: the name of the old master when it does not answer. ``lacks_commits``: the new master may lack the old
        one's last commits, which reserved ids; its shards begin above any that they can have reserved."""
        region, epoch = chosen.region, prepared.epoch
        async with replicas.session(region) as session:
            lost_ids, now = None, asyncio.get_running_loop().time()
            if lacks_commits:
                now_unix_ms = prepared.unix_ms + round(1000 * (now - prepared.read_at))
                known_epoch = replicas.database.version_epoch
                lost_ids = LostIds(LostTimes.at(now_unix_ms), known_epoch, prepared.reserving)
            deadline = now + self._settings.catch_up_seconds
            await raise_epoch(
                session,
                replicas.shards,
                chosen.name,
                epoch,
                other_servers=prepared.other_servers,
                lost_ids=lost_ids,
                deadline=deadline,
            )
        await self._begin(replicas, PromotionStep.TOPOLOGY)
        read_at = asyncio.get_running_loop().time()
        change = name_master(self._store, replicas, region, epoch, lost)
        topology, unix_ms = await both(change, replicas.unix_ms(region))
        changed = self._set_of(topology, replicas.database.name)
        # The lease of a lost master is over, so it answers no critical read.
        settle = not (lost and prepared.terms.seconds)
        installed = _Installed(prepared.terms, unix_ms, read_at, lost)
        return await self._open(changed, settle=settle, installed=installed)

    # ---- the state that the topology describes -----------------------------------------------------------------------

    async def _restore(
        self, replicas: ReplicationSet, last_renewal: LastRenewal | None, before: Sequence[SetMember] = ()
    ) -> PromotionResult:
        """``before``: how the servers were when a run began that is undone."""
        members = await replicas.members()
        master = next(member for member in members if member.is_master)
        epochs, without_tables = await replicas.epochs_as_masters(members)
        region = unfinished(members, epochs, replicas.database.version_epoch)
        if region is not None:
            try:
                done = await self._end_interrupted(replicas, region, members, epochs, last_renewal)
            except PromotionRefused:
                if master.state is None:  # as below: it may be there, and may now overtake that promotion
                    await self._under_way.reject(replicas, members, epochs)
                    await give_back(replicas, before or members)
                raise
            return msgspec.structs.replace(done, without_tables=without_tables)
        if master.state is None:
            # It is there when it refuses, and perhaps otherwise, out of the reach of this process alone. As long as its
            # replicas are stopped its commits wait, and none of them can tell the next run that it hears from it.
            await reject_late_promotion(self._store, replicas, members)
            left = await give_back(replicas, before)
            detail = "".join(f"; {name} does not receive from it: {why}" for name, why in left.items())
            what = "refuses this process" if master.refuses else "does not answer"
            raise PromotionRefused(f"the master {master.name} {what}: {master.error}{detail}")
        if master.state.following is not None:
            raise PromotionRefused(
                f"{master.name} is the master by the topology, and follows {master.state.following.source}: somebody "
                "has made it a replica by hand. Promote the right one by `tao promote`"
            )
        await reject_late_promotion(self._store, replicas, members)
        return msgspec.structs.replace(await self._open(replicas, settle=False), without_tables=without_tables)

    async def _end_interrupted(
        self,
        replicas: ReplicationSet,
        region: str,
        members: Sequence[SetMember],
        epochs: Mapping[str, int],
        last_renewal: LastRenewal | None,
    ) -> PromotionResult:
        """Finish the interrupted promotion of a region's server, or open the old master under an epoch above it if that
        may have acknowledged what the server lacks. Raises `PromotionRefused` when neither is safe."""
        members = await replicas.compared(members, region)
        master = next(each for each in members if each.is_master)
        promoted = promoted_only_in_rows(members, epochs, replicas.database.version_epoch)
        opened = [each.name for each in promoted if await replicas.was_opened(each)]
        why = overtaking(region, members, opened, semi_sync=replicas.database.semi_sync)
        if why:
            check_goes_on(members, promoted, opened, why)
            await replicas.close(master.region)
            await self._begin(replicas, PromotionStep.TOPOLOGY)
            # The master's rows are raised before it is opened, by the next run if this one ends here.
            kept = self._set_of(await keep_master(self._store, replicas, epochs), replicas.database.name)
            return await self._open(kept, settle=False)
        if master.state is None:
            # It may answer critical reads: its lease may have been renewed since the interrupted run.
            await self._begin(replicas, PromotionStep.OUTLAST)
            others = [each for each in members if not each.is_master and each.state is not None]
            now = asyncio.get_running_loop().time()
            await self._wait_for_lease(replicas, others, last_renewal, now, asyncio.Event())
            _, master = await replicas.beside_master(region)
        if master.state is not None:
            await replicas.close(master.region)
        else:
            # A commit may still be on its way to a replica, and without leases nothing else fences the master.
            await all_of(*map(replicas.stop_receiving, replicas.places_of_replicas(members)))
        # Only now has the old master everything that it will ever have acknowledged.
        members = await replicas.compared(await replicas.members(), region)
        why = overtaking(region, members, opened, semi_sync=replicas.database.semi_sync)
        if master.state is None and any(each.is_master and each.state is not None for each in members):
            why = f"it answers again{why and ', and '}{why}"
        if why:
            raise PromotionRefused(f"{master.name} was open until now, and {why}: the next run goes on from there")
        chosen = next(each for each in members if each.region == region)
        await self._apply_and_detach(replicas, chosen)
        # The old master may have been lost when the interrupted run began.
        lost = "" if master.state is not None else master.name
        prepared = await self._prepare(replicas, chosen)
        await self._begin(replicas, PromotionStep.RAISE_EPOCH)
        return await self._install(replicas, chosen, prepared, lost, lacks_commits=True)

    async def _open(
        self, replicas: ReplicationSet, *, settle: bool, installed: _Installed | None = None
    ) -> PromotionResult:
        """Make the other servers follow the master of the topology, and open it to writes. ``installed``: it has just
        become master."""
        loop = asyncio.get_running_loop()
        opened_at = loop.time() + (self._settings.settle_seconds if settle else 0.0)
        database = replicas.database
        await self._begin(replicas, PromotionStep.REPOINT)
        following, left = await follow_master(replicas, lost=installed.lost if installed else "")
        await self._begin(replicas, PromotionStep.SETTLE)
        await asyncio.sleep(max(0.0, opened_at - loop.time()))
        await self._begin(replicas, PromotionStep.OPEN)
        if installed is None:
            await self._raise_again(replicas)
        waits = database.semi_sync and await self._acknowledged_in_use(replicas, following)
        async with replicas.session(database.master_region) as session:
            deadline = replicas.statement_deadline()
            terms = installed.terms if installed else await lease_terms(session, deadline=deadline)
            if terms.seconds:
                # A lease may count from an earlier time. Others that have to follow, or do not answer, take seconds.
                if installed and loop.time() - installed.read_at < _RECENT_SECONDS:
                    now = installed.unix_ms
                else:
                    now = await server_unix_ms(session, deadline=deadline)
                await grant_lease(session, now, deadline=replicas.statement_deadline())
            await open_to_writes(session, semi_sync=waits, deadline=replicas.statement_deadline())
        version = (await self._store.load()).version
        return PromotionResult(
            database=database.name,
            master=replicas.master.name,
            region=database.master_region,
            version_epoch=database.version_epoch,
            topology_version=version,
            following=following,
            left=left,
            waits_for_replica=waits,
        )

    async def _raise_again(self, replicas: ReplicationSet) -> None:
        """Write the topology's epoch into shard rows of the master that lack it."""
        async with replicas.session(replicas.database.master_region) as session:
            await raise_epoch(
                session,
                replicas.shards,
                replicas.master.name,
                replicas.database.version_epoch,
                other_servers=await self._other_servers(replicas.database),
                deadline=replicas.statement_deadline(),
            )

    async def _acknowledged_in_use(self, replicas: ReplicationSet, following: list[str]) -> bool:
        """Return whether a replica in use acknowledges. A marked replica may be about to be stopped, and then all
        writes would stop."""
        marked = {server.name for server in replicas.database.places.values() if server.down}
        if marked.issuperset(following) or not await self._acknowledged(replicas, True):
            return False
        # Others are not asked: a lost master, which is marked, would be waited for.
        places = replicas.database.places
        asked = [place for place, server in places.items() if server.name in following]
        return not marked or bool(replicas.acknowledging(await asyncio.gather(*map(replicas.member, asked))))

    async def _acknowledged(self, replicas: ReplicationSet, expected: bool) -> bool:
        """Return whether a replica acknowledges to the master, now or within ``acknowledging_seconds``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._settings.acknowledging_seconds if expected else 0.0)
        async with replicas.session(replicas.database.master_region) as session:
            while not await acknowledging_replicas(session, deadline=replicas.statement_deadline()):
                if loop.time() >= deadline:
                    return False
                await asyncio.sleep(_PAUSE_SECONDS)
        return True

    async def _check_acknowledged(self, replicas: ReplicationSet) -> None:
        """Raise `OperatorError` when no replica acknowledges to the master within ``acknowledging_seconds``."""
        if not await self._acknowledged(replicas, True):
            raise OperatorError(f"{replicas.master.name} has no replica that acknowledges; it waits for none")

    async def _wait_for_replicas_again(self, replicas: ReplicationSet) -> None:
        """Make a master that waited for no replica wait again, now that one is back."""
        await self._check_acknowledged(replicas)
        async with replicas.session(replicas.database.master_region) as session:
            await set_semi_sync(session, waits=True, deadline=replicas.statement_deadline())

    @asynccontextmanager
    async def _exclusively(self, database: str) -> AsyncIterator[_Run]:
        async with hold_exclusively(self._locks, mastership_lock(database), self._settings.lock_seconds) as hold:
            run = self._runs[database] = _Run(hold, KeptSessions(), asyncio.get_running_loop().time())
            try:
                yield run
            except TaoError:
                hold.check()  # a process that was paused sees time-outs and closed sessions; report the cause
                raise
            finally:
                del self._runs[database]
                run.sessions.close()

    async def _set(self, database: str) -> ReplicationSet:
        return self._set_of(await self._store.load(), database)

    def _set_of(self, topology: Topology, database: str) -> ReplicationSet:
        run = self._runs.get(database)
        return ReplicationSet(
            find_database(topology, database),
            self._accounts,
            seen_from=self._seen_from,
            statement_seconds=self._settings.statement_seconds,
            silent=self._silent,
            hold=None if run is None else run.hold,
            sessions=None if run is None else run.sessions,
        )

    async def _other_servers(self, database: Database) -> list[str]:
        """Return the names of the servers of all other databases."""
        topology = await self._store.load()
        return sorted(each.server.name for each in topology.database_servers if each.database.name != database.name)

    async def _begin(self, replicas: ReplicationSet, step: PromotionStep) -> None:
        replicas.check_hold()
        if self._on_step is not None:
            await self._on_step(step)
