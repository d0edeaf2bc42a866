"""The share of the full work that properties and simulations do, in percent.

``TAO_TEST_EFFORT`` sets it. The default keeps a run of all tests within minutes; `make thorough` does four times the
full work.
"""

from __future__ import annotations

import os
from typing import Final

EFFORT_PERCENT: Final = int(os.environ.get("TAO_TEST_EFFORT", "15"))


def examples(full: int) -> int:
    """Return the number of examples, seeds or rounds to try, of ``full`` at an effort of 100; at least 5."""
    return max(5, full * EFFORT_PERCENT // 100)
