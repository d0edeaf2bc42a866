"""How the memory of a server would be better spent: budgets for its arenas by what comes back to them (DESIGN.md §4).

Both sides are fetches a megabyte would save or cost, over the same time:

* **more**: keys that came back before an eighth of the arena's budget had left since they did. An arena larger by that
  eighth would still have had them.
* **less**: entries that the hand found used and kept. In an arena smaller by an eighth the hand comes by an eighth
  earlier, and what was used only after that is lost: an eighth of them, if uses are spread evenly.

Near where an arena stands both are right; far from it they are not. So one step is proposed at a time, at most an
eighth of an arena's budget is taken when it is full, and whoever follows the advice looks again when it has told.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tao.cache.records import RETURN_PARTS

_PART = RETURN_PARTS[0]
_ROOM_FOR_GROWTH = 1.25
_UNUSED_BELOW = 0.75
_WORTH_MOVING = 1.5
_LEAST_EVENTS = 100


class ArenaUse(msgspec.Struct, frozen=True):
    """What was seen of an arena. ``returned``: keys back within an eighth of the budget; ``kept``: entries that the
    hand found used."""

    name: str
    bytes: int
    budget_bytes: int
    evictions: int
    returned: int
    kept: int


class Proposal(msgspec.Struct, frozen=True):
    """A budget for an arena, and why."""

    name: str
    budget_bytes: int
    proposed_bytes: int
    reason: str


def propose(arenas: Sequence[ArenaUse]) -> list[Proposal]:
    """Budgets with the same sum, in the order given. Arenas that have seen too little keep theirs."""
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
    """Fetches saved by a byte more."""
    return arena.returned * _PART / arena.budget_bytes if arena.returned >= _LEAST_EVENTS else 0.0


def _loss(arena: ArenaUse) -> float:
    """Fetches that a byte less costs: at least what a byte more would save, since each byte is worth less than the
    one before it."""
    return max(_gain(arena), arena.kept / arena.budget_bytes)


def _why_more(arena: ArenaUse) -> str:
    return f"a megabyte more saves {_gain(arena) * 2**20:.1f} fetches in the time observed"
