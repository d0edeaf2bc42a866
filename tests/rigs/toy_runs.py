"""Load-test scenarios at toy size, some at a time: each mostly waits for processes to start and for seconds to pass.

A test names by the mark ``scenario`` the scenario whose outcome it checks, and gets the outcome from the fixture
``ran``. The first test starts the scenarios that all selected tests of the module need; the others find their outcome
ready, or nearly so.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.rigs.forked_programs import Ended, ScenarioProcess, forked_scenario, loadtest_fork_server

_AT_ONCE: Final = 2
_SECONDS: Final = 1_000.0
"""Deadline of the scenarios of one process in seconds, from its own start."""


class ToyRun(NamedTuple):
    """The result and the files of a scenario."""

    json: bytes
    folder: Path
    """The scenario's own folder; ``{folder}`` in its arguments."""


class ToyRuns:
    """Scenarios by their arguments, under way or done."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder
        self._pool: Final = ThreadPoolExecutor(_AT_ONCE)
        self._runs: Final[dict[tuple[str, ...], Future[ToyRun]]] = {}
        self._under_way: Final[set[ScenarioProcess]] = set()
        self._closed = False
        loadtest_fork_server()  # it imports modules from now on

    def start(self, arguments: tuple[str, ...]) -> None:
        """Run a scenario when there is room."""
        if arguments not in self._runs:
            folder = self._folder / str(len(self._runs))
            self._runs[arguments] = self._pool.submit(self._run, arguments, folder)

    def outcome(self, arguments: tuple[str, ...]) -> ToyRun:
        """Return the outcome when it is over. Raises `AssertionError` with the output if it failed or left servers'
        files."""
        return self._runs[arguments].result()

    def close(self) -> None:
        """End what still runs, with the servers that it started."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for scenario in list(self._under_way):
            scenario.interrupt()
        self._pool.shutdown()

    def _run(self, arguments: tuple[str, ...], folder: Path) -> ToyRun:
        folder.mkdir()
        json_file = folder / "found.json"
        given = [each.format(folder=folder) for each in arguments]
        ended = asyncio.run(self._ended(*given, "--toy", "--json", str(json_file), temporary=folder))
        assert ended.status == 0, ended.output + ended.errors
        assert list(folder.glob("tao-bench-*")) == []
        return ToyRun(json_file.read_bytes(), folder)

    async def _ended(self, *given: str, temporary: Path) -> Ended:
        async with forked_scenario(*given, env={"TMPDIR": str(temporary)}) as scenario:
            self._under_way.add(scenario)
            try:
                if self._closed:
                    scenario.interrupt()
                async with asyncio.timeout(_SECONDS):
                    return await scenario.ended()
            except TimeoutError:
                scenario.interrupt()
                await scenario.ended()
                raise AssertionError(f"{' '.join(given)}: not over after {_SECONDS:g} s") from None
            finally:
                self._under_way.discard(scenario)
