"""What can happen to etcd: it is cut off, compacted, killed, restored from a snapshot, and it wants credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tao.etcd.client import (
    MAX_TRANSACTION_BYTES,
    MAX_TRANSACTION_OPERATIONS,
    EtcdClient,
    EtcdRefused,
    EtcdUnavailable,
    WatchBroken,
    put,
)
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.etcd.v3 import auth_pb2
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import SettingsError, TopologyError, TopologyTooLarge
from tao.replication.etcd_locks import open_locks
from tao.replication.locks import ACTIVITY, LocksAway
from tao.topology.edits import mark_server
from tao.topology.stores import EtcdConnections, open_topology
from tests.conformance.store_rig import Ear, StoreRig
from tests.conformance.test_locks import is_free
from tests.conformance.test_topology_stores import topology
from tests.rigs.certificates import TestAuthority
from tests.rigs.cuts import Cut
from tests.rigs.etcd_rig import EtcdRig
from tests.rigs.pacing import PATIENT_SECONDS


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EtcdRig]:
    rig = EtcdRig(tmp_path)
    await rig.start()
    yield rig
    await rig.kill()


async def test_a_watcher_that_was_cut_off_catches_up_after_a_compaction(etcd: EtcdRig) -> None:
    way, ear = Cut(etcd.port), Ear()
    await way.heal()
    near, far = StoreRig(etcd.url()), StoreRig(etcd.url(port=way.port))
    store, watched = near.store(), far.store(ear)
    found = await store.change(0, topology())
    await watched.load()
    stop = watched.watch(ear.changed)
    found = await store.change(1, found)
    await ear.until(lambda: ear.versions == [2])
    await way.cut()
    for _ in range(3):
        found = await store.change(found.version, mark_server(found, "w-1", found.version % 2 == 0))
    await etcd.compact()
    await way.heal()
    await ear.until(lambda: ear.versions == [2, 5])
    client = etcd.client()
    with pytest.raises(WatchBroken, match="compacted"):
        async for _ in client.watch(b"/tao/", b"/tao0", 2, 1.0):
            pass
    await client.close()
    stop()
    await near.close()
    await far.close()
    await way.cut()


async def test_what_was_known_stays_in_force_while_etcd_is_away(etcd: EtcdRig) -> None:
    rig, ear = StoreRig(etcd.url()), Ear()
    store, watched = rig.store(), rig.store(ear)
    now = [0.0]
    locks = open_locks(etcd.url(), EtcdConnections(EtcdSettings(timeout_seconds=1.0)), lambda: sum(now))
    found = await store.change(0, topology())
    await watched.load()
    stop = watched.watch(ear.changed)
    async with locks.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        await etcd.kill()
        with pytest.raises(TopologyError, match=r"cannot be read: .* did not answer"):
            await watched.load()
        with pytest.raises(TopologyError, match="not known whether topology 2 was stored"):
            await store.change(1, found)
        await ear.until(lambda: any("did not answer" in each for each in ear.errors))
        with pytest.raises(LocksAway):
            async with rig.locks().held("master-of-db", exclusive=False):
                pass
        await hold.touch()  # it may still be renewed, until too much time has passed
        now.append(ACTIVITY.holder_timeout_seconds + 0.1)
        assert not hold.is_held()
    assert ear.versions == []
    await etcd.start()
    await store.change(1, found)
    await ear.until(lambda: ear.versions == [2])
    stop()
    await rig.close()


async def test_a_shared_lock_that_could_not_be_released_ends_with_its_lease_although_its_process_goes_on(
    etcd: EtcdRig,
) -> None:
    way = Cut(etcd.port)
    await way.heal()
    near, far = StoreRig(etcd.url()), StoreRig(etcd.url(port=way.port))
    locks = far.locks()
    async with locks.held("master-of-db", exclusive=False) as hold:
        hold.check()
        await way.cut()
    await way.heal()
    other = near.locks()
    assert not await is_free(other, "master-of-db", exclusive=True)
    async with asyncio.timeout(PATIENT_SECONDS):
        while not await is_free(other, "master-of-db", exclusive=True):
            assert await is_free(locks, "master-of-db", exclusive=False)
            await asyncio.sleep(0.2)
    await near.close()
    await far.close()
    await way.cut()


async def test_a_restored_snapshot_is_refused_named_and_mended_by_an_import(etcd: EtcdRig) -> None:
    rig, ear = StoreRig(etcd.url()), Ear()
    store, watched = rig.store(), rig.store(ear)
    found = await store.change(0, topology())
    await etcd.kill()
    kept = await etcd.keep_data()
    await etcd.start()
    for _ in range(3):
        found = await store.change(found.version, mark_server(found, "w-1", down=True))
    await watched.load()
    stop = watched.watch(ear.changed)
    await etcd.kill()
    await etcd.restore(kept)
    await etcd.start()
    await ear.until(lambda: any("version 1 is not above 4" in each for each in ear.errors))
    with pytest.raises(TopologyError, match=r"version 1 is below 4.*tao topology import"):
        await watched.load()
    # Changes after the restoration take the numbers that were given out before, and are refused, too.
    fresh = rig.store()
    old = await fresh.load()
    for _ in range(3):
        old = await fresh.change(old.version, mark_server(old, "w-2", down=True))
    await ear.until(lambda: any("version 4 is not above 4" in each for each in ear.errors))
    assert ear.versions == []
    with pytest.raises(TopologyError, match=r"version 4 had other content before.*tao topology import"):
        await watched.load()
    mended = await fresh.replace(4, msgspec.structs.replace(found, version=5))
    await ear.until(lambda: ear.versions == [5])
    assert await watched.load() == mended
    stop()
    await rig.close()


async def test_a_change_of_more_than_a_transaction_is_refused_and_an_import_of_any_size_is_not(etcd: EtcdRig) -> None:
    rig = StoreRig(etcd.url())
    store = rig.store()
    large = msgspec.structs.replace(topology(shards=64, leaders=300), version=1)
    assert await store.change(0, large) == large
    leaders = large.regions[0].leaders
    servers = tuple(msgspec.structs.replace(server, weight=2.0) for server in leaders.servers)
    region = msgspec.structs.replace(large.regions[0], leaders=msgspec.structs.replace(leaders, servers=servers))
    changed = msgspec.structs.replace(large, version=2, regions=(region,), changes=None)
    with pytest.raises(TopologyTooLarge, match=r"the change has 30\d keys"):
        await store.change(1, changed)
    assert await rig.store().load() == large
    assert await store.replace(1, changed) == await rig.store().load() == changed
    await rig.close()


async def test_etcd_takes_a_transaction_of_as_many_operations_and_bytes_as_one_may_have(etcd: EtcdRig) -> None:
    client = etcd.client()
    room = MAX_TRANSACTION_BYTES // MAX_TRANSACTION_OPERATIONS
    keys = [f"/tao/{number:03}".encode() for number in range(MAX_TRANSACTION_OPERATIONS)]
    around = put(keys[0], bytes(room)).ByteSize() - room
    full = [put(key, bytes(room - around)) for key in keys]
    assert MAX_TRANSACTION_BYTES - 2 * len(full) < sum(each.ByteSize() for each in full) <= MAX_TRANSACTION_BYTES
    assert (await client.transact((), full)).succeeded
    with pytest.raises(EtcdRefused, match="too many operations"):
        await client.transact((), [*full, put(b"/tao/more", b"")])
    with pytest.raises(EtcdRefused, match="too large"):
        await client.transact((), [put(keys[0], bytes(1_600_000))])
    await client.close()


async def test_an_import_that_was_interrupted_is_not_seen(etcd: EtcdRig) -> None:
    rig = StoreRig(etcd.url())
    found = await rig.store().change(0, topology())
    client = etcd.client()
    await client.transact((), [put(b"/tao/topology/sections/9-dead/servers/x", b"{}")])
    assert await rig.store().load() == found
    await rig.store().replace(1, msgspec.structs.replace(found, version=2))
    assert not (await client.read(b"/tao/topology/sections/9-dead/", b"/tao/topology/sections/9-dead0")).kvs
    await client.close()
    await rig.close()


async def test_a_member_that_does_not_answer_is_passed_over(etcd: EtcdRig) -> None:
    gone = Cut(etcd.port)
    location = EtcdLocation((f"127.0.0.1:{gone.port}", f"127.0.0.1:{etcd.port}"), "/tao")
    connections = EtcdConnections(EtcdSettings(timeout_seconds=5.0))
    store = open_topology(location, connections, lambda error: None)
    found = await store.change(0, topology())
    assert (await store.change(1, found)).version == 2
    locks = open_locks(location, connections)
    async with locks.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        await hold.touch()
        hold.check()
    await connections.close()


def auth_method(name: str, endpoint: Any) -> Any:  # Any: each method has its own messages
    return getattr(endpoint.auth, name)


async def test_a_user_logs_in_again_when_its_token_has_expired(etcd: EtcdRig, tmp_path: Path) -> None:
    root = etcd.client()
    for method, request in (
        ("UserAdd", pb.AuthUserAddRequest(name="root", password="secret-1")),
        ("RoleAdd", pb.AuthRoleAddRequest(name="root")),
        ("UserGrantRole", pb.AuthUserGrantRoleRequest(user="root", role="root")),
        ("UserAdd", pb.AuthUserAddRequest(name="tao", password="secret-2")),
        ("RoleAdd", pb.AuthRoleAddRequest(name="tao")),
        (
            "RoleGrantPermission",
            pb.AuthRoleGrantPermissionRequest(
                name="tao",
                perm=auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=b"/tao/", range_end=b"/tao0"),
            ),
        ),
        ("UserGrantRole", pb.AuthUserGrantRoleRequest(user="tao", role="tao")),
        ("AuthEnable", pb.AuthEnableRequest()),
    ):
        await root.call(partial(auth_method, method), request)
    await root.close()
    file = tmp_path / "password"
    await asyncio.to_thread(file.write_text, "secret-2\n")
    settings = EtcdSettings(user="tao", password_file=file)
    connections = EtcdConnections(settings)
    store = open_topology(etcd.url(), connections, lambda error: None)
    found = await store.change(0, topology())
    connections.to(etcd.url())._token = "expired"
    assert await store.load() == found
    client = EtcdClient(etcd.url(), settings)
    with pytest.raises(EtcdRefused, match="permission denied"):
        await client.read(b"/other")
    with pytest.raises(EtcdRefused, match="invalid user ID or password"):
        await EtcdClient(etcd.url(), EtcdSettings(user="tao", password="wrong")).read(b"/tao/x")
    with pytest.raises(EtcdRefused, match="user name is empty"):
        await EtcdClient(etcd.url(), EtcdSettings()).read(b"/tao/x")
    await client.close()
    await connections.close()


async def test_certificates_prove_both_sides(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "certificates")
    server, own = authority.issue("etcd"), authority.issue("tao")
    rig = EtcdRig(
        tmp_path,
        (
            f"--cert-file={server.certificate}",
            f"--key-file={server.private_key}",
            "--client-cert-auth",
            f"--trusted-ca-file={authority.file}",
            *(f"--{each}-client-urls=https://127.0.0.1:{{port}}" for each in ("listen", "advertise")),
        ),
    )
    await rig.start(waits=False)
    location = EtcdLocation((f"127.0.0.1:{rig.port}",), "/tao", tls=True)
    proven = EtcdSettings(
        authorities=authority.file, certificate=own.certificate, private_key=own.private_key, timeout_seconds=20.0
    )
    client = EtcdClient(location, proven)
    assert not (await client.read(b"/tao/x")).kvs
    stranger = EtcdClient(location, EtcdSettings(authorities=authority.file, timeout_seconds=0.5))
    with pytest.raises(EtcdUnavailable):
        await stranger.read(b"/tao/x")
    await client.close()
    await stranger.close()
    await rig.kill()


async def test_a_password_never_passes_a_network_without_tls() -> None:
    location = EtcdLocation(("127.0.0.1:1", "etcd-2.example.com:2379"), "/tao")
    with pytest.raises(SettingsError, match=r"etcd-2.example.com:2379 over TLS only"):
        await EtcdClient(location, EtcdSettings(user="tao", password="secret")).read(b"/tao/x")
