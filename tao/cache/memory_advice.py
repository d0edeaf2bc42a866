"""Advice on how to divide a server's memory between its arenas, from the fetches that each megabyte saves or costs.

Both sides count fetches over the same time:

* **more**: keys that came back before an eighth of the arena's budget had been evicted since they left. An arena
  larger by that eighth would still have held them.
* **less**: entries that the eviction hand found used and kept. In an arena smaller by an eighth the hand comes earlier
  by an eighth. Entries that are used only after that are lost: an eighth of them, if uses are spread evenly.

Both figures are right near the present size of an arena, and wrong far from it. So the advice goes one step at a time
and takes at most an eighth of the budget of a full arena. Operators who follow it look again afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tao.cache.records_python import RETURN_PARTS

_PART = RETURN_PARTS[0]
_ROOM_FOR_GROWTH = 1.25
_UNUSED_BELOW = 0.75
_WORTH_MOVING = 1.5
_LEAST_EVENTS = 100


class ArenaUse(msgspec.Struct, frozen=True):
    """Observations of an arena. ``returned``: keys that came back within an eighth of the budget; ``kept``: entries
    that the eviction hand found used."""

    name: str
    bytes: int
    budget_bytes: int
    evictions: int
    returned: int
    kept: int


class Proposal(msgspec.Struct, frozen=True):
    """A proposed budget of an arena, and the reason."""

    name: str
    budget_bytes: int
    proposed_bytes: int
    reason: str


def propose(arenas: Sequence[ArenaUse]) -> list[Proposal]:
    """Return budgets with the same sum, in the order given. Arenas with too few observations keep their budget."""
    proposed = {arena.name: arena.budget_bytes for arena in arenas}
    reasons = {arena.name: "nothing is gained by another size" for arena in arenas}
    wanting = [arena for arena in arenas if _gain(arena) > 0]
    spare = [arena for arena in arenas if not arena.evictions and arena.bytes < arena.budget_bytes * _UNUSED_BELOW]
    if wanting and spare:
        for arena in spare:
            proposed[arena.name] = max(1, int(arena.bytes * _ROOM_FOR_GROWTH))
            reasons[arena.name] = f"uses {arena.bytes / arena.budget_bytes:.0%} of it, and has never evicted"
        freed = sum(arena.budget_bytes for arena in arenas) - sum(proposed.values())
        total = sum(map(_gain, wanting))
        for arena in wanting:
            proposed[arena.name] += int(freed * _gain(arena) / total)
            reasons[arena.name] = _why_more(arena)
    elif wanting:
        taker = max(wanting, key=_gain)
        givers = [arena for arena in arenas if arena is not taker and arena.kept + arena.evictions >= _LEAST_EVENTS]
        giver = min(givers, key=_loss, default=None)
        if giver is not None and _gain(taker) > _WORTH_MOVING * _loss(giver):
            moved = min(giver.budget_bytes, taker.budget_bytes) // _PART
            proposed[giver.name] -= moved
            proposed[taker.name] += moved
            reasons[giver.name] = f"a megabyte less costs {_loss(giver) * 2**20:.1f} fetches in the time observed"
            reasons[taker.name] = _why_more(taker)
        else:
            reasons[taker.name] = f"{_why_more(taker)}; no other arena can spare it: it takes more memory"
    return [Proposal(arena.name, arena.budget_bytes, proposed[arena.name], reasons[arena.name]) for arena in arenas]


def _gain(arena: ArenaUse) -> float:
    """Return the fetches that one more byte saves."""
    return arena.returned * _PART / arena.budget_bytes if arena.returned >= _LEAST_EVENTS else 0.0


def _loss(arena: ArenaUse) -> float:
    """Return the fetches that one byte less costs. This is at least what one more byte would save, since each byte is
    worth less than the one before it."""
    return max(_gain(arena), arena.kept / arena.budget_bytes)


def _why_more(arena: ArenaUse) -> str:
    return f"a megabyte more saves {_gain(arena) * 2**20:.1f} fetches in the time observed"
