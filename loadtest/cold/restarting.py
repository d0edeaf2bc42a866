"""Restarting a tier of followers: those of a cluster of one's own, or an operator's, of which the effect is waited for.

Nobody here can restart servers that another has started. Their operator does it, by a command that is given
(`systemctl restart …`, `kubectl rollout restart …`) or by hand when the run says that it is time; what is seen of it is
that a follower does not answer, and that its counters have begun anew.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Final

from loadtest.target import Target
from loadtest.waiting import together
from tao.devcluster.cluster import DevCluster
from tao.devcluster.readiness import is_ready, server_stats
from tao.model.errors import OperatorError, Unavailable

_LOOK_SECONDS: Final = 0.1
_TAIL_BYTES: Final = 500


class Restarts:
    """What is seen of servers that restart: when the first of them was gone or new, and when all were there anew."""

    def __init__(self, before: Mapping[str, int]) -> None:
        """``before``: what each server had answered until now; a new process has answered less."""
        self._answered = dict(before)
        self._away: dict[str, float] = {}
        self._anew: dict[str, float] = {}
        self.over: float | None = None

    def see(self, at: float, answered: Mapping[str, int]) -> None:
        """What each server that is ready has answered, at a moment."""
        for name in self._answered.keys() - self._anew.keys():
            if name not in answered:
                self._away.setdefault(name, at)
                continue
            count, old = answered[name], self._answered[name]
            # Who is back with what it had answered before was only not heard of. Of one that had answered nothing
            # there is no more to go by than that it was away.
            away = self._away.pop(name, None)
            if count < old or (old == 0 and away is not None):
                self._anew[name] = at if away is None else away
            self._answered[name] = count
        if self.over is None and len(self._anew) == len(self._answered):
            self.over = at

    @property
    def began(self) -> float | None:
        """When the first of those that have restarted, or are away, was not there any more."""
        return min((*self._anew.values(), *self._away.values()), default=None)

    @property
    def missing(self) -> list[str]:
        """Servers that have not restarted."""
        return sorted(self._answered.keys() - self._anew.keys())


async def restart_own(cluster: DevCluster, names: list[str]) -> tuple[float, float]:
    """Of all at once; when that began, and when all were ready again."""
    began = perf_counter()
    await together([cluster.restart(name) for name in names])
    return began, perf_counter()


async def restart_by_operator(
    target: Target, command: str, log: Path, tell: Callable[[str], None], is_over: Callable[[], bool]
) -> tuple[float, float]:
    """The same, as seen from outside. ``command``: empty for an operator who is told to do it; ``is_over``: whether
    the load has ended, until when it is waited for. Raises `OperatorError` for servers that were not restarted, and
    for a command that failed."""
    seen = Restarts(await _answered(target))
    names = ", ".join(target.followers)
    tell(f"restart {names} NOW, all of tier {target.tier}" if not command else f"restarting {names}: {command}")
    running = asyncio.ensure_future(_run(command, log) if command else asyncio.sleep(0))
    try:
        while seen.over is None:
            if is_over():
                raise OperatorError(
                    f"{', '.join(seen.missing)} of tier {target.tier} had not been restarted when the load ended: "
                    "restart every follower of the tier when the run says so, or have --restart-command do it, and "
                    "give it time with --after-seconds"
                )
            if running.done():
                await running
            await asyncio.sleep(_LOOK_SECONDS)
            seen.see(perf_counter(), await _answered(target))
        await running
    finally:
        running.cancel()
    assert seen.began is not None
    return seen.began, seen.over


async def _answered(target: Target) -> dict[str, int]:
    found = {}
    for name, admin in target.followers.items():
        try:
            if await is_ready(admin):
                stats = await server_stats(admin)
                found[name] = stats["hits"] + stats["misses"]
        except Unavailable:
            # It is being restarted.
            continue
    return found


async def _run(command: str, log: Path) -> None:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
    if status:
        tail = (await asyncio.to_thread(log.read_bytes))[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise OperatorError(f"--restart-command ended with status {status}: {tail}")
