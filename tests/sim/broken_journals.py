"""Journals, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from tao.journal.applier import Applier
from tao.journal.copies import Copies
from tao.journal.entries import Entry
from tao.journal.schedule import Batch, LoadPage
from tao.journal.store import JournalStore
from tao.model.errors import TaoError


@contextmanager
def accepted_before_it_is_synced() -> Iterator[None]:
    """Accept what is only in a follower's memory and reaches its disk later."""
    append = JournalStore.append

    def append_late(store: JournalStore, entries: Sequence[Entry], stored: Callable[[TaoError | None], None]) -> None:
        store._loop.call_later(random.random() * 20.0, append, store, entries, lambda _: None)
        store._loop.call_soon(stored, None)

    with patch.multiple(JournalStore, append=append_late):
        yield


@contextmanager
def entry_removed_before_its_outcome() -> Iterator[None]:
    """Remove an accepted write from its journal when an attempt begins."""
    begin = Applier._begin

    def begin_forgetting(applier: Applier, found: Batch | LoadPage) -> None:
        if isinstance(found, Batch):
            applier._store.remove(found.entries)
        begin(applier, found)

    with patch.multiple(Applier, _begin=begin_forgetting):
        yield


def accepted_without_a_copy() -> AbstractContextManager[None]:
    """Accept a write although no other follower has taken a copy of it."""

    async def accept_all(*_: object) -> None:
        """Take every refusal for an answer."""

    return patch.multiple(Copies, _copy=accept_all)


@contextmanager
def copy_deleted_before_it_is_applied() -> Iterator[None]:
    """Have the copy of an accepted write deleted when an attempt begins."""
    begin = Applier._begin

    def begin_forgetting(applier: Applier, found: Batch | LoadPage) -> None:
        if isinstance(found, Batch):
            applier._store.on_gone([entry.number for entry in found.entries])
        begin(applier, found)

    with patch.multiple(Applier, _begin=begin_forgetting):
        yield
