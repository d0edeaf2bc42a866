# ruff: noqa: S608 - schema names come from tao.storage.names, values are bound
"""Check, after the rows of a critical read or of intents to settle, that they were read at the master.

A reader takes the master from its topology, which may be old: the process was held up, or its region is cut off from
the topology and not from the former master. So the statement that reads the rows is followed, in the same message, by
one that asks the server itself: is it closed to writes, has its lease ended, and which master and version epoch does a
shard's row name. A check before the rows would prove nothing about a server that stands still in between. A server that
is open under a valid lease *after* the rows were read has had no successor before, so the rows were current when they
were read. The version epoch must be the one that came with the rows: a server that was replaced and made master again
in between has a higher one.

The shards of a server change their master together, and it is opened only when all have. So the row of one of them
stands for all; a part for each would cost as much as the rows. A shard that moves to another database is the exception:
its row here names another master before anybody may write there. That is read with its rows, in one snapshot
(`tao.storage.read_plan.ReadPlan`): what nobody could write elsewhere at the time of the snapshot was current.

The generation is not checked. It says which leader may write, and a critical read needs no leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tao.model.errors import InternalError, MasterReadOnly
from tao.storage.names import schema_name
from tao.storage.result_packets import Row

_LEASE_ENDED: Final = (
    "(SELECT MAX(lasts_ms > 0 AND ends_unix_ms <= CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)) FROM tao.lease)"
)
"""SQL expression: 1 when the lease has ended or was revoked, 0 while it lasts, NULL or 0 where none is kept.
`tao.replication.lease` describes the table. NOW() is the time at which the statement began, which was after the rows
were read."""


class MasterState(NamedTuple):
    """What a server says of itself after rows were read."""

    read_only: bool
    """It takes no writes. On MySQL, ``super_read_only`` includes ``read_only``."""
    lease_ended: bool
    """It keeps a lease, which has ended. For up to a second it may take writes nevertheless."""
    master: str
    """The master that the row of the shard names."""
    version_epoch: int
    """The version epoch of that row."""


def master_check(shard: int, *, with_lease: bool) -> str:
    """Return the statement that reads the `MasterState`, of one row. It has as many columns as those of
    `tao.storage.read_plan`, so that both are read in the same way. ``with_lease``: also read the server's lease."""
    return (
        f"SELECT {shard}, version_epoch, @@GLOBAL.read_only, {_LEASE_ENDED if with_lease else 0}, 0, 0, master_server "
        f"FROM {schema_name(shard)}.shard WHERE only_row = 1"
    )


def master_states(rows: Iterable[Row]) -> dict[int, MasterState]:
    """Return the state, by its shard, from the rows of `master_check`."""
    return {
        shard: MasterState(bool(read_only), bool(lease_ended), master.decode(), version_epoch)
        for shard, version_epoch, read_only, lease_ended, _, _, master in rows
    }


def master_refusal(server: str, shard: int, state: MasterState, read_epoch: int) -> MasterReadOnly | None:
    """Return why rows that were read at the server may not answer a critical read, or None. ``shard``: the one that was
    checked; ``read_epoch``: the version epoch that came with its rows."""
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


def missing_answer(server: str) -> InternalError:
    """Return the error of a critical read whose check brought no row."""
    return InternalError(
        f"database server {server} did not say whether it is the master: a shard's row is missing (run the shards' "
        "migrations), or something on the way drops statements"
    )
