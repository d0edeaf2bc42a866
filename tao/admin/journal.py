"""Look at the journals of followers, and change them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tao.admin.connection import ask_each
from tao.model.errors import NoJournal, OperatorError, TaoError, TopologyError
from tao.model.topology import CacheServer, Topology
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb

Report = dict[str, Any]
"""What a follower says of its journal. `Any`: a JSON document."""
ANSWER_SECONDS = 5.0
MOVE_SECONDS = 3_600.0
"""Longest wait for a journal to be handed over: millions of writes take minutes."""
_LOOK_SECONDS = 0.5


def journal_followers(topology: Topology, names: Sequence[str] = ()) -> list[CacheServer]:
    """Return the followers of these names, or all. Raises `TopologyError` for a name that is no follower's."""
    followers = {server.name: server for place, server in topology.cache_servers if place.role == "follower"}
    for name in names:
        if name not in followers:
            raise TopologyError(f"there is no follower {name}; followers are {', '.join(sorted(followers))}")
    return [followers[name] for name in names or followers]


async def journal_reports(
    links: Links, followers: Sequence[CacheServer], parked: int = 0
) -> dict[str, Report | TaoError | None]:
    """Return what each follower says of its journal, with up to so many ``parked`` writes; None for one that keeps
    none."""

    async def look(server: CacheServer) -> Report | None:
        request = pb.Request(inspect_journal=pb.InspectJournal(parked_limit=parked))
        try:
            return _report(await links.to(server).ask(request, ANSWER_SECONDS))
        except NoJournal:
            return None

    answers = await ask_each(followers, look)
    return dict(zip((server.name for server in followers), answers, strict=True))


def split_id(topology: Topology, written: str) -> tuple[CacheServer, int]:
    """Return the follower and the number in ``FOLLOWER/NUMBER``. Raises `OperatorError`."""
    name, _, number = written.rpartition("/")
    if not name or not number.isdecimal():
        raise OperatorError(f"{written!r} names no parked write: give FOLLOWER/NUMBER, as tao journal parked shows it")
    (server,) = journal_followers(topology, [name])
    return server, int(number)


async def inject(links: Links, server: CacheServer, number: int) -> Report:
    """Put a parked write back among those that wait."""
    return await _change(links, server, pb.ChangeJournal(inject=number), ANSWER_SECONDS)


async def discard(links: Links, server: CacheServer, number: int) -> Report:
    """Discard a parked write."""
    return await _change(links, server, pb.ChangeJournal(discard=number), ANSWER_SECONDS)


async def hand_over(links: Links, server: CacheServer, to: str) -> Report:
    """Have another follower accept everything that a follower's journal holds."""
    return await _change(links, server, pb.ChangeJournal(move_to=to), MOVE_SECONDS)


async def wait_until_empty(links: Links, server: CacheServer, timeout_seconds: float) -> Report:
    """Return what a follower says of its journal once nothing waits there, or when the time is up. Raises `NoJournal`
    and whatever keeps the follower from answering."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    request = pb.Request(inspect_journal=pb.InspectJournal())
    while True:
        report = _report(await links.to(server).ask(request, ANSWER_SECONDS))
        if not waiting_in(report) or asyncio.get_running_loop().time() >= deadline:
            return report
        await asyncio.sleep(_LOOK_SECONDS)


def waiting_in(report: Report) -> int:
    """Return how many writes wait in a journal, of all priorities."""
    return int(sum(report["waiting"].values()))


def parked_in(report: Report) -> int:
    """Return how many writes are parked in a journal, of all priorities."""
    return int(sum(report["parked"].values()))


async def _change(links: Links, server: CacheServer, change: pb.ChangeJournal, timeout_seconds: float) -> Report:
    return _report(await links.to(server).ask(pb.Request(change_journal=change), timeout_seconds))


def _report(answer: pb.Answer) -> Report:
    report: Report = msgspec.json.decode(answer.journal.json)
    return report
