"""A `ServerContext` around the parts that a test chooses."""

from __future__ import annotations

from typing import cast

from tao.model.ports import Clock
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
