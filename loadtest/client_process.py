"""The process that makes the load: one Python process with uvloop, as an application's would be.

A scenario describes the work of its load process as a `Job` and starts it with `run_job`. The process reads the job
from standard input and answers with lines of JSON on standard output: steps for the progress bar, then the result. It
ends when the job is done, and when the runner is gone.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import uvloop

from loadtest.rounds import settle_collector
from loadtest.scenario import Progress
from tao.devcluster.processes import to_the_end
from tao.model.errors import OperatorError

_MAX_LINE_BYTES: Final = 4 << 20
_LOG_TAIL_BYTES: Final = 2000
_STOP_SECONDS: Final = 5.0
_ROOT: Final = Path(__file__).resolve().parent.parent
_NOTHING: Final = msgspec.Raw(b"null")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

StepReport = Callable[[str, float], None]
"""``report(step, done)``: show a step of the load process in the runner's progress; ``done`` is its part, 0 to 1."""


class Job(Protocol[Result_co]):
    """The work of one load process: a `msgspec.Struct`, which travels to the process as JSON."""

    async def work(self, report: StepReport) -> Result_co:
        """Do the work in the load process. Raises what its clients raise, which fails the scenario."""


class _Order(msgspec.Struct, frozen=True):
    """A job on its way to the load process, with the module and name of its class."""

    module: str
    name: str
    job: msgspec.Raw


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the load process's standard output: a step, or the result at the end."""

    step: str = ""
    done: float = 0.0
    result: msgspec.Raw = _NOTHING


async def run_job(job: Job[Result], progress: Progress, log: Path, result: type[Result]) -> Result:
    """Run the job in a process of its own, which ends when this is cancelled.

    ``log`` receives the process's standard error, ``result`` is the type to decode. Raises `OperatorError` with the end
    of the log when the process gives no result.
    """
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
        encoded = msgspec.json.encode(job, enc_hook=_plain_id)
        order = _Order(type(job).__module__, type(job).__name__, msgspec.Raw(encoded))
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        # Standard input stays open: its end shows the process that the runner is gone.
        await process.stdin.drain()
        async for text in process.stdout:
            line = msgspec.json.decode(text, type=_Line)
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


def _plain_id(value: object) -> int:
    """Return the id of an added object as the integer that msgspec knows."""
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(f"a job cannot hold a {type(value).__name__}")


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


def _write(line: _Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _ordered_job(text: bytes) -> Job[Any]:
    # Any: the runner knows the type of the result and decodes it.
    order = msgspec.json.decode(text, type=_Order)
    job: Job[Any] = msgspec.json.decode(order.job, type=getattr(importlib.import_module(order.module), order.name))
    return job


async def _main() -> None:
    loop = asyncio.get_running_loop()
    job = _ordered_job(await loop.run_in_executor(None, sys.stdin.buffer.readline))
    work = asyncio.ensure_future(job.work(lambda step, done: _write(_Line(step, done))))
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    loop.add_reader(sys.stdin.fileno(), work.cancel)  # readable now means closed: the runner sends one line
    with suppress(asyncio.CancelledError):
        _write(_Line(result=msgspec.Raw(msgspec.json.encode(await work))))


if __name__ == "__main__":
    # A terminal's Ctrl-C, or its end, reaches every process of the group; the runner decides what it means here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settle_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())
