# ruff: noqa: S608 - nothing but constants stands in the statements
"""The lease of a master, kept by the database server itself (DESIGN.md §9).

A master that is cut off from everybody must stop taking writes although nobody can tell it so. So the server carries a
row that says until when it may write, by its own clock, and an event that closes it, every second, when that time is
over. Neither is replicated: both are made and written outside the binlog, in a schema that no service account reaches.

Two rules make it a lease. A renewal never revives one that has run out, so a fence that took it away stays. And the
new end is counted from a time that the server told *before* the renewal was sent: one that was under way for long buys
no more time than one that was not. The server's clock must not be set back by hand while it is master.
"""

from __future__ import annotations

from typing import Final

from tao.model.errors import OperatorError
from tao.storage.dialect import Dialect
from tao.storage.replication import set_read_only
from tao.storage.session import Session

EVENT_SECONDS: Final = 1
"""Between two looks of the server at its lease: how much longer than the lease it may take writes, at most."""

_NOW: Final = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)"
_EVENT: Final = "tao.close_without_lease"


async def install_lease(session: Session, lasts_seconds: float, *, deadline: float) -> None:
    """Prepare the server: schema, row (of a lease that has run out) and event. It is as open or closed afterwards as
    before, for at most a second. ``lasts_seconds``: of each lease from now on. Idempotent."""
    closed = "read_only" if session.dialect is Dialect.MARIADB else "super_read_only"
    (((read_only, super_closed),),) = await session.run(
        f"SELECT @@GLOBAL.read_only, @@GLOBAL.{closed}", deadline=deadline
    )
    if session.dialect is Dialect.MYSQL and super_closed:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)
    await session.run("ROLLBACK; SET SESSION sql_log_bin = 0", deadline=deadline)
    try:
        await session.run(
            "CREATE SCHEMA IF NOT EXISTS tao; "
            "CREATE TABLE IF NOT EXISTS tao.lease (only_row TINYINT UNSIGNED NOT NULL PRIMARY KEY, "
            "ends_unix_ms BIGINT UNSIGNED NOT NULL, lasts_ms BIGINT UNSIGNED NOT NULL) ENGINE = InnoDB; "
            "INSERT IGNORE INTO tao.lease VALUES (1, 0, 0); "
            f"UPDATE tao.lease SET lasts_ms = {int(lasts_seconds * 1000)}; COMMIT; "
            # A master that is open stays so until somebody renews what it has from here on.
            f"UPDATE tao.lease SET ends_unix_ms = {_NOW} + lasts_ms WHERE ends_unix_ms = 0 AND @@GLOBAL.read_only = 0; "
            "COMMIT; "
            f"CREATE EVENT IF NOT EXISTS {_EVENT} ON SCHEDULE EVERY {EVENT_SECONDS} SECOND DO "
            "BEGIN IF @@GLOBAL.read_only = 0 AND NOT EXISTS "
            f"(SELECT 1 FROM tao.lease WHERE ends_unix_ms > {_NOW}) THEN SET GLOBAL {closed} = 1; END IF; END",
            deadline=deadline,
        )
        # On MariaDB an event that was made on a replica is marked as one that runs at the master alone.
        await session.run(f"ALTER EVENT {_EVENT} ENABLE", deadline=deadline)
    finally:
        await session.run("SET SESSION sql_log_bin = 1", deadline=deadline)
    await session.run("SET GLOBAL event_scheduler = 1", deadline=deadline)
    if read_only:
        await set_read_only(session, True, deadline=deadline)


async def remove_lease(session: Session, *, deadline: float) -> None:
    """Undo `install_lease` at a server that is closed: it keeps no lease from now on, so it stays open once it is
    opened."""
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)
    await session.run(
        f"ROLLBACK; SET SESSION sql_log_bin = 0; DROP EVENT IF EXISTS {_EVENT}; SET SESSION sql_log_bin = 1",
        deadline=deadline,
    )


async def lease_seconds(session: Session, *, deadline: float) -> float:
    """How long the server's leases last; 0 when it keeps none, so that it closes itself never."""
    (events,) = await session.run(
        "SELECT 1 FROM information_schema.events WHERE event_schema = 'tao' AND event_name = 'close_without_lease'",
        deadline=deadline,
    )
    if not events:
        return 0.0
    ((((lasts_ms,),), _)) = await session.run("SELECT MAX(lasts_ms) FROM tao.lease; ROLLBACK", deadline=deadline)
    return int(lasts_ms or 0) / 1000


async def server_unix_ms(session: Session, *, deadline: float) -> int:
    """The server's clock: what `grant_lease` and `renew_lease` count from."""
    (((now,),),) = await session.run(f"SELECT {_NOW}", deadline=deadline)
    return int(now)


async def grant_lease(session: Session, from_unix_ms: int, *, deadline: float) -> None:
    """Begin a lease, whatever was before. The server has to be opened besides. Raises `OperatorError` where
    `install_lease` was never called."""
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)  # leaders are kept out still
    if not await _write(session, f"{from_unix_ms:d} + lasts_ms", "", deadline):
        raise OperatorError("the server keeps no lease: it was not prepared for one")


async def renew_lease(session: Session, from_unix_ms: int, *, deadline: float) -> bool:
    """Prolong a lease that has not run out; False when it has, or was taken away, or the server is closed."""
    (((read_only,),),) = await session.run("SELECT @@GLOBAL.read_only", deadline=deadline)
    return not read_only and await _write(
        session, f"{from_unix_ms:d} + lasts_ms", f" AND ends_unix_ms > {_NOW}", deadline
    )


async def revoke_lease(session: Session, *, deadline: float) -> None:
    """Take the lease away from a server that is open; it has to be closed besides. Nothing happens where none is kept,
    and at a server that is closed, which a lease does not open."""
    (((read_only,),),) = await session.run("SELECT @@GLOBAL.read_only", deadline=deadline)
    if not read_only and await lease_seconds(session, deadline=deadline):
        await _write(session, "0", " AND ends_unix_ms > 0", deadline)


async def _write(session: Session, ends: str, condition: str, deadline: float) -> bool:
    results = await session.run(
        "ROLLBACK; SET SESSION sql_log_bin = 0; "
        # Never the same value twice, or a renewal within a millisecond would count as none.
        f"UPDATE tao.lease SET ends_unix_ms = GREATEST({ends}, ends_unix_ms + 1) * ({ends} > 0) "
        f"WHERE only_row = 1{condition}; SELECT ROW_COUNT(); COMMIT; SET SESSION sql_log_bin = 1",
        deadline=deadline,
    )
    return bool(results[3][0][0])
