# ruff: noqa: S608 - nothing but constants stands in the statements
"""The lease of a master, enforced by the database server itself.

A master that is cut off from everything must stop taking writes although no process can reach it. So the server keeps a
row with the time until which it may write, by its own clock, and an event that makes it read-only, checked every
second, once that time has passed. Neither is replicated: both are created and written outside the binlog, in a schema
that no service account can write. Critical reads look at the row (`tao.storage.master_check`).

Two rules make it a lease. A renewal never revives a lease that has run out, so a fence that revoked it stays in force;
within its grace it does so only for a server that the topology names as master while the renewal holds the lock.
The new end counts from a time that the server reported *before* the renewal was sent, so a renewal that was delayed
buys no more time than one that was not. An operator must not set back the clock of a server while it is master.

Critical reads end with the lease. Writes end with it too, or, where each waits for a replica, some time later
(`LeaseTerms.grace_seconds`): a successor can keep such a master from acknowledging writes by having its replicas stop
receiving, and nobody but the lease can keep it from answering reads.

A database without a second server keeps no lease: nobody can be promoted in its place, so all that a lease could do is
stop the writes of a healthy server because its watchers are gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from tao.model.errors import OperatorError, TaoError
from tao.replication.server_statements import set_read_only
from tao.storage.dialect import Dialect
from tao.storage.failures import TablesMissing
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession

EVENT_SECONDS: Final = 1
"""Interval at which the server checks its lease, hence the longest time that it takes writes after the lease ended."""

CLOCK_MARGIN_SECONDS: Final = 0.3
"""How much the clocks of a server and of a watcher may differ in how long a lease lasts. By default chrony slews a
clock by up to a twelfth: 0.2 of 2.5 s."""

_NOW: Final = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)"
_EVENT: Final = "tao.close_without_lease"
_GRACE: Final = "grace_ms="
"""How the comment of the event begins. That of an earlier version has no comment, and no grace."""

LastRenewal = Callable[[], Awaitable[float]]
"""Returns when, on the loop's clock, a lease was renewed last."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long a master may act after the last renewal of its lease."""

    seconds: float = 0.0
    """Length of a lease: it answers critical reads. 0 for a server that keeps none."""
    grace_seconds: float = 0.0
    """Time after the end of a lease for which it takes writes."""

    @property
    def in_ms(self) -> tuple[int, int]:
        """Length and grace in milliseconds, as servers keep them."""
        return round(self.seconds * 1000), round(self.grace_seconds * 1000)

    @property
    def without_grace(self) -> LeaseTerms:
        """Terms under which a lease is renewed only until it ends."""
        return replace(self, grace_seconds=0.0)

    @property
    def reads_over_after_seconds(self) -> float:
        """Time from the last renewal until the server certainly answers no critical read."""
        return self.seconds + CLOCK_MARGIN_SECONDS if self.seconds else 0.0

    @property
    def over_after_seconds(self) -> float:
        """Time from the last renewal until the server has certainly closed itself."""
        return self.seconds + self.grace_seconds + 2 * EVENT_SECONDS if self.seconds else 0.0


