"""An audit log in a folder of the test, and its records as they stand in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tao.observability.audit_log import AuditLog, AuditSettings
from tao.observability.logs import logger
from tao.serving.audit import AuditTrail
from tests.rigs.pacing import until

UNIX_MS = 1_700_000_000_000


@dataclass
class AuditRig:
    """``trail`` makes the records; ``now`` is the time that it gives them, in milliseconds."""

    path: Path
    log: AuditLog
    now: int = UNIX_MS

    def __post_init__(self) -> None:
        self.trail = AuditTrail(self.log, "leader-1", lambda: self.now)

    async def records(self) -> list[dict[str, Any]]:
        """Return the records written so far, denials of the last second among them."""
        self.trail.record_denials()
        await until(lambda: not self.log.waiting)
        return read_records(self.path)

    async def shown(self) -> list[tuple[str, str, int]]:
        """Return caller, action and outcome of each record."""
        return [
            (each["actor"]["user"]["name"], each["api"]["operation"], each["status_id"])
            for each in await self.records()
        ]


@contextmanager
def audit_rig(folder: Path, **settings: Any) -> Iterator[AuditRig]:
    """Give an open audit log, and close it at the end."""
    path = folder / "audit.jsonl"
    log = AuditLog(AuditSettings(path=path, **settings), logger("test"))
    log.open()
    try:
        yield AuditRig(path, log)
    finally:
        log.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
