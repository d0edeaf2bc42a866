"""A `ServerContext` around the parts that a test chooses, and a topology that cannot be read."""

from __future__ import annotations

import asyncio
from typing import cast

from tao.model.ports import Clock
from tao.model.topology import Topology
from tao.observability.logs import logger
from tao.routing.budgets import RetryBudget, RetrySettings
from tao.runtime.clock import LoopClock
from tao.serving.audit import AuditTrail
from tao.serving.configuration import Configuration, ServerContext, Spawn
from tao.wire.links import Links, LinksPort


def make_context(
    configuration: Configuration,
    links: LinksPort,
    spawn: Spawn,
    *,
    name: str = "near-1",
    region: str = "east",
    tier: str = "near",
    clock: Clock | None = None,
    budget: RetryBudget | None = None,
    audit: AuditTrail | None = None,
    registered_grpc: str = "",
) -> ServerContext:
    """Return a context whose tasks are all started by ``spawn``, whatever their name."""
    return ServerContext(
        name=name,
        region=region,
        tier=tier,
        configuration=configuration,
        links=cast(Links, links),
        clock=clock or LoopClock(),
        spawn_as=lambda _: spawn,
        budget=budget or RetryBudget(RetrySettings(), 0.0),
        log=logger("test"),
        audit=audit or AuditTrail(),
        registered_grpc=registered_grpc,
    )


class SilentTopology:
    """The ``load`` of a `Configuration` whose document cannot be read, as while etcd is silent. ``reads``: how many
    reads have begun."""

    def __init__(self) -> None:
        self.reads = 0

    async def __call__(self) -> Topology:
        self.reads += 1
        await asyncio.Event().wait()
        raise AssertionError("the read has ended")
