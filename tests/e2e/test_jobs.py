"""Background jobs on a real cluster: a worker that is killed at every step, levers, a leader that is lost, purges."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import sys
import tomllib
from collections.abc import AsyncIterator, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any

import aiomysql
import pytest
import pytest_asyncio

from tao.client import Graph, InvalidArgument, Job, UnknownJob, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tao.model.ids import SHARD_SHIFT
from tao.storage.names import schema_name
from tests.e2e.cluster_access import PATIENT, assert_converges, running_cluster
from tests.e2e.job_workers import install, workers_of
from tests.e2e.region_access import until
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

GUIDES = Path(__file__).resolve().parents[2] / "docs/how-to"
EDGES = 25
PAGE = 10
MODULE = '''
import os, signal
from pathlib import Path

HERE = Path(__file__).parent


def die_at(step):
    try:
        (HERE / f"die at {step}").unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


async def mark(graph, edges):
    """Add the edge (id2, follows, id1) for each edge; writing it twice is harmless."""
    die_at(f"begin {edges[0].id2}")
    await graph.assoc_add_many([(edge.id2, "follows", edge.id1, edge.time) for edge in edges])
    die_at(f"end {edges[0].id2}")


async def rename(graph, ids):
    await graph.obj_update_many([(each, {"home": "renamed"}, "user") for each in ids])


async def fail(graph, items):
    raise ValueError("this function always fails")
'''


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=1, followers=1, leaders=2, shards=4)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), settings=PATIENT) as found:
        yield found


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder with an installed package that has functions for jobs."""
    install(tmp_path, "jobs_of_test", MODULE, {name: f"jobs_of_test:{name}" for name in ("mark", "rename", "fail")})
    return tmp_path


async def a_user_with_edges(graph: Graph) -> tuple[int, Sequence[int]]:
    user = await graph.obj_add("user", {"name": "Ada"})
    others = [await graph.obj_add("user", {"name": f"friend {number}"}) for number in range(EDGES)]
    await graph.assoc_add_many([(user, "friend", other, time) for time, other in enumerate(others, 1)])
    return user, others


async def finished(job: Job) -> Job:
    return await job.wait(timeout=PATIENT_SECONDS * 2)


async def command(cluster: DevCluster, *arguments: str) -> tuple[int, str]:
    """Run a command; returns its exit status and what it printed."""
    status, output, _ = await ended_command(cluster, *arguments)
    return status, output


