"""Variants of `tests.sim.variants`: restores of a backup without one of their rules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final
from unittest.mock import patch

from tao.admin.repair import Faults
from tao.model.ids import LostTimes
from tests.sim import restores
from tests.sim.broken import Variant
from tests.sim.plans import RESTORE, RESTORE_AGAIN, RESTORE_UNPROMOTED, Shape


def epoch_not_raised() -> AbstractContextManager[object]:
    """Let a restored database go on under the version epoch that the backup has."""

    return patch.object(restores, "epoch_after", lambda _, found_epoch: found_epoch)


def ceilings_not_raised() -> AbstractContextManager[object]:
    """Let a restored database give out ids from where the backup has them."""

    return patch.object(LostTimes, "begin", lambda _, stored_unix_ms, **__: stored_unix_ms)


def restored_like_promoted() -> AbstractContextManager[object]:
    """Let a restored database begin where a promoted one would: as if only its last commits were lost."""
    begin = LostTimes.begin
    return patch.object(LostTimes, "begin", lambda lost, stored, **_: begin(lost, stored, lacks_epoch=False))


def pairs_not_repaired() -> AbstractContextManager[object]:
    """Leave half what the cut between two databases has left half."""

    async def find_nothing(*_: object, **__: object) -> Faults:
        return Faults()

    return patch.object(restores, "find_faults", find_nothing)


_LOST: Final = {RESTORE: 1}

RESTORE_VARIANTS: Final[Sequence[Variant]] = (
    Variant("restored epoch not raised", epoch_not_raised, frozenset({"1", "3", "7"}), _LOST),
    # Another caller's object may stand under an id before that caller has its answer.
    Variant("restored ceilings not raised", ceilings_not_raised, frozenset({"9", "valid"}), _LOST, first=3),
    Variant(
        "restore without a promotion begins like a promotion",
        restored_like_promoted,
        frozenset({"9"}),
        {RESTORE_UNPROMOTED: 1},
        acts=1,
    ),
    Variant(
        "second restore of a backup begins like a promotion",
        restored_like_promoted,
        frozenset({"9"}),
        {RESTORE_AGAIN: 1},
        acts=1,
        first=1,
    ),
    Variant("restored pairs not repaired", pairs_not_repaired, frozenset({"6"}), _LOST, Shape(leaders=2)),
)
