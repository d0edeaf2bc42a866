"""May a server of a replication set become its master, and which one: pure decisions over what the servers say
(DESIGN.md §9).

The rule that nothing acknowledged is lost rests on two: whoever is promoted has *received* everything that any other
server within reach has, and no server that may have received more is out of reach without an operator saying so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tao.model.errors import OperatorError
from tao.storage.promotion import MemberState


class PromotionRefused(OperatorError):
    """Nothing was changed: a promotion now could lose writes or make two masters. The message says why, and what to
    do."""

    reason = "PROMOTION_REFUSED"


class MasterAnswers(PromotionRefused):
    """A master that was given up for lost answers, with everything that it has committed."""

    reason = "MASTER_ANSWERS"


class ServerDiverged(OperatorError):
    """The server has transactions that the master of its set has not: it cannot follow. It has to be seeded anew."""

    reason = "SERVER_DIVERGED"


class ServerSeeding(OperatorError):
    """The server is being seeded, or was when that ended halfway: it has a part of the data."""

    reason = "SERVER_SEEDING"


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a replication set. ``state`` is None when it does not answer; ``error`` then says how."""

    name: str
    region: str
    state: MemberState | None
    error: str = ""
    is_master: bool = False
    """By the topology."""

    @property
    def is_whole(self) -> bool:
        """It answers, and is not being seeded."""
        return self.state is not None and not self.state.seeding

    @property
    def receives(self) -> bool:
        """It is connected to a master."""
        return self.state is not None and self.state.following is not None and self.state.following.receiving

    @property
    def acknowledges(self) -> bool:
        """Its master hears from it what it has received."""
        return self.receives and self.state is not None and self.state.acknowledges


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. ``region``: whose server shall become master, None for the most advanced one.
    ``master_lost``: without the old master's help. ``without``: servers that may be out of reach, on the operator's
    word that they have nothing which the others lack."""

    region: str | None = None
    master_lost: bool = False
    without: frozenset[str] = frozenset()


def check_before(members: Sequence[Member], wish: Wish) -> None:
    """Before anything is touched. Raises `PromotionRefused`, `MasterAnswers` among it."""
    master = _master(members)
    check_lost(master, wish)
    others = [member for member in members if not member.is_master]
    if wish.region is not None and wish.region not in {member.region for member in members}:
        raise PromotionRefused(f"the database has no server in region {wish.region!r}")
    if not any(member.is_whole for member in others):
        raise PromotionRefused(f"no other server of the set is fit: there is nobody to promote ({_errors(others)})")
    for member in others:
        if member.state is None and member.name not in wish.without:
            raise PromotionRefused(
                f"{member.name} does not answer ({member.error}), and it may have received more than the others; bring "
                f"it back, or repeat with --without {member.name} when it certainly has not"
            )
        if member.state is None and member.region == wish.region:
            raise PromotionRefused(f"{member.name} does not answer: {member.error}")
        if not member.is_whole and member.region == wish.region:
            raise PromotionRefused(_half_seeded(member))
    if master.state is not None:
        return
    if not wish.master_lost:
        raise PromotionRefused(
            f"the master {master.name} does not answer ({master.error}); when it is lost for good, repeat with "
            "--master-lost"
        )
    for member in others:
        if member.receives:
            raise PromotionRefused(
                f"{member.name} still receives from {master.name}: it is not lost, it is out of reach from here. "
                "Promote from where it can be reached, or end it first"
            )


def choose(members: Sequence[Member], wish: Wish) -> Member:
    """The server to be promoted, once receiving has stopped: one that lacks nothing that another within reach has
    received. Among equals the one wished for, else the first by name. Raises `PromotionRefused`, `MasterAnswers` when
    a lost master has come back meanwhile."""
    master = _master(members)
    check_lost(master, wish)
    candidates = sorted((each for each in members if not each.is_master and each.is_whole), key=lambda each: each.name)
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
        # A planned switch: the old master is closed, and its history is the truth.
        complete = [each for each in best if each.state is not None and each.state.received >= master.state.executed]
        if not complete:
            raise PromotionRefused(
                f"{best[0].name} lacks {_lack(best[0], master)} of the master {master.name}; nothing would be "
                "gained by a switch that loses writes"
            )
        best = complete
    if wish.region is None:
        return best[0]
    for each in best:
        if each.region == wish.region:
            return each
    wished = next(each for each in members if each.region == wish.region)
    raise PromotionRefused(f"{wished.name} lacks {_lack(wished, best[0])} of {best[0].name}: promote that one")


def check_lost(master: Member, wish: Wish) -> None:
    """What a server that answers has can be had, so nobody takes its place without it."""
    if wish.master_lost and master.state is not None:
        raise MasterAnswers(
            f"the master {master.name} answers, so it is not lost, and others may lack what it has: repeat without "
            "--master-lost, which loses nothing; to do without what it has, stop it first"
        )


def choose_target(others: list[Member], wish: Wish) -> Member:
    """Who is waited for in a planned switch: the one wished for, else the first by name."""
    return min(others, key=lambda member: (member.region != wish.region, member.name))


def check_rejoin(member: Member, master: Member) -> None:
    """Whether a server may follow the master. Raises `ServerDiverged`, or `PromotionRefused` when it cannot be told."""
    for each in (member, master):
        if each.state is None:
            raise PromotionRefused(f"{each.name} does not answer: {each.error}")
    check_seeded(member)
    lack = _lack(master, member)
    if lack:
        raise ServerDiverged(
            f"{member.name} has {lack}, which the master {master.name} never had: writes that were lost with its "
            f"mastership, if anybody made them. It cannot follow, and has to be seeded anew: tao reseed {member.name} "
            '(docs/operations.md, "A lost master")'
        )


def check_seeded(member: Member) -> None:
    """Raises `ServerSeeding` for a server that has a part of the data."""
    if member.state is not None and member.state.seeding:
        raise ServerSeeding(_half_seeded(member))


def _half_seeded(member: Member) -> str:
    return (
        f"{member.name} is being seeded, or was when that ended halfway: it has a part of the data. "
        f"tao reseed {member.name} begins anew and ends it"
    )


def discarded(member: Member, master: Member) -> str:
    """The transactions of a server that its master does not have; empty when there are none."""
    return _lack(master, member)


def unfinished(members: Sequence[Member], epochs: Mapping[str, int], version_epoch: int) -> str | None:
    """The region of a server whose promotion was interrupted too late to be undone: its shard rows (``epochs``: the
    highest of each server that answers) have an epoch above the topology's and the master's. None: whatever was begun
    can be undone."""
    master = _master(members)
    for member in sorted(members, key=lambda each: each.name):
        if not member.is_master and epochs.get(member.name, 0) > max(version_epoch, epochs.get(master.name, 0)):
            return member.region
    return None


def _lacks(member: Member, others: Sequence[Member]) -> list[tuple[str, str]]:
    return [(other.name, _lack(member, other)) for other in others if other is not member]


def _lack(member: Member, other: Member) -> str:
    """What ``member`` has not received of what ``other`` has."""
    if member.state is None or other.state is None:
        return "everything"
    return member.state.received.lacks(other.state.received)


def _master(members: Sequence[Member]) -> Member:
    return next(member for member in members if member.is_master)


def _errors(members: Sequence[Member]) -> str:
    told = [f"{each.name}: {each.error}" if each.state is None else _half_seeded(each) for each in members]
    return "; ".join(told) or "it has no other server"
