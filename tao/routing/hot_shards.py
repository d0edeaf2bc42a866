"""Which shards should have more servers, and which fewer, by how much they are read: a pure decision (DESIGN.md §10).

A clone costs the memory of its shard once more and every write another message, so it has to be worth it for a while:
a shard is cloned when each of its servers has had too much for several rounds in a row, and gives a clone back when for
many rounds the remaining ones would have had little. Between the two bounds nothing changes, and of a tier one shard
at a time does, so that the next round shows what came of it. Clones that an operator has made are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tao.model.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class CloningPolicy:
    """When shards are cloned without an operator. Rates are reads a second of one shard at one server."""

    clone_above: float = 20_000.0
    """Above this a shard gets another server: about a fifth of what a server can answer, for one of its shards."""

    give_back_below: float = 5_000.0
    """A clone goes when the others would still be below this. At most half of the former, or they would chase each
    other."""

    rounds_above: int = 3
    """Rounds in a row before a shard is cloned: with the interval, half a minute. A burst is over by then."""

    rounds_below: int = 30
    """Rounds in a row before a clone goes: five minutes, as a clone that comes back begins with nothing."""

    max_copies: int = 3
    """Servers beside its home: more are an operator's to decide."""

    interval_seconds: float = 10.0
    """Between two rounds: above the half-life of the rates, so that each sees something new."""

    def __post_init__(self) -> None:
        if not 0 < self.give_back_below <= self.clone_above / 2:
            raise SettingsError(f"give_back_below must be above 0 and at most half of clone_above: {self}")
        if min(self.rounds_above, self.rounds_below, self.max_copies, self.interval_seconds) <= 0:
            raise SettingsError(f"numbers of a policy have to be above 0: {self}")


class ShardLoad(NamedTuple):
    """Reads a second of a shard over all its servers, and how many serve it. ``is_ours``: its clones are the policy's,
    or it has none."""

    per_second: float
    servers: int
    is_ours: bool


class Advice(NamedTuple):
    """A shard and how many servers beside its home it should have."""

    shard: int
    copies: int
    why: str


@dataclass(frozen=True, slots=True)
class Rounds:
    """What earlier rounds of one tier have seen: shard → rounds in a row above, and below, the bounds."""

    above: Mapping[int, int] = field(default_factory=dict)
    below: Mapping[int, int] = field(default_factory=dict)


NO_ROUNDS: Final = Rounds()


def advise(
    loads: Mapping[int, ShardLoad], servers_up: int, settings: CloningPolicy, before: Rounds
) -> tuple[Advice | None, Rounds]:
    """What to do in a tier with so many servers up, if anything, and what to remember. ``loads`` needs no shard that is
    read little and has no clones."""
    above = _counted(before.above, {shard for shard, load in loads.items() if _is_above(load, settings)})
    below = _counted(before.below, {shard for shard, load in loads.items() if _is_below(load, settings)})
    most = min(settings.max_copies, servers_up - 1)
    due = [
        shard
        for shard, rounds in above.items()
        if rounds >= settings.rounds_above and loads[shard].is_ours and loads[shard].servers - 1 < most
    ]
    if due:
        shard = max(due, key=lambda each: (loads[each].per_second / loads[each].servers, -each))
        load = loads[shard]
        why = f"{load.per_second / load.servers:,.0f} reads/s at each of {load.servers}"
        return Advice(shard, load.servers, why), _without(Rounds(above, below), shard)
    due = [shard for shard, rounds in below.items() if rounds >= settings.rounds_below and loads[shard].is_ours]
    if due:
        shard = min(due, key=lambda each: (loads[each].per_second, each))
        load = loads[shard]
        why = f"{load.per_second:,.0f} reads/s at all {load.servers} together"
        return Advice(shard, load.servers - 2, why), _without(Rounds(above, below), shard)
    return None, Rounds(above, below)


def _is_above(load: ShardLoad, settings: CloningPolicy) -> bool:
    return load.per_second / load.servers > settings.clone_above


def _is_below(load: ShardLoad, settings: CloningPolicy) -> bool:
    return load.servers > 1 and load.per_second / (load.servers - 1) < settings.give_back_below


def _counted(before: Mapping[int, int], now: Collection[int]) -> dict[int, int]:
    return {shard: before.get(shard, 0) + 1 for shard in now}


def _without(rounds: Rounds, shard: int) -> Rounds:
    """The shard begins anew: its figures were those of other servers."""
    return Rounds(
        {each: count for each, count in rounds.above.items() if each != shard},
        {each: count for each, count in rounds.below.items() if each != shard},
    )
