"""Pure decisions about promotion: may a server of a replication set become its master, and which one.

No acknowledged write is lost because of two rules. The promoted server has *received* everything that any other
reachable server has. And every server that may have received more is reachable, unless an operator vouches for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.model.errors import OperatorError
from tao.model.topology import region_of_place
from tao.replication.server_statements import HEARTBEAT_SECONDS, MemberState

SILENT_SECONDS: Final = 1.3 * HEARTBEAT_SECONDS
"""A replica that has heard nothing from its master for so long has missed a heartbeat."""


class PromotionRefused(OperatorError):
    """A promotion now could lose writes or create two masters. Nothing was changed; the message says why and what to
    do."""

    reason = "PROMOTION_REFUSED"


class MasterAnswers(PromotionRefused):
    """A master that was reported lost answers, and has everything that it has committed."""

    reason = "MASTER_ANSWERS"


class ServerDiverged(OperatorError):
    """The server has transactions that the master of its set lacks. It cannot follow and has to be reseeded."""

    reason = "SERVER_DIVERGED"


class ServerSeeding(OperatorError):
    """The server is being seeded, or its seeding was interrupted, so it has only a part of the data."""

    reason = "SERVER_SEEDING"


@dataclass(frozen=True, slots=True)
class SetMember:
    """A server of a replication set. ``region`` is its place: the region, or ``REGION/standby``. ``state`` is None when
    it does not answer; ``error`` then says why."""

    name: str
    region: str
    state: MemberState | None
    error: str = ""
    is_master: bool = False
    """True for the master region's server in the topology."""
    is_refused: bool = False
    """True when nothing listens at its address: its machine answers, and no process of it runs."""
    seen_at: float = 0.0
    """When its answer had come, on the loop's clock."""
    refuses: bool = False
    """True when it answers, and refuses this process' account or certificate, or is refused for its own certificate. So
    it is there, and nothing else is known of it."""
    is_silent: bool = False
    """True when it left the question unanswered, or the connection broke: another question may take as long."""
    is_outdated: bool = False
    """True when it follows nobody, and has nothing of the present master: it lost the mastership to that one or to an
    earlier one, and has not rejoined."""

    @property
    def is_fit(self) -> bool:
        """True when it may become master, if the others have nothing that it lacks."""
        return self.is_complete and not self.is_outdated

    @property
    def is_complete(self) -> bool:
        """True when it answers and is not being seeded."""
        return self.state is not None and not self.state.seeding

    @property
    def receives(self) -> bool:
        """True when it is connected to a master."""
        return self.state is not None and self.state.following is not None and self.state.following.receiving

    @property
    def acknowledges(self) -> bool:
        """True when it is connected and acknowledges to its master what it has received."""
        return self.receives and self.state is not None and self.state.acknowledges


@dataclass(frozen=True, slots=True)
class Heard:
    """What a replica had heard from its master (`ReplicationStatus.heard`) at a time on the loop's clock."""

    mark: str
    at: float


@dataclass(frozen=True, slots=True)
class PromotionRequest:
    """The promotion that was asked for.

    ``region``: the region (or other place) whose server becomes master, or None for the most advanced server.
    ``master_lost``: proceed without the old master, which is ``master``: what follows was seen of that one, and says
    nothing of a successor. ``without``: servers that may be unreachable, because the
    operator vouches that they have nothing that the others lack; with the old master among them, a former one that has
    not rejoined may take its place. ``waited_for_replica``: the commits of the lost
    master waited for a replica when it answered last, a moment ago. ``heard``: replica → what it had heard from that
    master when somebody looked earlier; without it a replica counts as one that hears while it is connected.
    ``only_fenced``: refuse if the lost master may still acknowledge writes, because it keeps no lease and is not
    fenced by its replicas (`is_fenced_by_replicas`). An operator knows that it is lost, a watcher does not.
    """

    region: str | None = None
    master_lost: bool = False
    without: frozenset[str] = frozenset()
    waited_for_replica: bool = False
    heard: Mapping[str, Heard] = field(default_factory=dict)
    master: str = ""
    only_fenced: bool = False


def check_reported(request: PromotionRequest, master: str) -> None:
    """Raise `PromotionRefused` when the set's ``master`` is not the one that was reported lost: somebody replaced it
    while this run waited for the lock."""
    if request.master_lost and request.master not in ("", master):
        raise PromotionRefused(
            f"{request.master} was reported lost, and {master} is the master by now: somebody has replaced it already"
        )


