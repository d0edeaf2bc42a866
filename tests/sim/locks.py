"""The lock files of the simulated processes, beneath the product's own `tao.replication.locks.FileLocks`.

A lock ends with the process that holds it, and a process that is paused keeps its locks, as with the files of an
operating system.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.sim.loop import CURRENT, Process, SimLoop


@dataclass(slots=True)
class _File:
    """One lock file. ``holders``: descriptor → whether it holds the lock exclusively."""

    touched_ns: int = 0
    holders: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open file of a process."""

    process: Process
    name: str
    number: int
    file: _File


class LockTable:
    """All lock files of one simulated machine."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop: Final = loop
        self.files: Final[dict[tuple[str, int], _File]] = {}
        self.opened: Final[dict[int, _Opened]] = {}
        self.last_descriptor = 0

    def release(self, process: Process) -> None:
        """Close all files of a process that has ended."""
        for descriptor, opened in list(self.opened.items()):
            if opened.process is process:
                self.close(descriptor)

    def close(self, descriptor: int) -> None:
        """Close one file."""
        opened = self.opened.pop(descriptor, None)
        if opened is not None:
            opened.file.holders.pop(descriptor, None)


class SimLockFiles:
    """Replaces `tao.replication.locks.LockFiles`."""

    def __init__(self, table: LockTable, _: Path) -> None:
        self._table: Final = table

    def newest(self, name: str) -> int:
        return max((number for of, number in self._table.files if of == name), default=0)

    def open(self, name: str, number: int, *, exclusive: bool) -> int:
        table, process = self._table, CURRENT.get()
        assert process is not None, "only simulated processes hold locks"
        file = table.files.setdefault((name, number), _File())
        table.last_descriptor += 1
        table.opened[table.last_descriptor] = _Opened(process, name, number, file)
        return table.last_descriptor

    def create(self, name: str, number: int) -> int | None:
        if (name, number) in self._table.files:
            return None
        return self.open(name, number, exclusive=True)

    def remove(self, name: str, number: int) -> None:
        self._table.files.pop((name, number), None)

    def lock(self, descriptor: int, *, exclusive: bool) -> bool:
        holders = self._table.opened[descriptor].file.holders
        if any(exclusive or held_exclusively for held_exclusively in holders.values()):
            return False
        holders[descriptor] = exclusive
        return True

    def touched_ns(self, descriptor: int) -> int:
        return self._table.opened[descriptor].file.touched_ns

    def touch(self, descriptor: int) -> None:
        self._table.opened[descriptor].file.touched_ns = int(self._table.loop.now * 1e9)

    def close(self, descriptor: int) -> None:
        self._table.close(descriptor)
