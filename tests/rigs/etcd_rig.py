"""An etcd for tests, a way to it that can be cut, and raw access to its keys."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from tao.devcluster.etcd import etcd_command, find_etcd, wait_until_etcd_answers
from tao.devcluster.processes import ManagedProcess
from tao.etcd.client import EtcdClient, delete, end_of, put
from tao.etcd.location import EtcdLocation, EtcdSettings, location_of
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import OperatorError
from tests.rigs.ports import free_ports

START_SECONDS = 30.0


class EtcdRig:
    """One member with its data in a folder."""

    def __init__(self, folder: Path, more: Sequence[str] = ()) -> None:
        """``more``: further options of its command line, with ``{port}`` for the port of clients."""
        try:
            self._program = find_etcd(os.environ)
        except OperatorError as error:
            pytest.skip(error.message)
        self.port, self._peer_port = free_ports(2)
        self._folder = folder
        self._more = more
        self._process: ManagedProcess | None = None

    def url(self, prefix: str = "tao", *, port: int = 0) -> EtcdLocation:
        """Return a prefix, at the member or at a port that leads there."""
        found = location_of(f"etcd://127.0.0.1:{port or self.port}/{prefix}")
        assert isinstance(found, EtcdLocation)
        return found

    def client(self) -> EtcdClient:
        return EtcdClient(self.url(), EtcdSettings(timeout_seconds=2.0))

    async def start(self, *, waits: bool = True) -> None:
        command = [
            *etcd_command(self._program, self.data, self.port, self._peer_port),
            *(each.replace("{port}", str(self.port)) for each in self._more),
        ]
        self._process = ManagedProcess("etcd", command, dict(os.environ), self._folder / "etcd.log")
        if waits:
            await wait_until_etcd_answers(self.port, START_SECONDS)

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        """Stop it with SIGSTOP, and let it go on with SIGCONT."""
        assert self._process is not None, "it was started"
        os.kill(self._process.pid, number)

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self._peer_port}"

    def leads(self) -> bool:
        """Return whether the other members follow this one. Blocks."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=START_SECONDS) as answer:
            return b"\netcd_server_is_leader 1\n" in answer.read()

    def belong_to(self, members: dict[str, EtcdRig]) -> None:
        """Make it one of several members, by name, before it is started."""
        (own,) = (name for name, each in members.items() if each is self)
        initial = ",".join(f"{name}={each.peer_url}" for name, each in members.items())
        self._more = (*self._more, f"--name={own}", f"--initial-cluster={initial}")

    @property
    def data(self) -> Path:
        return self._folder / "etcd"

    async def keep_data(self) -> Path:
        """Keep what it has as a snapshot, which `restore` brings back. It must not run."""
        kept = self._folder / "kept"
        await asyncio.to_thread(shutil.copytree, self.data, kept)
        return kept

    async def restore(self, kept: Path) -> None:
        """Bring back a snapshot. It must not run."""
        await asyncio.to_thread(shutil.rmtree, self.data)
        await asyncio.to_thread(shutil.copytree, kept, self.data)

    async def compact(self) -> None:
        """Forget all but the present revision."""
        client = self.client()
        revision = (await client.read(b"/")).header.revision
        await client.call(lambda each: each.kv.Compact, pb.CompactionRequest(revision=revision, physical=True))
        await client.close()


class EtcdMembers:
    """Three members of one etcd."""

    def __init__(self, folder: Path) -> None:
        self.by_name: dict[str, EtcdRig] = {}
        for name in ("one", "two", "three"):
            (folder / name).mkdir()
            self.by_name[name] = EtcdRig(folder / name)
        for member in self.by_name.values():
            member.belong_to(self.by_name)

    async def start(self) -> None:
        for member in self.by_name.values():
            await member.start(waits=False)
        for member in self.by_name.values():
            await wait_until_etcd_answers(member.port, START_SECONDS)

    async def kill(self) -> None:
        for member in self.by_name.values():
            await member.kill()

    def location(self, first: EtcdRig) -> EtcdLocation:
        """Return all members, one of them first."""
        others = [each for each in self.by_name.values() if each is not first]
        return EtcdLocation(tuple(f"127.0.0.1:{each.port}" for each in (first, *others)), "/tao")

    async def leader(self) -> EtcdRig:
        """Return the member that the others follow at present."""
        for member in self.by_name.values():
            if await asyncio.to_thread(member.leads):
                return member
        raise AssertionError("no member leads")

    async def follower(self) -> EtcdRig:
        """Return one that follows the leading member."""
        leader = await self.leader()
        return next(each for each in self.by_name.values() if each is not leader)


async def keys_under(client: EtcdClient, location: EtcdLocation) -> dict[bytes, bytes]:
    prefix = location.key("")
    found = await client.read(prefix, end_of(prefix))
    return {each.key: each.value for each in found.kvs}


async def set_keys(client: EtcdClient, location: EtcdLocation, keys: dict[bytes, bytes]) -> None:
    """Make the keys of a prefix what they were, as a restored snapshot does."""
    prefix = location.key("")
    await client.transact((), [delete(prefix, end_of(prefix))])
    await client.transact((), [put(key, value) for key, value in keys.items()])
