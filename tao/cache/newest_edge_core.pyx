# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""The compiled implementation of `tao.cache.newest_edge_python`, which specifies it: the same block."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    HEADER_BYTES = 24
    COMPLETE = 1
    HAS_DATA = 4
    PREFIX = 8

cdef struct Header:
    uint64_t version
    uint64_t count
    uint32_t n
    uint32_t flags


cdef inline uint64_t word(const unsigned char *column, Py_ssize_t index) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, column + 8 * index, 8)
    return value


cdef bint is_among(uint64_t wanted, const unsigned char *column, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t index
    for index in range(n):
        if word(column, index) == wanted:
            return True
    return False


cdef bytes with_edge(
    const unsigned char *held, const Header *now, uint64_t id2, uint64_t time, bytes data, Py_ssize_t data_bytes,
    bint has_ends
):
    """Return the block of header ``now`` that has this edge before those of ``held``. ``data_bytes``: those of the held
    edges, whose ends they have only if ``has_ends``."""
    cdef Py_ssize_t n = now.n - 1, index
    cdef uint32_t size = PyBytes_GET_SIZE(data), end = 0
    cdef Py_ssize_t total = HEADER_BYTES + 16 * <Py_ssize_t>now.n
    if now.flags & HAS_DATA:
        total += 4 * <Py_ssize_t>now.n + size + data_bytes
    cdef bytes block = PyBytes_FromStringAndSize(NULL, total)
    cdef unsigned char *at = <unsigned char *>PyBytes_AS_STRING(block)
    memcpy(at, now, HEADER_BYTES)
    at += HEADER_BYTES
    held += HEADER_BYTES
    memcpy(at, &id2, 8)
    memcpy(at + 8, held, 8 * n)
    at += 8 + 8 * n
    held += 8 * n
    memcpy(at, &time, 8)
    memcpy(at + 8, held, 8 * n)
    at += 8 + 8 * n
    held += 8 * n
    if now.flags & HAS_DATA:
        memcpy(at, &size, 4)
        at += 4
        for index in range(n):
            if has_ends:
                memcpy(&end, held + 4 * index, 4)
            end += size
            memcpy(at, &end, 4)
            at += 4
            end -= size
        if has_ends:
            held += 4 * n
        memcpy(at, PyBytes_AS_STRING(data), size)
        memcpy(at + size, held, data_bytes)
    return block


def with_newest(bytes block, change, Py_ssize_t limit):
    """See `tao.cache.newest_edge_python.with_newest`."""
    cdef const unsigned char *held = <const unsigned char *>PyBytes_AS_STRING(block)
    cdef Py_ssize_t n, data_bytes = PyBytes_GET_SIZE(block) - HEADER_BYTES
    cdef Header now
    cdef uint64_t id2, time, first
    cdef tuple put = change.put
    cdef bytes data
    if len(put) != 1 or change.gone or data_bytes < 0:
        return b""
    memcpy(&now, held, HEADER_BYTES)
    n = now.n
    cdef bint has_ends = now.flags & HAS_DATA
    data_bytes -= 20 * n if has_ends else 16 * n
    if n >= limit or data_bytes < 0:
        return b""
    edge = put[0]
    data = <bytes?>edge.data
    try:
        id2, time = edge.id2, edge.time
        now.version, now.count = change.after, change.count
    except OverflowError:
        return b""
    if <uint64_t>n + 1 > now.count or (<uint64_t>n + 1 != now.count if now.flags & COMPLETE else not n):
        return b""
    if n:
        first = word(held + HEADER_BYTES, n)
        if time < first or (time == first and id2 < word(held + HEADER_BYTES, 0)):
            return b""
        if is_among(id2, held + HEADER_BYTES, n):
            return b""
    now.n += 1
    now.flags = PREFIX | (COMPLETE if now.n == now.count else 0) | (HAS_DATA if has_ends or data else 0)
    return with_edge(held, &now, id2, time, data, data_bytes if has_ends else 0, has_ends)
