# ruff: noqa: S608 - schema names come from tao.storage.names, values are bound
"""Check, after the rows of a critical read, that they were read at the master.

A reader takes the master from its topology, which may be old: the process was held up, or its region is cut off from
the topology and not from the former master. So the statement that reads the rows is followed, in the same message, by
one that asks the server itself: is it closed to writes, has its lease ended, and which master and version epoch do the
shards' rows name. A check before the rows would prove nothing about a server that stands still in between. A server
that is open under a valid lease *after* the rows were read has had no successor before, so the rows were current when
they were read. The version epoch must be the one that came with the rows: a server that was replaced and made master
again in between has a higher one.

The generation is not checked. It says which leader may write, and a critical read needs no leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tao.model.errors import MasterReadOnly
from tao.storage.names import schema_name
from tao.storage.result_packets import Row

_LEASE_ENDED: Final = (
    "(SELECT MAX(lasts_ms > 0 AND ends_unix_ms <= CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)) FROM tao.lease)"
)
"""SQL expression: 1 when the lease has ended or was revoked, 0 while it lasts, NULL or 0 where none is kept.
`tao.replication.lease` describes the table. NOW() is the time at which the statement began, which was after the rows
were read."""


class MasterState(NamedTuple):
    """What a server says of itself, and of one shard, after the rows were read."""

    read_only: bool
    """It takes no writes. On MySQL, ``super_read_only`` includes ``read_only``."""
    lease_ended: bool
    """It keeps a lease, which has ended. For up to a second it may take writes nevertheless."""
    master: str
    """The master that the shard's row names."""
    version_epoch: int
    """The version epoch of the shard's row."""


def master_check(shards: Iterable[int], *, with_lease: bool) -> str:
    """Return the statement that reads the `MasterState` of each shard, a row a shard; the first part also asks about
    the server as a whole. The rows have as many columns as those of `tao.storage.read_plan`, so that both are read in
    the same way. ``with_lease``: also read the server's lease."""
    of_server = f"@@GLOBAL.read_only, {_LEASE_ENDED if with_lease else 0}"
    parts: list[str] = []
    for shard in shards:
        parts.append(
            f"SELECT {shard}, version_epoch, {of_server}, 0, 0, master_server "
            f"FROM {schema_name(shard)}.shard WHERE only_row = 1"
        )
        of_server = "0, 0"
    return parts[0] if len(parts) == 1 else f"({') UNION ALL ('.join(parts)})"


def master_states(rows: Sequence[Row]) -> dict[int, MasterState]:
    """Return the state of each shard from all rows of `master_check`."""
    read_only = any(row[2] for row in rows)
    lease_ended = any(row[3] for row in rows)
    return {
        shard: MasterState(read_only, lease_ended, master.decode(), version_epoch)
        for shard, version_epoch, _, _, _, _, master in rows
    }


def master_refusal(server: str, shard: int, state: MasterState, read_epoch: int) -> MasterReadOnly | None:
    """Return why rows of the shard that were read at the server may not answer a critical read, or None.

    ``read_epoch``: the version epoch that came with the rows."""
    if state.read_only:
        why = "is closed to writes"
    elif state.lease_ended:
        why = "has a lease that has ended"
    elif state.master != server:
        why = f"holds shard {shard} of the master {state.master or '(none)'}"
    elif state.version_epoch != read_epoch:
        why = f"became the master of shard {shard} again during the read"
    else:
        return None
    return MasterReadOnly(
        f"database server {server} {why}: another may be the master by now, or is about to be. The read was critical, "
        "so it is not answered from there; try again"
    )
