"""The statements of semi-synchronous replication: does a commit wait until a replica has received it (DESIGN.md §9).

A replica tells its master when it connects that it acknowledges, and both servers count and know it whether or not the
master waits just then (measured on MariaDB 10.11 and MySQL 9.7). So a master is only ever told to wait when a replica
acknowledges already: no commit waits for one that may never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.errors import OperatorError
from tao.storage.dialect import Dialect
from tao.storage.result_packets import Row
from tao.storage.session import Session

_PREFIXES: Final = {
    Dialect.MARIADB: ("rpl_semi_sync_master", "rpl_semi_sync_slave"),
    Dialect.MYSQL: ("rpl_semi_sync_source", "rpl_semi_sync_replica"),
}
"""Of names of variables, and, with a capital, of figures: a server's as a master, and as a replica."""

SEMI_SYNC_FIGURES: Final = "SHOW GLOBAL STATUS LIKE 'Rpl_semi_sync_%%_status'"
"""For a packet of several statements; `semi_sync_state` reads its rows. The figures and not the settings: a master that
has given up waiting, and a replica that is not connected, say so there."""


@dataclass(frozen=True, slots=True)
class SemiSyncState:
    """Of one server, as master and as replica. Without the plugins, which MySQL needs, it is neither."""

    waits: bool
    """Its commits wait for a replica."""
    acknowledges: bool
    """It acknowledges what it receives; a moment longer than its master is there."""


def semi_sync_state(dialect: Dialect, rows: Sequence[Row]) -> SemiSyncState:
    """What the rows of `SEMI_SYNC_FIGURES` say."""
    running = {str(name).lower() for name, value in rows if str(value) == "ON"}
    waits, acknowledges = (f"{prefix}_status" in running for prefix in _PREFIXES[dialect])
    return SemiSyncState(waits, acknowledges)


async def set_semi_sync(session: Session, *, waits: bool, deadline: float) -> None:
    """Whether commits of this server wait for a replica. Servers without semi-synchronous replication stay so."""
    known = await _variables(session, deadline=deadline)
    master, _ = _PREFIXES[session.dialect]
    if f"{master}_enabled" not in known:
        if waits:
            raise OperatorError("the server has no semi-synchronous replication: load its plugins (docs/operations.md)")
        return
    if waits:
        # The default timeout, ten seconds, silently falls back to asynchronous. AFTER_SYNC: nobody sees a row before
        # it is safe.
        no_replica = "no_slave" if session.dialect is Dialect.MARIADB else "no_replica"
        await session.run(
            f"SET GLOBAL {master}_wait_point = 'AFTER_SYNC'; SET GLOBAL {master}_timeout = 4294967295; "
            f"SET GLOBAL {master}_wait_{no_replica} = 1",
            deadline=deadline,
        )
    await session.run(f"SET GLOBAL {master}_enabled = {waits:d}", deadline=deadline)


async def acknowledge_as_replica(session: Session, *, deadline: float) -> None:
    """Have a server acknowledge to its master what it receives, from its next connection on. It waits for nobody
    itself."""
    known = await _variables(session, deadline=deadline)
    master, replica = _PREFIXES[session.dialect]
    if f"{replica}_enabled" not in known:
        raise OperatorError("the server has no semi-synchronous replication: load its plugins (docs/operations.md)")
    await session.run(f"SET GLOBAL {master}_enabled = 0; SET GLOBAL {replica}_enabled = 1", deadline=deadline)


async def acknowledging_replicas(session: Session, *, deadline: float) -> int:
    """How many replicas that acknowledge are connected."""
    name = f"{_PREFIXES[session.dialect][0]}_clients"
    rows = await session.named(f"SHOW GLOBAL STATUS LIKE '{name}'", deadline=deadline)
    return int(rows[0]["Value"]) if rows else 0


async def _variables(session: Session, *, deadline: float) -> set[str]:
    rows = await session.named("SHOW GLOBAL VARIABLES LIKE 'rpl_semi_sync%%'", deadline=deadline)
    return {str(row["Variable_name"]) for row in rows}
