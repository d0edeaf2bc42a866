"""The collector of Python's garbage in a load process: as the product's servers have it, for every contestant alike.

A load process keeps a graph's plan, ids and prepared requests for as long as it lives, and makes thousands of tasks
that reference counting frees. Python's own thresholds have it look at all of that again and again to find nothing: of
ten thousand awaiters that ask at one moment that was half of the CPU time, and part of what they waited.
"""

from __future__ import annotations

import gc
from typing import Final

from tao.runtime.process import ProcessSettings

_SERVERS: Final = ProcessSettings()


def settle_collector() -> None:
    """Before something is measured: no collection looks at what is there now again, and what comes is looked at as
    rarely as in a server (`ProcessSettings.gc_allocations`). The garbage that a measurement finds is its own."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_SERVERS.gc_allocations, _SERVERS.gc_generation_ratio, _SERVERS.gc_generation_ratio)
