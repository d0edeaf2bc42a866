"""Wires a promotion or a reseeding by hand: with the topology file, its locks and the accounts of the databases.

`tao.replication` does the work; the lock of the database keeps an operator and a watcher from changing it at the same
time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tao.admin.documents import topology_file
from tao.replication.locks import FileLocks
from tao.replication.promotion import Promoter, PromotionSettings
from tao.replication.replica_seed import Reseeder

if TYPE_CHECKING:
    from tao.replication.database_copy import CopyProgress
    from tao.replication.promotion import PromotionStep
    from tao.replication.replica_seed import SeedStep
    from tao.replication.replication_set import SetAccounts


def promoter_of(
    path: Path,
    accounts: SetAccounts,
    *,
    on_step: Callable[[PromotionStep], Awaitable[None]] | None = None,
    catch_up_seconds: float | None = None,
) -> Promoter:
    """Return a promoter of the databases in a topology file.

    ``on_step`` is called before each step. ``catch_up_seconds``: how long a replica may take to catch up; None for the
    usual time."""
    settings = PromotionSettings()
    if catch_up_seconds is not None:
        settings = replace(settings, catch_up_seconds=catch_up_seconds)
    return Promoter(topology_file(path), FileLocks(path), accounts, settings, on_step=on_step)


def reseeder_of(
    path: Path,
    accounts: SetAccounts,
    *,
    on_step: Callable[[SeedStep], Awaitable[None]] | None = None,
    on_copied: Callable[[CopyProgress, int], None] | None = None,
) -> Reseeder:
    """Return a reseeder of the database servers in a topology file.

    ``on_step`` is called before each step, ``on_copied`` with what has been copied so far and the number of shards."""
    return Reseeder(
        topology_file(path),
        FileLocks(path),
        accounts,
        PromotionSettings(),
        promoter_of(path, accounts),
        on_step=on_step,
        on_copied=on_copied,
    )
