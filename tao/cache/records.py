"""The choice between two implementations of what a cache remembers beside its entries: the compiled one, or Python
where there was no compiler. `tao.cache.records_python` says what it is."""

from __future__ import annotations

try:
    from tao.cache.records_core import DepartedVersions, Ghosts, RecordQueue
except ImportError:  # built without a compiler
    from tao.cache.records_python import (  # type: ignore[assignment]
        DepartedVersions,
        Ghosts,
        RecordQueue,
    )

__all__ = ["DepartedVersions", "Ghosts", "RecordQueue"]
