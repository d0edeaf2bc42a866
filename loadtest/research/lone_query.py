"""What one awaiter of cached objects costs between two processes: system calls, wake-ups, turns of the loops, CPU.

`python -m loadtest.research.lone_query` asks one follower for cached objects, one after the other, and redis-server for
the same values by redis-py. Counts are for one query. Wake-ups are the voluntary switches of all threads and CPU is the
kernel's account; both are of queries that nobody traces. System calls are then counted by `strace -c` over as many
queries again. A turn of an event loop is a call that waits for descriptors.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

import click
import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.dataset import TOY, DatasetSize, Operation, Query, write_dataset
from loadtest.drivers import Call, ask_call, closed
from loadtest.peer_servers import REDIS_SERVER, private_server
from loadtest.redis_reads import RedisReads
from loadtest.rounds import MICRO, TurnSamples, percentile
from loadtest.scenario import BenchSettings, Silent
from loadtest.tao_reads import GraphReads, open_graph
from loadtest.target import OneFollower, one_follower

_WAITS: Final = ("epoll_wait", "epoll_pwait", "epoll_pwait2")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
"""The kernel counts user and system time of a process in so many parts of a second."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What a query costs one process."""

    user_us: float
    system_us: float
    wake_ups: float
    """Switches of its threads that had to wait."""
    calls: dict[str, float]
    """System calls, by name."""

    @property
    def turns(self) -> float:
        """Calls that wait for descriptors: turns of its event loop."""
        return sum(self.calls.get(name, 0.0) for name in _WAITS)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a query of one contestant costs both processes; latencies are without strace."""

    contestant: str
    p50_us: float
    mean_us: float
    client: Side
    server: Side


class LoneQueryJob(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for cached objects, one after the other, in this process."""

    cluster: OneFollower
    redis_port: int
    redis_pid: int
    size: DatasetSize
    queries: int

    async def work(self, report: StepReport) -> list[Measured]:
        """Return the costs of the SDK and of redis-py. Raises `TaoError`, or what redis-py raises."""
        async with AsyncExitStack() as stack:
            async with AsyncExitStack() as writing:
                data = await write_dataset(await open_graph(self.cluster.topology_file, "frames", writing), self.size)
            graph = GraphReads(await open_graph(self.cluster.topology_file, "frames", stack))
            redis = RedisReads(self.redis_port)
            stack.push_async_callback(redis.close)
            await redis.fill(data)
            contestants = ((graph, "tao", self.cluster.follower_pid), (redis, "redis-py", self.redis_pid))
            found = []
            for reader, name, server in contestants:
                await reader.verify(data)
                calls = [reader.call(Query(Operation.OBJ_GET, each)) for each in data.objects]
                found.append(await self._measure(name, server, calls))
            return found

    async def _measure(self, name: str, server: int, calls: Sequence[Call]) -> Measured:
        client = os.getpid()
        before = [_account(pid) for pid in (client, server)]
        latencies = await _ask(calls, self.queries)
        after = [_account(pid) for pid in (client, server)]
        # This process last: from then on strace would follow its children, and so another strace.
        async with _counted(server) as of_server, _counted(client) as of_client:
            await _ask(calls, self.queries)
        sides = [
            Side(
                **{field: (now[field] - then[field]) / self.queries for field in now},
                calls={call: count / self.queries for call, count in traced().items()},
            )
            for then, now, traced in zip(before, after, (of_client, of_server), strict=True)
        ]
        return Measured(
            contestant=name,
            p50_us=percentile(latencies, 0.5) * MICRO,
            mean_us=sum(latencies) / len(latencies) * MICRO,
            client=sides[0],
            server=sides[1],
        )


async def _ask(calls: Sequence[Call], queries: int) -> list[float]:
    samples = TurnSamples()
    await closed(ask_call, [itertools.islice(itertools.cycle(calls), queries)])(math.inf, samples)
    return samples.ordered()


def _account(pid: int) -> dict[str, float]:
    """Return what the kernel has counted of a process so far, as the fields of a `Side`."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = (int(after_name[place]) * MICRO / _TICKS for place in (11, 12))
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    return {"user_us": user, "system_us": system, "wake_ups": sum(map(_switches, threads))}


def _switches(status: Path) -> int:
    """Return how often a thread has waited."""
    lines = (line.partition(":") for line in status.read_text().splitlines())
    return next(int(value) for name, _, value in lines if name == "voluntary_ctxt_switches")


@asynccontextmanager
async def _counted(pid: int) -> AsyncIterator[Callable[[], dict[str, int]]]:
    """Count the system calls of a process. What is yielded returns the counts when the context has ended."""
    strace = await asyncio.create_subprocess_exec(
        "strace", "-c", "-f", "-U", "calls,name", "-p", str(pid), stderr=asyncio.subprocess.PIPE
    )
    assert strace.stderr is not None
    await strace.stderr.readline()  # it has attached
    counts: dict[str, int] = {}
    yield lambda: counts
    strace.send_signal(signal.SIGINT)
    for line in (await strace.stderr.read()).decode().splitlines():
        match line.split():
            case [count, name] if count.isdigit() and name != "total":
                counts[name] = int(count)
    await strace.wait()


def table(measured: Sequence[Measured]) -> str:
    """Return the table in Markdown: a row for each kind of cost, columns for the processes."""
    sides = [side for each in measured for side in (each.client, each.server)]
    rows = {
        "system calls": [f"{sum(side.calls.values()):.2f}" for side in sides],
        "of them turns of the loop": [f"{side.turns:.2f}" for side in sides],
        "wake-ups": [f"{side.wake_ups:.2f}" for side in sides],
        "CPU, user and kernel, µs": [f"{side.user_us:.0f}, {side.system_us:.0f}" for side in sides],
    }
    heads = [f"{each.contestant}: {side}" for each in measured for side in ("client", "server")]
    lines = [f"| a query | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


@click.command()
@click.option("--queries", default=10_000, show_default=True, help="Queries of each pass, untraced and traced.")
def main(queries: int) -> None:
    """Print what a cached query costs that one awaiter asks, in both processes."""
    if shutil.which("strace") is None:
        raise click.ClickException("there is no strace on the PATH, which counts the system calls")
    measured = asyncio.run(_run(queries))
    click.echo(table(measured))
    for each in measured:
        click.echo(f"{each.contestant}: p50 {each.p50_us:.0f} µs, mean {each.mean_us:.0f} µs, untraced")
        for name, side in (("client", each.client), ("server", each.server)):
            calls = sorted(side.calls.items(), key=lambda item: -item[1])
            click.echo(f"  {name}: " + ", ".join(f"{call} {count:.2f}" for call, count in calls if count >= 0.005))


async def _run(queries: int) -> list[Measured]:
    with tempfile.TemporaryDirectory(prefix="tao-lone-query-") as folder:
        settings, progress = BenchSettings(Path(folder)), Silent()
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(private_server(REDIS_SERVER, settings.work_dir / "redis"))
            job = LoneQueryJob(
                cluster=await stack.enter_async_context(one_follower(settings, "lone_query", progress)),
                redis_port=server.port,
                redis_pid=server.pid,
                size=TOY,
                queries=queries,
            )
            return await run_job(job, progress, settings.work_dir / "lone_query.log", list[Measured])


if __name__ == "__main__":
    # The load process imports the job by the name of its module, which is another one here.
    import_module("loadtest.research.lone_query").main()