def check_before(members: Sequence[SetMember], request: PromotionRequest) -> None:
    """Check the members before anything is changed. Raises `PromotionRefused`, or its subclass `MasterAnswers`."""
    master = _master(members)
    check_lost(master, request)
    others = [member for member in members if not member.is_master]
    if request.region is not None and request.region not in {member.region for member in members}:
        places = ", ".join(member.region for member in members)
        raise PromotionRefused(f"the database has no server in region {request.region!r}: it has servers in {places}")
    for member in others:
        if member.region == request.region and master.state is not None:
            _check_can_catch_up(member, master)
    if not any(member.is_fit for member in others):
        raise PromotionRefused(f"no other server of the set is fit: there is nobody to promote ({_errors(others)})")
    for member in others:
        if member.state is None and member.name not in request.without:
            raise PromotionRefused(
                f"{member.name} does not answer ({member.error}), and it may have received more than the others; bring "
                f"it back, or repeat with --without {member.name} when it certainly has not"
            )
        if member.state is None and member.region == request.region:
            raise PromotionRefused(f"{member.name} does not answer: {member.error}")
        if not member.is_fit and member.region == request.region:
            raise PromotionRefused(_errors([member]))
    if master.state is not None:
        return
    if not request.master_lost:
        raise PromotionRefused(
            f"the master {master.name} does not answer ({master.error}); when it is lost for good, repeat with "
            "--master-lost"
        )
    for member in others:
        if member.receives and not _hears_nothing(member, request.heard.get(member.name)):
            raise PromotionRefused(
                f"{member.name} still receives from {master.name}: it is not lost, it is out of reach from here. "
                "Promote from where it can be reached, or end it first"
            )


def _check_can_catch_up(member: SetMember, master: SetMember) -> None:
    """Raise `PromotionRefused` for a server that follows nobody and lacks something: it would never catch up. One that
    an interrupted promotion detached lacks nothing."""
    lack = _lack(member, master)
    if lack and member.state is not None and member.is_complete and member.state.following is None:
        raise PromotionRefused(
            f"{member.name} follows nobody and lacks {lack} of the master {master.name}: tao rejoin {member.name} first"
        )


def _hears_nothing(member: SetMember, before: Heard | None) -> bool:
    """Return whether a replica has heard nothing from its master since ``before``, for longer than a heartbeat takes.

    A replica takes itself for connected until its server's ``slave_net_timeout``, whatever has befallen the master."""
    following = None if member.state is None else member.state.following
    return (
        before is not None
        and following is not None
        and following.heard == before.mark
        and member.seen_at - before.at >= SILENT_SECONDS
    )


def choose(members: Sequence[SetMember], request: PromotionRequest) -> SetMember:
    """Choose the server to promote once receiving has stopped: one that has received everything that any other
    reachable server has.

    Among equals the requested one is chosen, else the one in the master's region, else the first by name. Raises
    `PromotionRefused`, or `MasterAnswers` when a lost master has come back.
    """
    master = _master(members)
    check_lost(master, request)
    candidates = sorted(
        (each for each in members if not each.is_master and each.is_fit),
        key=lambda each: (region_of_place(each.region) != master.region, each.name),
    )
    best = [each for each in candidates if not any(lack for _, lack in _lacks(each, candidates))]
    if not best:
        detail = "; ".join(
            f"{each.name} lacks {lack} of {name}"
            for each in candidates
            for name, lack in _lacks(each, candidates)
            if lack
        )
        raise PromotionRefused(f"no server has everything that the others have: {detail}")
    if master.state is not None:
        # In a planned switch the old master is closed, so its history is complete and decides.
        complete = [each for each in best if each.state is not None and each.state.received >= master.state.executed]
        if not complete:
            raise PromotionRefused(
                f"{best[0].name} lacks {_lack(best[0], master)} of the master {master.name}; nothing would be "
                "gained by a switch that loses writes"
            )
        best = complete
    if request.region is None:
        return best[0]
    for each in best:
        if each.region == request.region:
            return each
    requested = next(each for each in members if each.region == request.region)
    raise PromotionRefused(f"{requested.name} lacks {_lack(requested, best[0])} of {best[0].name}: promote that one")


