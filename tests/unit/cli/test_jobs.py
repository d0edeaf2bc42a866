"""`tao jobs`: what `add` refuses before it adds a job, and how `show` prints fields without a value."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.client import Graph, InvalidArgument
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, FakeLink


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()

    async def connected(work: Callable[[Graph], Awaitable[object]]) -> object:
        async with await cluster.connect() as graph:
            return await work(graph)

    monkeypatch.setattr("tao.cli.jobs.on_graph", lambda work: asyncio.run(connected(work)))
    return cluster


def add(*options: str) -> Result:
    return CliRunner().invoke(tao, ["jobs", "add", "each_edge", "--function", "f", "--type", "friend", *options])


def test_no_job_is_added_when_one_of_the_named_shards_does_not_exist(cluster: FakeCluster) -> None:
    last = cluster.topology.shards - 1
    result = add("--shard", "0", "--shard", str(last + 1))
    assert result.exit_code != 0
    said = f"there is no shard {last + 1}: this graph has shards 0 to {last}"
    assert said in result.output or (isinstance(result.exception, InvalidArgument) and said in str(result.exception))
    assert cluster.batches() == []


def test_a_list_and_a_shard_are_not_taken_together(cluster: FakeCluster) -> None:
    result = add("--list", "5", "--shard", "0")
    assert result.exit_code == 2
    assert "give --list or --shard, not both" in result.output
    assert cluster.batches() == []


def test_a_field_without_a_value_is_shown_as_a_dash(cluster: FakeCluster) -> None:
    def answer(_: FakeLink, __: pb.Request, on_answer: AnswerHandler) -> None:
        job = pb.Job(id=9, kind="walk", body=b"\x80")
        on_answer(pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(found=True, job=job)])))

    cluster.link("near-1").behaviour = answer
    shown = dict(line.split(maxsplit=1) for line in CliRunner().invoke(tao, ["jobs", "show", "9"]).stdout.splitlines())
    assert [shown[name] for name in ("worker", "error", "cursor")] == ["-"] * 3
