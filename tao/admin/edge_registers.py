"""Finds edges with states whose two ends disagree in their registers, lie in the list of another state, or do not know
the state of the node at the other end.

Neither end is the truth: the leader that coordinates the pair joins both. The rows are scanned, and for every edge the
rows of the other end, in the lists of all states, are read.

The ends of a removed edge are purged by the jobs of two shards, hours apart. So one end alone is no fault when it is
removed and old enough to go; to join it to the other end would bring back what was purged, with a new age."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from tao.model.edge_states import NO_OPERATION, UNSET_NODE, EdgeRegisters, NodeState, State
from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.planning.edge_states import PURGE_MARGIN_SECONDS, purge_before_unix_s, removed_by_nodes_us
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.storage.scans import FIRST_EDGE, Scans

_PAGE_EDGES: Final = 500
"""Edges of a page, each of which has up to four rows at its other end."""


class UnequalEnds(NamedTuple):
    """An edge whose ends disagree. ``key``: of the edge under its type with states, as it was found."""

    key: EdgeKey
    fault: str


class _End(NamedTuple):
    """What one end has of an edge: the join of its rows, the numbers of the types whose lists they are in, and the
    state of the node."""

    registers: EdgeRegisters
    places: frozenset[int]
    node: NodeState


async def find_unequal_ends(
    routes: Routes,
    schema: Schema,
    scans: Scans,
    *,
    recheck_seconds: float,
    on_progress: Callable[[int, int], None],
    time_ns: Callable[[], int] = time.time_ns,
) -> AsyncIterator[UnequalEnds]:
    """Yield the edges whose ends disagree, some of them once for each end.

    One that disagrees is read again after ``recheck_seconds``, because it may be being written. ``on_progress``
    receives the shard and how many edges have been read so far."""
    if not any(atype.states for atype in schema.assocs):
        return
    looked_at = 0
    for shard in range(routes.shards):
        last = FIRST_EDGE
        while page := await scans.scan_registers(shard, last, _PAGE_EDGES):
            last = page[-1][0]
            keys = dict.fromkeys(_declared(key, schema) for key, _ in page if schema.knows_atype(key.atype))
            suspects = await _unequal(keys, schema, scans, time_ns())
            if suspects:
                await asyncio.sleep(recheck_seconds)
                for found in await _unequal([each.key for each in suspects], schema, scans, time_ns()):
                    yield found
            looked_at += len(page)
            on_progress(shard, looked_at)


def _declared(key: EdgeKey, schema: Schema) -> EdgeKey:
    return EdgeKey(key.id1, schema.declared((key.atype,))[0], key.id2)


async def _unequal(keys: Iterable[EdgeKey], schema: Schema, scans: Scans, now_ns: int) -> list[UnequalEnds]:
    edges = list(keys)
    mirrors = [_mirror(key, schema) for key in edges]
    ends = await _ends([*edges, *(mirror for mirror in mirrors if mirror is not None)], schema, scans)
    found: list[UnequalEnds] = []
    for key, mirror in zip(edges, mirrors, strict=True):
        if mirror is None or _is_half_purged(key, ends[key], ends[mirror], schema, now_ns):
            continue
        if fault := _fault(key, ends[key], ends[mirror], schema):
            found.append(UnequalEnds(key, fault))
    return found


def _mirror(key: EdgeKey, schema: Schema) -> EdgeKey | None:
    inverse = schema.atype(key.atype).inverse
    return None if inverse is None else EdgeKey(key.id2, inverse, key.id1)


def _is_half_purged(key: EdgeKey, near: _End, far: _End, schema: Schema, now_ns: int) -> bool:
    """Return whether one end has no row, and the other one that may be purged. The margin is for clocks that differ.

    The age is that of the operations: a row that was written again since, with the same ones, beats no more."""
    atype = schema.atype(key.atype)
    if far.places or near.places != {atype.states[State.REMOVED]}:
        return False
    registers = near.registers
    newest_us = max(registers.state_us, registers.payload_us, removed_by_nodes_us(registers, near.node))
    return newest_us // 1_000_000 <= purge_before_unix_s(atype, now_ns // 1_000_000) + PURGE_MARGIN_SECONDS


def _fault(key: EdgeKey, near: _End, far: _End, schema: Schema) -> str:
    if near.registers.with_id2(UNSET_NODE) != far.registers.with_id2(UNSET_NODE):
        return "the ends have other registers"
    # One that knows more than the node itself, as after a promotion with loss, has to wait for the node's next state.
    if near.registers.id2_node < far.node:
        return "one end has an older state of the node at the other"
    place = schema.atype(key.atype).states[near.registers.effective_state(near.node.state)]
    return "" if near.places == {place} else "in the list of another state"


async def _ends(keys: Sequence[EdgeKey], schema: Schema, scans: Scans) -> dict[EdgeKey, _End]:
    by_shard: dict[int, list[EdgeKey]] = {}
    for key in keys:
        rows = [EdgeKey(key.id1, number, key.id2) for number in schema.atype(key.atype).state_numbers]
        by_shard.setdefault(key.id1 >> SHARD_SHIFT, []).extend(rows)
    ends = dict.fromkeys(keys, _End(NO_OPERATION, frozenset(), UNSET_NODE))
    for shard, rows in by_shard.items():
        for row_key, registers in await scans.read_registers(shard, rows):
            key = _declared(row_key, schema)
            before = ends[key]
            ends[key] = _End(before.registers.joined(registers), before.places | {row_key.atype}, before.node)
        nodes = await scans.read_nodes(shard, {ListKey(row.id1, schema.declared((row.atype,))[0]) for row in rows})
        for key, end in ends.items():
            node = nodes.get(ListKey(key.id1, key.atype))
            if node is not None:
                ends[key] = end._replace(node=node)
    return ends
