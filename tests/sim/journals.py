"""Followers' journals on simulated disks: what is accepted, what a crash leaves of it, and that all of it is made.

The product's own store runs, with its SQL. Only its thread and its file are replaced: the jobs that gather while the
disk is busy are one commit, of which a killed process leaves all or nothing behind.
"""

from __future__ import annotations

import io
import random
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Generic, Protocol, TypeVar

from tao.delivery.synced_file import GatheringThread, lock_folder, make_synced_folder, open_synced
from tao.journal.settings import JournalSettings
from tests.sim.checks import Violation
from tests.sim.loop import SimLoop
from tests.sim.substitutes import Substitution

Job = TypeVar("Job")


class _File(sqlite3.Connection):
    """A file, which outlives the processes that open it."""

    def close(self) -> None:
        """Do nothing: the next process opens the same file."""

    def discard(self) -> None:
        """Free the memory that it takes."""
        super().close()


class Machine(Protocol):
    """The part of the world that journals need."""

    @property
    def loop(self) -> SimLoop: ...

    @property
    def random(self) -> random.Random: ...

    @property
    def journals(self) -> Journals: ...


class Journals:
    """The files of all journals, by path."""

    def __init__(self) -> None:
        self._files: Final[dict[str, _File]] = {}
        self._lost: Final[list[_File]] = []
        self.may_lose = False
        """Whether the disk of one follower may still be lost before everything accepted is made."""

    def open(self, path: Path, formats: Sequence[str], max_bytes: int) -> sqlite3.Connection:
        """Replaces `tao.delivery.synced_file.open_synced`."""
        file = self._files.get(str(path))
        if file is None:
            file = sqlite3.connect(":memory:", isolation_level=None, factory=_File)
            file.executescript("".join(formats))
            self._files[str(path)] = file
        return file

    def lose(self, name: str) -> None:
        """Lose the disk of a follower that was killed: its next process begins with an empty folder."""
        for path in [path for path in self._files if Path(path).parent == Path(name)]:
            self._lost.append(self._files.pop(path))
        self.may_lose = False

    def discard(self) -> None:
        """Free the memory of all files, when nobody opens them any more."""
        for file in (*self._files.values(), *self._lost):
            file.discard()


class SimGatheringThread(Generic[Job]):
    """Replaces `tao.delivery.synced_file.GatheringThread`: without a thread, at the pace of a disk."""

    def __init__(self, world: Machine, _: str, run: Callable[[list[Job]], None], end: Callable[[], None]) -> None:
        self._world: Final = world
        self._run_jobs: Final = run
        self._end: Final = end
        self._jobs: list[Job] = []
        self._runs = self._busy = False

    def start(self) -> None:
        self._runs = True
        self._soon()

    def put(self, job: Job) -> None:
        self._jobs.append(job)
        self._soon()

    async def stop(self) -> None:
        if self._runs:
            self._sync()
            self._end()

    def _soon(self) -> None:
        if self._runs and self._jobs and not self._busy:
            self._busy = True
            chance = self._world.random.random()
            self._world.loop.call_later(0.0005 + 0.004 * chance + (0.3 * chance if chance > 0.97 else 0.0), self._sync)

    def _sync(self) -> None:
        self._busy = False
        jobs, self._jobs = self._jobs, []
        if jobs:
            self._run_jobs(jobs)


def journal_settings(name: str, pace: float, *, has_copies: bool) -> JournalSettings:
    """Return the settings of a follower's journal: pauses so short that all is made before an act is over, and batches
    and memory so small that lanes are read from disk."""
    return JournalSettings(
        folder=Path(name),
        copies=2 if has_copies else 1,
        takeover_seconds=3.0 * pace,
        max_delay_seconds=10.0 * pace,
        batch_writes=4,
        max_loaded_entries=6,
        clock_seconds=15.0 * pace,
    )


def journal_substitutes(world: Machine) -> list[Substitution]:
    """Return the substitutes of what journals use."""
    drawn = SimpleNamespace(
        token_hex=lambda count: world.random.randbytes(count).hex(),
        token_bytes=world.random.randbytes,
        randbits=random.Random(0).getrandbits,  # of its own, so that a seed keeps its faults
    )
    return [
        Substitution(GatheringThread, partial(SimGatheringThread, world)),
        Substitution(make_synced_folder, lambda _: None),
        Substitution(lock_folder, lambda _: io.BytesIO()),
        Substitution(open_synced, world.journals.open),
        Substitution(secrets, drawn),
    ]


def check_journals_calm(followers: dict[str, Any]) -> None:
    """Check that everything accepted was made, and nothing was given up. Raises `Violation`."""
    for name, follower in followers.items():
        figures = follower._journal.control.figures()
        left = {each: figures[each] for each in ("waiting", "parked") if any(figures[each].values())}
        if figures["held_copies"]:
            left["copies"] = figures["held_copies"]
        if left or figures["trouble"]:
            raise Violation("journal", f"{name} has accepted writes left: {left} {figures['trouble']}")
