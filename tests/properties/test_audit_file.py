"""The files of the audit log while the disk fails: their chain stays whole, and what was synced stays in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.observability.audit_log import AuditFile
from tao.observability.audit_records import AuditEvent, verify
from tests.rigs.effort import examples

MAX_BYTES = 2_000
"""Three or four records fill a file."""

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "append", "fail", "no sync", "no new file", "crash"]), st.integers(0, 2_000)),
    max_size=12,
)


@contextmanager
def failing(step: str, allowed_bytes: int) -> Iterator[None]:
    """Let the disk fail: after some bytes, at the sync, or when a file is made."""
    left = allowed_bytes
    write, opened = os.write, os.open

    def partial_write(descriptor: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[:left])
        left -= written
        return written

    def no_sync(_: int) -> None:
        raise OSError(5, "Input/output error")

    def no_new_file(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not path.exists():
            raise OSError(28, "No space left on device")
        return opened(path, flags, mode)

    replaced = {"fail": ("write", partial_write), "no sync": ("fsync", no_sync), "no new file": ("open", no_new_file)}
    with mock.patch.object(os, *replaced[step]):
        yield


def files_of(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("audit.jsonl.0*")), *folder.glob("audit.jsonl")]


@given(STEPS)
@settings(max_examples=examples(200), deadline=None)
def test_the_chain_is_whole_and_has_every_synced_record_whatever_the_disk_does(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "audit.jsonl"
        synced: list[str] = []
        file = AuditFile(path, MAX_BYTES)
        file.open()
        for number, (step, amount) in enumerate(steps):
            actions = [f"{number}.{each}" for each in range(1 + amount % 3)]
            events = [AuditEvent(time_ms=0, server="s", caller="c", action=action) for action in actions]
            if step in ("append", "crash"):
                file.append(events)
                synced += actions
            else:
                with suppress(OSError), failing(step, amount):
                    file.append(events)
                    synced += actions
            if step == "crash":  # a part of a line was written, and not synced
                file.close()
                with path.open("ab") as torn:
                    torn.write(b'{"action":"torn"'[: amount % 16])
                file = AuditFile(path, MAX_BYTES)
                file.open()
        file.append([AuditEvent(time_ms=0, server="s", caller="c", action="last")])
        file.close()
        lines = [line for each in files_of(Path(name)) for line in each.read_bytes().splitlines(keepends=True)]
        assert verify(lines, newest=file.end.hash).fault is None
        assert [json.loads(line)["api"]["operation"] for line in lines] == [*synced, "last"]
