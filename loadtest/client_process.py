"""The process that makes the load: one Python process with uvloop, as an application's would be.

The runner starts it (`run_job`) with a job on standard input; it answers on standard output with lines of JSON: steps
for the progress bar, then the result. It ends by itself when the job is done, and when the runner is gone.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from loadtest.capacity.capacity_client import CapacityJob, GrowJob, MixJob, run_capacity, run_grow, run_mix
from loadtest.cold.herd_client import HerdJob, run_herd
from loadtest.collector import settle_collector
from loadtest.jobs import GeoJob, HotKeyJob, Job, ReadsJob, StreamJob
from loadtest.peers.peers_process import PairJob, PeersJob, run_pair, run_peers
from loadtest.peers.staleness import StaleJob, run_stale
from loadtest.published.load_process import AskJob, FillJob, ask, fill
from loadtest.scenario import Progress
from tao.devcluster.processes import to_the_end
from tao.model.errors import OperatorError

_MAX_LINE_BYTES = 4 << 20
_LOG_TAIL_BYTES = 2000
_STOP_SECONDS = 5.0
_ROOT = Path(__file__).resolve().parent.parent
_NOTHING = msgspec.Raw(b"null")
Result = TypeVar("Result")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of standard output: a step, or the result at the end, which the job's kind gives its form."""

    step: str = ""
    done: float = 0.0
    result: msgspec.Raw = _NOTHING


async def run_job(job: Job, progress: Progress, log: Path, result: type[Result]) -> Result:
    """Run the job in a process of its own; ended with it when this is cancelled. Raises `OperatorError` with the end
    of its standard error when it fails."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtest.client_process",
            cwd=_ROOT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=_MAX_LINE_BYTES,
        )  # fmt: skip
    found: Result | None = None
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        # Standard input stays open: its end tells the process that the runner is gone.
        await process.stdin.drain()
        async for text in process.stdout:
            line = msgspec.json.decode(text, type=Line)
            if bytes(line.result) != bytes(_NOTHING):
                found = msgspec.json.decode(line.result, type=result)
            else:
                progress.step(line.step, line.done)
        status = await process.wait()
    finally:
        await to_the_end(_end(process))
    if found is None:
        raise OperatorError(f"the load process ended with status {status} and no result:\n{_tail(log)}")
    return found


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _write(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


async def _work(job: Job, tell: Callable[[str, float], None]) -> object:
    if isinstance(job, ReadsJob):
        from loadtest.reads_client import run_reads

        return await run_reads(job, tell)
    if isinstance(job, StreamJob):
        from loadtest.stream_client import run_stream

        return await run_stream(job, tell)
    if isinstance(job, GeoJob):
        from loadtest.geo_client import run_geo

        return await run_geo(job, tell)
    if isinstance(job, FillJob):
        return await fill(job, tell)
    if isinstance(job, AskJob):
        return await ask(job, tell)
    if isinstance(job, HotKeyJob):
        from loadtest.hot_key_client import run_hot_key

        return await run_hot_key(job, tell)
    if isinstance(job, HerdJob):
        return await run_herd(job, tell)
    if isinstance(job, GrowJob):
        return await run_grow(job, tell)
    if isinstance(job, CapacityJob):
        return await run_capacity(job, tell)
    if isinstance(job, MixJob):
        return await run_mix(job, tell)
    if isinstance(job, PeersJob):
        return await run_peers(job, tell)
    if isinstance(job, PairJob):
        return await run_pair(job, tell)
    if isinstance(job, StaleJob):
        return await run_stale(job, tell)
    from loadtest.writes_client import run_writes

    return await run_writes(job, tell)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    job = msgspec.json.decode(await loop.run_in_executor(None, sys.stdin.buffer.readline), type=Job)
    work = asyncio.ensure_future(_work(job, lambda step, done: _write(Line(step, done))))
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    loop.add_reader(sys.stdin.fileno(), work.cancel)  # readable now means closed: the runner sends one line
    with suppress(asyncio.CancelledError):
        _write(Line(result=msgspec.Raw(msgspec.json.encode(await work))))


if __name__ == "__main__":
    # A terminal's Ctrl-C, or its end, reaches every process of the group; the runner decides what it means here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settle_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())