async def install_lease(session: DatabaseSession, terms: LeaseTerms, *, deadline: float) -> None:
    """Prepare the server: schema, row (of a lease that has run out) and event. Idempotent.

    ``terms``: those of each lease from now on, of the present one too where they shorten it. The server is as open or
    closed afterwards as before. While this runs, a closed MySQL server lets administrators write.
    """
    closed = "read_only" if session.dialect is Dialect.MARIADB else "super_read_only"
    (((read_only, super_closed),),) = await session.run(
        f"SELECT @@GLOBAL.read_only, @@GLOBAL.{closed}", deadline=deadline
    )
    if session.dialect is Dialect.MYSQL and super_closed:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)
    await session.run("ROLLBACK; SET SESSION sql_log_bin = 0", deadline=deadline)
    lasts_ms, grace_ms = terms.in_ms
    try:
        await session.run(
            "CREATE SCHEMA IF NOT EXISTS tao; "
            "CREATE TABLE IF NOT EXISTS tao.lease (only_row TINYINT UNSIGNED NOT NULL PRIMARY KEY, "
            "ends_unix_ms BIGINT UNSIGNED NOT NULL, lasts_ms BIGINT UNSIGNED NOT NULL) ENGINE = InnoDB; "
            "INSERT IGNORE INTO tao.lease VALUES (1, 0, 0); "
            f"UPDATE tao.lease SET lasts_ms = {lasts_ms}; "
            # A promotion counts with the new terms as soon as they are installed at the other servers.
            f"UPDATE tao.lease SET ends_unix_ms = LEAST(ends_unix_ms, {_NOW} + lasts_ms); COMMIT; "
            # Give an open master a first lease, so that it stays open until a watcher renews it.
            f"UPDATE tao.lease SET ends_unix_ms = {_NOW} + lasts_ms WHERE ends_unix_ms = 0 AND @@GLOBAL.read_only = 0; "
            "COMMIT; "
            f"CREATE EVENT IF NOT EXISTS {_EVENT} ON SCHEDULE EVERY {EVENT_SECONDS} SECOND DO BEGIN END",
            deadline=deadline,
        )
        # MariaDB marks an event that was created on a replica as one that runs only on the master. A lease that was
        # revoked has no grace.
        await session.run(
            f"ALTER EVENT {_EVENT} ENABLE COMMENT '{_GRACE}{grace_ms}' DO BEGIN IF @@GLOBAL.read_only = 0 AND NOT "
            f"EXISTS (SELECT 1 FROM tao.lease WHERE ends_unix_ms > 0 AND ends_unix_ms + {grace_ms} > {_NOW}) "
            f"THEN SET GLOBAL {closed} = 1; END IF; END",
            deadline=deadline,
        )
    finally:
        await session.run("SET SESSION sql_log_bin = 1", deadline=deadline)
    # MariaDB lets nobody but SUPER start it; it runs where the option file has it as the documentation says.
    (((scheduler,),),) = await session.run("SELECT @@GLOBAL.event_scheduler", deadline=deadline)
    if scheduler != "ON":
        await session.run("SET GLOBAL event_scheduler = 1", deadline=deadline)
    if read_only:
        await set_read_only(session, True, deadline=deadline)


async def remove_lease(session: DatabaseSession, *, deadline: float) -> None:
    """Undo `install_lease`. The server has no lease from now on, so it stays open once it is open."""
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)
    # Readers look at the row alone. There is none where no lease was ever installed.
    has_row = await _has_table(session, deadline)
    clear = "UPDATE tao.lease SET ends_unix_ms = 0, lasts_ms = 0; COMMIT; " if has_row else ""
    await session.run(
        f"ROLLBACK; SET SESSION sql_log_bin = 0; DROP EVENT IF EXISTS {_EVENT}; {clear}SET SESSION sql_log_bin = 1",
        deadline=deadline,
    )


async def lease_terms(session: DatabaseSession, *, deadline: float) -> LeaseTerms:
    """Return the terms of the server's leases, of 0 seconds when it keeps none and never closes itself."""
    results: list[list[Row]] = []
    try:
        # In one packet: promotions between distant regions wait for the answer.
        await session.run(
            "SELECT event_comment FROM information_schema.events "
            "WHERE event_schema = 'tao' AND event_name = 'close_without_lease'; "
            "SELECT MAX(lasts_ms) FROM tao.lease; ROLLBACK",
            deadline=deadline,
            results=results,
        )
    except TablesMissing:
        # No lease was ever installed.
        await session.run("ROLLBACK", deadline=deadline)
        return LeaseTerms()
    events, ((lasts_ms,),), _ = results
    if not events:
        return LeaseTerms()
    return LeaseTerms(int(lasts_ms or 0) / 1000, int(str(events[0][0]).removeprefix(_GRACE) or 0) / 1000)


