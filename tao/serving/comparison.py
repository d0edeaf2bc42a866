"""Whether a cached entry is what the database holds: pure comparison of encoded values (DESIGN.md §15).

Versions tell *in flight* from *wrong*: an entry of the stored version must be the stored value; an older one may be
about to be corrected; a newer one may mean that the database was read first. The latter two are looked at again.
"""

from __future__ import annotations

import enum

from tao.model.edge_block import COMPLETE, PREFIX, decode_block, header
from tao.model.graph import version_of


class Verdict(enum.Enum):
    """What one comparison says."""

    EQUAL = "equal"
    BEHIND = "behind"
    """The cache holds an older version."""
    AHEAD = "ahead"
    """The cache holds a version that the database does not have."""
    DIFFERENT = "different"
    """Same version, other content: never right."""


def compare_value(cached: bytes, stored: bytes) -> Verdict:
    """For objects and counts, which have one encoding."""
    return _by_version(cached, stored) or (Verdict.EQUAL if cached == stored else Verdict.DIFFERENT)


def compare_list(cached: bytes, stored: bytes) -> Verdict:
    """``stored`` is a prefix that is at least one edge longer than ``cached``, or the whole list."""
    by_version = _by_version(cached, stored)
    if by_version is not None:
        return by_version
    _, count, n, flags = header(cached)
    _, stored_count, _, _ = header(stored)
    same = (
        count == stored_count
        and bool(flags & PREFIX)
        and bool(flags & COMPLETE) == (n == count)
        and decode_block(cached) == decode_block(stored)[:n]
    )
    return Verdict.EQUAL if same else Verdict.DIFFERENT


def _by_version(cached: bytes, stored: bytes) -> Verdict | None:
    held, have = version_of(cached), version_of(stored)
    if held == have:
        return None
    return Verdict.BEHIND if held < have else Verdict.AHEAD
