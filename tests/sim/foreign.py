"""Foreign writes: a script's transaction that bypasses the product, waits for locks as all do, and keeps no
versions."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import RowChanges
from tests.sim.database import SimDatabase
from tests.sim.plans import Fault
from tests.sim.world import World

_WITHOUT_INVERSE: Final = ("comment", "note")


def write_past_the_product(world: World, fault: Fault) -> None:
    """Change an object, or remove or change an edge of a type that has no inverse."""
    masters = world.masters
    master = masters[fault.pick % len(masters)]
    rows = master.truth
    atypes = [world.schema.atype(name).number for name in _WITHOUT_INVERSE]
    edges = sorted(
        EdgeKey(key.id1, key.atype, id2)
        for key, of_list in rows.edges.items()
        if key.atype in atypes
        for id2 in of_list
    )
    objects = sorted(key for key, row in rows.objects.items() if not row.deleted)
    changes = RowChanges()
    if fault.other % 2 and objects:
        row = rows.objects[objects[fault.other % len(objects)]]
        changes.put_objects.append(msgspec.structs.replace(row, data=b"\x81\x01\xa3" + f"{fault.pick:03}".encode()))
    elif edges and fault.other % 4:
        changes.delete_edges.append(edges[fault.other % len(edges)])
    elif edges:
        key = edges[fault.other % len(edges)]
        edge = rows.edges[ListKey(key.id1, key.atype)][key.id2]
        changes.put_edges[key] = msgspec.structs.replace(edge, time=edge.time + 1)
    if changes:
        world.spawn(_write(world, master, changes))


async def _write(world: World, master: SimDatabase, changes: RowChanges) -> None:
    objects = [row.id for row in changes.put_objects]
    changed = (*changes.put_edges, *changes.delete_edges)
    shard = (objects + [key.id1 for key in changed])[0] >> SHARD_SHIFT
    await master.locks.exclude(shard)
    try:
        truth = master.truth
        current = all(not truth.objects[key].deleted for key in objects)
        current = current and all(truth.edge(key) is not None for key in changed)
        if current and not master.read_only and not master.down:
            changes.put_objects[:] = [
                msgspec.structs.replace(row, version=truth.objects[row.id].version) for row in changes.put_objects
            ]
            master.past.foreign.update(objects, [ListKey(key.id1, key.atype) for key in changed])
            await asyncio.sleep(master.log(changes, world.schema))
            master.show(changes)
    finally:
        master.locks.free_exclusive(shard)