async def has_abandoned_lease(session: DatabaseSession, *, deadline: float) -> bool:
    """Return whether the server keeps no lease, and critical reads believe in one: its event was dropped, and its row
    was left as it is."""
    if (await lease_terms(session, deadline=deadline)).seconds or not await _has_table(session, deadline):
        return False
    ((((lasts_ms,),), _)) = await session.run("SELECT MAX(lasts_ms) FROM tao.lease; ROLLBACK", deadline=deadline)
    return bool(lasts_ms)


async def server_unix_ms(session: DatabaseSession, *, deadline: float) -> int:
    """Return the server's clock in milliseconds, the time base of `grant_lease` and `renew_lease`."""
    (((now,),),) = await session.run(f"SELECT {_NOW}", deadline=deadline)
    return int(now)


async def grant_lease(session: DatabaseSession, from_unix_ms: int, *, deadline: float) -> None:
    """Begin a lease, whatever state the previous one is in. The caller opens the server separately. Raises
    `OperatorError` when `install_lease` has not been run."""
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)  # leaders still cannot write
    if not await _write(session, f"{from_unix_ms:d} + lasts_ms", "", deadline):
        raise OperatorError("the server keeps no lease: it was not prepared for one")


async def renew_lease(session: DatabaseSession, from_unix_ms: int, terms: LeaseTerms, *, deadline: float) -> bool:
    """Extend a lease that has not run out, or whose grace has not. Returns False when it has run out or was revoked, or
    the server is closed. ``terms``: those that the server keeps, or `LeaseTerms.without_grace`, unless the caller knows
    that the server is still the master."""
    (((read_only,),),) = await session.run("SELECT @@GLOBAL.read_only", deadline=deadline)
    _, grace_ms = terms.in_ms
    return not read_only and await _write(
        session,
        f"{from_unix_ms:d} + lasts_ms",
        f" AND ends_unix_ms > 0 AND ends_unix_ms + {grace_ms} > {_NOW}",
        deadline,
    )


async def revoke_lease(session: DatabaseSession, *, deadline: float) -> None:
    """Revoke the lease of a server that is open; the caller closes it separately.

    Does nothing where no lease is kept, and at a closed server, which a lease does not open.
    """
    (((read_only,),),) = await session.run("SELECT @@GLOBAL.read_only", deadline=deadline)
    if not read_only and (await lease_terms(session, deadline=deadline)).seconds:
        await _write(session, "0", " AND ends_unix_ms > 0", deadline)


async def _has_table(session: DatabaseSession, deadline: float) -> bool:
    tables, _ = await session.run(
        "SELECT 1 FROM information_schema.tables WHERE table_schema = 'tao' AND table_name = 'lease'; ROLLBACK",
        deadline=deadline,
    )
    return bool(tables)


async def _write(session: DatabaseSession, ends: str, condition: str, deadline: float) -> bool:
    try:
        results = await session.run(
            "ROLLBACK; SET SESSION sql_log_bin = 0; "
            # The value must change, or a renewal within the same millisecond would count no row.
            f"UPDATE tao.lease SET ends_unix_ms = GREATEST({ends}, ends_unix_ms + 1) * ({ends} > 0) "
            f"WHERE only_row = 1{condition}; SELECT ROW_COUNT(); COMMIT; SET SESSION sql_log_bin = 1",
            deadline=deadline,
        )
    except TaoError:
        # A caller that goes on with this session must not write beside the binlog.
        if session.is_open:
            await session.run("ROLLBACK; SET SESSION sql_log_bin = 1", deadline=deadline)
        raise
    return bool(results[3][0][0])


async def lease_over_at(after_seconds: float, last_renewal: LastRenewal | None, latest: float) -> float:
    """Return when it is so long after the last renewal of a lease; at once for 0, which a server without leases has.

    ``latest``: no renewal has begun later, whatever is known of the last one: since then this process holds the lock,
    or no server receives. So the watchers of a region that is lost with its master need not be waited for any longer.
    """
    if not after_seconds:
        return 0.0
    since = latest if last_renewal is None else min(latest, await last_renewal())
    return since + after_seconds
