"""Variants of `tests.sim.variants`: restores of a backup without one of their rules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final
from unittest.mock import patch

from tao.admin.repair import Faults
from tao.admin.restore import DatabaseRestore, FirstNumbers, numbers_after
from tests.sim import restores
from tests.sim.broken import Variant
from tests.sim.plans import RESTORE, Shape


def epoch_not_raised() -> AbstractContextManager[object]:
    """Let a restored database go on under the version epoch that the backup has."""

    def begin(plan: DatabaseRestore, found_epoch: int, now_unix_ms: int) -> FirstNumbers:
        return numbers_after(plan, found_epoch, now_unix_ms)._replace(version_epoch=found_epoch)

    return patch.object(restores, "numbers_after", begin)


def ceilings_not_raised() -> AbstractContextManager[object]:
    """Let a restored database give out ids from where the backup has them."""

    def begin(plan: DatabaseRestore, found_epoch: int, now_unix_ms: int) -> FirstNumbers:
        return numbers_after(plan, found_epoch, now_unix_ms)._replace(lacks_ids_until_unix_ms=0)

    return patch.object(restores, "numbers_after", begin)


def pairs_not_repaired() -> AbstractContextManager[object]:
    """Leave half what the cut between two databases has left half."""

    async def find_nothing(*_: object, **__: object) -> Faults:
        return Faults()

    return patch.object(restores, "find_faults", find_nothing)


_LOST: Final = {RESTORE: 1}

RESTORE_VARIANTS: Final[Sequence[Variant]] = (
    Variant("restored epoch not raised", epoch_not_raised, frozenset({"1", "3", "7"}), _LOST),
    Variant("restored ceilings not raised", ceilings_not_raised, frozenset({"9"}), _LOST, first=3),
    Variant("restored pairs not repaired", pairs_not_repaired, frozenset({"6"}), _LOST, Shape(leaders=2)),
)
