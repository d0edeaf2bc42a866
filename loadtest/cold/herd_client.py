"""A load process' part of `herd`: many awaiters that ask for one key at one moment.

Processes are kept in step by files in one folder: each says that it is ready for a round, and begins at the time that
the runner writes down once all are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter, process_time
from typing import Final, Literal

import msgspec

from loadtest.collector import settle_collector
from loadtest.published.contestant import LINK
from loadtest.published.recording import Recorder, Recording
from loadtest.waiting import within
from tao.client import ClientSettings, Graph, connect
from tao.model.errors import TaoError

ANSWERED: Final = "answered"
_TIMEOUT_SECONDS: Final = 30.0
"""Of a read: a busy machine should show as a latency, not as an error."""
_STEP_SECONDS: Final = 120.0
"""Of waiting for the others."""
_POLL_SECONDS: Final = 0.005


class HerdRound(msgspec.Struct, frozen=True):
    """What everybody asks for: an object, or the first page of its list, of so many edges."""

    what: Literal["object", "list"]
    id: int
    edges: int = 0


class HerdJob(msgspec.Struct, frozen=True, kw_only=True, tag="herd"):
    """One load process of a herd. ``number``: which of them."""

    topology_file: str
    region: str
    tiers: tuple[str, ...]
    """The sessions take turns at asking these first."""
    sessions: int
    awaiters: int
    """Of all sessions together."""
    known_id: int
    """An object that each session reads before the rounds begin, so that connections are there."""
    rounds: tuple[HerdRound, ...]
    folder: str
    number: int


class HerdAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """What one process saw of one round."""

    recording: Recording
    wrong: int
    client_cpu: float
    """Seconds of this process, from the start to its last answer."""


def ready_file(folder: Path, number: int, process: int) -> Path:
    """Written by a process that is ready for a round."""
    return folder / f"ready-{number}-{process}"


def go_file(folder: Path, number: int) -> Path:
    """Written by the runner: when the round begins, in Unix seconds."""
    return folder / f"go-{number}"


def done_file(folder: Path, number: int, process: int) -> Path:
    """Written by a process that has all answers of a round."""
    return folder / f"done-{number}-{process}"


async def run_herd(job: HerdJob, tell: Callable[[str, float], None]) -> list[HerdAnswers]:
    """One result a round. Raises a `TaoError` when the cluster cannot be reached or the runner is not heard of."""
    folder, settings = Path(job.folder), ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
    async with AsyncExitStack() as stack:
        graphs = [
            await stack.enter_async_context(
                connect(job.topology_file, region=job.region, tier=job.tiers[index % len(job.tiers)], settings=settings)
            )
            for index in range(job.sessions)
        ]
        answers = []
        for number, herd_round in enumerate(job.rounds):
            for graph in graphs:
                await graph.obj_get(job.known_id)
            settle_collector()
            ready_file(folder, number, job.number).touch()
            starts = await _start(go_file(folder, number))
            tell(f"round {number + 1} of {len(job.rounds)}", number / len(job.rounds))
            answers.append(await _rush(graphs, herd_round, job.awaiters, starts))
            done_file(folder, number, job.number).touch()
        return answers


async def _start(file: Path) -> float:
    async def is_there() -> bool:
        return await asyncio.to_thread(file.exists)

    await within(_STEP_SECONDS, is_there, _POLL_SECONDS, f"{file.name} was not written")
    return float(await asyncio.to_thread(file.read_text))


async def _rush(graphs: list[Graph], herd_round: HerdRound, awaiters: int, starts: float) -> HerdAnswers:
    recorder, wrong = Recorder(), 0
    await asyncio.sleep(max(0.0, starts - time.time()))
    began, cpu = perf_counter(), process_time()

    async def one(graph: Graph) -> None:
        nonlocal wrong
        try:
            if herd_round.what == "object":
                wrong += await graph.obj_get(herd_round.id) is None
            else:
                wrong += len(await graph.assoc_range(herd_round.id, LINK, 0, herd_round.edges)) != herd_round.edges
        except TaoError as error:
            recorder.failed(error.reason)
            return
        now = perf_counter()
        recorder.answered(ANSWERED, now - began, now - began)

    await asyncio.gather(*(one(graphs[index % len(graphs)]) for index in range(awaiters)))
    cpu = process_time() - cpu
    return HerdAnswers(recording=recorder.recording(), wrong=wrong, client_cpu=cpu)