async def ended_command(cluster: DevCluster, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tao.cli", *arguments),
        env={**os.environ, "TAO_CONNECT": str(cluster.topology_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_a_worker_that_is_killed_at_every_step_loses_nothing_and_does_a_page_twice_at_most(
    cluster: DevCluster, graph: Graph, package: Path
) -> None:
    user, others = await a_user_with_edges(graph)
    job = await graph.add_job("each_edge", {"function": "mark", "atype": "friend", "id1": user}, near=user)
    newest_first = others[::-1]
    pages = [newest_first[start] for start in range(0, EDGES, PAGE)]
    for page in pages:
        for step in ("begin", "end"):
            (package / f"die at {step} {page}").touch()
    async with workers_of(cluster, package, PAGE) as workers:
        for death in range(2 * len(pages)):
            async with asyncio.timeout(PATIENT_SECONDS):
                assert await (await workers.start()).wait() == -signal.SIGKILL
            # The deaths at the two ends of a page come before its report.
            assert (await job.refresh()).edges == death // 2 * PAGE
        await workers.start()
        assert (await finished(job)).done
    assert job.edges == EDGES
    marked = await asyncio.gather(*(graph.assoc_exists(other, "follows", user) for other in others))
    assert all(marked)


async def test_two_workers_share_the_jobs_of_all_shards_and_a_job_for_each_object_handles_each(
    cluster: DevCluster, graph: Graph, package: Path
) -> None:
    users = [await graph.obj_add("user", {"name": f"user {number}"}) for number in range(30)]
    async with workers_of(cluster, package, PAGE) as workers:
        await workers.start()
        await workers.start()
        status, output = await command(
            cluster, "jobs", "add", "each_object", "--function", "rename", "--type", "user", "--json"
        )
        jobs = [graph.job(job) for job in json.loads(output)["jobs"]]
        assert (status, len(jobs)) == (0, 4)
        for job in jobs:
            assert (await finished(job)).done
    found = await graph.obj_get_many(users)
    assert {each.fields["home"] for each in found if each is not None} == {"renamed"}


async def test_operators_pause_resume_list_show_and_cancel_jobs(
    cluster: DevCluster, graph: Graph, package: Path
) -> None:
    user, others = await a_user_with_edges(graph)
    assert await command(cluster, "jobs", "pause", "each_edge") == (0, "each_edge is paused on 4 shards\n")
    job = await graph.add_job("each_edge", {"function": "mark", "atype": "friend", "id1": user}, near=user)
    broken = await graph.add_job("each_object", {"function": "fail", "shard": 0}, near=1)
    async with workers_of(cluster, package, PAGE) as workers:
        await workers.start()

        async def has_failed() -> bool:
            return bool((await broken.refresh()).error)

        await until(has_failed, "the failure is not reported")
        assert (broken.error, broken.state) == ("ValueError: this function always fails", "waiting")
        assert not (await job.refresh()).edges
        status, output = await command(cluster, "jobs", "list", "--kind", "each_edge", "--state", "waiting", "--json")
        listed = json.loads(output)
        assert (status, [each["id"] for each in listed["jobs"]]) == (0, [job.id])
        assert listed["paused"] == {"each_edge": [0, 1, 2, 3]}
        status, output = await command(cluster, "jobs", "list")
        assert "each_edge is paused on 4 shards" in output
        status, output = await command(cluster, "jobs", "show", str(broken.id))
        assert "this function always fails" in output
        assert '{"function": "fail", "shard": 0}' in output
        status, output = await command(cluster, "jobs", "show", str(job.id), "--json")
        assert json.loads(output)["body"] == {"function": "mark", "atype": "friend", "id1": user}
        for _ in range(2):
            assert await command(cluster, "jobs", "cancel", str(broken.id)) == (0, f"job {broken.id}: cancelled\n")
        assert (await command(cluster, "jobs", "show", str(broken.id + 1)))[0] == 1
        assert await command(cluster, "jobs", "resume", "each_edge") == (0, "each_edge is resumed on 4 shards\n")
        assert (await finished(job)).done
        await graph.add_job("walk_edges", {}, near=user)
        status, output = await command(cluster, "jobs", "list", "--kind", "walk_edges")
        kinds = "each_edge, each_object, fold, node_state, purge"
        assert output.endswith(f"no worker knows the kind walk_edges, so its jobs wait; workers know {kinds}\n")
        assert (await command(cluster, "jobs", "pause", "walk_edges"))[0] == 0
        assert (await command(cluster, "jobs", "resume", "walk_edges"))[0] == 0
    assert (await graph.job(broken.id).refresh()).state == "cancelled"
    assert await graph.assoc_exists(others[0], "follows", user)


HUGE = "99999999999999999999"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("pause", "each_edgy"),
            "the kind each_edgy, and there is no job of it; known are each_edge, ",
        ),
        (
            ("resume", "each_edgy"),
            "the kind each_edgy, and there is no job of it; known are each_edge, ",
        ),
        (("add", "each_edge", "--function", "mark", "--type", "frend"), "frend"),
        (("add", "each_edge", "--function", "mark", "--type", "friend", "--state", "archived"), "friend"),
        (("add", "each_object", "--function", "rename", "--type", "usr"), "usr"),
        (("add", "each_edge", "--function", "mark", "--type", "friend", "--list", HUGE), HUGE),
        (("add", "each_edge", "--function", "mark", "--type", "friend", "--shard", HUGE), "there is no shard"),
        (
            ("add", "each_edge", "--function", "mark", "--type", "friend", "--shard", "3", "--shard", "4"),
            "there is no shard 4: this graph has shards 0 to 3",
        ),
        (("add", "each_edge", "--function", "mark", "--type", "friend", "--list", "5", "--shard", "0"), "not both"),
        (("show", HUGE), HUGE),
        (("cancel", HUGE), HUGE),
    ],
)
async def test_commands_refuse_kinds_types_and_ids_that_there_are_not(
    cluster: DevCluster, words: Sequence[str], said: str
) -> None:
    status, _, errors = await ended_command(cluster, "jobs", *words)
    assert status not in (0, 1)
    assert said in errors
    assert "Traceback" not in errors


async def test_waiting_for_a_job_that_there_is_not_is_an_error(graph: Graph) -> None:
    with pytest.raises(UnknownJob, match="there is no job 99;"):
        await graph.job(99).wait()
    with pytest.raises(InvalidArgument, match="a number outside of"):
        await graph.add_job("each_object", {"shard": int(HUGE)}, near=1)


async def test_jobs_go_on_after_their_leader_is_lost(cluster: DevCluster, graph: Graph, package: Path) -> None:
    user, others = await a_user_with_edges(graph)
    async with workers_of(cluster, package, PAGE) as workers:
        (package / f"die at end {others[-1]}").touch()
        job = await graph.add_job("each_edge", {"function": "mark", "atype": "friend", "id1": user}, near=user)
        assert await (await workers.start()).wait() == -signal.SIGKILL
        for leader in ("leader-1", "leader-2"):
            await cluster.kill(leader)
            await cluster.restart(leader)
        await workers.start()
        assert (await finished(job)).done
    assert job.edges == EDGES
    assert await graph.assoc_exists(others[-1], "follows", user)


