"""What a leader asks of the leaders of other shards (DESIGN.md §6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tao.model.changes import ShardMessages
from tao.model.errors import Fenced, OutcomeUnknown, RetryableError, TaoError
from tao.model.rows import IntentRow
from tao.model.writes import Coordinator, SettleEdge


class Deposed(Fenced):
    """This leader coordinates the pair no more: its shard has changed hands."""


class Undecided(OutcomeUnknown):
    """The leader of the other side says that it does not know what became of its commit. It writes nothing more of the
    shard before it, or another, has taken it anew, and whoever takes a shard waits for what holds its row: by then that
    commit has happened or never will. So no copy that is sent later can be overtaken by this one."""


def may_be_under_way(error: TaoError) -> bool:
    """Whether a copy that ended so may yet be written, after one that is sent later."""
    return not isinstance(error, (RetryableError, Undecided))


def unknown_of(error: TaoError) -> OutcomeUnknown | None:
    """What says that a copy may have been written: the error, or that of an earlier try, which is its cause then."""
    return next((each for each in (error, error.__cause__) if isinstance(each, OutcomeUnknown)), None)


class OtherLeaders(Protocol):
    """Calls to the leaders of other shards."""

    async def settle(
        self, shard: int, settles: Sequence[SettleEdge], coordinator: Coordinator, timeout_seconds: float
    ) -> list[ShardMessages]:
        """Have the shard's leader make these edges so, on behalf of ``coordinator``. Returns what its caches were told.
        Raises `Deposed` when the coordinator has been deposed, and other `TaoError`: `OutcomeUnknown` that is not
        `Undecided` when a copy may still be under way; of earlier tries `unknown_of` tells."""

    async def hand_over(self, intent: IntentRow, timeout_seconds: float) -> list[ShardMessages]:
        """Have the leader that has taken the coordinating shard over settle the pair. Returns what its caches were
        told. Raises `Deposed` when nobody else is to have it, and other `TaoError` when that is not done in time."""
