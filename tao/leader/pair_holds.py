"""A pair of ids that one write holds, the copy of its edges that is under way, and what the failure of a copy means for
the writer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from tao.leader.remote_inverses import Deposed, unknown_outcome_of
from tao.model.changes import ShardMessages
from tao.model.edge_states import UNSET_NODE
from tao.model.errors import OutcomeUnknown, RetryableError, TaoError
from tao.model.graph import EdgeKey
from tao.model.rows import IntentRow
from tao.model.writes import Coordinator, SettleEdge, WriteOutcome


class PairCopy(NamedTuple):
    """A copy of the coordinator's rows to the far side of a pair."""

    intent: IntentRow
    settles: tuple[SettleEdge, ...]
    coordinator: Coordinator

    def covers(self, intent: IntentRow) -> bool:
        """Return whether the copy holds the edges of all types of the intent."""
        return set(intent.atypes) <= set(self.intent.atypes)


class Settlement(NamedTuple):
    """A settlement of a pair that is in progress: the types of edges, as seen from the smaller id, and its messages."""

    atypes: frozenset[int]
    messages: asyncio.Future[list[ShardMessages]]


class PairHold:
    """A pair that one write holds.

    ``deadline``: the time until which the writer waits. ``needs_far_side``: the writer named the far side, so the
    write must not be acknowledged before that side has it. ``release_at``: keep the pair held until this time,
    because a copy may still be in progress; ``timer``: fires then. ``copy``: the last copy that was made.
    ``attempts``: how many tries to send it again are in progress. ``unknown_outcome``: the error of a copy that may
    have been written, whatever the outcome of later copies. ``raised``: by the key at either end, the outcome of
    what the coordinator has joined that the far side knew of an edge with states. A copy may have edges of several
    types."""

    __slots__ = (
        "attempts",
        "copy",
        "deadline",
        "is_released",
        "needs_far_side",
        "raised",
        "release_at",
        "timer",
        "unknown_outcome",
    )

    def __init__(self, deadline: float, *, needs_far_side: bool = False) -> None:
        self.deadline = deadline
        self.needs_far_side = needs_far_side
        self.release_at: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.copy: PairCopy | None = None
        self.attempts = 0
        self.is_released = False
        self.unknown_outcome: OutcomeUnknown | None = None
        self.raised: dict[EdgeKey, WriteOutcome] = {}


@contextmanager
def before_first_commit(hold: PairHold) -> Iterator[None]:
    """Translate failures of a copy before which nothing is committed.

    A refused last attempt does not mean that nothing was written if an earlier attempt has an unknown outcome. A
    deposed coordinator reports that it is deposed; its successor completes the write."""
    try:
        yield
    except Deposed:
        raise
    except RetryableError as error:
        unknown = unknown_outcome_of(error) or hold.unknown_outcome
        if unknown is None:
            raise
        raise unknown from error


@contextmanager
def after_first_commit() -> Iterator[None]:
    """Translate failures of the second of two commits: they no longer mean that nothing was written."""
    try:
        yield
    except OutcomeUnknown:
        raise
    except TaoError as error:
        raise OutcomeUnknown(
            f"the edge was added under its new type and still exists under the old one ({error.message}); "
            "repeat the change"
        ) from error


def after_raise(outcome: WriteOutcome, raised: WriteOutcome) -> WriteOutcome:
    """Return the outcome of an operation on an edge of which the far side knew more. Only a newer operation, and not
    the state of a node, supersedes it."""
    assert outcome.registers is not None, "an operation on an edge with states has registers"
    assert raised.registers is not None, "a join has a result"
    is_newer = raised.registers.with_id2(UNSET_NODE) != outcome.registers.with_id2(UNSET_NODE)
    superseded = outcome.superseded or is_newer
    return msgspec.structs.replace(outcome, registers=raised.registers, node=raised.node, superseded=superseded)
