"""The active watcher's work on masters: renew their leases, open one that restarted, replace one that is lost.

`next_action`, a pure function of the last observation, decides what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from tao.model.errors import TaoError
from tao.replication.gtid import GtidSet
from tao.replication.lease import (
    LeaseTerms,
    install_lease,
    lease_terms,
    remove_lease,
    renew_lease,
    server_unix_ms,
)
from tao.replication.locks import LockHold, Locks, LocksAway, LockTaken, mastership_lock
from tao.replication.promotion import Promoter, PromotionResult
from tao.replication.promotion_plan import (
    Heard,
    PromotionRequest,
    ServerDiverged,
    SetMember,
    check_rejoin,
    discarded_transactions,
)
from tao.replication.replication_set import ReplicationSet, is_silence
from tao.storage.session import DatabaseSession
from tao.watcher.probes import PeerReports, WatcherContext
from tao.watcher.settings import ProbeSettings, WatcherSettings

_ATTEMPTS_WITHOUT_LOCK: Final = 2
"""Attempts to renew a lease while etcd is away. One lost packet can take a second, and the next look comes too late."""


class Action(StrEnum):
    """The action that a database needs."""

    NOTHING = "nothing"
    RESTORE = "restore"
    """The master of the topology answers and is closed, or nobody receives from it although it waits for a replica: it
    restarted, or a promotion was interrupted."""
    FINISH = "finish"
    """A promotion was interrupted when it could only be finished, and its old master answers again and waits."""
    PROMOTE = "promote"
    """The master has been silent for too long."""
    REJOIN = "rejoin"
    """A server follows no master."""
    WAIT = "wait"
    """Commits of the master wait for no replica, although the topology asks for it and a replica acknowledges. That
    replica was drained and unmarked by hand, or its seeding was interrupted, or it was away when the master was opened.
    """
    END_WAITS = "end_waits"
    """Commits of the master wait for acknowledgements that were lost on the way, and all others wait behind them."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a database as the watcher observes it. ``silent_seconds``: how long its master has not answered."""

    members: Sequence[SetMember]
    silent_seconds: float
    closed_observations: int
    """Consecutive observations that found the master closed."""
    seen_by_its_region: bool = False
    """The watcher of the master's own region reaches it, so it is cut off from here and not lost."""
    semi_sync: bool = False
    """The topology makes the database semi-synchronous."""
    acknowledging: Sequence[str] = ()
    """Replicas for which commits may wait."""
    lost_acknowledgements: int = 0
    """Consecutive observations that found the same commits waiting although a replica has them
    (`ReplicationSet.has_lost_acknowledgements`)."""
    waited_for_replica: bool = False
    """When the master answered last, its commits waited for a replica; without leases, that was lately, and for nobody
    but servers of its database. The topology alone says what was asked for: a master whose last replica is gone,
    drained or seeded may wait for none."""
    is_dead: bool = False
    """Nothing listens at the master's address, as the watcher of its region finds; this one where there is none."""
    marked: Collection[str] = ()
    """Servers with a ``down`` mark, as an operator sets on one that is taken out of use."""
    silent_in_its_region: bool = False
    """A watcher of the master's own region, this one or another, gets no answer from it either."""
    is_unheard: bool = False
    """A watcher of the master's region is there and refuses this one, so it is not known whether that sees the
    master."""


CLOSED_OBSERVATIONS: Final = 2
"""A single observation may fall between the fence of a promotion and the moment its lock is seen; two are a state."""
LOST_ACKNOWLEDGEMENTS: Final = 2
"""An acknowledgement may be on its way during one observation."""


