"""Connections to databases over TLS: nobody gets in without a certificate, and no server passes with a wrong one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tao.admin.shard_contents import ShardContents
from tao.devcluster.database import DatabaseInstance
from tao.model.errors import OperatorError, TaoError
from tao.model.topology import DatabaseServer
from tao.observability.logs import logger
from tao.replication.accounts import Account, ServiceAccounts
from tao.replication.database_tools import find_tools
from tao.replication.promotion_plan import PromotionRequest
from tao.storage.dialect import Dialect, SessionSetup
from tao.storage.failures import ConnectionLost
from tao.storage.result_packets import Row
from tao.storage.session import open_session
from tao.storage.tls import DatabaseTls, DatabaseTlsFiles
from tao.tailer.reader import BinlogReader
from tao.tailer.settings import ReaderSettings
from tests.rigs.certificates import TestAuthority
from tests.rigs.move_rig import QUICK, SHARDS, SOURCE, TARGET, Writer, move_rig, writing
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, assert_is_master, replication_rig, statement_deadline

pytestmark = [pytest.mark.database, pytest.mark.e2e]


def tls_of(authority: TestAuthority, name: str) -> DatabaseTls:
    files = authority.issue(name)
    return DatabaseTls(
        DatabaseTlsFiles(authorities=files.authorities, certificate=files.certificate, private_key=files.private_key)
    )


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ca")


@pytest.fixture
def accounts(authority: TestAuthority, database_accounts: ServiceAccounts) -> ServiceAccounts:
    """The accounts, with the operator's certificate."""
    tls = tls_of(authority, "operator")
    roles = ("administrator", "leader", "reader", "replicator", "watcher")
    encrypted: dict[str, Account] = {role: replace(getattr(database_accounts, role), tls=tls) for role in roles}
    return replace(database_accounts, **encrypted)


@pytest.fixture
async def rig(tmp_path: Path, authority: TestAuthority, accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, accounts, tls=authority.issue("database")) as made:
        yield made


async def log_in(rig: ReplicationRig, tls: DatabaseTls | None) -> Row:
    """Return the cipher of a reader's connection to the master."""
    server = DatabaseServer(name=EAST, port=rig.servers[EAST].port)
    account = replace(rig.accounts.reader, tls=tls).at(server)
    session = await open_session(account, EAST, SessionSetup(writes=False), deadline=statement_deadline())
    try:
        return (await session.run("SHOW STATUS LIKE 'Ssl_cipher'", deadline=statement_deadline()))[0][0]
    finally:
        session.quit()


async def encrypted_replication(rig: ReplicationRig, region: str) -> tuple[str, str, str]:
    """Return whether a replica receives, uses TLS and verifies its master."""
    async with rig.session(region) as session:
        mariadb = session.dialect is Dialect.MARIADB
        (row,) = await session.named(f"SHOW {'SLAVE' if mariadb else 'REPLICA'} STATUS", deadline=statement_deadline())
    master, replica = ("Master", "Slave") if mariadb else ("Source", "Replica")
    names = (f"{replica}_IO_Running", f"{master}_SSL_Allowed", f"{master}_SSL_Verify_Server_Cert")
    return row[names[0]], row[names[1]], row[names[2]]


async def read_binlog(rig: ReplicationRig, region: str, write: int) -> str:
    """Follow a server's binlog over TLS, write a row at the master, and return the GTID of its transaction there."""
    account = rig.accounts.replicator.at(DatabaseServer(name=region, port=rig.servers[region].port))
    reader = BinlogReader(account, 4_000_000_002, ReaderSettings(heartbeat_seconds=0.1), logger("test"))
    position = await reader.current_position()
    async with asyncio.timeout(PATIENT_SECONDS), contextlib.aclosing(reader.batches(position)) as batches:
        await rig.write(rig.database.master_region, write)
        async for batch in batches:
            return batch[-1].gtid
    raise AssertionError("the reader does not end")


async def test_servers_clients_replicas_and_tailers_prove_themselves_to_each_other_also_after_a_promotion(
    rig: ReplicationRig, authority: TestAuthority, tmp_path: Path
) -> None:
    assert rig.accounts.reader.tls is not None
    assert (await log_in(rig, rig.accounts.reader.tls))[1]
    only_authority = DatabaseTls(DatabaseTlsFiles(authorities=authority.file))
    for without_certificate in (None, only_authority):
        with pytest.raises(OperatorError, match="Access denied"):
            await log_in(rig, without_certificate)
    stranger = TestAuthority(tmp_path / "other", "another authority")
    with pytest.raises(ConnectionLost, match=r"no TLS with the server: .*CERTIFICATE_VERIFY_FAILED"):
        await log_in(rig, tls_of(stranger, "operator"))
    shown = stranger.issue("stranger")
    trusting = replace(only_authority.files, certificate=shown.certificate, private_key=shown.private_key)
    with pytest.raises(TaoError):
        await log_in(rig, DatabaseTls(trusting))

    assert await encrypted_replication(rig, WEST) == ("Yes", "Yes", "Yes")
    assert await read_binlog(rig, EAST, 1)
    assert await read_binlog(rig, WEST, 2)
    await rig.promoter().promote("db", PromotionRequest(region=WEST))
    await assert_is_master(rig, WEST, EAST)
    assert await encrypted_replication(rig, EAST) == ("Yes", "Yes", "Yes")
    assert await read_binlog(rig, EAST, 30)
    async with rig.session(EAST) as session:
        dialect = session.dialect
    try:
        await find_tools(dialect, os.environ)
    except OperatorError:
        return  # the programs that copy a database of this kind are not on this machine
    await rig.reseeder().seed(EAST)
    assert await encrypted_replication(rig, EAST) == ("Yes", "Yes", "Yes")
    assert {1, 2, 30} <= await rig.written(EAST)


async def test_a_shard_moves_between_servers_that_demand_certificates(
    tmp_path: Path, authority: TestAuthority, accounts: ServiceAccounts
) -> None:
    async with move_rig(tmp_path, accounts, tls=authority.issue("database")) as rig:
        contents = ShardContents(rig.moves(), QUICK, accounts.replicator, logger("test"))
        changes = await contents.in_row_changes(rig.topology, 0.1)
        assert set(changes[SOURCE]) == set(range(SHARDS // 2))
        writer = Writer(rig.store(), 3)
        async with writing(writer):
            await writer.more(5)
            await rig.mover().move(3, TARGET)
            await writer.more(5)
        assert rig.holder(3) == TARGET


async def test_a_server_that_offers_no_tls_is_refused_before_it_is_shown_anything(
    database_server: DatabaseInstance, authority: TestAuthority
) -> None:
    server = DatabaseServer(name="db", port=database_server.port)
    account = replace(database_server.accounts.reader, tls=tls_of(authority, "reader")).at(server)
    with pytest.raises(ConnectionLost, match=r"offers no TLS|CERTIFICATE_VERIFY_FAILED"):
        await open_session(account, "db", SessionSetup(writes=False), deadline=statement_deadline())
    reader = BinlogReader(account, 4_000_000_003, ReaderSettings(), logger("test"))
    with pytest.raises(TaoError, match=r"offers no TLS|CERTIFICATE_VERIFY_FAILED"):
        await reader.current_position()
