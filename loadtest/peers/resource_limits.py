"""Limits of memory and disk operations for database servers, through control groups of the kernel (cgroups).

Each server has groups of its own, which it enters before it reads or writes its data: the pages that the kernel caches
for it then count as its memory. The limits are set later (`ServerGroups.limit`), once the data is loaded, to the memory
that its processes hold and a fixed rest. Both versions of cgroups are used as they are mounted. Version 1 does not
limit writes that the kernel delays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from loadtest.rounds import children_of

_MOUNT: Final = Path("/sys/fs/cgroup")
_REST_MB: Final = 24
"""Memory beyond what a server's processes hold: for what they still grow by, and for the kernel's pages."""
_RECLAIM_ATTEMPTS: Final = 20
_RECLAIM_SECONDS: Final = 0.25


class AppliedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What was limited of one server, and what it held then."""

    memory_mb: int | None = None
    """The limit of memory, pages that the kernel caches included; None: not limited."""
    held_mb: int | None = None
    """The part of it that its processes held when the limit was set, its buffer pool included."""
    operations_per_second: int | None = None
    """The limit of reads, and of writes, a second; None: not limited."""
    unlimited: list[str] = []
    """What could not be limited, and the reason."""


class ServerGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The control groups of one server: one for both limits in version 2, one for each in version 1."""

    memory: str | None
    disk: str | None
    is_version_2: bool
    device: str | None
    """The disk of the server's data, ``major:minor``; None for a file system without one."""
    refused: list[str] = []
    """Why there is no group, as the system said."""

    def enter(self, pid: int) -> None:
        """Put a process and its children into the groups. Raises `OSError`."""
        for group in {self.memory, self.disk} - {None}:
            members = Path(str(group)) / "cgroup.procs"
            members.write_text(str(pid))
            for child in children_of(pid):
                with suppress(ProcessLookupError):  # it has served its connection
                    members.write_text(str(child))

    def limit(self, operations_per_second: int) -> AppliedLimits:
        """Limit the server from now on, and return the limits."""
        reasons = list(self.refused)
        memory = held = operations = None
        if self.memory is not None:
            try:
                held, memory = self._limit_memory(Path(self.memory))
            except OSError as error:
                reasons.append(f"memory: {error.strerror}")
        if self.disk is not None and self.device is not None:
            try:
                self._limit_disk(Path(self.disk), operations_per_second)
                operations = operations_per_second
            except OSError as error:
                reasons.append(f"disk operations: {error.strerror}")
        elif self.device is None:
            reasons.append("disk operations: the data is on no disk of this machine")
        return AppliedLimits(memory_mb=memory, held_mb=held, operations_per_second=operations, unlimited=reasons)

    def _limit_memory(self, group: Path) -> tuple[int, int]:
        """Return the megabytes held, and the limit. Raises `OSError`."""
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        held = int(stat["anon" if self.is_version_2 else "rss"]) + int(stat.get("shmem", 0))
        limit = held + (_REST_MB << 20)
        file = group / ("memory.max" if self.is_version_2 else "memory.limit_in_bytes")
        for last in (False,) * (_RECLAIM_ATTEMPTS - 1) + (True,):
            try:
                file.write_text(str(limit))
                break
            except OSError:  # pages that are being written cannot be reclaimed yet
                if last:
                    raise
                time.sleep(_RECLAIM_SECONDS)
        return held >> 20, limit >> 20

    def _limit_disk(self, group: Path, operations_per_second: int) -> None:
        if self.is_version_2:
            (group / "io.max").write_text(f"{self.device} riops={operations_per_second} wiops={operations_per_second}")
            return
        for name in ("read", "write"):
            file = group / f"blkio.throttle.{name}_iops_device"
            file.write_text(f"{self.device} {operations_per_second}")


@contextmanager
def server_groups(name: str, data: Path) -> Iterator[ServerGroups]:
    """Make the groups of a server whose data is in this folder, and remove them; its processes must have ended by then.

    A system that refuses gives no groups, and the reasons."""
    is_version_2 = (_MOUNT / "cgroup.controllers").exists()
    own, made, refused = f"tao-loadtest-{os.getpid()}-{name}", dict[str, Path](), list[str]()
    places = {"memory": _MOUNT, "io": _MOUNT} if is_version_2 else {
        "memory": _MOUNT / "memory", "io": _MOUNT / "blkio"
    }  # fmt: skip
    for controller, place in places.items():
        try:
            if is_version_2:
                (place / "cgroup.subtree_control").write_text(f"+{controller}")
            elif not place.is_dir():
                raise FileNotFoundError(0, f"{place} is not mounted")
            (place / own).mkdir(exist_ok=is_version_2)
        except OSError as error:
            refused.append(f"{controller}: {error.strerror}")
        else:
            made[controller] = place / own
    try:
        yield ServerGroups(
            memory=_text(made, "memory"),
            disk=_text(made, "io"),
            is_version_2=is_version_2,
            device=disk_of(data),
            refused=refused,
        )
    finally:
        for group in set(made.values()):
            group.rmdir()


def _text(groups: Mapping[str, Path], controller: str) -> str | None:
    group = groups.get(controller)
    return None if group is None else str(group)


def disk_of(folder: Path) -> str | None:
    """Return the disk of a folder's file system as ``major:minor``; None when it is on none."""
    device = folder.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not entry.exists():
        return None
    # Operations are limited for whole disks; a partition's folder lies in that of its disk.
    whole = entry.resolve().parent if (entry / "partition").exists() else entry
    return (whole / "dev").read_text().strip()
