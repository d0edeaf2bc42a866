"""A database's disk fills up: errors, status, metric and log of the leader name it, and writes go on by themselves."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from tao.admin.status import View, cluster_view
from tao.client import ClientSettings, Object, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import DatabaseFull, OutcomeUnknown, RetryableError
from tao.topology.document import parse_topology
from tests.e2e.cluster_access import assert_converges, running_cluster
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.small_disk import small_disk

pytestmark = [pytest.mark.e2e, pytest.mark.database, pytest.mark.unhurried]

SERVER_RETRY_SECONDS = 120.0
"""The server tries its binlog again once a minute."""


async def view_of(cluster: DevCluster) -> View:
    return await cluster_view(parse_topology(cluster.topology_path.read_bytes(), "topology"), 5.0)


def metrics_of(cluster: DevCluster) -> list[str]:
    with urllib.request.urlopen(f"http://{cluster.admin('leader-1')}/metrics", timeout=PATIENT_SECONDS) as answer:
        return [line for line in answer.read().decode().splitlines() if line.startswith("tao_database_full_info")]


async def test_a_full_disk_is_named_in_errors_status_metric_and_log_and_writes_go_on_once_there_is_room(
    tmp_path: Path,
) -> None:
    shape = Shape(tiers=2, followers=1, leaders=1, databases=1, shards=4)
    state = tmp_path / "cluster"
    with small_disk(StateFolder(state).database("db-1")) as disk:
        async with running_cluster(state, shape) as cluster:
            settings = ClientSettings(timeout_seconds=5.0)
            async with connect(str(cluster.topology_path), settings=settings) as graph:
                user = await graph.obj_add("user", {"name": "n", "home": "before"})
                disk.fill()
                errors: list[Exception] = []
                async with asyncio.timeout(PATIENT_SECONDS):
                    while not errors or not isinstance(errors[-1], DatabaseFull):
                        try:
                            await graph.obj_update(user, {"home": "during"})
                        except (RetryableError, OutcomeUnknown) as error:
                            errors.append(error)
                assert all("disk of database server db-1 is full" in str(error) for error in errors), errors
                assert [type(error) for error in errors[:-1]] in ([], [OutcomeUnknown])
                assert isinstance(await graph.obj_get(user), Object), "cache hits go on"
                problems = (await view_of(cluster)).problems
                assert any("writes of db-1 fail: the disk of database server db-1 is full" in each for each in problems)
                assert [line.rpartition(" ")[2] for line in await asyncio.to_thread(metrics_of, cluster)] == ["1.0"]

                disk.make_room()
                async with asyncio.timeout(SERVER_RETRY_SECONDS):
                    while True:
                        try:
                            await graph.obj_update(user, {"home": "after"})
                            break
                        except (RetryableError, OutcomeUnknown):
                            await asyncio.sleep(0.2)
                async with asyncio.timeout(PATIENT_SECONDS):
                    while (await view_of(cluster)).problems:  # noqa: ASYNC110 - the state of other processes
                        await asyncio.sleep(0.2)
            await assert_converges(cluster)
            lines = (state / "servers" / "leader-1.log").read_text().splitlines()
            events = [json.loads(line)["event"] for line in lines if line.startswith("{")]
            assert events.count("database_full") == events.count("database_has_room") == 1
            assert "outcome_unknown" in events or len(errors) == 1
