"""A peer's server, private to a run: on a free port of loopback, asked until it answers, ended with the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tao.devcluster.ports import reserve_port
from tao.devcluster.processes import ManagedProcess, to_the_end
from tao.model.errors import OperatorError

_START_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0
_PROBE_PAUSE_SECONDS: Final = 0.02


@asynccontextmanager
async def private_server(
    name: str, argv: Callable[[int], Sequence[str]], answers: Callable[[int], Awaitable[bool]], folder: Path
) -> AsyncIterator[tuple[int, int]]:
    """Run one; gives ``(port, pid)``. ``argv``: how it is started on a port; ``answers``: whether it does there. Raises
    `OperatorError` when it does not come up."""
    with reserve_port() as reservation:
        port = reservation.port
        process = ManagedProcess(name, argv(port), os.environ, folder / f"{name}.log", stop_seconds=_STOP_SECONDS)
        process.start()
        try:
            await _wait(process, lambda: answers(port))
        except BaseException:
            await to_the_end(process.stop())
            raise
    try:
        yield port, process.pid
    finally:
        await to_the_end(process.stop())


async def _wait(process: ManagedProcess, answers: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not await answers():
                if not process.is_running:
                    raise OperatorError(f"{process.name} ended at once:\n{process.log_tail()}")
                await asyncio.sleep(_PROBE_PAUSE_SECONDS)
    except TimeoutError:
        raise OperatorError(f"{process.name} did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}") from None
