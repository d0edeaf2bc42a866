"""Followers stay warm while their leaders die, return, and have stand-ins; they converge when a spool is lost.

Writes continue throughout.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tao.client import Graph, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Role, Shape
from tao.runtime.admin_client import admin_get
from tao.topology import edits
from tao.topology.file_store import TopologyFile
from tests.e2e.cluster_access import (
    LOOK_SECONDS,
    PACE_SECONDS,
    PATIENT,
    assert_converges,
    patient_stats,
    running_cluster,
)
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SHARDS = 8
USERS = 40
ENTERED = 'tao_relay_references_total{outcome="entered"'
"""How a tailer's metric begins that counts the transactions whose messages a leader had."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=1, followers=1, leaders=2, databases=1, shards=SHARDS)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


async def stats(cluster: DevCluster, name: str) -> dict[str, Any]:
    return await patient_stats(cluster.admin(name))


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENT_SECONDS
    while not await condition():
        assert loop.time() < deadline, what
        await asyncio.sleep(LOOK_SECONDS)


async def until_linked(cluster: DevCluster) -> None:
    """Wait until the follower subscribes to every shard, and the leaders own all shards and have none unlinked."""

    async def linked() -> bool:
        followers = [await stats(cluster, "follower-1a")]
        leaders = [await stats(cluster, name) for name in ("leader-1", "leader-2")]
        return (
            not any(each["unsubscribed_shards"] for each in followers)
            and not any(each["delivery"]["unlinked_shards"] for each in leaders)
            and sum(each["owned_shards"] for each in leaders) == SHARDS
        )

    await until(linked, "not every shard is subscribed and linked")


async def resets(cluster: DevCluster) -> int:
    return int((await stats(cluster, "follower-1a"))["resets"])


@asynccontextmanager
async def writes(graph: Graph, users: Sequence[int]) -> AsyncIterator[None]:
    """Write objects continuously; skip writes that fail because their leader is away."""

    async def write() -> None:
        number = 0
        while True:
            number += 1
            with suppress(TaoError):
                await graph.obj_update(users[number % len(users)], {"home": str(number)})
            await asyncio.sleep(PACE_SECONDS)

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture(loop_scope="module")
async def warm(cluster: DevCluster) -> AsyncIterator[tuple[Graph, Sequence[int]]]:
    """Yield cached users that no client writes, while other users are being written."""
    await until_linked(cluster)
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        still = await asyncio.gather(*(graph.obj_add("user", {"name": "still"}) for _ in range(USERS)))
        written = await asyncio.gather(*(graph.obj_add("user", {"name": "written"}) for _ in range(USERS)))
        async with writes(graph, written):
            await asyncio.gather(*map(graph.obj_get, still))
            await until_linked(cluster)
            yield graph, still
    await assert_converges(cluster)


async def test_a_leader_that_is_killed_and_started_again_leaves_its_followers_warm(
    cluster: DevCluster, warm: tuple[Graph, list[int]]
) -> None:
    before = await resets(cluster)
    await cluster.kill("leader-1")
    await cluster.restart("leader-1")
    await until_linked(cluster)
    assert await resets(cluster) == before
    assert (await stats(cluster, "leader-1"))["delivery"]["continued_total"] > 0


async def test_leaders_enter_messages_of_their_own_that_a_tailer_relays_by_reference(
    cluster: DevCluster, warm: tuple[Graph, list[int]]
) -> None:
    (tailer,) = [name for name, role in cluster.processes.items() if role is Role.TAILER]

    async def entered() -> bool:
        _, page = await admin_get(cluster.admin(tailer), "/metrics", PATIENT_SECONDS)
        (line,) = [each for each in page.decode().splitlines() if each.startswith(ENTERED)]
        return float(line.rpartition(" ")[2]) > 0

    await until(entered, "every transaction is decoded and relayed with its messages")


async def mark(cluster: DevCluster, name: str, *, down: bool) -> None:
    store = TopologyFile(cluster.topology_path, on_error=lambda _: None)
    before = await store.load()
    await store.change(before.version, edits.mark_server(before, name, down))


