"""A cache server that adds itself to its tier, takes its share of the ring in steps, and leaves when it is asked to.

`tao.topology.registration` decides each step from the document; here the steps are taken, by the server that they are
about: it alone knows when it is ready for more shards. Others only ask it to leave (`tao drain`), and remove it once it
has stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from tao.model.errors import SettingsError, TaoError, TopologyConflict
from tao.model.ports import Clock, TopologyStore
from tao.model.topology import CacheServer, Registration, Role, Topology
from tao.observability.logs import Logger
from tao.serving.configuration import Configuration
from tao.topology.registration import Registrant, eighths, placed, register, step

_LOOK_SECONDS: Final = 0.5
"""Interval between two looks at the own entry, which cost no I/O: as often as the document is looked at."""

_MAX_CONFLICTS: Final = 20
"""Attempts to register while others change the document at the same moment: several servers may be started at once,
next to a watcher and an operator."""

_CONFLICT_SECONDS: Final = 0.1
"""Longest pause before another attempt; a random one, so that servers which start together do not meet again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationSettings:
    """How the server adds itself to the topology. Without ``join`` an operator adds it (`tao topology add-server`)."""

    join: bool = False
    """Whether the server adds itself, when the topology does not list its name. It then needs ``tier`` and ``grpc``,
    and with etcd a user that may write the topology."""

    region: str = ""
    """The region to join. Empty: the only one of the topology."""

    tier: str = ""
    """The tier to join, which must exist: that of the region's leaders for a leader, one of followers for a
    follower."""

    grpc: str = ""
    """``host:port`` where it serves gRPC, as others reach it. It is known by it: a server of the same name with
    another one is refused."""

    frames: str = ""
    """``host:port`` where it serves the frames transport. Empty: peers use gRPC."""

    admin: str = ""
    """``host:port`` of its metrics, health and readiness. Without it `tao drain` cannot see when it is safe to stop."""

    share: float = 1.0
    """The part of the ring that it gets, relative to the tier's other servers."""

    step_seconds: float = 5.0
    """Time from one step of its weight to the next. A follower takes eight steps: with each it misses what it has just
    taken over, and a second is enough for the most read of that."""

    def __post_init__(self) -> None:
        if self.join and not (self.tier and self.grpc):
            raise SettingsError("registration.join needs registration.tier and registration.grpc")


class RegistrationKeeper:
    """Keeps the registration of one server. ``trouble``: why it must get no requests, or empty."""

    def __init__(
        self,
        name: str,
        role: Role,
        settings: RegistrationSettings,
        configuration: Configuration,
        store: TopologyStore,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._settings: Final = settings
        self._configuration: Final = configuration
        self._store: Final = store
        self._clock: Final = clock
        self._log: Final = log
        self._stepped_at = -inf
        self._is_leaving = False
        self._reported = ""
        self.trouble = ""
        self.wanted: Final = Registrant(
            role,
            settings.region or _only_region(configuration.routes.topology),
            settings.tier,
            CacheServer(
                name=name,
                grpc=settings.grpc,
                frames=settings.frames,
                admin=settings.admin,
                weight=0.0,
                registration=Registration(share=settings.share),
            ),
        )

    async def register(self) -> None:
        """Have the document list this server, and use that document. Raises as `register` of
        `tao.topology.registration`, and `TopologyConflict` when others go on changing the document."""
        for left in reversed(range(_MAX_CONFLICTS)):
            before = await self._store.load()
            try:
                await self._change(before, register(before, self.wanted))
                return
            except TopologyConflict:
                if not left:
                    raise
                await asyncio.sleep(_CONFLICT_SECONDS * random.random())

    async def keep(self, is_ready: Callable[[], bool]) -> None:
        """Take the steps that are due, until cancelled. ``is_ready`` returns whether the server is ready for more
        shards."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.look(is_ready)
                self._reported = ""
            except TopologyConflict:
                await self._configuration.refresh()
            except TaoError as error:
                if self._reported != error.message:  # log each different reason once
                    self._reported = error.message
                    self._log.error("registration_not_stored", reason=error.message)

    async def look(self, is_ready: Callable[[], bool]) -> None:
        """Take the step that is due now, if any. Raises `TopologyError`, and `TopologyConflict` when the document in
        use here is not the present one."""
        topology, name = self._configuration.routes.topology, self.wanted.server.name
        found = placed(topology, name)
        if found is None:
            # A watcher has removed it while it was away, unless it was on its way out.
            if not self._is_leaving:
                await self._change(topology, register(topology, self.wanted))
            return
        self._note_place(found.server.grpc)
        own = found.server.registration
        self._is_leaving = own.leaving if own else False
        now = self._clock.monotonic()
        if self.trouble or now - self._stepped_at < self._settings.step_seconds:
            return
        if await self._change(topology, step(topology, name, is_ready=is_ready())):
            self._stepped_at = now

    def _note_place(self, grpc: str) -> None:
        """Note whether another server has taken this one's name: a watcher found this one gone when it registered.
        Then this one gives up its shards (`ServerContext.own_shards`)."""
        self.trouble = (
            ""
            if grpc == self.wanted.server.grpc
            else f"another server has registered as {self.wanted.server.name}, at {grpc}: stop one of both"
        )

    async def _change(self, before: Topology, after: Topology) -> bool:
        """Store and use a document, unless it is the same. Returns whether it was stored."""
        if after is not before:
            after = await self._store.change(before.version, after)
            found = placed(after, self.wanted.server.name)
            if found is not None:
                self._log.info("registration_changed", weight=found.server.weight, eighths=eighths(found.server))
        self._configuration.use_topology(after)
        return after is not before

    def figures(self) -> dict[str, object]:
        """Return the registration for `/stats`."""
        return {"leaving": self._is_leaving, "trouble": self.trouble}


def _only_region(topology: Topology) -> str:
    names = [region.name for region in topology.regions]
    if len(names) > 1:
        raise SettingsError(f"registration.region is missing; the topology has the regions {', '.join(names)}")
    return names[0]
