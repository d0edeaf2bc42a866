# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""Numbered migrations, applied shard by shard. Each shard records its migrations in ``schema_migrations``.

Making a table syncs several files, so a shard costs a few milliseconds in any case. A shard's whole migration is one
packet, and several shards run side by side. The migrations of all shards are read first, at once, so a second run is
two statements. Statements are written to be safe when a run was cut off between them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tao.model.errors import OperatorError
from tao.model.graph import MAX_ASSOC_DATA_BYTES
from tao.model.versions import FIRST_EPOCH
from tao.storage.dialect import SessionSetup
from tao.storage.names import check_edge_table, schema_name, shard_of_schema
from tao.storage.session import DatabaseSession, ServerAccount, open_session

_NUMBERED = re.compile(r"(\d{4})_[a-z0-9_]+\.sql\Z")
_CUSTOM_EDGES: Final = "custom_edges.sql"
# Names are bytes everywhere, so the character set matters only to what an operator sees.
_CREATE_SCHEMA: Final = "CREATE DATABASE IF NOT EXISTS {schema} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin; USE {schema}"
_RECORD_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS schema_migrations (number INT UNSIGNED NOT NULL, name VARBINARY(255) NOT NULL, "
    "applied_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (number)) ENGINE = InnoDB"
)

Progress = Callable[[int, int], None]
"""Called with the number of shards done and the number of all shards."""
PARALLEL_SHARDS: Final = 4
"""Making tables is bound by syncs, which the server merges when several connections wait; more connections gain
nothing."""
SHARD_SECONDS: Final = 60.0
"""Time of one shard's packet; a rebuild of a large table belongs to an online tool."""
CONNECT_SECONDS: Final = 5.0
"""Time to connect; the server is expected to be up."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered migration file."""

    number: int
    name: str
    text: str


def sql_folder() -> Path:
    """Return the folder of the files: beside the package in a source checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_sql", package.parent / "sql"):
        if (folder / _CUSTOM_EDGES).is_file():
            return folder
    raise OperatorError(f"the SQL files are neither in {package / '_sql'} nor in {package.parent / 'sql'}: reinstall")


def load_migrations() -> tuple[Migration, ...]:
    """Return all numbered migrations, ascending. Raises `OperatorError` when a number is missing or taken twice."""
    found = []
    for path in sorted(sql_folder().glob("*.sql")):
        matched = _NUMBERED.match(path.name)
        if matched:
            found.append(Migration(int(matched[1]), path.stem, path.read_text(encoding="utf-8").strip()))
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise OperatorError(f"migrations are not numbered 1, 2 ...: {', '.join(each.name for each in found)}")
    return tuple(found)


async def migrate(
    account: ServerAccount,
    shards: Sequence[int],
    tables: Mapping[str, int],
    master_server: str,
    *,
    version_epoch: int = FIRST_EPOCH,
    progress: Progress | None = None,
) -> int:
    """Bring the schemas of ``shards`` on one server up to date. Returns how many needed it.

    ``account``: an administrator's, at the master (replicas get it by replication). ``tables``: custom edge table →
    bytes of data (see `tao.schema.Schema.custom_tables`). ``master_server``: the server's name in the topology. A new
    shard's row starts with it, without an owner, at ``version_epoch``, the epoch of the database in the topology: no
    cache believes what is read under an older one. An existing row is left alone.

    Raises `OperatorError`, `Unavailable` or `DeadlineExceeded`; shards done stay done, and a second run goes on.
    """
    migrations = load_migrations()
    todo = await _due(account, shards, migrations, _checked(tables))
    done = len(shards) - len(todo)
    if progress is not None:
        progress(done, len(shards))
    queue = iter(todo.values())

    async def work() -> None:
        nonlocal done
        async with _connected(account) as session:
            for statements in queue:
                deadline = asyncio.get_running_loop().time() + SHARD_SECONDS
                sql = "; ".join(statement.rstrip("; \n") for statement in statements)
                await session.run(sql, (master_server, version_epoch), deadline=deadline)
                done += 1
                if progress is not None:
                    progress(done, len(shards))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(PARALLEL_SHARDS, len(todo))):
                workers.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return len(todo)


async def _due(
    account: ServerAccount,
    shards: Sequence[int],
    migrations: Sequence[Migration],
    tables: Sequence[str],
) -> dict[int, list[str]]:
    """Return the statements that each shard still needs; shards that need none are left out."""
    async with _connected(account) as session:
        deadline = asyncio.get_running_loop().time() + SHARD_SECONDS
        (rows,) = await session.run(
            "SELECT table_schema, table_name FROM information_schema.tables WHERE table_schema LIKE 'tao\\_%%'",
            deadline=deadline,
        )
        present: dict[int, set[str]] = {}
        for schema, table in rows:
            shard = shard_of_schema(schema)
            if shard is not None:
                present.setdefault(shard, set()).add(table)
        recorded = [shard for shard in shards if "schema_migrations" in present.get(shard, ())]
        applied: dict[int, set[int]] = {shard: set() for shard in shards}
        if recorded:
            union = " UNION ALL ".join(
                f"SELECT {shard:d}, number FROM {schema_name(shard)}.schema_migrations" for shard in recorded
            )
            for shard, number in (await session.run(union, deadline=deadline))[0]:
                applied[shard].add(number)
    todo: dict[int, list[str]] = {}
    for shard in shards:
        missing = [migration for migration in migrations if migration.number not in applied[shard]]
        missing_tables = [table for table in tables if table not in present.get(shard, ())]
        if missing or missing_tables:
            todo[shard] = _statements(shard, missing, missing_tables)
    return todo


def _statements(shard: int, migrations: Sequence[Migration], tables: Sequence[str]) -> list[str]:
    statements = [_CREATE_SCHEMA.format(schema=schema_name(shard)), _RECORD_TABLE]
    for migration in migrations:
        statements.append(migration.text.replace("%", "%%"))
        statements.append(
            f"INSERT IGNORE INTO schema_migrations (number, name) VALUES ({migration.number:d}, '{migration.name}')"
        )
    statements += map(_custom_table, tables)
    statements.append(
        "INSERT IGNORE INTO shard (only_row, master_server, version_epoch, owner, generation) VALUES (1, %s, %s, '', 0)"
    )
    return [*statements, "COMMIT"]


def _custom_table(name: str) -> str:
    text = (sql_folder() / _CUSTOM_EDGES).read_text(encoding="utf-8")
    return text.replace("%", "%%").replace("{table}", check_edge_table(name)).strip().rstrip(";")


def _checked(tables: Mapping[str, int]) -> list[str]:
    for name, data_bytes in tables.items():
        check_edge_table(name)
        if not 0 <= data_bytes <= MAX_ASSOC_DATA_BYTES:
            raise OperatorError(f"{name}: {data_bytes} bytes of data are outside 0 … {MAX_ASSOC_DATA_BYTES}")
    return sorted(tables)


@asynccontextmanager
async def _connected(account: ServerAccount) -> AsyncIterator[DatabaseSession]:
    deadline = asyncio.get_running_loop().time() + CONNECT_SECONDS
    session = await open_session(account, "for migrations", SessionSetup(writes=True), deadline=deadline)
    try:
        yield session
    finally:
        session.quit()
