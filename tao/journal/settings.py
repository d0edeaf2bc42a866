"""The bounds of a follower's journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Size, attempts, pace and clock of a journal."""

    folder: Path | None = None
    """Folder of the journal, on a disk that outlives the process: without ``copies: 2``, accepted writes are on
    no other disk. None: the follower accepts no writes."""

    max_bytes: int = 1 << 30
    """Size of the writes held, waiting and parked; further ones are refused as overload. 1 GiB holds 3 million writes
    of 300 bytes, an hour and a half at 500 a second."""

    copies: Literal[1, 2] = 1
    """Number of followers of the tier that have a write on disk when it is accepted. With 2, writes are refused as
    NoCopy while no other follower takes a copy. Every follower of the tier needs a journal, and the same
    ``takeover_seconds``."""

    copy_seconds: float = 1.0
    """Time limit for another follower to take a copy: it must have the copy on its disk by then. The next one is asked
    after that."""

    takeover_seconds: float = 60.0
    """Time without a heartbeat of the follower that accepted writes, after which this follower makes them from its
    copies. Heartbeats are sent six times in it. For as long a follower is passed over that has not taken a copy."""

    max_copy_bytes: int = 1 << 30
    """Size of the copies kept for other followers; further ones are refused as overload."""

    high_tasks: int = 32
    """Batches of high priority that are made side by side, each of one shard. 0: none are made, and they wait."""

    normal_tasks: int = 12
    """Batches of normal priority that are made side by side."""

    low_tasks: int = 2
    """Batches of low priority that are made side by side, whatever the number of others that wait."""

    batch_writes: int = 64
    """Writes of one shard in one batch: as many as a leader commits in one transaction."""

    attempt_seconds: float = 5.0
    """Time limit of one attempt, that of an ordinary write."""

    first_delay_seconds: float = 1.0
    """How long a shard pauses after an attempt that failed and may be repeated. It doubles with every further one."""

    max_delay_seconds: float = 900.0
    """Longest such pause. A database that answers again ends the pauses of its shards at once."""

    probe_seconds: float = 1.0
    """While shards of a database pause, one write is tried this often, to notice that it answers again. Such a try does
    not count as an attempt."""

    max_attempts: int = 100
    """Attempts after which a write is parked. With the longest pauses they take a day."""

    max_loaded_entries: int = 20_000
    """Waiting writes that are held in memory too; others are read from disk when it is their turn."""

    kept_results: int = 20_000
    """Results of writes that are kept for callers who ask for them later."""

    retry_seconds: float = 1.0
    """Pause after a failure of the disk."""

    clock_seconds: float = 30.0
    """Interval between two measurements of the leaders' clocks."""

    clock_age_seconds: float = 3_600.0
    """Age above which a measurement is not used, and writes that need a time are refused."""

    alarm_seconds: float = 300.0
    """Age of the oldest waiting write above which `tao journal status` reports that writes wait for too long."""
