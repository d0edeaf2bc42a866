"""Invalid schema, access and topology files give one line for each problem and status 2 at the start; a serving process
keeps the last valid one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from tao.client import Graph, UnknownType, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tests.e2e.cluster_access import PATIENT, bystander_of, replace_text, running_cluster
from tests.rigs.forked_programs import run_tao
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SERVERS = ("leader-1", "follower-1a")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=4)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(cluster.client_address, settings=PATIENT) as graph:
        yield graph


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while not condition():  # noqa: ASYNC110 - the state of other processes
            await asyncio.sleep(0.02)


async def logs_of(cluster: DevCluster) -> dict[str, Path]:
    return {each.name: Path(each.log) for each in (await cluster.status()).processes if each.name in SERVERS}


def count_in(log: Path, word: str) -> int:
    return log.read_text().count(word)


async def start(cluster: DevCluster, folder: Path, server: str, **changes: str) -> tuple[int, str]:
    """Start a server with these settings changed; return its exit status and standard error."""
    role = server.partition("-")[0]
    found = next(path for path in cluster.topology_path.parent.rglob("*.yaml") if path.stem == server)
    settings = folder / f"{server}.yaml"
    settings.write_text(yaml.safe_dump(yaml.safe_load(found.read_text()) | changes))
    async with asyncio.timeout(PATIENT_SECONDS):
        ended = await run_tao(role, "--settings", settings, folder=folder)
    return ended.status, ended.errors


@pytest.mark.parametrize(
    ("setting", "text", "named"),
    [
        ("schema_file", "objects: [", ":1: not valid YAML"),
        ("schema_file", "format: 1\nobjects: {user: {number: 0}}\nassociations: {}\n", "number"),
        ("access_file", "format: 1\nversion: 1\nothers: [reader]\n", ":3: others.0: there is no role 'reader'"),
        ("topology_file", "{", "topology"),
        ("topology_file", '{"version": 1, "shards": 4, "regions": [], "databases": []}', "region"),
    ],
)
async def test_a_server_does_not_start_with_a_wrong_file_and_says_why_without_a_traceback(
    cluster: DevCluster, tmp_path: Path, setting: str, text: str, named: str
) -> None:
    wrong = tmp_path / f"wrong-{setting}"
    wrong.write_text(text)
    for server in SERVERS:
        status, said = await start(cluster, tmp_path, server, **{setting: str(wrong)})
        assert status == 2
        problems = said.strip().splitlines()  # one a line
        assert len(problems) <= 2, said
        assert problems[0].startswith(f"tao: {wrong}")
        assert named in said


async def test_a_server_that_the_topology_does_not_name_says_so(cluster: DevCluster, tmp_path: Path) -> None:
    for server, name in zip(SERVERS, ("leader-9", "leader-1"), strict=True):
        status, said = await start(cluster, tmp_path, server, name=name)
        assert status == 2
        assert name in said


async def test_an_invalid_or_incompatible_schema_is_rejected_while_serving_and_the_old_one_stays(
    cluster: DevCluster, graph: Graph
) -> None:
    good = cluster.schema_path.read_text()
    logs = await logs_of(cluster)
    async with bystander_of(cluster) as bystander:
        for refused, text in enumerate(
            ("objects: [", good.replace("name: {number: 1, type: str}", "name: {number: 1, type: uint}"), ""), 1
        ):
            replace_text(cluster.schema_path, text)
            for process in (await cluster.status()).processes:
                if process.name in SERVERS:
                    os.kill(process.pid, signal.SIGHUP)
            for log in logs.values():
                await until(lambda log=log, refused=refused: count_in(log, "schema_refused") == refused)  # type: ignore[misc]
            await bystander.more_rounds(3)
            assert await graph.obj_add("user", {"name": "as before"})
        replace_text(cluster.schema_path, good)
        await bystander.more_rounds(3)
        assert bystander.errors == []


async def test_a_compatible_schema_is_picked_up_by_servers_and_connected_clients_without_a_restart(
    cluster: DevCluster, graph: Graph
) -> None:
    user = await graph.obj_add("user", {"name": "before"})
    with pytest.raises(UnknownType):
        await graph.obj_add("planet", {"name": "Mars"})
    document = yaml.safe_load(cluster.schema_path.read_text())
    document["objects"]["planet"] = {"number": 77, "fields": {"name": {"number": 1, "type": "str"}}}
    document["objects"]["user"]["fields"]["motto"] = {"number": 9, "type": "str", "default": "none yet"}
    document["associations"]["orbits"] = {"number": 78, "inverse": "orbited_by"}
    document["associations"]["orbited_by"] = {"number": 79, "inverse": "orbits"}
    replace_text(cluster.schema_path, yaml.safe_dump(document))
    logs = await logs_of(cluster)
    for log in logs.values():
        await until(lambda log=log: count_in(log, "schema_changed") == 1)  # type: ignore[misc]
    await until(lambda: any(each.name == "planet" for each in graph.schema.objects))
    mars = await graph.obj_add("planet", {"name": "Mars"})
    await graph.assoc_add(mars, "orbits", user, 1)
    assert (await graph.assoc_range(user, "orbited_by", 0, 5)).id2s == [mars]
    found = await graph.obj_get(user)
    assert found is not None
    assert dict(found.fields) == {"name": "before", "home": "", "motto": "none yet"}
