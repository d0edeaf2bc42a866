"""How a write transaction ends otherwise than well (DESIGN.md §3, §6)."""

from __future__ import annotations

from tao.model.errors import OutcomeUnknown, Overloaded, TaoError
from tao.model.ports import Transaction


class ShardLost(Overloaded):
    """A shard of the batch is not this leader's (any more); the others' writes are planned again without it."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard


async def commit_or_unknown(transaction: Transaction) -> None:
    """Commit. What fails in COMMIT, however it fails, may have happened: raises `OutcomeUnknown`."""
    try:
        await transaction.commit()
    except TaoError:
        raise
    except Exception as error:
        raise OutcomeUnknown(f"{type(error).__name__} in COMMIT: {error}") from error
