"""`Graph`: all operations over one connected client, and `connect`, which opens one.

Each await is one query. Queries that are awaited side by side (``asyncio.gather``, several tasks) in one tick of the
event loop travel in one message per server; a many-form does the same in one call. One `Graph` serves a whole process.
It belongs to the event loop on which it was opened.

Besides the errors that its docstring names, every operation may raise any error of `tao.model.errors`: `RequestError`
for a mistake, mostly before anything is sent; `RetryableError` when nothing was written and another try may succeed;
`OutcomeUnknown` when a write may or may not have happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NoReturn, Self

from tao.client.configuration import ClientConfiguration, LinkPool, read_target
from tao.client.counters import CounterOperations
from tao.client.dispatcher import Dispatcher
from tao.client.journaled import JournaledOperations
from tao.client.settings import ClientSettings
from tao.wire.identity import Credentials
from tao.wire.links import Links

_ANONYMOUS = Credentials(name="", role="client")
_HOW_TO_OPEN = (
    "await it (`graph = await connect(…)` or `async with connect(…) as graph`), or use `SyncGraph`, which needs none"
)


class Graph(JournaledOperations, CounterOperations):
    """A connection to the graph. Made by `connect`; close it, or use it as a context manager."""

    def __init__(
        self,
        links: LinkPool,
        configuration: ClientConfiguration,
        settings: ClientSettings,
        tier: str | None = None,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Open the operations over connections. Raises `TopologyError` when the region has no such tier."""
        dispatcher = Dispatcher(
            settings, region=configuration.region, tier=tier, link_to=links.to, refresh=configuration.refresh
        )
        super().__init__(configuration, dispatcher, settings, unix_seconds)
        self._links = links
        self._additions = {}
        self._counters_asked = {}
        self._counter_tasks = set()

    def servers(self) -> dict[str, dict[str, object]]:
        """Return what the failure detector says of each follower that was asked so far, by name: ``health`` (``up``,
        ``suspect``, ``down``, ``probing``), for how many seconds, and why. For the application's logs and metrics."""
        return self._links.figures()

    async def close(self) -> None:
        """Close the connections. Operations still in flight fail with `Unavailable`."""
        self._own_writes.close()
        self._hot.close()
        self._close_counters()
        await self._dispatcher.close()
        await self._configuration.close()
        await self._links.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class PendingGraph:
    """A graph that is not open yet: await it, or enter it (``async with connect(…) as graph``), which closes it."""

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

    def __await__(self) -> Generator[Any, None, Graph]:  # Any: coroutines yield to the event loop what it likes
        return self._open().__await__()

    async def __aenter__(self) -> Graph:
        self._graph = await self._open()
        return self._graph

    async def __aexit__(self, *_: object) -> None:
        if self._graph is not None:
            await self._graph.close()

    if not TYPE_CHECKING:  # type checkers report these uses by themselves

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)  # what Python and tools ask of any object
            raise AttributeError(f"this graph is not open yet, so it has no {name!r}: {_HOW_TO_OPEN}")

        def __enter__(self) -> NoReturn:
            raise TypeError(f"connect() opens a graph of an event loop: {_HOW_TO_OPEN}")

        def __exit__(self, *_: object) -> None:
            """Exist, so that ``with`` reaches `__enter__`, which raises."""

    async def _open(self) -> Graph:
        source = await read_target(self._target)
        links = Links(self._settings.links, self._credentials, self._settings.tls)
        try:
            configuration = await ClientConfiguration.fetch(source, self._region, links, self._settings)
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
) -> PendingGraph:
    """Open a graph: ``await connect(…)`` or ``async with connect(…) as graph``.

    ``target`` is the address of any follower (``host:port`` of its gRPC port, or ``frames:host:port``), or a topology
    file (a path, or ``file:…``). Topology and schema come from a follower and are watched from then on. ``region`` is
    the region of this process; it may be left out when there is only one, or when the target is the address of a
    follower in the topology. ``tier`` is the follower tier to prefer, by default the region's first.

    Raises `InvalidArgument` for a target that cannot be read, `Unavailable` or `DeadlineExceeded` when no follower
    answers, `TlsMismatch` when only one side uses TLS (``settings.tls``), `Unauthorized` for wrong credentials,
    `TopologyError` when there is no such region or tier.
    """
    return PendingGraph(target, region, tier, settings or ClientSettings(), credentials or _ANONYMOUS)
