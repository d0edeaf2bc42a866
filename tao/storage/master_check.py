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
(`tao.storage.read_plan.ReadPlan`): rows that no other master could write at the time of the snapshot were current.
Behind the fence of a move the server that the row names is asked, after the rows: the shard arrives there under the
next generation, and each leader that takes it adds one. Below that nobody has written there, and nobody may write here.
So critical reads go on while a shard moves, and after a mover died behind the fence. Before it arrives the server has
the incoming copy. One that has neither proves nothing: the shard may have arrived, been written and moved on.

Otherwise the generation is not checked. It says which leader may write, and a critical read needs no leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tao.model.errors import InternalError, MasterReadOnly
from tao.storage.names import incoming_schema_name, schema_name
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
    generation: int
    """The generation of that row."""

    def is_moving_away(self, server: str) -> bool:
        """Return whether nothing but the row of the shard speaks against the server: it names another master."""
        return not self.read_only and not self.lease_ended and self.master != server

    def is_untouched(self, generations: Sequence[int]) -> bool:
        """Return whether nobody has written the shard at the server that the row names. ``generations``: what
        `generations_there` have found there, after this state was read; the server is the master afterwards. Without
        any, the shard may have been there, and have moved on."""
        return bool(generations) and max(generations) <= self.generation + 1


def master_check(shard: int, *, with_lease: bool) -> str:
    """Return the statement that reads the `MasterState`, of one row. It has as many columns as those of
    `tao.storage.read_plan`, so that both are read in the same way. ``with_lease``: also read the server's lease."""
    return (
        f"SELECT {shard}, version_epoch, @@GLOBAL.read_only, {_LEASE_ENDED if with_lease else 0}, generation, 0, "
        f"master_server FROM {schema_name(shard)}.shard WHERE only_row = 1"
    )


def master_states(rows: Iterable[Row]) -> dict[int, MasterState]:
    """Return the state, by its shard, from the rows of `master_check`."""
    return {
        shard: MasterState(bool(read_only), bool(lease_ended), master.decode(), version_epoch, generation)
        for shard, version_epoch, read_only, lease_ended, generation, _, master in rows
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


def generations_there(shard: int) -> tuple[str, str]:
    """Return the statements that read the generation of a shard at a server to which it moves: of its incoming copy,
    and of the shard once it has arrived. Either schema may be missing. In this order at least one is found during a
    move, for the copy becomes the shard in one statement."""
    schemas = incoming_schema_name(shard), schema_name(shard)
    copied, arrived = (f"SELECT generation FROM {schema}.shard WHERE only_row = 1" for schema in schemas)
    return copied, arrived


TAKES_WRITES: Final = "SELECT NOT @@GLOBAL.read_only"
"""Reads whether a server is open."""
LEASE_LASTS: Final = f"SELECT NOT COALESCE({_LEASE_ENDED}, 0)"
"""Reads whether a server's lease lasts, or it keeps none. Its table may be missing then."""


def missing_answer(server: str) -> InternalError:
    """Return the error of a critical read whose check brought no row."""
    return InternalError(
        f"database server {server} did not say whether it is the master: a shard's row is missing (run the shards' "
        "migrations), or something on the way drops statements"
    )
