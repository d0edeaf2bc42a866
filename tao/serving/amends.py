"""What becomes of a server of this tier that has not heard of a change in time (DESIGN.md §10).

The write is committed, and its writer has waited long enough. But the server may go on answering from its cache, and
whoever was told that the write is done would read there as if it were not. So it is asked to drop the shard, until it
has heard that: a shard read anew costs misses, and is never wrong. The leader tells it of the change, too; this is for
the case that it does not, or later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tao.model.errors import TaoError
from tao.model.topology import CacheServer
from tao.serving.links import LinksPort
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class AmendsSettings:
    """How a server that missed changes is asked to drop shards."""

    answer_seconds: float = 1.0
    """For its answer: dropping a shard takes microseconds."""

    first_pause_seconds: float = 0.1
    """Before it is asked again; the pause doubles."""

    max_attempts: int = 8
    """Some half a minute. By then it is marked down, or its leader has voided what it missed."""


class Amends:
    """Shards owed to servers, one task for each server at most."""

    def __init__(
        self,
        links: LinksPort,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: AmendsSettings | None = None,
    ) -> None:
        self._links: Final = links
        self._spawn: Final = spawn
        self._settings: Final = settings or AmendsSettings()
        self._owed: Final[dict[str, set[int]]] = {}
        self.voided = 0
        """Shards that servers have dropped because of this."""

    @property
    def owes(self) -> bool:
        """A server has yet to drop something."""
        return bool(self._owed)

    def owe(self, server: CacheServer, shards: Iterable[int]) -> None:
        """The server has missed changes of these shards."""
        owed = self._owed.get(server.name)
        if owed is not None:
            owed.update(shards)
            return
        self._owed[server.name] = set(shards)
        try:
            self._spawn(self._make(server))
        except TaoError:
            # Too busy for a task: its leader's message has to do.
            del self._owed[server.name]

    async def _make(self, server: CacheServer) -> None:
        owed = self._owed[server.name]
        try:
            for attempt in range(self._settings.max_attempts):
                if attempt:
                    await asyncio.sleep(self._settings.first_pause_seconds * 2 ** (attempt - 1))
                while owed:
                    asked = sorted(owed)
                    owed.clear()  # what is missed from now on is owed anew
                    if not await self._has_dropped(server, asked):
                        owed.update(asked)
                        break
                    self.voided += len(asked)
                if not owed:
                    return
        finally:
            del self._owed[server.name]

    async def _has_dropped(self, server: CacheServer, shards: Sequence[int]) -> bool:
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(answer: pb.Answer) -> None:
            if not answered.done():
                answered.set_result(not answer.HasField("error"))

        request = pb.Request(invalidate=pb.Invalidate(shards=shards))
        self._links.to(server).send(request, self._settings.answer_seconds, take)
        return await answered
