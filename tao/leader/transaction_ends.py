"""How a write transaction ends otherwise than well (DESIGN.md §3, §6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tao.leader.other_leaders import Deposed, unknown_of
from tao.leader.pair_queue import Hold
from tao.model.errors import OutcomeUnknown, Overloaded, RetryableError, TaoError
from tao.model.ports import Transaction


class ShardLost(Overloaded):
    """A shard of the batch is not this leader's (any more); the others' writes are planned again without it."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard


async def commit_or_unknown(transaction: Transaction) -> None:
    """Commit. Raises what `Transaction.commit` does; what fails there in any other way may have happened, too:
    `OutcomeUnknown`."""
    try:
        await transaction.commit()
    except TaoError:
        raise
    except Exception as error:
        raise OutcomeUnknown(f"{type(error).__name__} in COMMIT: {error}") from error


@contextmanager
def first_half(hold: Hold) -> Iterator[None]:
    """A copy that nothing is committed before: that its last try was refused is no "nothing was written" where it is
    not known of an earlier one. Whoever has been deposed says so; his successor ends it."""
    try:
        yield
    except Deposed:
        raise
    except RetryableError as error:
        unknown = unknown_of(error) or hold.unknown
        if unknown is None:
            raise
        raise unknown from error


@contextmanager
def second_half() -> Iterator[None]:
    """The first of two commits has happened: a plain failure of the second is no longer "nothing was written"."""
    try:
        yield
    except OutcomeUnknown:
        raise
    except TaoError as error:
        raise OutcomeUnknown(
            f"the edge was added under its new type and stays under the old one, too ({error.message}); "
            "change it once more"
        ) from error