def next_action(
    observation: Observation,
    *,
    probes: ProbeSettings,
    auto_promote: bool,
    auto_rejoin: bool,
    leases: bool = True,
) -> tuple[Action, str]:
    """Return the action to take now, and the server to rejoin if that is the action.

    A master that is dead or hangs is replaced sooner than one that is silent, if nothing is lost with it. One that
    refuses this watcher is there, and one whose region's watchers refuse it may be: neither is replaced.

    ``leases``: a master that is out of reach has closed itself. Without them it is replaced only if it cannot
    acknowledge a write by itself, because its commits wait for a replica, and no replica receives from it."""
    master = next(member for member in observation.members if member.is_master)
    others = [member for member in observation.members if not member.is_master and member.state is not None]
    if master.refuses and _waits_in_vain(others, observation):
        return Action.RESTORE, ""
    if master.state is None:
        is_hidden = observation.seen_by_its_region or observation.is_unheard or master.refuses
        is_lost = not is_hidden and _is_lost(observation, probes)
        if auto_promote and is_lost and len(observation.members) > 1 and (leases or _keeps_writes(observation)):
            return Action.PROMOTE, ""
        return Action.NOTHING, ""
    if observation.closed_observations >= CLOSED_OBSERVATIONS:
        return Action.RESTORE, ""
    if observation.semi_sync and _waits_for_nobody(master, others):
        if any(
            _could_receive(each, observation.marked) and not discarded_transactions(each, master) for each in others
        ):
            return Action.RESTORE, ""
        if any(_follows_nobody(each) and discarded_transactions(each, master) for each in others):
            return Action.FINISH, ""
    if observation.semi_sync and not master.state.waits_for_replica and observation.acknowledging:
        return Action.WAIT, ""
    if observation.lost_acknowledgements >= LOST_ACKNOWLEDGEMENTS:
        return Action.END_WAITS, ""
    if auto_rejoin:
        for member in others:
            if _follows_nobody(member) and not _was_refused(member, master):
                return Action.REJOIN, member.name
    return Action.NOTHING, ""


def _keeps_writes(observation: Observation) -> bool:
    """Return whether nothing that was acknowledged is lost with the master."""
    return observation.semi_sync and observation.waited_for_replica


def _is_lost(observation: Observation, probes: ProbeSettings) -> bool:
    """Return whether a master that does not answer is lost.

    One with which nothing is lost is given up sooner: when its process is dead; and when it hangs, if a watcher beside
    it finds so too (a region that is cut off looks the same from here), and if the promotion need not wait for the
    whole lease, during which nobody could renew it (`is_fenced_by_replicas`).
    """
    if observation.silent_seconds >= probes.master_gone_seconds:
        return True
    if not _keeps_writes(observation):
        return False
    others = [member for member in observation.members if not member.is_master]
    return observation.is_dead or (
        observation.silent_seconds >= probes.hangs_after_seconds
        and observation.silent_in_its_region
        and all(member.is_complete and member.name not in observation.marked for member in others)
    )


def _reason_to_wait(master: str, observation: Observation, *, leases: bool) -> str:
    """Return why a master is not replaced that has been silent for long; "" when it is."""
    if observation.is_unheard:
        return (
            f"watchers of {master}'s region refuse this one, so it is not known whether they see {master}: mend what "
            "they refuse it for, which the log says (watcher_refused)"
        )
    if observation.semi_sync and not leases and not observation.waited_for_replica:
        return (
            f"without leases a lost master is replaced only if its commits waited for servers of its database, and "
            f"{master} was not lately seen to do so: it may still acknowledge writes, which would be lost"
        )
    return ""


def _waits_for_nobody(master: SetMember, others: Sequence[SetMember]) -> bool:
    """Return whether an open master waits for a replica, and nobody is going to receive from it.

    A promotion that failed after it had stopped or detached the others leaves such a master. A planned
    removal of the last replica first makes the master wait for none. An operator who stops one by hand marks it before.
    """
    return (
        master.state is not None
        and not master.state.read_only
        and master.state.waits_for_replica
        and all(map(_has_stopped_receiving, others))
    )


