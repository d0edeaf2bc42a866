"""A small file system that a test can fill, and give room again. Only root can mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DISK_MB = 400


class SmallDisk:
    """The file system of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filling = folder / "filling"

    def fill(self) -> None:
        """Leave no block free."""
        descriptor = os.open(self._filling, os.O_WRONLY | os.O_CREAT)
        try:
            for size in (1 << 20, 4096):
                with suppress(OSError):
                    while True:
                        os.write(descriptor, bytes(size))
        finally:
            os.close(descriptor)

    def make_room(self) -> None:
        """Free what `fill` took."""
        self._filling.unlink()


@contextmanager
def small_disk(folder: Path, size_mb: int = DISK_MB) -> Iterator[SmallDisk]:
    """Mount a small file system at a new folder. Skips the test where that is not allowed."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system can only be mounted by root")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
