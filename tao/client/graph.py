"""`Graph`: all operations over one connected client, and `connect`, which makes one (DESIGN.md §12).

Each await is one query; what is awaited side by side (``asyncio.gather``, many tasks) in one tick of the event loop
travels in one message per server. The many-forms say the same in one call. One `Graph` serves a whole process; it
belongs to the event loop it was opened on.

Every operation raises, besides what its own text says, the tree of `tao.model.errors`: `RequestError` for a mistake,
mostly before anything is sent; `RetryableError` when nothing was written and another try may succeed; `OutcomeUnknown`
when a write may or may not have happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

from tao.client.configuration import Configuration, LinkPool, read_target
from tao.client.dispatch import Dispatcher
from tao.client.settings import ClientSettings
from tao.client.writes import WriteOperations
from tao.peers.links import Links
from tao.wire.identity import Credentials

_ANONYMOUS = Credentials(name="", role="client")


class Graph(WriteOperations):
    """The graph. Made by `connect`; close it, or use it as a context manager."""

    def __init__(
        self,
        links: LinkPool,
        configuration: Configuration,
        settings: ClientSettings,
        tier: str | None = None,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Raises `TopologyError` when the region has no such tier."""
        dispatcher = Dispatcher(
            settings, region=configuration.region, tier=tier, link_to=links.to, refresh=configuration.refresh
        )
        super().__init__(configuration, dispatcher, settings, unix_seconds)
        self._links = links

    def servers(self) -> dict[str, dict[str, object]]:
        """What is held of each follower that was asked so far, by name: ``health`` (``up``, ``suspect``, ``down``,
        ``probing``), since how many seconds and why; for logs and metrics of the application."""
        return self._links.figures()

    async def close(self) -> None:
        """Close the connections. What is still waited for fails as `Unavailable`."""
        self._own_writes.close()
        self._hot.close()
        await self._dispatcher.close()
        await self._configuration.close()
        await self._links.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Connecting:
    """A graph about to be opened: await it, or enter it (``async with connect(…) as graph``) to have it closed."""

    def __init__(
        self,
        target: str,
        region: str | None,
        tier: str | None,
        settings: ClientSettings,
        credentials: Credentials,
    ) -> None:
        self._target = target
        self._region = region
        self._tier = tier
        self._settings = settings
        self._credentials = credentials
        self._graph: Graph | None = None

    def __await__(self) -> Generator[Any, None, Graph]:  # Any: what a coroutine yields is the loop's affair
        return self._open().__await__()

    async def __aenter__(self) -> Graph:
        self._graph = await self._open()
        return self._graph

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._graph is not None:
            await self._graph.close()

    async def _open(self) -> Graph:
        source = read_target(self._target)
        links = Links(self._settings.links, self._credentials, self._settings.tls)
        try:
            configuration = await Configuration.fetch(source, self._region, links, self._settings)
            return Graph(links, configuration, self._settings, self._tier)
        except BaseException:
            await links.close()
            raise


def connect(
    target: str,
    *,
    region: str | None = None,
    tier: str | None = None,
    settings: ClientSettings | None = None,
    credentials: Credentials | None = None,
) -> Connecting:
    """Open a graph: ``await connect(…)`` or ``async with connect(…) as graph``.

    ``target``: the address of any follower (``host:port`` of its gRPC port, ``frames:host:port``), or a topology file
    (a path, or ``file:…``). Topology and schema come from a follower and are watched from then on. ``region``: where
    this process is; told by the address when that is one of the topology's, or when there is only one. ``tier``: the
    follower tier to ask first, else the region's first.

    Raises `InvalidArgument` for a target that is none, `Unavailable` or `DeadlineExceeded` when no follower answers,
    `Unauthorized` for wrong credentials, `TopologyError` when there is no such region or tier.
    """
    return Connecting(target, region, tier, settings or ClientSettings(), credentials or _ANONYMOUS)