def _waits_in_vain(others: Sequence[SetMember], observation: Observation) -> bool:
    """Return whether a master that refuses this watcher may wait for replicas, and all of them have stopped receiving:
    a promotion that failed has left them so, and did not even get so far as to give them back."""
    stopped = [each for each in others if each.state is not None and each.state.following is not None]
    return (
        observation.semi_sync
        and all(map(_has_stopped_receiving, others))
        and any(_could_receive(each, observation.marked) for each in stopped)
    )


def _follows_nobody(member: SetMember) -> bool:
    """Return whether a server follows nobody: it is an old master, or its promotion was interrupted."""
    return member.is_complete and member.state is not None and member.state.following is None


def _was_refused(member: SetMember, master: SetMember) -> bool:
    """Return whether a server can follow the master no more, and is closed already. Each attempt to have it rejoin
    would hold the lock of the database, again and again, and nobody could mark the server."""
    closed = member.state is not None and member.state.read_only
    return closed and bool(discarded_transactions(member, master))


def _has_stopped_receiving(member: SetMember) -> bool:
    """Return whether a server follows no master, or one with receiving stopped, which does not resume by itself."""
    following = None if member.state is None else member.state.following
    return following is None or following.receiving_stopped


def _could_receive(member: SetMember, marked: Collection[str]) -> bool:
    """Return whether a server that has stopped receiving is whole, and has neither failed nor been marked."""
    following = None if member.state is None else member.state.following
    return member.is_complete and (following is None or not (following.receiving_failed or member.name in marked))


def _names_by_place(replicas: ReplicationSet) -> dict[str, str]:
    return {place: server.name for place, server in replicas.database.places.items()}


