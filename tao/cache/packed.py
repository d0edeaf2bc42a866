"""The choice between two implementations of packed counts: the compiled one, or Python where there was no compiler.

Measured on CPython 3.11 with a table of 200,000 counts: nanoseconds of a look-up that answers with encoded bytes, and
of a store; bytes of resident memory for an entry of a full table of a million (`loadtest bench --only memory`):

    where                                 look    store  bytes
    dictionary of encoded bytes            147      136    148
    NumPy, two arrays of buckets         1,330    1,280     16
    `packed_python` (bytearray, struct)  2,170    2,690     14
    `packed_core` (Cython)                  75      174     14

The standard library reaches the size but not the speed, since each of a dozen steps costs a call. NumPy saves none of
them, because a hit looks at one bucket at a time, and it would be a dependency of every server. Compiled, a count costs
no more time than in a dictionary, in an eleventh of the memory. So a build makes the compiled module where it finds a
compiler (`hatch_build.py`). The Python implementation serves everywhere else, at two microseconds a count, and is the
specification.
"""

from __future__ import annotations

from typing import Final

try:
    from tao.cache.packed_core import PackedCounts, PackedStore
except ImportError:  # built without a compiler
    from tao.cache.packed_python import PackedCounts, PackedStore  # type: ignore[assignment]

CORE: Final = "compiled" if PackedStore.__module__.endswith("_core") else "python"
"""Return the name of the implementation in use, for `tao --version` and `tao stats`."""

_BUCKET_BYTES: Final = (112, 80)
_LEAST_BUCKETS: Final = 8


def packed_store(budget: int) -> PackedStore:
    """Return a store of at most ``budget`` bytes: two thirds for counts, one third for the counts of lists without
    edges. Each part is rounded down to a power of two of buckets."""
    with_edges, without = _BUCKET_BYTES
    return PackedStore(_buckets(budget * 2 // 3, with_edges), _buckets(budget // 3, without))


def _buckets(budget: int, bucket_bytes: int) -> int:
    fit = budget // bucket_bytes
    return 0 if fit < _LEAST_BUCKETS else 1 << fit.bit_length() - 1


__all__ = ["CORE", "PackedCounts", "PackedStore", "packed_store"]
