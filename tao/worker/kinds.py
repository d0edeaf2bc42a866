"""The kinds of jobs that a worker knows, and what one has to offer.

A kind does one page of a job at a time. The worker reports the page's cursor to the shard's leader before it begins the
next one. When it dies in between, another worker does that page again, so a page that is done twice must have the
effect of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from tao.client import Graph
from tao.model.errors import SettingsError


class Page(NamedTuple):
    """What one page has done. ``cursor``: where the next one begins, at most 1,024 bytes. ``edges``: how many edges or
    objects it has handled. ``done``: there is no next one."""

    cursor: bytes
    edges: int
    done: bool


class PageWaits(Exception):
    """Raised by a page that waits for something that will be back, such as a region that is cut off. The job goes on
    at ``cursor`` after ``seconds``, 900 at most, however often; meanwhile it holds no slot."""

    def __init__(self, why: str, seconds: float, cursor: bytes) -> None:
        super().__init__(why)
        self.cursor: Final = cursor
        self.seconds: Final = seconds


class JobKind(Protocol):
    """One kind of jobs."""

    @property
    def name(self) -> str:
        """Return the kind's name in the rows of jobs, settings and metrics: up to 63 of a-z, 0-9, '_', '.' and '-'."""

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """Do the page that begins at ``cursor``, which is empty at first, with at most ``limit`` edges or objects.

        ``body`` is the job's own. Whatever this raises, the page is done again from the same cursor, after a pause that
        grows; the job is parked after a hundred failures in a row. `PageWaits` is not counted."""


def kinds_by_name(kinds: Sequence[JobKind]) -> dict[str, JobKind]:
    """Return the kinds by name. Raises `SettingsError` for a name that two of them have."""
    found: dict[str, JobKind] = {}
    for kind in kinds:
        if kind.name in found:
            raise SettingsError(f"two kinds of jobs have the name {kind.name!r}")
        found[kind.name] = kind
    return found
