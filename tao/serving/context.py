"""The collaborators that every part of a cache server shares."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tao.model.ports import Clock
from tao.observability.logs import Logger
from tao.routing.budgets import RetryBudget
from tao.serving.configuration import Configuration
from tao.wire.links import Links

Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Starts a coroutine as a task of the server. Raises `Overloaded`, with the coroutine closed, when the server has as
many tasks as it may have."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One cache server's place in the topology, its clock, its connections to other servers, and its tasks."""

    name: str
    """The server's name in the topology."""

    region: str
    tier: str

    configuration: Configuration
    """The current topology and schema."""

    links: Links
    """Connections to other cache servers."""

    clock: Clock

    spawn_as: Callable[[str], Spawn]
    """Return a `Spawn` whose tasks carry this name in logs."""

    budget: RetryBudget
    """Bounds the requests that this server repeats, over all of its parts."""

    log: Logger
