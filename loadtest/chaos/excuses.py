"""Which failed reads a fault excuses.

A read that asks for more than an answer may have to fail: while its key's master database is away, or the line between
it and the reader, nobody can prove what is critical, as fresh as a token, or fresh at all. What asks for nothing has no
such excuse, nor has a key whose master nothing happened to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

MASTER_LOST: Final = frozenset({"master_kill", "master_stop"})
LINE_CUT: Final = frozenset({"link_cut", "link_silent"})
_MASTERS_TO_SAY: Final = frozenset({"critical", "token", "max_staleness"})
"""Demands that cannot be met without the key's master database."""
AFTERMATH_SECONDS: Final = 5.0
"""After there is a master again, or a line, until everybody has found it: a probe's interval, and a busy machine."""


class Fault(msgspec.Struct, kw_only=True):
    """One fault. Seconds of the run: it struck; its healing began; what it took was there again, a master or a line;
    everything was well again. 0 where that is yet to come. ``database``: whose master it took."""

    kind: str
    victim: str
    struck: float
    database: str = ""
    healing: float = 0.0
    mended: float = 0.0
    healthy: float = 0.0


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Of a read: the reader's region, the database of its key, and the region of that database's master."""

    region: str
    database: str
    master_region: str


def excuses(fault: Fault, where: Whereabouts, began: float, demand: str, *, own_write: bool) -> bool:
    """Whether a read that demands this, from there, has to fail while this fault lasts. ``own_write``: it was refused
    because of what its client has written itself, which it attaches: a token by another name."""
    if fault.mended and began > fault.mended + AFTERMATH_SECONDS:
        return False
    if demand not in _MASTERS_TO_SAY and not own_write:
        return False
    if fault.kind in MASTER_LOST:
        return where.database == fault.database
    return fault.kind in LINE_CUT and where.region != where.master_region
