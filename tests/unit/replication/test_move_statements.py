"""What a server reports of its disk, and of a shard whose tables are being renamed."""

from __future__ import annotations

import socket
from collections import namedtuple
from pathlib import Path
from typing import cast

import pytest

from tao.replication.move_statements import ShardThere, free_bytes, read_shard
from tao.storage.failures import TablesMissing
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession

Usage = namedtuple("Usage", "total used free")  # noqa: PYI024 - as `shutil.disk_usage` has it


class Server:
    """A server with or without the plugin DISKS, which knows these disks."""

    def __init__(self, host: str, folder: Path | str, disks: list[Row] | None = None) -> None:
        self.host, self.folder, self.disks = host, folder, disks

    async def run(self, sql: str, *, deadline: float) -> list[list[Row]]:
        if sql.startswith("SELECT path"):
            assert self.disks is not None, "the table is only there with the plugin"
            return [self.disks]
        return [[(self.host, f"{self.folder}/")], [] if self.disks is None else [("DISKS",)]]


async def free_of(server: Server) -> int | None:
    return await free_bytes(cast("DatabaseSession", server), deadline=0.0)


async def test_the_plugin_of_a_server_reports_the_disk_that_has_the_data() -> None:
    disks: list[Row] = [("/", 7), ("/var/lib", 8), ("/var/lib/mysql", 9), ("/var/lib/mysql-files", 10)]
    assert await free_of(Server("elsewhere", "/var/lib/mysql/data", disks)) == 9 << 10
    assert await free_of(Server("elsewhere", "/srv/data", disks)) == 7 << 10


async def test_the_disk_of_a_server_on_this_machine_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(9, 4, 5) if path == tmp_path else None)
    here = socket.gethostname()
    assert await free_of(Server(here, tmp_path)) == 5
    assert await free_of(Server(here, tmp_path, disks=[])) == 5, "an account without the right sees no disks"
    assert await free_of(Server("elsewhere", tmp_path)) is None


async def test_the_disk_of_a_server_that_sees_other_folders_is_not_known() -> None:
    assert await free_of(Server(socket.gethostname(), "/no/such/folder")) is None


class RenamingServer:
    """A server on which the table of a shard is renamed just after it was listed."""

    def __init__(self) -> None:
        self.tables: list[Row] = [("tao_00003", "shard")]

    async def run(self, sql: str, values: object = (), *, deadline: float) -> list[list[Row]]:
        if sql.startswith("SELECT schema_name"):
            return [[], self.tables, []]
        self.tables = []
        raise TablesMissing("table 'tao_00003.shard' doesn't exist")


async def test_a_table_that_is_renamed_while_it_is_looked_for_is_not_there() -> None:
    found = await read_shard(cast("DatabaseSession", RenamingServer()), 3, deadline=0.0)
    assert found == ShardThere(row=None, copy=None, is_marked=False)
