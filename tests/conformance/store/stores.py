"""The parts that the suites over stores share: shards, types, ids that no other test uses, and one way to write."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import make_id
from tao.model.ports import IntentReads, WriteStore
from tao.model.rows import ListRow, RowChanges, ShardRow, WriteKeys
from tao.schema.types import STATES_TABLE
from tao.storage.pools import Pools
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.versions import make_version

SERVER = "one"
SHARDS = (40_000, 40_001, 40_002)
CUSTOM_TABLE = "assocs_long"
LIKES, LONG, NORMAL, ARCHIVED = 5, 9, 52, 152  # association types; edges of the others lie in tables of their own

MakePools = Callable[..., Pools]

"""Deadline of a write in seconds. No test waits that long, but a loaded MySQL with a redo log of 16 MB takes several
seconds for 24 MB."""

_sequence = itertools.count(1)


@dataclass(frozen=True)
class Stores:
    """Both store ports over `SHARDS` of the server `SERVER`."""

    read: IntentReads
    write: WriteStore


def new_id(shard: int = SHARDS[0]) -> int:
    """Return an id that no other test uses."""
    return make_id(shard, 1_700_000_000_000 + next(_sequence), 0)


def server_of(shard: int) -> str:
    return SERVER


def table_of(atype: int) -> str:
    return {LONG: CUSTOM_TABLE, NORMAL: STATES_TABLE, ARCHIVED: STATES_TABLE}.get(atype, "assocs")


def version(counter: int) -> int:
    return make_version(1, counter)


async def write(stores: Stores, changes: RowChanges, keys: WriteKeys | None = None) -> dict[int, ShardRow]:
    """Commit ``changes`` in one transaction."""
    async with stores.write.transaction(SERVER, timeout_seconds=PATIENT_SECONDS) as transaction:
        shards, _ = await transaction.lock_and_read(SHARDS, keys or WriteKeys())
        await transaction.apply(changes)
        await transaction.commit()
    return shards


def list_of(id1: int, atype: int, edges: list[Edge], counter: int = 1) -> RowChanges:
    """Return changes that make these edges, with their list."""
    return RowChanges(
        put_lists={ListKey(id1, atype): ListRow(len(edges), version(counter))},
        put_edges={EdgeKey(id1, atype, edge.id2): edge for edge in edges},
    )
