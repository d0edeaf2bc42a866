"""Simulated disks: what a leader's spool has written, and what a crash leaves of it.

A killed process loses what was not synced; here every crash is one of the machine. All writes that arrive while the
disk is busy form one commit, as in `tao.delivery.spool`: after a crash all of it is there or nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from tao.delivery.settings import SpoolSettings
from tao.model.delivery import SpoolMark, SpoolRow
from tao.observability.logs import Logger
from tests.sim.loop import SimLoop

_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class SpoolFile:
    """The contents of a spool's file on the disk."""

    rows: list[SpoolRow] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Sizes of the encoded rows, in bytes."""
    marks: dict[int, SpoolMark] = field(default_factory=dict)
    proofs: dict[str, int] = field(default_factory=dict)
    places: int = 0
    full: bool = False


class Machine(Protocol):
    """The part of the world that a spool needs."""

    @property
    def loop(self) -> SimLoop: ...

    @property
    def random(self) -> random.Random: ...

    @property
    def spools(self) -> dict[str, SpoolFile]: ...


class SimSpool:
    """Replaces `tao.delivery.spool.SqliteSpool`."""

    synced = True
    """Whether a commit waits for the disk. Otherwise each write reaches the disk in its own time, or never."""

    def __init__(self, world: Machine, folder: Path, settings: SpoolSettings, log: Logger) -> None:
        self._world: Final = world
        self._max_bytes: Final = settings.max_bytes
        self._file: Final = world.spools.setdefault(str(folder), SpoolFile())
        self._jobs: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._busy = False
        self._era = 0
        self._dropped: Callable[[int, str, int], None] = lambda shard, source, number: None
        self._lost: Callable[[], None] = lambda: None
        self._marks: list[SpoolMark] = []
        self.trouble = ""
        self.rows = self.bytes = self.dropped_rows = self.failures = self.set_aside = 0

    async def open(self) -> None:
        """Reopen the file as a restart does: later proofs say nothing about a shard until it is marked again."""
        file = self._file
        for shard, mark in file.marks.items():
            reached = max(mark.head, file.proofs.get(mark.source, 0)) if mark.linked else mark.head
            file.marks[shard] = SpoolMark(shard, mark.source, mark.after, reached, linked=False)
        self._marks = [file.marks[shard] for shard in sorted(file.marks)]

    async def close(self) -> None:
        """Resolve when everything written so far is stored."""
        self._commit()

    def marks(self) -> Sequence[SpoolMark]:
        return self._marks

    def on_change(self, dropped: Callable[[int, str, int], None], lost: Callable[[], None]) -> None:
        self._dropped, self._lost = dropped, lost

    def append(self, rows: Sequence[SpoolRow], marks: Sequence[SpoolMark], stored: Callable[[], None]) -> None:
        def write() -> None:
            for row in rows:
                self._file.places += 1
                self._file.rows.append(SpoolRow(row.source, row.number, row.messages, self._file.places))
                self._file.sizes.append(len(_ENCODER.encode(row.messages)))
            self.rows += len(rows)
            self._file.marks.update({mark.shard: mark for mark in marks})

        if self.synced:
            self._jobs.append((self._unless_lost(write), stored))
        else:
            self._world.loop.call_later(self._world.random.random() * 20.0, self._write_late, write)
            self._jobs.append((_nothing, stored))
        self._soon()

    def prove(self, source: str, number: int) -> None:
        def write() -> None:
            self._file.proofs[source] = number

        self._jobs.append((self._unless_lost(write), _nothing))
        self._soon()

    def read(
        self,
        shard: int,
        source: str,
        after: tuple[int, int],
        max_bytes: int,
        answer: Callable[[Sequence[SpoolRow] | None], None],
    ) -> None:
        def reply() -> None:
            if self._file.full:
                answer(None)
                return
            found = [row for row in self._file.rows if row.messages.shard == shard and row.source == source]
            found = sorted(found, key=lambda row: (row.number, row.place))
            some = [row for row in found if (row.number, row.place) > after][:3]
            answer(some)

        self._jobs.append((_nothing, reply))
        self._soon()

    def _soon(self) -> None:
        if not self._busy:
            self._busy = True
            chance = self._world.random.random()
            self._world.loop.call_later(
                0.0005 + 0.004 * chance + (0.3 * chance if chance > 0.97 else 0.0), self._commit
            )

    def _commit(self) -> None:
        self._busy = False
        jobs, self._jobs = self._jobs, []
        if self._file.full and jobs:
            self.failures += 1
            self._era += 1
            self._lost()
        else:
            for write, _ in jobs:
                write()
        self._report_dropped()
        for _, done in jobs:
            done()

    def _write_late(self, write: Callable[[], None]) -> None:
        write()
        self._report_dropped()

    def _report_dropped(self) -> None:
        dropped = self._make_room()
        for shard, source in dropped:
            self._dropped(shard, source, dropped[shard, source])

    def _unless_lost(self, write: Callable[[], None]) -> Callable[[], None]:
        """Skip a write that was issued before a loss was known: it relies on what is lost."""
        era = self._era

        def checked() -> None:
            if era == self._era:
                write()

        return checked

    def _make_room(self) -> dict[tuple[int, str], int]:
        file, dropped = self._file, dict[tuple[int, str], int]()
        above, count = sum(file.sizes) - self._max_bytes, 0
        while above > 0:
            above -= file.sizes[count]
            count += 1
        gone, file.rows, file.sizes = file.rows[:count], file.rows[count:], file.sizes[count:]
        for row in gone:
            key = row.messages.shard, row.source
            dropped[key] = max(row.number, dropped.get(key, 0))
        for (shard, source), number in dropped.items():
            mark = file.marks.get(shard)
            if mark is not None and mark.source == source and mark.after < number:
                file.marks[shard] = SpoolMark(shard, source, number, mark.head, mark.linked)
        self.dropped_rows += len(gone)
        return dropped


def _nothing() -> None:
    """Do nothing."""
