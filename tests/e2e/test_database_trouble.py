"""A database fails or hangs: requests that need it fail in time with a typed error, cache hits continue, and service
recovers without a restart."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from tao.client import ClientSettings, Graph, Object, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tao.model.errors import DeadlineExceeded, OutcomeUnknown, Overloaded, RetryableError, TaoError
from tests.e2e.cluster_access import PATIENT, assert_converges, running_cluster
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

IMPATIENT = ClientSettings(timeout_seconds=1.0, connect_timeout_seconds=PATIENT_SECONDS)
"""The settings of a client whose requests must fail, so that they need not wait long."""
Result = TypeVar("Result")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=2, followers=1, leaders=2, databases=2, shards=8)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        yield graph


@pytest_asyncio.fixture(loop_scope="module")
async def impatient(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), settings=IMPATIENT) as graph:
        yield graph


async def until_done(operation: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of an operation once it no longer fails."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            try:
                return await operation()
            except (RetryableError, OutcomeUnknown):
                await asyncio.sleep(0.05)


async def home_of(graph: Graph, user: int, *, critical: bool = False) -> object:
    found = await graph.obj_get(user, critical=critical)
    assert isinstance(found, Object)
    return found.fields["home"]


async def users_of_both_databases(graph: Graph) -> tuple[int, int]:
    """Create two users cached by both tiers: one on a shard of db-1 (0 to 3), one on a shard of db-2 (4 to 7).

    Each leader finds out for itself that a database answers again, so one may still refuse after another test.
    """

    async def add() -> int:
        return await graph.obj_add("user", {"name": "n", "home": "first"})

    low = high = 0
    while not (low and high):
        user = await until_done(add)
        low, high = (user, high) if user >> 47 < 4 else (low, user)
    return low, high


async def trouble_and_recovery(
    cluster: DevCluster,
    graph: Graph,
    impatient: Graph,
    begin: Callable[[], Awaitable[object]],
    end: Callable[[], Awaitable[object]],
) -> None:
    troubled, healthy = await users_of_both_databases(graph)
    never_read = (await graph.reserve_ids(1, near=troubled))[0]
    assert await home_of(graph, troubled) == "first"
    pids = {process.name: process.pid for process in (await cluster.status()).processes if process.role != "database"}
    failed_before = await failed_writes(cluster)
    await begin()
    try:
        operations: list[Callable[[], Awaitable[object]]] = [
            lambda: impatient.obj_update(troubled, {"home": "lost"}),
            lambda: impatient.obj_get(never_read),
            lambda: impatient.assoc_add(troubled, "likes", troubled, 1),
            lambda: impatient.assoc_add(healthy, "friend", troubled, 1),
            lambda: impatient.obj_get(troubled, critical=True),
        ]

        async def fails_in_time(operation: Callable[[], Awaitable[object]]) -> TaoError:
            with pytest.raises((RetryableError, OutcomeUnknown)) as caught:
                await operation()
            return caught.value

        for error in await asyncio.gather(*map(fails_in_time, operations)):
            assert error.message
        # The leaders must abort these transactions themselves, because other writes wait for their lanes.
        async with asyncio.timeout(PATIENT_SECONDS):
            while await failed_writes(cluster) == failed_before:  # noqa: ASYNC110 - the state of other processes
                await asyncio.sleep(0.05)
        # Cache hits continue, and so do all requests to the other database.
        assert await home_of(graph, troubled) == "first"
        await graph.obj_update(healthy, {"home": "second"})
        assert await home_of(graph, healthy, critical=True) == "second"
    finally:
        await end()
    await until_done(lambda: graph.obj_update(troubled, {"home": "third"}))
    assert await until_done(lambda: home_of(graph, troubled, critical=True)) == "third"
    assert await home_of(graph, troubled) == "third"
    assert await until_done(lambda: graph.obj_get(never_read)) is None
    await until_done(lambda: graph.assoc_add(healthy, "friend", troubled, 2))
    await until_done(lambda: both_ends_agree(graph, healthy, troubled))
    now = {process.name: process.pid for process in (await cluster.status()).processes if process.role != "database"}
    assert now == pids
    await assert_converges(cluster)


async def failed_writes(cluster: DevCluster) -> int:
    """Return the number of failed writes that the leaders count."""
    found = 0
    for name in ("leader-1", "leader-2"):
        found += (await asyncio.to_thread(_stats_of, cluster.admin(name)))["writes"]["failed"]
    return found


def _stats_of(admin: str) -> dict[str, Any]:  # Any: a JSON document
    with urllib.request.urlopen(f"http://{admin}/stats", timeout=PATIENT_SECONDS) as answer:
        stats: dict[str, Any] = json.load(answer)
    return stats


async def both_ends_agree(graph: Graph, id1: int, id2: int) -> None:
    there = await graph.assoc_get(id1, "friend", [id2], critical=True)
    back = await graph.assoc_get(id2, "friend", [id1], critical=True)
    if [edge.time for edge in there] != [edge.time for edge in back]:
        raise DeadlineExceeded("the inverse is still on its way")


async def test_a_database_that_hangs_costs_its_own_shards_their_misses_and_writes_while_it_does(
    cluster: DevCluster, graph: Graph, impatient: Graph
) -> None:
    pid = cluster.database("db-1").process.pid

    async def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        # A thread inside the kernel, for example in a sync, stops only when it returns from it, and may answer before.
        while not stands_still(pid):  # noqa: ASYNC110 - the state of another process
            await asyncio.sleep(0.001)

    async def wake() -> None:
        os.kill(pid, signal.SIGCONT)

    await trouble_and_recovery(cluster, graph, impatient, stop, wake)


def stands_still(pid: int) -> bool:
    """Return whether all threads of a process are stopped."""
    stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


async def test_a_database_that_is_stopped_and_started_again_is_used_again_without_a_restart(
    cluster: DevCluster, graph: Graph, impatient: Graph
) -> None:
    database = cluster.database("db-1")
    await trouble_and_recovery(cluster, graph, impatient, database.stop, database.start)


async def test_a_database_whose_disk_is_full_fails_its_writes_with_a_type_writes_nothing_by_halves_and_recovers(
    cluster: DevCluster, graph: Graph
) -> None:
    troubled, healthy = await users_of_both_databases(graph)
    database = cluster.database("db-1")
    possible, number = {"first"}, 0

    async def write() -> None:
        nonlocal number
        number += 1
        await graph.assoc_add(healthy, "friend", troubled, number)  # its two objects lie on both databases
        possible.add(f"{number}")
        try:
            await graph.obj_update(troubled, {"home": f"{number}"})
        except RetryableError:
            possible.remove(f"{number}")  # nothing of it was written
            raise
        possible.clear()
        possible.add(f"{number}")

    async def write_on() -> None:
        async with asyncio.timeout(PATIENT_SECONDS):
            while True:
                await write()

    # No file of the server may grow. The server then exits, as it does when its log has no room.
    before = resource.prlimit(database.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    with pytest.raises((RetryableError, OutcomeUnknown)) as caught:
        await write_on()
    assert caught.value.message
    await graph.obj_update(healthy, {"home": "second"})
    assert await home_of(graph, healthy, critical=True) == "second"
    # Free the space, and start the process again as a service manager does.
    if database.is_running:
        resource.prlimit(database.process.pid, resource.RLIMIT_FSIZE, before)
    await database.stop()
    await database.start()
    assert await until_done(lambda: home_of(graph, troubled, critical=True)) in possible
    await until_done(lambda: graph.assoc_add(healthy, "friend", troubled, number + 1))
    await until_done(lambda: both_ends_agree(graph, healthy, troubled))
    await until_done(lambda: graph.obj_update(troubled, {"home": "last"}))
    assert await home_of(graph, troubled) == "last"
    await assert_converges(cluster)


async def test_a_leader_with_a_full_write_queue_rejects_the_rest_at_once_and_retries_nothing(
    cluster: DevCluster,
) -> None:
    folder = cluster.topology_path.parent / "servers"
    files = {name: folder / f"{name}.yaml" for name in ("leader-1", "leader-2")}
    usual = {name: file.read_text() for name, file in files.items()}
    try:
        for name, file in files.items():
            file.write_text(usual[name] + "writes:\n  max_waiting_per_shard: 4\n")
            await cluster.restart(name)
        async with connect(str(cluster.topology_path), settings=ClientSettings(timeout_seconds=20)) as graph:
            user, _ = await users_of_both_databases(graph)
            others = await graph.reserve_ids(40, near=user)
            await until_done(lambda: graph.obj_update(user, {"home": "before"}))
            retried = await retries(cluster)
            pid = cluster.database("db-1").process.pid
            os.kill(pid, signal.SIGSTOP)
            try:
                adding = [asyncio.ensure_future(graph.obj_add("user", {"name": "n"}, id=each)) for each in others]
                # While the database hangs, writes that do not fit the queue are rejected and not kept waiting.
                async with asyncio.timeout(PATIENT_SECONDS):
                    while sum(each.done() for each in adding) < len(adding) - 8:  # noqa: ASYNC110 - counts other tasks
                        await asyncio.sleep(0.01)
                refused = [each for each in adding if each.done()]
                assert {type(each.exception()) for each in refused} == {Overloaded}
                assert await home_of(graph, user) == "before", "cache hits must continue"
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.gather(*adding, return_exceptions=True)
            assert await retries(cluster) - retried <= len(refused) // 10
            await until_done(lambda: graph.obj_update(user, {"home": "after"}))
            assert await home_of(graph, user) == "after"
    finally:
        for name, file in files.items():
            file.write_text(usual[name])
            await cluster.restart(name)
    await assert_converges(cluster)


async def retries(cluster: DevCluster) -> int:
    """Return how many retries followers and leaders have sent so far."""
    found = 0
    for name in ("leader-1", "leader-2", "follower-1a", "follower-2a"):
        found += (await asyncio.to_thread(_stats_of, cluster.admin(name)))["retries"]["spent"]
    return found


@asynccontextmanager
async def at_a_tenth_of_its_speed(pid: int) -> AsyncIterator[None]:
    """Slow a process down: stop and resume it repeatedly, so that every answer of it is late."""

    async def slow() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.18)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(slow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)


async def test_a_slow_database_slows_its_misses_and_writes_and_fails_none(cluster: DevCluster) -> None:
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        slow, quick = await users_of_both_databases(graph)
        never_read = await graph.reserve_ids(8, near=slow)
        async with at_a_tenth_of_its_speed(cluster.database("db-1").process.pid):
            for round_, unknown in enumerate(never_read):
                await graph.obj_update(slow, {"home": f"{round_}"})
                assert await home_of(graph, slow) == f"{round_}"
                assert await graph.obj_get(unknown) is None
                await graph.assoc_add(quick, "friend", slow, round_)
                assert await home_of(graph, slow, critical=True) == f"{round_}"
            await until_done(lambda: both_ends_agree(graph, quick, slow))
    await assert_converges(cluster)
