"""The bounds of one read batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Bounds of one read batch."""

    max_queries: int = 10_000
    """Ten times what the SDK puts into a message. They hold the loop for some 10 ms; more would delay everybody."""

    max_part_bytes: int = 4 << 20
    """Values in one message of the answer: a quarter of the largest message, so that what is copied on the way stays
    small and the first values leave before the last are looked up."""

    max_answer_bytes: int = 32 << 20
    """Values in the whole answer, in all its parts: two messages of the largest size, half of what a peer may leave
    unread before it is cut off."""

    max_misses_at_once: int = 512
    """Queries of one batch that are fetched at a time: as many as a follower asks its leader in one
    message, so that its misses are all under way at once and those of a wild client are not."""
