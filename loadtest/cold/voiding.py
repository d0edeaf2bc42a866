"""Caches that are to have nothing of what a scenario asks for: they are told to drop it, as `tao invalidate` does.

Of a running cluster it takes the types of the load test alone, in the shards of its keys; a cluster that has a secret
wants it in ``TAO_TOKEN``, as for `tao invalidate`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from tao.cli.invalidating import invalidate, plan_invalidation, types_named
from tao.cli.reaching import operator_links
from tao.client import Graph
from tao.model.errors import OperatorError
from tao.model.ids import SHARD_SHIFT
from tao.routing.routes import Routes


async def drop_everywhere(graph: Graph, ids: Iterable[int], types: Sequence[str]) -> None:
    """Have every leader and follower of all regions drop what it holds of these types in the shards of these ids.
    Raises `OperatorError` naming the servers that could not be told, and why."""
    shards = sorted({each >> SHARD_SHIFT for each in ids})
    plan = plan_invalidation(Routes(graph.topology), shards, ())
    async with operator_links(os.environ.get("TAO_TOKEN", "")) as links:
        results = await invalidate(plan, links, types_named(graph.schema, types))
    failed = [f"{each.server} ({each.error})" for each in results if each.error]
    if failed:
        raise OperatorError(f"these caches could not be told to drop the test's keys: {', '.join(failed)}")
