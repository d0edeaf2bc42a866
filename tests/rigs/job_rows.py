"""Jobs of a substitute of the database, found as the real one finds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobCount, JobQuery, JobRow, JobState, PausedKind


def select_jobs(
    rows: Iterable[JobRow], shards: Sequence[int], query: JobQuery, is_paused: Callable[[PausedKind], bool]
) -> list[JobRow]:
    """Return the jobs of these shards that are looked for without their bodies, at most ``query.limit`` of each."""

    def is_wanted(row: JobRow) -> bool:
        return (
            (not query.states or row.state in query.states)
            and (not query.priorities or row.priority in query.priorities)
            and (not query.kinds or row.kind in query.kinds)
            and (not query.due_by_unix_ms or row.due_unix_ms <= query.due_by_unix_ms)
            and (not query.is_failing or (row.attempts > 0 and not row.worker))
            and not (row.kind in query.routine_kinds and row.state == JobState.WAITING and not row.attempts)
            and not (query.is_running and is_paused(PausedKind(row.id >> SHARD_SHIFT, row.kind)))
        )

    found = sorted(filter(is_wanted, rows), key=lambda row: (row.state, row.priority, row.due_unix_ms, row.id))
    return [
        msgspec.structs.replace(row, body=b"")
        for shard in shards
        for row in [each for each in found if each.id >> SHARD_SHIFT == shard][: query.limit]
    ]


def count_jobs(rows: Iterable[JobRow], shards: Sequence[int]) -> list[JobCount]:
    """Return how many jobs of these shards wait or are parked."""
    found = Counter(
        (row.state, bool(row.worker), row.attempts > 0)
        for row in rows
        if row.id >> SHARD_SHIFT in shards and row.state in (JobState.WAITING, JobState.PARKED)
    )
    return [JobCount(*alike, jobs) for alike, jobs in found.items()]