class Mastership:
    """Keeps the masters of all databases. At most one action runs for each database."""

    def __init__(
        self,
        settings: WatcherSettings,
        promoter: Promoter,
        locks: Locks,
        peers: PeerReports,
        silent_seconds: Callable[[str], float],
        context: WatcherContext,
        is_dead: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``silent_seconds``: how long a master has not answered; ``is_dead``: whether nothing listens at its
        address."""
        self._settings: Final = settings
        self._promoter: Final = promoter
        self._locks: Final = locks
        self._peers: Final = peers
        self._silent_seconds: Final = silent_seconds
        self._is_dead: Final = is_dead
        self._tasks: Final = context.tasks
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._audit: Final = context.audit
        self._sets: Final[dict[str, ReplicationSet]] = {}
        self._closed_observations: Final[dict[str, int]] = {}
        self._lost_acknowledgements: Final[dict[str, tuple[GtidSet, int]]] = {}
        """Database → what its master had executed when it waited for acknowledgements that were lost, and how many
        observations have found it like that."""
        self._renewed_at: Final[dict[str, float]] = {}
        self._began: Final = context.clock.monotonic()
        self._prepared: Final[dict[str, LeaseTerms]] = {}
        """The terms of the lease that each prepared server keeps."""
        self._acting: Final = set[str]()
        self._acted_at: Final[dict[str, float]] = {}
        self._renewing: Final = set[str]()
        self._unanswered_until: Final[dict[str, float]] = {}
        """Database whose master left a probe or a renewal unanswered → until when no renewal of its lease is begun. It
        would hold the lock, which a promotion may need, for as long as it waits."""
        self._heard: Final[dict[str, Heard]] = {}
        """Replica → what it has heard from its master, and since when nothing more."""
        self._refusals: Final[dict[str, str]] = {}
        self._lost: Final = set[str]()
        self._diverged: Final = set[str]()
        """The servers that would rejoin by themselves, had they no transactions that their master lacks."""
        self._waited_for_replica: Final[dict[str, str]] = {}
        """Database → its master, if that waited for a replica when it answered last."""
        self._acknowledged_by_set: Final[dict[str, tuple[str, float]]] = {}
        """Database → its master, and when it was seen last that nobody but servers of its set acknowledge to it."""
        self._withheld: Final[dict[str, str]] = {}
        """Database → why its lost master is not replaced."""
        self.activity: LockHold | None = None
        """The hold of the lock of the active watcher."""
        self.active_since = context.clock.monotonic()
        """Before this time another watcher, or a predecessor of this process, may have been active."""
        self.actions: Final[dict[str, int]] = dict.fromkeys(
            (action.value for action in Action if action is not Action.NOTHING), 0
        )
        self.failed_actions = 0
        self.renewals = 0
        self.missed_renewals = 0
        self.last_promotion: dict[str, object] = {}

    @property
    def is_active(self) -> bool:
        """Checked on each access, because this process may have been paused and another one may be active since."""
        return self.activity is not None and self.activity.is_held()

    def observe(self, replicas: ReplicationSet, members: list[SetMember], began: float) -> None:
        """Decide about a database from what a probe has seen.

        ``began``: when the probe began. What was seen before an action ended is no reason for another one.
        """
        name = replicas.database.name
        for member in members:
            if member.state is None:
                self._prepared.pop(member.name, None)
                if member.is_silent and member.is_master:
                    self._note_silence(replicas)
            elif member.is_master:
                self._unanswered_until.pop(name, None)
            else:
                self._note_heard(member)
        if began < self._acted_at.get(name, began):
            return
        former = self._sets.get(name)
        if former is not None and _names_by_place(former) != _names_by_place(replicas):
            # A server that was taken out may still acknowledge, and is a stranger now.
            self._acknowledged_by_set.pop(name, None)
        self._sets[name] = replicas
        master = next(member for member in members if member.is_master)
        if master.state is not None:
            self._waited_for_replica[name] = master.name if master.state.waits_for_replica else ""
            self._note_acknowledgements(replicas, master.name, master.state.acknowledging_clients, members, began)
        self._note_loss(name, master, len(members))
        closed = master.state is not None and master.state.read_only
        self._closed_observations[name] = self._closed_observations.get(name, 0) + 1 if closed else 0
        self._count_lost_acknowledgements(replicas, members)
        if not self.is_active or name in self._acting:
            return
        settings = self._settings
        observation = Observation(
            members,
            self._silent_seconds(master.name),
            self._closed_observations[name],
            self._peers.says_up(master.region, master.name),
            replicas.database.semi_sync,
            replicas.acknowledging(members),
            self._lost_acknowledgements[name][1] if name in self._lost_acknowledgements else 0,
            self._keeps_writes(name, master.name),
            self._is_known_dead(master),
            {server.name for server in replicas.database.places.values() if server.down},
            master.region == self._settings.region or self._peers.says_silent(master.region, master.name),
            self._peers.refuse(master.region),
        )
        self._note_withheld(name, master, observation)
        self._note_diverged(name, master, members)
        action, server = next_action(
            observation,
            probes=settings.probes,
            auto_promote=settings.auto_promote,
            auto_rejoin=settings.auto_rejoin,
            leases=settings.leases,
        )
        if action is not Action.NOTHING:
            if settings.dry_run:
                self._log.warning("action_simulated", database=name, action=action.value, target=server or master.name)
                return
            self._acting.add(name)
            self._tasks.start(self._do(name, action, server, observation), f"{action} {name}")

    def _note_silence(self, replicas: ReplicationSet) -> None:
        """Note that a master has left a question unanswered. A single one keeps its lease from being renewed for no
        longer than until the next probe begins: it may only have been slow. Several do until a probe is answered."""
        name, probes = replicas.database.name, self._settings.probes
        seconds = probes.interval_seconds + (probes.timeout_seconds if name in self._unanswered_until else 0.0)
        self._unanswered_until[name] = self._clock.monotonic() + seconds

    def _note_heard(self, replica: SetMember) -> None:
        """Note what a replica has heard from its master, if that is more than before."""
        following = None if replica.state is None else replica.state.following
        if following is None or following.heard is None:
            self._heard.pop(replica.name, None)
        elif replica.name not in self._heard or self._heard[replica.name].mark != following.heard:
            self._heard[replica.name] = Heard(following.heard, replica.seen_at)

    def _note_acknowledgements(
        self, replicas: ReplicationSet, master: str, clients: int, members: Sequence[SetMember], now: float
    ) -> None:
        """Note whether nobody but servers of the set acknowledges to its master, which counts its ``clients``.

        An undecided observation leaves what an earlier one has found: a master is often lost together with the
        link to its replicas, which then do not answer, or do not acknowledge any more, while it still does.
        """
        known = len(replicas.acknowledging(members))
        silent = sum(member.state is None for member in members)
        if clients == known:
            self._acknowledged_by_set[replicas.database.name] = master, now
        elif clients > known + silent:
            self._acknowledged_by_set.pop(replicas.database.name, None)

    def _count_lost_acknowledgements(self, replicas: ReplicationSet, members: list[SetMember]) -> None:
        """Count the observations of commits that wait for a lost acknowledgement, while their master commits nothing
        else."""
        name, state = replicas.database.name, next(member.state for member in members if member.is_master)
        if state is None or not replicas.has_lost_acknowledgements(members):
            self._lost_acknowledgements.pop(name, None)
            return
        executed, count = self._lost_acknowledgements.get(name, (state.executed, 0))
        self._lost_acknowledgements[name] = state.executed, count + 1 if state.executed == executed else 1

    def lost_databases(self) -> list[str]:
        """Return the databases whose only server has been silent for as long as a lost master."""
        return sorted(self._lost)

    def _note_withheld(self, name: str, master: SetMember, observation: Observation) -> None:
        """Report once why a lost master is not replaced."""
        settings = self._settings
        why = ""
        if (
            master.state is None
            and not master.refuses
            and settings.auto_promote
            and observation.silent_seconds >= settings.probes.master_gone_seconds
            and len(observation.members) > 1
        ):
            why = _reason_to_wait(master.name, observation, leases=settings.leases)
        if not why:
            self._withheld.pop(name, None)
        elif self._withheld.get(name) != why:
            self._withheld[name] = why
            self._log.error(
                "promotion_withheld",
                database=name,
                target=master.name,
                silent_seconds=round(observation.silent_seconds, 2),
                reason=f"{why}. If it is lost for good: tao promote --master-lost",
            )

    def _note_diverged(self, name: str, master: SetMember, members: Sequence[SetMember]) -> None:
        """Report once that a server is not made a replica again, because it cannot follow the master any more."""
        if not self._settings.auto_rejoin or master.state is None:
            return
        for member in members:
            if member.is_master or not _follows_nobody(member) or not _was_refused(member, master):
                self._diverged.discard(member.name)
            elif member.name not in self._diverged:
                self._diverged.add(member.name)
                try:
                    check_rejoin(member, master)
                except ServerDiverged as error:
                    self._log.error("rejoin_withheld", database=name, target=member.name, reason=error.message)

    def _note_loss(self, name: str, master: SetMember, servers: int) -> None:
        """Report once that a database has lost its only server: only an operator can bring that back."""
        silent_seconds = self._silent_seconds(master.name)
        if master.state is not None or servers > 1 or silent_seconds < self._settings.probes.master_gone_seconds:
            self._lost.discard(name)
        elif name not in self._lost:
            self._lost.add(name)
            self._log.error(
                "database_lost",
                database=name,
                target=master.name,
                silent_seconds=round(silent_seconds, 2),
                reason=f"{master.error}; it has no second server that could be promoted: start it again, or restore it "
                "from a backup. Until then its shards take no writes, and only what is cached of them can be read",
            )

    async def keep_leases(self) -> None:
        """Renew leases until cancelled: of all masters while active, and always of masters in the own region.

        So a region that is cut off from the active watcher keeps its masters until somebody replaces them.
        """
        while True:
            if self._settings.leases and not self._settings.dry_run:
                for name, replicas in self._sets.items():
                    hangs = self._clock.monotonic() < self._unanswered_until.get(name, 0.0)
                    if self._renews_lease_of(replicas) and name not in self._renewing and not hangs:
                        self._renewing.add(name)
                        self._tasks.start(self._renew_lease(replicas), f"lease of {name}")
            await asyncio.sleep(self._settings.lease.renew_seconds)

    async def _do(self, name: str, action: Action, server: str, observation: Observation) -> None:
        began = self._clock.monotonic()
        done: PromotionResult | None = None
        try:
            if action is Action.PROMOTE:
                done = await self._replace(name, observation)
            elif action is Action.RESTORE:
                done = await self._promoter.restore(name)
            elif action is Action.FINISH:
                done = await self._promoter.finish(name)
            elif action is Action.WAIT:
                await self._promoter.wait_for_replicas(name)
            elif action is Action.END_WAITS:
                await self._promoter.end_lost_waits(name)
            else:
                await self._promoter.rejoin(name, server)
        except LockTaken:
            return  # an operator or another watcher is changing it
        except TaoError as error:
            self.failed_actions += 1
            if self._is_new_failure(name, error.message):
                self._log.error("action_failed", database=name, action=action.value, reason=error.message)
                self._audit.acted(action.value, error, database=name, target=server)
            return
        except Exception as error:
            self.failed_actions += 1
            if self._is_new_failure(name, repr(error)):
                self._audit.acted(action.value, error, database=name, target=server)
            raise  # the task's owner logs it
        finally:
            self._acting.discard(name)
            self._acted_at[name] = self._clock.monotonic()
        self._refusals.pop(name, None)
        self._closed_observations[name] = 0
        self._lost_acknowledgements.pop(name, None)
        if done is not None:
            self._waited_for_replica[name] = done.master if done.waits_for_replica else ""
        self._renewed_at[name] = self._clock.monotonic()  # the action may have granted the new master a lease
        self.actions[action.value] += 1
        seconds = self._clock.monotonic() - began
        if done is not None and action is Action.PROMOTE:
            self.last_promotion = {
                "database": name,
                "master": done.master,
                "detected_after_seconds": round(observation.silent_seconds, 3),
                "promoted_within_seconds": round(seconds, 3),
                "waits_for_replica": done.waits_for_replica,
            }
        promoted = done.master if done else ""
        self._audit.acted(action.value, database=name, master=promoted, target=server)
        self._log.warning(
            "action_completed",
            database=name,
            action=action.value,
            seconds=round(seconds, 3),
            master=promoted,
            target=server,
            left=done.left if done else {},
            without_tables=done.without_tables if done else {},
            waits_for_replica=done.waits_for_replica if done else None,
        )

    async def _replace(self, name: str, observation: Observation) -> PromotionResult:
        """Replace a lost master. Raises as `Promoter.promote`."""
        self._log.warning("master_lost", database=name, silent_seconds=round(observation.silent_seconds, 2))
        region, master = next((each.region, each.name) for each in observation.members if each.is_master)
        waits = partial(self._waited, name, master)
        request = PromotionRequest(
            master_lost=True, waited_for_replica=waits(), heard=dict(self._heard), master=master, only_fenced=True
        )
        return await self._promoter.promote(
            name,
            request,
            last_renewal=partial(self._last_renewal, name, region),
            still_waits=waits,
            has_answered=partial(self._has_answered, region, master, self._clock.monotonic()),
        )

    def _keeps_writes(self, database: str, master: str) -> bool:
        """Return whether a master waited for a replica when it answered last. Without leases nothing but its replicas
        can fence it, so then it must also be certain that they do (`_waited`)."""
        waited = self._waited_for_replica.get(database) == master
        return waited and (self._settings.leases or self._waited(database, master))

    def _waited(self, database: str, master: str) -> bool:
        """Return whether a lost master was lately seen to wait for a replica, and nobody but servers of its set to
        acknowledge to it.

        While a lease lasted, others may have changed what a silent master does. And a replica outside the set, which
        the promotion would not stop, could acknowledge all along."""
        now = self._clock.monotonic()
        known_for = self._settings.lease.terms(semi_sync=True).over_after_seconds
        acknowledged_by, seen_at = self._acknowledged_by_set.get(database, ("", now))
        is_known = max(self._silent_seconds(master), now - seen_at) < known_for
        return self._waited_for_replica.get(database) == acknowledged_by == master and is_known

    def _is_known_dead(self, master: SetMember) -> bool:
        """Return whether a watcher near a master finds that nothing listens at its address. Where its region has a
        watcher only that one can know: for others, something on the way may refuse."""
        if master.region in self._peers.reports:
            return self._peers.says_dead(master.region, master.name)
        return self._is_dead(master.name)

    def _has_answered(self, region: str, master: str, since: float) -> bool:
        """Return whether a lost master has answered this watcher since then, or another one of its region lately."""
        own = self._silent_seconds(master) < self._clock.monotonic() - since
        return own or self._peers.says_up(region, master)

    def _is_new_failure(self, database: str, reason: str) -> bool:
        """Return whether the last action on a database has not failed for the same reason: each is reported once."""
        is_new = self._refusals.get(database) != reason
        self._refusals[database] = reason
        return is_new

    def renewed_seconds_ago(self) -> dict[str, float]:
        """Return, for other watchers, how long ago this one renewed each master's lease. Without a renewal it counts
        from the start, because an earlier process in this place may have renewed until then."""
        now = self._clock.monotonic()
        return {name: now - self._renewed_at.get(name, self._began) for name in self._sets}

    async def _last_renewal(self, database: str, region: str) -> float:
        """Return the latest renewal by any watcher that may have renewed: this one, and all of the master's region."""
        renewed_at = max(self._renewed_at.get(database, self._began), self.active_since)
        if region == self._settings.region or region in self._peers.reports:
            asked_at = self._clock.monotonic()
            ago = await self._peers.renewed_seconds_ago(region, database)
            renewed_at = max(renewed_at, (asked_at if ago else self._clock.monotonic()) - ago)
        return renewed_at

    def _renews_lease_of(self, replicas: ReplicationSet) -> bool:
        """Return whether this watcher has to renew the lease of the set's master.

        One that the topology does not list does so only while it acts: nobody else knows of its renewals, and who
        replaced the master would not wait for the end of the lease."""
        is_near = replicas.database.master_region == self._settings.region
        return self.is_active or (is_near and self._peers.is_listed)

    async def _renew_lease(self, replicas: ReplicationSet) -> None:
        try:
            await self._renew(replicas)
        except Exception:
            self.missed_renewals += 1
            raise
        finally:
            self._renewing.discard(replicas.database.name)

    async def _renew(self, replicas: ReplicationSet) -> None:
        """Prepare the servers of a set for leases, and renew the lease of its master, if it keeps one."""
        database = replicas.database
        terms = self._settings.lease.terms(semi_sync=database.semi_sync) if database.keeps_lease else LeaseTerms()
        # The master comes first: a promotion takes the length of its lease from the other servers.
        for region in sorted(database.places, key=lambda each: each != database.master_region):
            name = database.places[region].name
            if self._prepared.get(name) != terms and not await self._prepare(replicas, region, name, terms):
                break
        if not terms.seconds:
            return
        try:
            async with (
                self._locks.held(mastership_lock(database.name), exclusive=False) as hold,
                replicas.session(database.master_region) as session,
            ):
                if not await self._keeps(session, replicas, terms):
                    return
                now = await server_unix_ms(session, deadline=replicas.statement_deadline())
                # Whatever happens to the renewal, the lease ends at most its length after this moment.
                self._renewed_at[database.name] = self._clock.monotonic()
                # Check the lock after that moment: a promotion that began since then takes this renewal into account.
                hold.check()
                if not self._renews_lease_of(replicas):
                    return
                renewed = await self._renew_at(session, replicas, now, terms)
        except LockTaken:
            return  # its master is being changed
        except LocksAway as error:
            renewed = await self._renew_without_lock(replicas, terms, error)
        except TaoError as error:
            if is_silence(error):
                self._note_silence(replicas)
            self._log.warning("lease_not_renewed", database=database.name, reason=error.message)
            renewed = False
        if renewed:
            self.renewals += 1
        else:
            self.missed_renewals += 1

    async def _renew_at(
        self, session: DatabaseSession, replicas: ReplicationSet, from_unix_ms: int, terms: LeaseTerms
    ) -> bool:
        """Renew a lease under its lock. Returns whether it was renewed.

        The set may be out of date. A lease that has not ended belongs to the master all the same, because its successor
        waits for the end; within the grace it is the topology that says whether there is a successor.
        """
        before_end = terms.without_grace
        if await renew_lease(session, from_unix_ms, before_end, deadline=replicas.statement_deadline()):
            return True
        if not terms.grace_seconds or not await self._promoter.is_master(replicas.database.name, replicas.master.name):
            return False
        return await renew_lease(session, from_unix_ms, terms, deadline=replicas.statement_deadline())

    async def _renew_without_lock(self, replicas: ReplicationSet, terms: LeaseTerms, away: LocksAway) -> bool:
        """Renew the lease of a master of the own region although it is not known who holds its lock, if all other
        servers follow it (`ReplicationSet.is_followed_by_all`). Returns whether it was renewed."""
        database = replicas.database
        reason = away.message
        is_near = database.semi_sync and database.master_region == self._settings.region
        for _ in range(_ATTEMPTS_WITHOUT_LOCK if is_near else 0):
            try:
                async with replicas.session(database.master_region) as session:
                    if not await self._keeps(session, replicas, terms):
                        return False
                    now = await server_unix_ms(session, deadline=replicas.statement_deadline())
                    # Before the servers are asked: a promotion that stops one of them later counts with this renewal.
                    self._renewed_at[database.name] = self._clock.monotonic()
                    is_followed = replicas.is_followed_by_all(await replicas.members())
                    # It may have ceased to be the active watcher while it waited for the lock.
                    if not is_followed or not self._renews_lease_of(replicas):
                        break
                    return await renew_lease(session, now, terms, deadline=replicas.statement_deadline())
            except TaoError as error:
                reason = error.message
        self._log.warning("lease_not_renewed", database=database.name, reason=reason)
        return False

    async def _keeps(self, session: DatabaseSession, replicas: ReplicationSet, terms: LeaseTerms) -> bool:
        """Return whether the master keeps its lease on these terms; otherwise it is prepared again before a renewal.

        A watcher of another version installs its own, under which a renewal could last longer than a promotion waits.
        """
        found = await lease_terms(session, deadline=replicas.statement_deadline())
        if found.in_ms != terms.in_ms:
            self._prepared.pop(replicas.master.name, None)
        return found.in_ms == terms.in_ms

    async def _prepare(self, replicas: ReplicationSet, region: str, name: str, terms: LeaseTerms) -> bool:
        """Have a server keep a lease on these terms, or none for 0 seconds. Return whether it does so now."""
        try:
            async with replicas.session(region) as session:
                found = await lease_terms(session, deadline=replicas.statement_deadline())
                if terms.seconds and found.in_ms != terms.in_ms:
                    await install_lease(session, terms, deadline=replicas.statement_deadline())
                elif found.seconds and not terms.seconds:  # the database had a second server once
                    await remove_lease(session, deadline=replicas.statement_deadline())
            self._prepared[name] = terms
        except TaoError as error:
            # This repeats while the server is unreachable.
            self._log.debug("lease_not_installed", target=name, reason=error.message)
            return False
        return True
