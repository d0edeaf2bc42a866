"""A replica's own binlog holds what the replica has applied, in the same form as the master's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tao.devcluster.database_program import Flavour
from tao.model.changes import Message
from tao.model.ids import make_id
from tao.model.writes import AssocAdd, ObjAdd, ObjUpdate, Write
from tao.replication.accounts import ServiceAccounts
from tao.schema.codec import encode_fields, encode_patch
from tao.tailer.binlog import BinlogMoved
from tests.rigs.binlog_rig import BinlogRig, open_rig, until
from tests.unit.planning.stored_rows import LIKES, NOW, SCHEMA, USER

pytestmark = [pytest.mark.database, pytest.mark.e2e]

GIVEN = make_id(0, NOW, 0)


async def attach(replica: BinlogRig, master: BinlogRig) -> None:
    account = master.instance.accounts.replicator
    login = f"'127.0.0.1', {{0}}_port = {master.instance.port}, {{0}}_user = '{account.user}', "
    login += f"{{0}}_password = '{account.password}'"
    if replica.instance.binary.flavour is Flavour.MARIADB:
        position = (await master.rows("SELECT @@global.gtid_binlog_pos"))[0][0]
        await replica.sql(
            f"SET GLOBAL gtid_slave_pos = '{position}'",
            f"CHANGE MASTER TO master_host = {login.format('master')}, master_use_gtid = slave_pos",
            "START SLAVE",
        )
    else:
        executed = (await master.rows("SELECT @@global.gtid_executed"))[0][0].replace("\n", "")
        await replica.sql(
            f"SET GLOBAL gtid_purged = '+{executed}'",
            f"CHANGE REPLICATION SOURCE TO source_host = {login.format('source')}, source_auto_position = 1, "
            "get_source_public_key = 1",
            "START REPLICA",
        )


async def test_the_binlog_of_a_replica_holds_the_masters_changesets(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with (
        open_rig(tmp_path / "master", database_accounts, server_id=11) as master,
        open_rig(tmp_path / "replica", database_accounts, server_id=12) as replica,
    ):
        await attach(replica, master)
        followings = [await replica.follow(reader=replica.reader(server_id=100 + n)) for n in range(2)]
        followings.append(await master.follow(reader=master.reader(server_id=200)))
        changes: list[Message] = []
        for number in range(1, 30):
            batch: list[Write] = [
                ObjAdd(make_id(0, NOW + number, 0), USER, encode_fields(SCHEMA.otype(USER), {"name": "a"}), False),
                AssocAdd(GIVEN, LIKES, make_id(0, NOW + number, 0), number, b""),
                ObjUpdate(make_id(0, NOW + 1, 0), 0, encode_patch(SCHEMA.otype(USER), {"age": number})),
            ]
            changes.extend(await master.write(*batch))
        for following in followings:
            await until(lambda following=following: len(following.messages) >= len(changes))  # type: ignore[misc]
            assert following.messages == changes
        assert followings[0].gtids == followings[2].gtids


async def test_a_reader_goes_on_at_the_master_and_comes_back_and_misses_and_repeats_nothing(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    """Both servers number transactions alike, so a position of one is valid at the other once its transactions are
    there."""
    async with (
        open_rig(tmp_path / "master", database_accounts, server_id=11) as master,
        open_rig(tmp_path / "replica", database_accounts, server_id=12) as replica,
    ):
        await attach(replica, master)
        reader = replica.reader(server_id=100)
        reached = reader.position(await reader.current_position())
        gtids_read: list[str] = []
        for rig in (replica, master, replica, master):
            reader.read_from(rig.account("replicator"))
            while reached.is_beyond(await reader.current_position()):  # noqa: ASYNC110 - a replica
                await asyncio.sleep(0.01)
            following = await rig.follow(str(reached), reader)
            for number in range(3):
                await master.write(AssocAdd(GIVEN, LIKES, make_id(0, NOW + len(gtids_read) + number, 0), number, b""))
            await until(lambda following=following: len(following.gtids) == 3)  # type: ignore[misc]
            gtids_read += following.gtids
            for gtid in following.gtids:
                reached.advance(gtid)
            other = master if rig is replica else replica
            reader.read_from(other.account("replicator"))
            await until(lambda following=following: isinstance(following.failure, BinlogMoved))  # type: ignore[misc]
        assert len(set(gtids_read)) == len(gtids_read) == 12