async def test_a_leader_s_stand_in_has_the_binlog_read_again_and_its_followers_stay_warm(
    cluster: DevCluster, warm: tuple[Graph, list[int]]
) -> None:
    before = await resets(cluster)
    await cluster.kill("leader-1")
    await mark(cluster, "leader-1", down=True)

    async def stood_in_for() -> bool:
        stand_in, follower = await stats(cluster, "leader-2"), await stats(cluster, "follower-1a")
        return stand_in["owned_shards"] == SHARDS and not follower["unsubscribed_shards"]

    await until(stood_in_for, "leader-2 does not stand in")
    assert await resets(cluster) == before
    await cluster.restart("leader-1")
    await mark(cluster, "leader-1", down=False)
    await until_linked(cluster)
    assert await resets(cluster) == before


async def test_a_leader_whose_spool_is_damaged_says_so_and_everything_converges(
    cluster: DevCluster, warm: tuple[Graph, list[int]]
) -> None:
    await cluster.kill("leader-2")
    spool = cluster.topology_path.parent / "servers" / "leader-2" / "spool.sqlite"
    damage(spool)
    await cluster.restart("leader-2")
    await until_linked(cluster)
    assert spool.with_name("spool.sqlite.unreadable").exists()
    assert (await stats(cluster, "leader-2"))["delivery"]["spool"]["set_aside_total"] == 1


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Stop every file of the process from growing, as a full disk does to spools, positions and logs."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


async def pid_of(cluster: DevCluster, name: str) -> int:
    (pid,) = [process.pid for process in (await cluster.status()).processes if process.name == name]
    assert pid is not None
    return pid


async def assert_changes_reach_followers(cluster: DevCluster, graph: Graph, users: list[int], home: str) -> None:
    """Assert that writes succeed, are read, and reach the followers through the binlog."""
    messages_before = (await stats(cluster, "follower-1a"))["messages"]
    for user in users:
        await graph.obj_update(user, {"home": home})
        found = await graph.obj_get(user)
        assert found is not None
        assert found.fields["home"] == home

    async def received() -> bool:
        return bool((await stats(cluster, "follower-1a"))["messages"] > messages_before)

    await until(received, "the follower receives no more messages")


async def test_a_leader_whose_disk_is_full_goes_on_in_memory_says_so_and_spools_again(
    cluster: DevCluster, warm: tuple[Graph, list[int]]
) -> None:
    graph, users = warm
    before = await resets(cluster)

    async def spool() -> dict[str, Any]:
        return dict((await stats(cluster, "leader-1"))["delivery"]["spool"])

    async def in_trouble() -> bool:
        return bool((await spool())["trouble"])

    with full_disk(await pid_of(cluster, "leader-1")):
        await until(in_trouble, "the spool does not notice")
        await assert_changes_reach_followers(cluster, graph, users, "during")
        await assert_changes_reach_followers(cluster, graph, users, "later")
    stored = (await spool())["rows_total"]

    async def spools_again() -> bool:
        now = await spool()
        return not now["trouble"] and now["rows_total"] > stored

    await until(spools_again, "nothing is spooled when there is room again")
    await assert_changes_reach_followers(cluster, graph, users, "after")
    assert await resets(cluster) == before


async def test_a_tailer_whose_disk_is_full_goes_on_delivering_and_stores_its_position_when_there_is_room(
    cluster: DevCluster, warm: tuple[Graph, list[int]]
) -> None:
    graph, users = warm
    (tailer,) = [name for name, role in cluster.processes.items() if role is Role.TAILER]
    (position,) = (cluster.topology_path.parent / "servers" / tailer).glob("*.position.json")

    async def moved() -> bool:
        return position.read_bytes() != stored

    with full_disk(await pid_of(cluster, tailer)):
        await assert_changes_reach_followers(cluster, graph, users, "during")
        stored = position.read_bytes()
        await assert_changes_reach_followers(cluster, graph, users, "later")
        assert not await moved()
    await until(moved, "the position is not stored when there is room again")


def damage(spool: Path) -> None:
    """Overwrite a spool, as an operator might by mistake."""
    assert spool.stat().st_size > 0
    spool.write_bytes(b"no database" * 1_000)
    for suffix in ("-wal", "-shm"):
        Path(f"{spool}{suffix}").unlink(missing_ok=True)
