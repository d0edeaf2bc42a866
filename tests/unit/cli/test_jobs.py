"""`tao jobs`: which jobs `list` leaves out, what `add` refuses, and how `show` prints fields without a value."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from click.testing import CliRunner, Result

from tao.admin.jobs import FoundJobs
from tao.cli.commands import tao
from tao.client import Graph, InvalidArgument
from tao.model.jobs import ROUTINE_KINDS, JobPriority, JobRow, JobState
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


@pytest.mark.parametrize(
    ("options", "left_out"),
    [((), ROUTINE_KINDS), (("--all",), ()), (("--kind", "fold"), ()), (("--kind", "walk"), ROUTINE_KINDS)],
)
def test_the_jobs_of_the_system_itself_are_left_out_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    asked: list[Sequence[str]] = []

    async def looks(_kind: str, _states: Sequence[int], _limit: int, routine_kinds: Sequence[str] = ()) -> FoundJobs:
        asked.append(routine_kinds)
        return FoundJobs()

    monkeypatch.setattr("tao.cli.jobs._look", looks)
    assert CliRunner().invoke(tao, ["jobs", "list", *options]).stdout == "no jobs\n"
    assert asked == [left_out]


def test_the_error_of_a_job_stands_below_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = JobRow(
        *(
            9,
            "walk",
            JobPriority.NORMAL,
            JobState.PARKED,
            1_000,
            100,
            100,
            "",
            b"",
            b"",
            0,
            "ValueError: " + 50 * "no ",
        ),
        *(1_000, 0),
    )

    async def looks(*_: object) -> FoundJobs:
        return FoundJobs([failed])

    monkeypatch.setattr("tao.cli.jobs._look", looks)
    head, row, below = CliRunner().invoke(tao, ["jobs", "list"]).stdout.splitlines()
    assert head.split()[-2:] == ["worker", "due"]
    assert "parked" in row
    assert max(len(head), len(row)) < 100
    assert below.startswith("9: ValueError: no no")
