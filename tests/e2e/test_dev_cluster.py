"""The development cluster, with real processes: start, crash, recovery, stop, and operator errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tao.client import Consistency, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.etcd import find_etcd
from tao.devcluster.inspection import cluster_status, stop_cluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.state_folder import StateFolder
from tao.etcd.client import EtcdClient, end_of
from tao.etcd.location import EtcdLocation, EtcdSettings, location_of
from tao.model.errors import OperatorError
from tests.e2e.cluster_access import PATIENT, patient_stats
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.unhurried]

SMALL = Shape(tiers=1, followers=1, leaders=1, shards=4)
TAO = [sys.executable, "-P", "-m", "tao.cli"]


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """Yield a state folder, and stop its processes at the end, whichever command left them."""
    path = tmp_path / "s"
    yield path
    if StateFolder(path).read() is not None:
        await stop_cluster(path, lambda _: None)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list for processes, and kill those that still run at the end."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def settings(folder: Path, **changes: Any) -> ClusterSettings:
    return ClusterSettings(**{"state_dir": folder, "shape": SMALL, "durability": Durability.RELAXED, **changes})


async def tao(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *TAO, *arguments, cwd=folder.parent, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def up_in_foreground(folder: Path) -> subprocess.Popen[str]:
    shape = ["--tiers", "1", "--followers", "1", "--leaders", "1", "--shards", "4", "--durability", "relaxed"]
    return subprocess.Popen(
        [*TAO, "dev", "up", "--state-dir", str(folder), *shape],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready in"):
            return
    pytest.fail(f"not ready: {process.communicate()[1]}")


async def test_a_cluster_serves_and_keeps_its_data_shards_and_addresses_over_a_restart(folder: Path) -> None:
    async with DevCluster(settings(folder)) as cluster:
        assert cluster.running == list(cluster.processes)
        address = cluster.client_address
        async with connect(address, settings=PATIENT) as graph:
            alice = await graph.obj_add("user", {"name": "Alice"})
    assert cluster.running == []
    with pytest.raises(OperatorError, match="4 shards on 1 database"):
        await DevCluster(settings(folder, shape=Shape(shards=8))).start()
    async with DevCluster(settings(folder, shape=None)) as again:
        assert again.client_address == address
        assert again.record.shape == SMALL
        async with connect(str(again.topology_path), settings=PATIENT) as graph:
            found = await graph.obj_get(alice)
            assert found is not None
            assert found.fields["name"] == "Alice"


async def test_a_killed_server_is_started_again_while_the_others_go_on_and_logs_are_shown(
    folder: Path,
) -> None:
    async with DevCluster(settings(folder, shape=Shape(tiers=2, followers=1, leaders=1, shards=4))) as cluster:
        await cluster.kill("follower-1a")
        states = {process.name: process.state for process in (await cluster.status()).processes}
        assert states["follower-1a"] == "stopped"
        assert states["follower-2a"] == "ready"
        # Nothing else that looks for a free port gets one of its own.
        for port in cluster.record.ports["follower-1a"].values():
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((LOOPBACK, port))
        await cluster.restart("follower-1a")
        assert {process.state for process in (await cluster.status()).processes} == {"ready"}
        code, out, _ = await tao(folder, "dev", "logs", "leader-1", "--state-dir", str(folder))
        assert code == 0
        assert "leader-1" in out
        code, _, err = await tao(folder, "dev", "logs", "leader-9", "--state-dir", str(folder))
        assert code == 2
        assert "leader-1" in err


def etcd_or_skip() -> None:
    try:
        find_etcd(os.environ)
    except OperatorError as error:
        pytest.skip(error.message)


async def version_seen(found: dict[str, Any]) -> int:
    """Return the oldest version of the topology that a leader or follower uses."""
    admins = [each["admin"] for each in found["processes"] if each["role"] in ("leader", "follower")]
    return min([int((await patient_stats(admin))["topology_version"]) for admin in admins])


async def test_a_detached_cluster_with_etcd_outlives_etcd_and_is_ended_by_down(folder: Path) -> None:
    etcd_or_skip()
    shape = ("--tiers", "1", "--followers", "1", "--leaders", "1", "--shards", "4", "--durability", "relaxed")
    where = ("--state-dir", str(folder))
    code, _, err = await tao(folder, "dev", "up", "--detach", "--etcd", *where, *shape)
    assert code == 0, err
    code, out, _ = await tao(folder, "dev", "status", "--json", *where)
    found = json.loads(out)
    assert code == 0
    roles = ["etcd", "database", "leader", "tailer", "follower", "watcher", "worker"]
    assert [each["role"] for each in found["processes"]] == roles
    assert all(process["state"] == "ready" and process["pid"] > 0 for process in found["processes"])

    place = location_of(found["topology"])
    assert isinstance(place, EtcdLocation)
    assert not (folder / "topology.json").exists()
    client = EtcdClient(place, EtcdSettings())
    async with asyncio.timeout(PATIENT_SECONDS):
        keys: dict[bytes, int] = {}
        # A watcher renews the lease of the master under a lock, which is held only for that long.
        while place.key("topology/head") not in keys or not any(keys.values()):
            prefix = place.key("")
            keys = {each.key: each.lease for each in (await client.read(prefix, end_of(prefix))).kvs}
    await client.close()

    async with connect(found["client"], settings=PATIENT) as graph:
        alice = await graph.obj_add("user", {"name": "Alice"})
        assert (await tao(folder, "dev", "kill", "etcd", *where))[:2] == (0, "killed etcd\n")
        for consistency in (Consistency.cached(), Consistency.master()):
            read = await graph.obj_get(alice, consistency=consistency)
            assert read is not None, consistency
            assert read.fields["name"] == "Alice"
        assert (await tao(folder, "dev", "restart", "etcd", *where))[:2] == (0, "etcd is ready\n")
        code, out, err = await tao(folder, "topology", "add-shards", "1", "--yes", "--json", *where)
        assert code == 0, err
        changed = json.loads(out)
        assert changed["shards"] == 5
        async with asyncio.timeout(PATIENT_SECONDS):
            while min(graph.topology.version, await version_seen(found)) < changed["version"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        bob = (await graph.reserve_ids(1, shard=4))[0]
        await graph.obj_add("user", {"name": "Bob"}, id=bob)

    code, out, err = await tao(folder, "doctor", "--json", *where)
    assert code == 1, err
    findings = json.loads(out)
    assert [finding for finding in findings if not finding["examined"]] == []
    said = [problem["problem"] for finding in findings for problem in finding["problems"]]
    # The relaxed durability of this cluster, and nothing else; the room on the disk is the machine's.
    assert [text for text in said if "of disk" not in text] == [
        "innodb_flush_log_at_trx_commit is 2, not 1",
        "sync_binlog is 0, not 1",
    ]

    code, out, err = await tao(folder, "dev", "up", *where)
    assert code == 0, err
    assert "all processes run already" in out

    assert (await tao(folder, "dev", "down", *where))[0] == 0
    code, out, _ = await tao(folder, "dev", "status", "--json", *where)
    assert code == 1
    assert {process["state"] for process in json.loads(out)["processes"]} == {"stopped"}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*place.endpoints[0].split(":"))


async def test_other_commands_kill_restart_and_reset_what_runs_in_a_foreground(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    where = ("--state-dir", str(folder))
    process = up_in_foreground(folder)
    started.append(process)
    await asyncio.to_thread(read_until_ready, process)
    before = {each.name: each.pid for each in (await cluster_status(folder)).processes}

    assert (await tao(folder, "dev", "kill", "leader-1", *where))[:2] == (0, "killed leader-1\n")
    assert (await tao(folder, "dev", "kill", "leader-1", *where))[:2] == (1, "leader-1 does not run\n")
    code, out, err = await tao(folder, "dev", "up", *where)
    assert code == 0, err
    assert "started leader-1; the others ran already" in out
    down = f"`tao dev down --state-dir {folder}`"
    for options in ((), ("--detach",)):
        code, out, err = await tao(folder, "dev", "up", *options, *where)
        assert code == 0, err
        assert f"all processes run already; {down} stops them" in out
    code, _, err = await tao(folder, "dev", "up", "--detach", "--followers", "2", *where)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{down} first" in err
    for name in ("follower-1a", "db-1"):
        assert (await tao(folder, "dev", "restart", name, *where))[:2] == (0, f"{name} is ready\n")
    status = await cluster_status(folder)
    assert all(each.state != "stopped" for each in status.processes)
    changed = {each.name for each in status.processes if each.pid != before[each.name]}
    assert changed == {"leader-1", "follower-1a", "db-1"}

    async with connect(status.client, settings=PATIENT) as graph:
        alice = await graph.obj_add("user", {"name": "Alice"})
    code, _, err = await tao(folder, "dev", "reset", "--yes", *where)
    assert code == 0, err
    async with connect(status.client, settings=PATIENT) as graph:
        assert await graph.obj_get(alice) is None
        assert await graph.obj_add("user", {"name": "Bob"}) > 0

    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    assert not (await cluster_status(folder)).running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_in_the_foreground_stops_everything_cleanly(
    folder: Path, started: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = up_in_foreground(folder)
    started.append(process)
    await asyncio.to_thread(read_until_ready, process)
    process.send_signal(number)
    _, err = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    assert err.endswith("stopped\n")
    assert not (await cluster_status(folder)).running


async def test_down_ends_a_cluster_in_another_terminal_s_foreground(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = up_in_foreground(folder)
    started.append(process)
    await asyncio.to_thread(read_until_ready, process)
    assert await stop_cluster(folder, lambda _: None) == []
    await asyncio.to_thread(process.communicate)
    assert process.returncode == 0


async def test_a_killed_foreground_leaves_nothing_behind_and_the_next_start_has_the_data(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = up_in_foreground(folder)
    started.append(process)
    await asyncio.to_thread(read_until_ready, process)
    status = await cluster_status(folder)
    async with connect(status.client, settings=PATIENT) as graph:
        alice = await graph.obj_add("user", {"name": "Alice"})
    process.kill()
    await asyncio.to_thread(process.communicate)
    async with DevCluster(settings(folder)) as cluster, connect(cluster.client_address, settings=PATIENT) as graph:
        assert await graph.obj_get(alice) is not None


async def test_a_detached_start_that_was_cut_short_is_cleared_by_the_next(folder: Path) -> None:
    cluster = DevCluster(settings(folder, detached=True))
    await cluster.start()
    state = StateFolder(folder)
    cluster.release()
    # A start that was killed early leaves running processes and a record that is not ready.
    record = state.require()
    state.write(type(record)(**{**{name: getattr(record, name) for name in record.__struct_fields__}, "ready": False}))
    left = state.running(record)
    assert left
    async with DevCluster(settings(folder)) as again:
        assert len(again.running) == len(left)
        assert not any(identity.is_running() for identity in left.values())


async def test_a_client_port_in_use_is_reported_before_anything_runs(folder: Path) -> None:
    with reserve_port() as taken:
        listener = await asyncio.start_server(lambda *_: None, LOOPBACK, taken.port)
        async with listener:
            with pytest.raises(OperatorError, match=f"port {taken.port}") as refused:
                await DevCluster(settings(folder, client_port=taken.port)).start()
    assert "\n" not in refused.value.message
    assert not (folder / "db-1").exists()


async def test_a_leader_that_cannot_start_takes_the_whole_start_down_with_its_reason(folder: Path) -> None:
    cluster = DevCluster(settings(folder, log_level="loud"))
    with pytest.raises(OperatorError, match=r"leader-1 ended with status 2 .*log_level"):
        await cluster.start()
    status = await cluster_status(folder)
    assert not status.running
    assert {process.role for process in status.processes} == {Role.DATABASE, Role.LEADER, Role.TAILER, Role.FOLLOWER}
