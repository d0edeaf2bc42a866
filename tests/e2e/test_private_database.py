"""Private database instances with a real server: start, crash, recovery, several at once, and operator errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiomysql
import pymysql.err
import pytest

from tao.devcluster.database import (
    DatabaseInstance,
    DatabaseStartFailed,
    InstanceSettings,
    default_cache_folder,
    prepare_template,
)
from tao.devcluster.database_program import Durability, Flavour, ServerBinaryMissing, ServerOptions, find_server_binary
from tao.devcluster.processes import read_record, write_record
from tao.model.errors import OperatorError
from tao.replication.accounts import LOOPBACK_HOSTS, Account, ServiceAccounts, create_accounts

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.unhurried]

MakeInstance = Callable[..., DatabaseInstance]


@pytest.fixture
async def make_instance(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[MakeInstance]:
    """Yield a function that makes instances, each in its own folder; stop those that still run at the end."""
    made: list[DatabaseInstance] = []

    def make(name: str = "one", **changes: Any) -> DatabaseInstance:
        settings = InstanceSettings(
            **{
                "folder": tmp_path / name,
                "accounts": database_accounts,
                "cache_folder": default_cache_folder(os.environ),
                "options": ServerOptions(server_id=len(made) + 1, durability=Durability.RELAXED),
                **changes,
            }
        )
        made.append(DatabaseInstance(find_server_binary(os.environ), settings))
        return made[-1]

    yield make
    for instance in made:
        await instance.stop()


@contextlib.asynccontextmanager
async def connected(instance: DatabaseInstance, account: Account) -> AsyncIterator[Any]:
    connection = await aiomysql.connect(
        host=instance.host, port=instance.port, user=account.user, password=account.password, autocommit=True
    )
    try:
        async with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


async def fetch(instance: DatabaseInstance, account: Account, statement: str) -> list[tuple[Any, ...]]:
    async with connected(instance, account) as cursor:
        await cursor.execute(statement)
        return list(await cursor.fetchall())


async def fill(instance: DatabaseInstance) -> None:
    async with connected(instance, instance.accounts.administrator) as cursor:
        await cursor.execute("CREATE DATABASE tao_00001")
        await cursor.execute("CREATE TABLE tao_00001.objects (id BIGINT PRIMARY KEY, data VARBINARY(9)) ENGINE=InnoDB")
        await cursor.execute("INSERT INTO tao_00001.objects VALUES (1, 'kept')")


async def test_what_was_committed_is_there_after_a_crash_and_a_restart_on_the_same_port(
    make_instance: MakeInstance,
) -> None:
    instance = make_instance()
    await instance.start()
    port = instance.port
    await fill(instance)
    await instance.kill()
    assert not instance.is_running

    await instance.start()

    assert instance.port == port
    assert await fetch(instance, instance.accounts.reader, "SELECT * FROM tao_00001.objects") == [(1, b"kept")]


async def test_a_folder_left_by_another_cluster_that_crashed_is_taken_over(
    make_instance: MakeInstance, tmp_path: Path
) -> None:
    first = make_instance()
    await first.start()
    await fill(first)
    first_process = first.process.identity
    await first.kill()
    # Leave what a crash of the machine leaves: record, pid file, socket and MySQL's socket lock.
    write_record(tmp_path / "one" / "process.json", first_process)
    (tmp_path / "one" / "db.sock.lock").write_text(f"{os.getpid()}\n")

    second = make_instance()
    await second.start()

    assert await fetch(second, second.accounts.leader, "SELECT id FROM tao_00001.objects") == [(1,)]


async def test_a_clean_stop_needs_no_force_and_leaves_no_record(make_instance: MakeInstance, tmp_path: Path) -> None:
    instance = make_instance()
    await instance.start()
    assert read_record(tmp_path / "one" / "process.json") == instance.process.identity

    assert await instance.stop()

    assert read_record(tmp_path / "one" / "process.json") is None
    assert await instance.process.wait() == 0


async def test_each_account_may_do_its_own_work_and_nothing_else(make_instance: MakeInstance) -> None:
    instance = make_instance()
    await instance.start()
    await fill(instance)
    accounts = instance.accounts
    mariadb = instance.binary.flavour is Flavour.MARIADB
    position = "SHOW BINLOG STATUS" if mariadb or instance.binary.version < (8, 2, 0) else "SHOW BINARY LOG STATUS"

    assert accounts.watcher is not None
    await fetch(instance, accounts.leader, "DELETE FROM tao_00001.objects WHERE id = 2")
    await fetch(instance, accounts.watcher, "SET GLOBAL read_only = 1")
    await fetch(instance, accounts.watcher, "UPDATE tao_00001.objects SET id = id")
    await fetch(instance, accounts.watcher, "SET GLOBAL read_only = 0")
    await fetch(instance, accounts.reader, "SELECT * FROM tao_00001.objects")
    assert await fetch(instance, accounts.replicator, position)

    for account, forbidden in (
        (accounts.leader, "DROP TABLE tao_00001.objects"),
        (accounts.leader, "CREATE DATABASE taox00001"),
        (accounts.reader, "DELETE FROM tao_00001.objects"),
        (accounts.replicator, "SELECT * FROM tao_00001.objects"),
        (accounts.watcher, "DROP TABLE tao_00001.objects"),
        (accounts.watcher, "DELETE FROM tao_00001.objects"),
        (accounts.watcher, "DROP TABLE tao.lease"),
        (accounts.watcher, "DELETE FROM tao.lease"),
        (accounts.watcher, "ALTER TABLE tao.lease ADD COLUMN x INT"),
        (accounts.watcher, "SELECT * FROM mysql.global_priv" if mariadb else "SELECT * FROM mysql.user"),
        (accounts.watcher, "CREATE USER x@localhost"),
    ):
        with pytest.raises((pymysql.err.OperationalError, pymysql.err.ProgrammingError), match="denied"):
            await fetch(instance, account, forbidden)


async def test_making_accounts_again_takes_from_the_watcher_what_earlier_versions_granted(
    make_instance: MakeInstance,
) -> None:
    instance = make_instance()
    await instance.start()
    accounts = instance.accounts
    assert accounts.watcher is not None
    watcher = accounts.watcher
    root = await aiomysql.connect(unix_socket=str(instance.socket_path), user="root", autocommit=True)
    try:
        async with root.cursor() as cursor:
            await cursor.execute("SET SESSION max_error_count = 0")  # MySQL warns about accounts of localhost
            await cursor.execute("CREATE DATABASE IF NOT EXISTS tao")
            for host in LOOPBACK_HOSTS:
                await cursor.execute("GRANT ALL PRIVILEGES ON tao.* TO %s@%s", (watcher.user, host))
        await fetch(instance, watcher, "CREATE TABLE tao.lost (id INT)")
        await create_accounts(root, accounts)
    finally:
        root.close()

    with pytest.raises((pymysql.err.OperationalError, pymysql.err.ProgrammingError), match="denied"):
        await fetch(instance, watcher, "DROP TABLE tao.lost")
    await fetch(instance, watcher, "INSERT INTO tao.lost VALUES (1)")


async def test_making_accounts_leaves_no_trace_in_the_binlog(make_instance: MakeInstance) -> None:
    instance = make_instance()
    await instance.start()
    events = await fetch(instance, instance.accounts.administrator, "SHOW BINLOG EVENTS")
    assert events  # the format description at least
    assert not [event for event in events if "USER" in str(event).upper()]


async def test_the_server_runs_as_the_design_asks(make_instance: MakeInstance) -> None:
    instance = make_instance(options=ServerOptions(server_id=7, gtid_domain=3))
    await instance.start()
    mariadb = instance.binary.flavour is Flavour.MARIADB
    expected: dict[str, object] = {
        "server_id": 7,
        "binlog_row_image": "FULL",
        "binlog_row_metadata": "FULL",
        "innodb_flush_log_at_trx_commit": 1,
        "sync_binlog": 1,
        "lock_wait_timeout": 2,
        "innodb_lock_wait_timeout": 2,
        "tx_isolation" if mariadb else "transaction_isolation": "READ-COMMITTED",
        "log_slave_updates" if mariadb else "log_replica_updates": 1,
        **({"gtid_domain_id": 3, "gtid_strict_mode": 1, "binlog_format": "ROW"} if mariadb else {"gtid_mode": "ON"}),
    }
    names = ", ".join(f"@@GLOBAL.{name}" for name in expected)

    (row,) = await fetch(instance, instance.accounts.administrator, f"SELECT {names}")

    assert dict(zip(expected, row, strict=True)) == expected


async def test_two_instances_run_at_once_and_keep_one_template_between_them(
    make_instance: MakeInstance, tmp_path: Path
) -> None:
    one = make_instance("one", cache_folder=tmp_path / "cache")
    two = make_instance("two", cache_folder=tmp_path / "cache")

    await asyncio.gather(one.start(), two.start())

    assert one.port != two.port
    await fill(one)
    assert await fetch(two, two.accounts.administrator, "SHOW DATABASES LIKE 'tao%'") == []
    left = sorted(path.name for path in (tmp_path / "cache" / "databases").iterdir())
    template = await prepare_template(one.binary, tmp_path / "cache")
    assert left == [template.name]


async def test_a_port_in_use_is_reported_in_one_line_and_nothing_is_created(
    make_instance: MakeInstance, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OperatorError, match=f"port {port} .* choose another port") as raised:
            await make_instance(port=port).start()
    assert "\n" not in raised.value.message
    assert not (tmp_path / "one").exists()


async def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(
    make_instance: MakeInstance, tmp_path: Path
) -> None:
    (tmp_path / "one" / "data").mkdir(parents=True)  # data that no server ever wrote
    instance = make_instance()
    with pytest.raises(
        DatabaseStartFailed, match=r"(?s)ended with status [13] .*server\.log ends with:\n.*ERROR"
    ) as raised:
        await instance.start()
    assert not instance.is_running
    assert len(raised.value.message.splitlines()) < 20


async def test_a_folder_that_is_being_served_is_not_served_twice(make_instance: MakeInstance) -> None:
    running = make_instance()
    await running.start()
    with pytest.raises(OperatorError, match=f"is running already, as process {running.process.pid}"):
        await make_instance().start()
    assert running.is_running


def test_without_an_installed_server_the_error_names_the_command_that_installs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tao.devcluster.database_program._SYSTEM_FOLDERS", ())
    with pytest.raises(ServerBinaryMissing, match="apt-get install mariadb-server-core") as raised:
        find_server_binary({"PATH": str(tmp_path)})
    assert "\n" not in raised.value.message


async def test_a_full_disk_is_reported_before_anything_is_created(make_instance: MakeInstance, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="MB are needed: make room"):
        await make_instance(min_free_disk_mb=2**40).start()
    assert not (tmp_path / "one").exists()


async def test_root_comes_in_by_the_socket_only_and_only_the_owner_reaches_that(
    make_instance: MakeInstance, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir(mode=0o755)
    instance = make_instance()
    await instance.start()
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0
    assert (tmp_path / "one" / "server.log").stat().st_mode & 0o077 == 0
    statement = "SELECT user, host FROM mysql.user WHERE user IN ('root', '') ORDER BY user"
    doors = await fetch(instance, instance.accounts.administrator, statement)
    assert doors == [("root", "localhost")]
    with pytest.raises(pymysql.err.OperationalError, match=r"denied|not allowed"):
        await aiomysql.connect(host=instance.host, port=instance.port, user="root")


async def test_the_suites_shared_server_admits_every_account(database_server: DatabaseInstance) -> None:
    accounts = database_server.accounts
    for account in (accounts.administrator, accounts.leader, accounts.reader, accounts.replicator):
        ((user,),) = await fetch(database_server, account, "SELECT CURRENT_USER()")
        assert user.partition("@")[0] == account.user