def is_fenced_by_replicas(
    members: Sequence[SetMember], request: PromotionRequest, *, semi_sync: bool, marked: Collection[str]
) -> bool:
    """Return whether a lost master acknowledges no write once the other servers have stopped receiving, so that its
    successor can be chosen before it has closed itself.

    Its commits wait for a replica, and each server for which they may wait can be stopped: it answers, and nobody seeds
    it. What made the master wait for none since it was seen to wait has left a trace: a command that takes its last
    replica out of use marks that one first (``marked``: the servers with a ``down`` mark).
    """
    others = [member for member in members if not member.is_master]
    return (
        request.master_lost
        and semi_sync
        and request.waited_for_replica
        and all(member.is_complete and member.name not in marked for member in others)
    )


def check_fenced(master: str, request: PromotionRequest, lease_seconds: float) -> None:
    """Raise `PromotionRefused` when nothing fences a lost master whose replicas do not. ``lease_seconds``: how long it
    takes writes after the last renewal of its lease; 0 without one, and then for ever."""
    if request.only_fenced and not lease_seconds:
        raise PromotionRefused(
            f"{master} keeps no lease, and it is not certain that its commits wait for servers that answer: it may "
            "still acknowledge writes, which would be lost. If it is lost for good: tao promote --master-lost"
        )


def check_has_all(chosen: SetMember, other: SetMember) -> None:
    """Raise `PromotionRefused` when a server has received what the one to be promoted lacks."""
    lack = _lack(chosen, other)
    if lack:
        raise PromotionRefused(f"{chosen.name} lacks {lack}, which {other.name} has received meanwhile")


def promoted_only_in_rows(
    members: Sequence[SetMember], epochs: Mapping[str, int], version_epoch: int
) -> list[SetMember]:
    """Return the servers whose rows name them as master under an epoch above the topology's (``epochs``, as in
    `unfinished`): their promotions were interrupted, or the topology has forgotten them."""
    return [each for each in members if not each.is_master and epochs.get(each.name, 0) > version_epoch]


def overtaking(region: str, members: Sequence[SetMember], opened: Collection[str], *, semi_sync: bool) -> str:
    """Return why the interrupted promotion of a region's server may not be finished, or an empty string: its old master
    may have gone on while the server was away, and somebody has, or may have, what was acknowledged then.

    The old master has all of that. Where it is silent, what it acknowledged under ``semi_sync`` another server has;
    otherwise what it has not sent is lost with it anyway. ``opened``: those of `promoted_only_in_rows` that were open
    to writes. The topology has forgotten their promotion, and what the former master has alone nobody is to keep."""
    master = _master(members)
    chosen = next(each for each in members if each.region == region)
    for other in members:
        if other.is_outdated or (chosen.name in opened if other.is_master else not semi_sync):
            continue
        if other.state is None and master.state is None and not other.is_master:
            vouch = f"tao promote --master-lost --without {other.name}, when it certainly has not"
            return f"{other.name} does not answer, and may have received something since ({vouch})"
        lack = _lack(chosen, other) if other.is_complete else ""
        if lack:
            return f"{other.name} has {lack}, which {chosen.name} lacks"
    return ""


def check_goes_on(
    members: Sequence[SetMember], promoted: Sequence[SetMember], opened: Collection[str], why: str
) -> None:
    """Check that the old master may go on in place of the ``promoted`` servers (`promoted_only_in_rows`): it has
    everything that was acknowledged. Raises `PromotionRefused`. ``opened`` and ``why``: as in `overtaking`."""
    master = _master(members)
    names = " and ".join(each.name for each in promoted)
    what = f"the promotion of {names} was interrupted, and {why}: to finish it could lose that"
    if opened:
        raise PromotionRefused(
            f"{what}. But {' and '.join(opened)} was open to writes, too: look at what both have, and run tao reseed "
            "for the one that is to lose what it has"
        )
    if master.state is None or master.state.following is not None:
        state = f"does not answer ({master.error})" if master.state is None else "follows another server"
        raise PromotionRefused(
            f"{what}, and the old master {master.name} {state}. Bring it back, and it goes on; if it is lost, run "
            f"tao reseed {names}, and another server takes its place"
        )
    for each in members:
        lack = _lack(master, each) if each.is_fit and each not in promoted else ""
        if lack:
            raise PromotionRefused(
                f"{what}, and the old master {master.name} lacks {lack} of {each.name}: look at what both have, and "
                "run tao reseed for the one that is to lose what it has"
            )


