"""Background jobs: rows of the shard that they concern, handed out to workers under leases.

A job is done page by page. After each page its worker reports the cursor at which the next one begins, so that the job
of a lost worker goes on at another from there. A page may be done twice: what a job does has to be idempotent.
"""

from __future__ import annotations

import hashlib
import re
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from tao.model.errors import InvalidArgument, TooLarge
from tao.model.ids import EPOCH_UNIX_MS, SEQUENCE_PER_MS, SHARD_SHIFT, make_id


class JobState(IntEnum):
    """The state of a job; the numbers are stored and sent. One that a worker holds is waiting, for the end of its
    lease."""

    WAITING = 0
    DONE = 1
    PARKED = 2
    """It failed `MAX_JOB_ATTEMPTS` times in a row, and waits for an operator."""
    CANCELLED = 3

    @property
    def label(self) -> str:
        """Return the name in the SDK and in commands."""
        return self.name.lower()


class JobPriority(IntEnum):
    """Which of the jobs that are due goes first; the numbers are stored and sent."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @property
    def label(self) -> str:
        """Return the name in the SDK and in commands."""
        return self.name.lower()


JOB_PRIORITIES: Final = {priority.label: priority for priority in JobPriority}
MAX_JOB_ATTEMPTS: Final = 100
"""Failures in a row after which a job is parked. With the longest delay that is a day."""
MAX_JOB_BODY_BYTES: Final = 64 << 10
"""A job says where its data is; it does not carry them."""
MAX_JOB_CURSOR_BYTES: Final = 1024
MAX_JOB_ERROR_BYTES: Final = 1024
MAX_WORKER_NAME_BYTES: Final = 255
MAX_JOB_LEASE_MS: Final = 600_000
"""The longest lease: the job of a lost worker waits for its end."""
FIRST_RETRY_MS: Final = 1_000
LAST_RETRY_MS: Final = 900_000
"""The delay after the first failure, which doubles with each further one in a row, and the longest."""

_MAX_REPEAT_SECONDS: Final = 366 * 24 * 3600
_KIND: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


class NewJob(msgspec.Struct, frozen=True):
    """A job to be inserted. ``id`` is of the shard that it concerns, and is given out as the ids of objects are.
    ``body`` is for its kind to read. ``repeat_seconds``: how long after its end it begins anew; 0: it does not."""

    id: int
    kind: str
    priority: int = JobPriority.NORMAL
    body: bytes = b""
    repeat_seconds: int = 0


class JobRow(msgspec.Struct, frozen=True):
    """A row of ``jobs``.

    ``due_unix_ms``: when it may be leased; of a leased job, the end of the lease. ``attempts``: failures since its last
    page. ``leases``: the number of its leases so far, which names the last of them. ``worker``: who holds it; empty:
    nobody. ``cursor``: where the next page begins; empty at first. ``edges``: handled so far. ``error``: of the last
    failure."""

    id: int
    kind: str
    priority: int
    state: int
    due_unix_ms: int
    attempts: int
    leases: int
    worker: str
    body: bytes
    cursor: bytes
    edges: int
    error: str
    created_unix_ms: int
    repeat_seconds: int

    def is_held(self, lease: int) -> bool:
        """Return whether this lease of the job stands. It does beyond its end until the job is leased anew."""
        return self.state == JobState.WAITING and bool(self.worker) and self.leases == lease


class PausedKind(msgspec.Struct, frozen=True, order=True):
    """A kind of jobs that is paused on a shard."""

    shard: int
    kind: str


MAX_JOB_LEASES: Final = 64
"""Jobs in one answer to a worker, of each priority, and so the most that it does side by side."""


class JobCount(NamedTuple):
    """How many jobs of a shard wait or are parked: those alike in what is counted."""

    state: int
    is_leased: bool
    is_failing: bool
    jobs: int


class JobQuery(msgspec.Struct, frozen=True):
    """Which jobs are looked for. Without ``states``, ``priorities`` or ``kinds``: any. ``due_by_unix_ms``: they have
    to be due by then; 0: whenever they are. ``is_running``: their kind has to be one that is not paused.
    ``is_failing``: they have to wait after a failure, held by no worker. ``routine_kinds``: jobs of these kinds are
    left out while they wait without a failure."""

    limit: int
    states: tuple[int, ...] = ()
    priorities: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    due_by_unix_ms: int = 0
    is_running: bool = False
    is_failing: bool = False
    routine_kinds: tuple[str, ...] = ()


def check_kind(kind: str) -> None:
    """Raise `InvalidArgument` for a text that names no kind of jobs."""
    if not _KIND.fullmatch(kind):
        raise InvalidArgument(
            f"{kind!r} is no kind of jobs: a kind is 1 to 63 of a-z, 0-9, '_', '.' and '-', and begins with a letter or"
            " digit"
        )


def retry_delay_ms(attempts: int) -> int:
    """Return how long to wait after this many failures in a row."""
    return min(FIRST_RETRY_MS << min(attempts - 1, 20), LAST_RETRY_MS)


def check_new_job(job: NewJob) -> None:
    """Raise `InvalidArgument` or `TooLarge` for a job that cannot be inserted, whatever its id is."""
    check_kind(job.kind)
    if not JobPriority.HIGH <= job.priority <= JobPriority.LOW:
        raise InvalidArgument(f"{job.priority} is no priority of a job; they are 0 (high) to {JobPriority.LOW:d} (low)")
    if len(job.body) > MAX_JOB_BODY_BYTES:
        raise TooLarge(f"the job's body is {len(job.body)} bytes; at most {MAX_JOB_BODY_BYTES} are allowed")
    if not 0 <= job.repeat_seconds <= _MAX_REPEAT_SECONDS:
        raise InvalidArgument(f"{job.repeat_seconds} s between repetitions are outside 0 … {_MAX_REPEAT_SECONDS}")


EACH_EDGE_KIND: Final = "each_edge"
EACH_OBJECT_KIND: Final = "each_object"
"""The kinds of the jobs that call a function of the application."""
NODE_STATE_KIND: Final = "node_state"
"""The kind of the jobs that move the edges of a node to the lists of their effective states."""
PURGE_KIND: Final = "purge"
"""The kind of the jobs that remove tombstones."""
FOLD_KIND: Final = "fold"
"""The kind of the jobs that fold the slots of counters."""
ROUTINE_KINDS: Final = (PURGE_KIND, FOLD_KIND)
"""The kinds of the jobs that the system adds for itself, one for each shard, and that never end."""
KINDS_OF_EVERY_WORKER: Final = (EACH_EDGE_KIND, EACH_OBJECT_KIND, FOLD_KIND, NODE_STATE_KIND, PURGE_KIND)


class NodeStateBody(msgspec.Struct, frozen=True, array_like=True):
    """The body of such a job: a node, and the types whose edges are moved. Which state the node has by now is read with
    each page. ``state_us``: of the operation that has added the job; 0: unknown."""

    id: int
    atypes: tuple[int, ...]
    state_us: int = 0


_UNUSED_MS: Final = 5 * 365 * 86_400_000
"""The first five years of the epoch of ids: no leader gives out an id of that time."""


def node_job_id(node: int, atypes: tuple[int, ...], state: int, state_us: int) -> int:
    """Return the id of the job that every attempt of an operation on a node adds: a journaled operation has one job,
    however often it is attempted. 0 for an operation without a time, which its leader stamps at each attempt."""
    if not state_us:
        return 0
    operation = msgspec.msgpack.encode((node, atypes, state, state_us))
    drawn = int.from_bytes(hashlib.blake2b(operation, digest_size=8).digest(), "big")
    unix_ms = EPOCH_UNIX_MS + 1 + drawn // SEQUENCE_PER_MS % _UNUSED_MS
    return make_id(node >> SHARD_SHIFT, unix_ms, drawn % SEQUENCE_PER_MS)
