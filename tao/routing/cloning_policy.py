"""Decide, by their read rates, which shards should be served by more servers and which by fewer. Pure.

A clone costs the memory of its shard once more, and one more message per write, so it has to pay off for a while. A
shard is cloned when each of its servers has had too many reads for several rounds in a row. It gives a clone back when
for many rounds the remaining servers would have had few reads. Between the two bounds nothing changes. In a tier only
one shard changes at a time, so that the next round shows the effect. Clones made by an operator are never changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tao.model.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class CloningPolicy:
    """Bounds for cloning shards automatically. Rates are reads per second of one shard at one server."""

    clone_above: float = 20_000.0
    """Rate above which a shard gets another server: about a fifth of what a server can answer, for one of its
    shards."""

    give_back_below: float = 5_000.0
    """A clone is removed when the remaining servers would still be below this rate. At most half of ``clone_above``, or
    clones would be added and removed in turn."""

    rounds_above: int = 3
    """Rounds in a row before a shard is cloned: half a minute at the default interval. A burst is over by then."""

    rounds_below: int = 30
    """Rounds in a row before a clone is removed: five minutes, since a clone that is added again starts empty."""

    max_copies: int = 3
    """Servers of a shard beside its home; an operator may add more."""

    interval_seconds: float = 10.0
    """Interval between two rounds: longer than the half-life of the rates, so that each round sees new reads."""

    def __post_init__(self) -> None:
        if not 0 < self.give_back_below <= self.clone_above / 2:
            raise SettingsError(f"give_back_below must be above 0 and at most half of clone_above: {self}")
        if min(self.rounds_above, self.rounds_below, self.max_copies, self.interval_seconds) <= 0:
            raise SettingsError(f"rounds_above, rounds_below, max_copies and interval_seconds must be above 0: {self}")


class ShardLoad(NamedTuple):
    """Reads per second of a shard over all its servers, and the number of these servers. ``is_managed``: the policy
    made its clones, or it has none."""

    per_second: float
    servers: int
    is_managed: bool


class Advice(NamedTuple):
    """A shard, and how many servers beside its home it should have."""

    shard: int
    copies: int
    why: str


@dataclass(frozen=True, slots=True)
class Rounds:
    """The result of earlier rounds in one tier: shard → number of consecutive rounds above and below the bounds."""

    above: Mapping[int, int] = field(default_factory=dict)
    below: Mapping[int, int] = field(default_factory=dict)


NO_ROUNDS: Final = Rounds()


def advise(
    loads: Mapping[int, ShardLoad], servers_up: int, settings: CloningPolicy, before: Rounds
) -> tuple[Advice | None, Rounds]:
    """Return the change to make in a tier with ``servers_up`` servers, if any, and the rounds to remember.

    ``loads`` may leave out shards that are read little and have no clones."""
    above = _counted(before.above, {shard for shard, load in loads.items() if _is_above(load, settings)})
    below = _counted(before.below, {shard for shard, load in loads.items() if _is_below(load, settings)})
    most = min(settings.max_copies, servers_up - 1)
    due = [
        shard
        for shard, rounds in above.items()
        if rounds >= settings.rounds_above and loads[shard].is_managed and loads[shard].servers - 1 < most
    ]
    if due:
        shard = max(due, key=lambda each: (loads[each].per_second / loads[each].servers, -each))
        load = loads[shard]
        why = f"{load.per_second / load.servers:,.0f} reads/s at each of {load.servers} servers"
        return Advice(shard, load.servers, why), _without(Rounds(above, below), shard)
    due = [shard for shard, rounds in below.items() if rounds >= settings.rounds_below and loads[shard].is_managed]
    if due:
        shard = min(due, key=lambda each: (loads[each].per_second, each))
        load = loads[shard]
        why = f"{load.per_second:,.0f} reads/s at all {load.servers} servers together"
        return Advice(shard, load.servers - 2, why), _without(Rounds(above, below), shard)
    return None, Rounds(above, below)


def _is_above(load: ShardLoad, settings: CloningPolicy) -> bool:
    return load.per_second / load.servers > settings.clone_above


def _is_below(load: ShardLoad, settings: CloningPolicy) -> bool:
    return load.servers > 1 and load.per_second / (load.servers - 1) < settings.give_back_below


def _counted(before: Mapping[int, int], now: Collection[int]) -> dict[int, int]:
    return {shard: before.get(shard, 0) + 1 for shard in now}


def _without(rounds: Rounds, shard: int) -> Rounds:
    """Restart the counts of a shard: its rates are about to be those of other servers."""
    return Rounds(
        {each: count for each, count in rounds.above.items() if each != shard},
        {each: count for each, count in rounds.below.items() if each != shard},
    )