def check_kept(chosen: SetMember, now: MemberState) -> None:
    """Raise `PromotionRefused` when a server that was chosen lacks what it had received when it was compared: a MariaDB
    server that restarts before it has applied its relay log drops it, to fetch it anew."""
    lack = _lack(SetMember(chosen.name, chosen.region, now), chosen)
    if lack:
        raise PromotionRefused(f"{chosen.name} has lost {lack}, which it had received: it restarted meanwhile")


def check_lost(master: SetMember, request: PromotionRequest) -> None:
    """Raise `MasterAnswers` when a master that was reported lost answers: everything it has can still be received. One
    that refuses this process' account or certificate is there, and may take writes."""
    if request.master_lost and master.refuses:
        raise MasterAnswers(
            f"the master {master.name} is not lost, it refuses this process: {master.error}. Mend what it is refused "
            "for; to do without what the master has, stop it first"
        )
    if request.master_lost and master.state is not None:
        raise MasterAnswers(
            f"the master {master.name} answers, so it is not lost, and others may lack what it has: repeat without "
            "--master-lost, which loses nothing; to do without what it has, stop it first"
        )


def choose_catch_up_target(others: list[SetMember], request: PromotionRequest) -> SetMember:
    """Return the replica that has to catch up in a planned switch: the requested one, else the first by name."""
    return min(others, key=lambda member: (member.region != request.region, member.name))


def check_rejoin(member: SetMember, master: SetMember) -> None:
    """Check that a server may follow the master. Raises `ServerDiverged`, or `PromotionRefused` when either of them
    does not answer, and `ServerSeeding`."""
    for each in (member, master):
        if each.state is None:
            raise PromotionRefused(f"{each.name} does not answer: {each.error}")
    check_seeded(member)
    lack = _lack(master, member)
    if lack:
        raise ServerDiverged(
            f"{member.name} has {lack}, which the master {master.name} never had: writes that were lost with its "
            f"mastership, if anybody made them. It cannot follow, and has to be seeded anew: tao reseed {member.name} "
            "(docs/how-to/lost-master.md)"
        )


def check_seeded(member: SetMember) -> None:
    """Raise `ServerSeeding` for a server that has only a part of the data."""
    if member.state is not None and member.state.seeding:
        raise ServerSeeding(_half_seeded(member))


def _half_seeded(member: SetMember) -> str:
    return (
        f"{member.name} is being seeded, or was when that ended halfway: it has a part of the data. "
        f"tao reseed {member.name} begins anew and ends it"
    )


def discarded_transactions(member: SetMember, master: SetMember) -> str:
    """Return the transactions of a server that its master lacks, or an empty string when there are none."""
    return _lack(master, member)


def unfinished(members: Sequence[SetMember], epochs: Mapping[str, int], version_epoch: int) -> str | None:
    """Return the region of a server whose promotion was interrupted too late to be undone, or None.

    Its shard rows name it as master, with an epoch above those of the topology and the master. ``epochs``: by the name
    of each server that answers, the highest epoch of the rows there that name it as master. The highest one counts:
    servers with lower ones have lost to an old master, or were replaced, in a time that the topology has forgotten.
    """
    master = _master(members)
    for member in sorted(members, key=lambda each: (-epochs.get(each.name, 0), each.name)):
        if not member.is_master and epochs.get(member.name, 0) > max(version_epoch, epochs.get(master.name, 0)):
            return member.region
    return None


def _lacks(member: SetMember, others: Sequence[SetMember]) -> list[tuple[str, str]]:
    return [(other.name, _lack(member, other)) for other in others if other is not member]


def _lack(member: SetMember, other: SetMember) -> str:
    """Return what ``other`` has received and ``member`` has not."""
    if member.state is None or other.state is None:
        return "everything"
    return member.state.received.lacks(other.state.received)


def _master(members: Sequence[SetMember]) -> SetMember:
    return next(member for member in members if member.is_master)


def _errors(members: Sequence[SetMember]) -> str:
    return "; ".join(map(_error, members)) or "it has no other server"


def _error(member: SetMember) -> str:
    if member.state is None:
        return f"{member.name}: {member.error}"
    if member.is_outdated:
        return (
            f"{member.name} was master earlier, and has nothing of what was written since: bring the present master "
            f"back, and tao rejoin {member.name}; or do without all that with --without and the present master's name"
        )
    return _half_seeded(member)
