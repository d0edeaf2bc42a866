"""How long a server may work at a request, of the time that whoever asked will wait (DESIGN.md §9).

Every hop keeps a margin back, for its answer to travel and for the coarse clocks of deadlines on the way. So the server
below gives up first, and what its caller gets is a typed answer that says why, instead of silence: silence is what
failure detectors take for death. Pure.
"""

from __future__ import annotations

from typing import Final

from tao.model.errors import DeadlineExceeded

MARGIN_SHARE: Final = 0.05
"""Of the time left: deadlines are chosen in proportion to distances."""

LEAST_MARGIN_SECONDS: Final = 0.005
"""A round trip within a region, and a busy loop's turn."""

MOST_MARGIN_SECONDS: Final = 0.2
"""A round trip across an ocean."""

LEAST_WORK_SECONDS: Final = 0.005
"""Less than a miss or a write takes: what has no more time left is refused instead of begun."""


def work_seconds(deadline_ms: int) -> float:
    """Of a request's ``deadline_ms`` (what its caller still waited when it was sent), the seconds to work at it.

    Raises `DeadlineExceeded` when that is too little to be worth beginning: nothing was written."""
    left = deadline_ms / 1000
    margin = min(max(MARGIN_SHARE * left, LEAST_MARGIN_SECONDS), MOST_MARGIN_SECONDS)
    if left - margin < LEAST_WORK_SECONDS:
        raise DeadlineExceeded(f"{deadline_ms} ms are too little for more than a cache hit; nothing was begun")
    return left - margin