async def test_removed_edges_are_purged_at_both_ends_once_they_are_old(
    cluster: DevCluster, graph: Graph, package: Path
) -> None:
    user, page = (await graph.reserve_ids(1, shard=0))[0], (await graph.reserve_ids(1, shard=1))[0]
    await graph.assoc_add(user, "subscribes", page, time=1)
    await graph.assoc_delete(user, "subscribes", page)
    kept = (await graph.reserve_ids(1, shard=1))[0]
    await graph.assoc_add(user, "subscribes", kept, time=1)
    await graph.assoc_archive(user, "subscribes", kept)
    ends = ((user, "subscribes", 0), (page, "subscribers", 1))
    administrator = cluster.database("db-1").accounts.administrator

    async def purged() -> list[int]:
        for shard in (0, 1):
            job = await graph.add_job("purge", {"shard": shard}, near=shard << SHARD_SHIFT | 1)
            assert (await finished(job)).done
        return [await graph.assoc_count(each, atype, state="removed", critical=True) for each, atype, _ in ends]

    async with workers_of(cluster, package, PAGE) as workers:
        await workers.start()
        assert await purged() == [1, 1]
        account = cluster.database("db-1")
        connection = await aiomysql.connect(
            host=account.host, port=account.port, user=administrator.user, password=administrator.password
        )
        async with connection.cursor() as cursor:
            for shard in (0, 1):
                await cursor.execute(f"UPDATE {schema_name(shard)}.assocs_states SET changed_unix_s = 1")
        await connection.commit()
        connection.close()
        assert await purged() == [0, 0]
    assert await graph.assoc_count(user, "subscribes", state="archived", critical=True) == 1
    assert await graph.assoc_state(user, "subscribes", page) is None
    await assert_converges(cluster)


class Guide:
    """The code and the commands of a how-to guide."""

    def __init__(self, page: str) -> None:
        self._text = (GUIDES / page).read_text()

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```$", self._text, re.MULTILINE | re.DOTALL)

    async def add_jobs(self, cluster: DevCluster) -> None:
        """Run the commands that add jobs, and wait until these are done."""
        lines = re.findall(r"^    tao (jobs add .*)$", self._text, re.MULTILINE)
        assert lines
        for line in lines:
            status, output = await command(cluster, *line.split(), "--json")
            assert status == 0, line
            async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
                for job in json.loads(output)["jobs"]:
                    assert (await finished(graph.job(job))).done, line


async def test_the_guide_runs_from_end_to_end(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Guide("jobs.md")
    module, *session = guide.blocks("python")
    points = tomllib.loads(guide.blocks("toml")[0])["project"]["entry-points"]["tao.jobs"]
    install(tmp_path, "my_jobs", module, points)
    (tmp_path / ".tao-dev").mkdir()
    (tmp_path / ".tao-dev" / "topology.json").symlink_to(cluster.topology_path)
    monkeypatch.chdir(tmp_path)
    async with workers_of(cluster, tmp_path, PAGE) as workers:
        await workers.start()
        names: dict[str, Any] = {}
        for number, block in enumerate(session, start=1):
            result = eval(compile(block, f"block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if isawaitable(result):
                await result
        await guide.add_jobs(cluster)


async def test_the_job_of_the_guide_renews_the_people_whom_users_may_know(
    cluster: DevCluster, graph: Graph, tmp_path: Path
) -> None:
    guide = Guide("people-you-may-know.md")
    (module,) = [block for block in guide.blocks("python") if block.startswith("# my_jobs.py\n")]
    install(tmp_path, "my_jobs", module, {"renew_suggestions": "my_jobs:renew_suggestions"})
    ids = await graph.obj_add_many([("user", {"name": name}) for name in "abcdef"])
    alice, bob, carol, dave, erin, blocked = ids
    pairs = [(alice, bob), (alice, carol), (bob, dave), (carol, dave), (carol, erin), (bob, blocked)]
    await graph.assoc_add_many([(one, "friend", other) for one, other in pairs])
    await graph.assoc_add(alice, "blocks", blocked)
    async with workers_of(cluster, tmp_path, PAGE, lease_seconds=30.0) as workers:
        await workers.start()
        await guide.add_jobs(cluster)
        kept = await graph.assoc_range(alice, "may_know", 0, 10, critical=True)
        assert (kept.id2s, kept.times) == ([dave, erin], [2, 1])
        await graph.assoc_delete(bob, "friend", dave)
        await graph.assoc_delete(carol, "friend", erin)
        await guide.add_jobs(cluster)
        kept = await graph.assoc_range(alice, "may_know", 0, 10, critical=True)
        assert (kept.id2s, kept.times) == ([dave], [1]), "the list is made anew, and not only added to"
