"""The yardstick of writes: the same transactions, each issued by itself over aiomysql on a connection of its own.

What an application would write by hand for an edge with its inverse, in as few round trips as single statements allow:
lock the shards' rows in share mode, read the rows to be touched with locks, upsert edge, inverse and the two lists'
counts and versions, commit. The tables are the product's, on the same server; the ids are nobody else's. Two
writers that both find no list yet would both count 1: an application has to care for that, this yardstick need not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiomysql
import pymysql.err

_DEADLOCK = 1213
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class DatabaseAddress:
    """Where, and as whom."""

    host: str
    port: int
    user: str
    password: str


class DirectWriter:
    """One connection. `Any`: aiomysql has no types."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, address: DatabaseAddress) -> DirectWriter:
        """Connect. Raises `pymysql.err.MySQLError`."""
        connection = await aiomysql.connect(
            host=address.host, port=address.port, user=address.user, password=address.password, autocommit=False
        )
        async with connection.cursor() as cursor:
            await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return cls(connection)

    async def close(self) -> None:
        """Say good-bye."""
        await self._connection.ensure_closed()

    async def add_edge(self, id1: int, id2: int, time: int, atype: int, shards: tuple[int, int]) -> int:
        """Add an edge and its inverse of the same type. Returns how many edges were added: 2. Raises
        `pymysql.err.MySQLError`; a deadlock is tried again a few times."""
        sides = sorted(((shards[0], id1, id2), (shards[1], id2, id1)))
        attempts = 1
        while True:
            try:
                return await self._transaction(sides, time, atype)
            except pymysql.err.OperationalError as error:
                await self._connection.rollback()
                if error.args[0] != _DEADLOCK or attempts == _ATTEMPTS:
                    raise
                attempts += 1

    async def _transaction(self, sides: list[tuple[int, int, int]], time: int, atype: int) -> int:
        added = 0
        async with self._connection.cursor() as cursor:
            await cursor.execute("START TRANSACTION")
            for shard in sorted({shard for shard, _, _ in sides}):
                await cursor.execute(f"SELECT generation FROM tao_{shard:05d}.shard LOCK IN SHARE MODE")  # noqa: S608
            for shard, id1, id2 in sides:
                schema = f"tao_{shard:05d}"
                await cursor.execute(
                    f"SELECT l.version, l.count, a.time FROM {schema}.assoc_lists l "  # noqa: S608
                    f"LEFT JOIN {schema}.assocs a ON a.id1 = l.id1 AND a.atype = l.atype AND a.id2 = %s "
                    "WHERE l.id1 = %s AND l.atype = %s FOR UPDATE",
                    (id2, id1, atype),
                )
                found = await cursor.fetchone()
                version, count, present = found or (0, 0, None)
                added += present is None
                await cursor.execute(
                    f"INSERT INTO {schema}.assocs (id1, atype, id2, time, version, data) "  # noqa: S608
                    "VALUES (%s, %s, %s, %s, %s, '') "
                    "ON DUPLICATE KEY UPDATE time = VALUES(time), version = VALUES(version)",
                    (id1, atype, id2, time, version + 1),
                )
                await cursor.execute(
                    f"INSERT INTO {schema}.assoc_lists (id1, atype, count, version) VALUES (%s, %s, %s, %s) "  # noqa: S608
                    "ON DUPLICATE KEY UPDATE count = VALUES(count), version = VALUES(version)",
                    (id1, atype, count + (present is None), version + 1),
                )
        await self._connection.commit()
        return added
