"""Having what a check has found mended: each shard's owner is asked, and one that is away keeps no other from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tao.model.errors import DeadlineExceeded, TaoError, Unavailable
from tao.peers.links import Link, Links
from tao.routing.routes import Routes

MAX_FOUND: Final = 100_000
"""Findings of one kind in one run, some tens of megabytes: whoever has more repeats the command."""

_Found = TypeVar("_Found")


@dataclass(slots=True)
class LeaderResult:
    """``asked``: findings that are its to mend; ``mended``: of these; ``error``: why the others were not, if it said so
    or was away."""

    server: str
    asked: int = 0
    mended: int = 0
    error: str = ""


async def have_mended(
    routes: Routes,
    links: Links,
    found: Iterable[_Found],
    shard_of: Callable[[_Found], int],
    ask: Callable[[Link, Sequence[_Found]], Awaitable[int]],
    per_call: int,
) -> list[LeaderResult]:
    """``ask``: have a leader mend these, which are of one shard; returns how many it has. A leader that is away is not
    asked about its other shards."""
    by_shard: dict[int, list[_Found]] = {}
    for each in found:
        by_shard.setdefault(shard_of(each), []).append(each)
    results: dict[str, LeaderResult] = {}
    away: set[str] = set()
    for shard, of_shard in by_shard.items():
        leader = routes.leaders(routes.master_region(shard)).home(shard)
        result = results.setdefault(leader.name, LeaderResult(leader.name))
        result.asked += len(of_shard)
        if leader.name in away:
            continue
        try:
            for start in range(0, len(of_shard), per_call):
                result.mended += await ask(links.to(leader), of_shard[start : start + per_call])
        except TaoError as error:
            result.error = error.message
            if isinstance(error, (Unavailable, DeadlineExceeded)):
                away.add(leader.name)
    return list(results.values())


def together(results: Iterable[LeaderResult]) -> list[LeaderResult]:
    """One for each leader."""
    by_name: dict[str, LeaderResult] = {}
    for each in results:
        of_leader = by_name.setdefault(each.server, LeaderResult(each.server))
        of_leader.asked += each.asked
        of_leader.mended += each.mended
        of_leader.error = of_leader.error or each.error
    return list(by_name.values())
