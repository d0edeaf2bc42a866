# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""The compiled implementation of `tao.cache.answers_python`, which specifies it: the same answers to the same queries.

It reads the columns where they lie in the block and makes one bytes object, the answer. A block that is not whole, which
`tao.model.edge_block.check_block` would refuse, is a `ValueError` where an answer would have to read beyond it.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    SHARD_SHIFT = 47
    HEADER_BYTES = 24
    COUNT_BYTES = 16
    OBJECT_BYTES = 12
    COMPLETE = 1
    HAS_DATA = 4
    PREFIX = 8
    USE_CREDIT = 2
    MOST_CREDIT = 30

cdef uint64_t MAX_TIME = (<uint64_t>1 << 63) - 1
cdef uint64_t AT_POSITION = <uint64_t>1 << 63

cdef struct Header:
    uint64_t version
    uint64_t count
    uint32_t n
    uint32_t flags

cdef struct Block:
    Header header
    const unsigned char *id2s
    const unsigned char *times
    const unsigned char *ends
    const unsigned char *data
    Py_ssize_t data_bytes


cdef int opened(bytes block, Block *found) except -1:
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(block)
    cdef Py_ssize_t left = PyBytes_GET_SIZE(block) - HEADER_BYTES
    if left < 0:
        raise ValueError("an edge block ends within its header")
    memcpy(&found.header, at, HEADER_BYTES)
    cdef Py_ssize_t n = found.header.n
    found.id2s = at + HEADER_BYTES
    found.times = found.id2s + 8 * n
    found.ends = found.times + 8 * n
    left -= 16 * n
    if found.header.flags & HAS_DATA:
        left -= 4 * n
        found.data = found.ends + 4 * n
    else:
        found.data = found.ends
    found.data_bytes = left
    if left < 0:
        raise ValueError("an edge block ends within its columns")
    return 0


cdef inline uint64_t word(const unsigned char *column, uint64_t index) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, column + 8 * index, 8)
    return value


cdef inline uint32_t end_of(Block *block, uint64_t index) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, block.ends + 4 * index, 4)
    return value


cdef uint64_t first_not_newer(Block *block, uint64_t time) noexcept nogil:
    cdef uint64_t low = 0, high = block.header.n, middle
    while low < high:
        middle = (low + high) // 2
        if word(block.times, middle) > time:
            low = middle + 1
        else:
            high = middle
    return low


cdef uint64_t first_after(Block *block, uint64_t time, uint64_t id2) noexcept nogil:
    cdef uint64_t low = 0, high = block.header.n, middle, found
    while low < high:
        middle = (low + high) // 2
        found = word(block.times, middle)
        if found < time or (found == time and word(block.id2s, middle) < id2):
            high = middle
        else:
            low = middle + 1
    return low


cdef bytes no_edges(uint64_t version, uint64_t count, uint32_t flags):
    cdef Header header = Header(version, count, 0, flags)
    return PyBytes_FromStringAndSize(<char *>&header, HEADER_BYTES)


cdef bytes part(bytes whole, Block *block, uint64_t start, uint64_t stop, uint32_t flags):
    """Return the edges at ``start`` to ``stop - 1``, which are not all of them; as `tao.model.edge_block.slice_block`."""
    cdef uint64_t n = block.header.n
    cdef uint32_t first = 0, last = 0, shifted
    cdef Header header = block.header
    cdef bytes made
    cdef unsigned char *at
    cdef uint64_t index
    stop = min(stop, n)
    start = min(start, stop)
    cdef size_t m = stop - start
    if block.header.flags & HAS_DATA and m:
        first = end_of(block, start - 1) if start else 0
        last = end_of(block, stop - 1)
        if last < first or last > <uint64_t>block.data_bytes:
            raise ValueError("the data offsets of an edge block are not in order")
    header.n = <uint32_t>m
    header.flags = flags & ~<uint32_t>HAS_DATA
    cdef size_t size = HEADER_BYTES + 16 * m
    if last > first:
        header.flags |= HAS_DATA
        size += 4 * m + (last - first)
    made = PyBytes_FromStringAndSize(NULL, size)
    at = <unsigned char *>PyBytes_AS_STRING(made)
    memcpy(at, &header, HEADER_BYTES)
    at += HEADER_BYTES
    memcpy(at, block.id2s + 8 * start, 8 * m)
    at += 8 * m
    memcpy(at, block.times + 8 * start, 8 * m)
    at += 8 * m
    if last > first:
        if first:
            for index in range(start, stop):
                shifted = end_of(block, index) - first
                memcpy(at, &shifted, 4)
                at += 4
        else:
            memcpy(at, block.ends + 4 * start, 4 * m)
            at += 4 * m
        memcpy(at, block.data + first, last - first)
    return made


cdef inline bytes from_position(bytes whole, Block *block, uint64_t start, uint64_t stop):
    if not block.header.n or (not start and stop >= block.header.n):
        return whole
    return part(whole, block, start, stop, 0 if start else PREFIX)


cdef inline bint ends_within(Block *block, uint64_t low) noexcept nogil:
    return block.header.n > 0 and low > word(block.times, block.header.n - 1)


cdef inline uint64_t added(uint64_t one, uint64_t other) noexcept nogil:
    return one + other if one + other >= one else ~<uint64_t>0


cdef object range_of(bytes block, uint64_t pos, uint64_t limit):
    cdef Block held
    opened(block, &held)
    if not held.header.flags & COMPLETE and added(pos, limit) > held.header.n:
        return no_edges(held.header.version, held.header.count, 0) if pos >= held.header.count else None
    return from_position(block, &held, pos, added(pos, limit))


cdef object time_range_of(bytes block, uint64_t high, uint64_t low, uint64_t limit, uint64_t start):
    cdef Block held
    cdef uint64_t first, stop
    opened(block, &held)
    if start and start < AT_POSITION:
        first = first_after(&held, high, start)
    else:
        first = 0 if high >= MAX_TIME else first_not_newer(&held, high)
        if start:
            first = added(first, start - AT_POSITION)
    stop = max(first, first_not_newer(&held, low - 1) if low else held.header.n)
    if stop - first < limit and not held.header.flags & COMPLETE and not ends_within(&held, low):
        return no_edges(held.header.version, held.header.count, 0) if first >= held.header.count else None
    return from_position(block, &held, first, min(stop, added(first, limit)))


cdef object edge_of(bytes block, uint64_t id2, uint64_t high, uint64_t low):
    cdef Block held
    cdef uint64_t at = 0, n, time
    opened(block, &held)
    n = held.header.n
    while at < n and word(held.id2s, at) != id2:
        at += 1
    if at == n and not held.header.flags & COMPLETE and not ends_within(&held, low):
        return None
    if at < n and (low or high < MAX_TIME):
        time = word(held.times, at)
        if time > high or time < low:
            at = n
    if n == (at < n):
        return block
    if at == n:
        return no_edges(held.header.version, held.header.count, 0)
    return part(block, &held, at, at + 1, 0)


cdef object beyond_of(bytes count_value, uint64_t pos):
    cdef uint64_t words[2]
    if PyBytes_GET_SIZE(count_value) != COUNT_BYTES:
        raise ValueError("a count value has 16 bytes")
    memcpy(words, PyBytes_AS_STRING(count_value), COUNT_BYTES)
    if not words[1]:
        return no_edges(words[0], 0, COMPLETE | PREFIX)
    return no_edges(words[0], words[1], 0) if pos >= words[1] else None


def range_answer(bytes block not None, uint64_t pos, uint64_t limit):
    return range_of(block, pos, limit)


def time_range_answer(bytes block not None, uint64_t high, uint64_t low, uint64_t limit, uint64_t start=0):
    return time_range_of(block, high, low, limit, start)


def edge_answer(bytes block not None, uint64_t id2, uint64_t high, uint64_t low):
    return edge_of(block, id2, high, low)


def beyond_answer(bytes count_value not None, uint64_t pos):
    return beyond_of(count_value, pos)


cdef bint is_older(bytes value, uint64_t minimum) noexcept:
    cdef uint64_t version = 0
    if not minimum:
        return False
    memcpy(&version, PyBytes_AS_STRING(value), min(PyBytes_GET_SIZE(value), 8))
    return version < minimum


def has_foreign_number(list numbers, bytes known):
    """See `tao.cache.answers_python.has_foreign_number`."""
    cdef const unsigned char *bits = <const unsigned char *>PyBytes_AS_STRING(known)
    cdef uint64_t size = PyBytes_GET_SIZE(known)
    cdef uint64_t number
    for each in numbers:
        number = each
        if (number >> 3) >= size or not (bits[number >> 3] >> (number & 7)) & 1:
            return True
    return False


def has_foreign_type(list values, bytes otypes):
    """See `tao.cache.answers_python.has_foreign_type`."""
    cdef const unsigned char *bits = <const unsigned char *>PyBytes_AS_STRING(otypes)
    cdef uint64_t size = PyBytes_GET_SIZE(otypes)
    cdef uint32_t otype
    for value in values:
        if value is None or PyBytes_GET_SIZE(<bytes>value) < OBJECT_BYTES:
            continue
        memcpy(&otype, PyBytes_AS_STRING(<bytes>value) + 8, 4)
        if (otype >> 3) >= size or not (bits[otype >> 3] >> (otype & 7)) & 1:
            return True
    return False


cdef class Hits:
    """See `tao.cache.answers_python.Hits`."""

    cdef dict shards
    cdef bytearray credit

    def __cinit__(self, dict shards not None, bytearray credit not None):
        self.shards = shards
        self.credit = credit

    cdef object shard_of(self, uint64_t key):
        return self.shards.get(key >> SHARD_SHIFT)

    cdef bytes used(self, bytes value, uint64_t key, uint64_t minimum):
        """Return the value, if there is one that is new enough, and credit its use; ``key``: id and type together."""
        if value is None or not PyBytes_GET_SIZE(value) or is_older(value, minimum):
            return None
        self.use(key)
        return value

    cpdef void use(self, uint64_t key) noexcept:
        cdef unsigned char *slot = <unsigned char *>PyByteArray_AS_STRING(self.credit)
        slot += key % <uint64_t>PyByteArray_GET_SIZE(self.credit)
        if slot[0] < MOST_CREDIT:
            slot[0] += USE_CREDIT

    def object(self, id, uint64_t minimum=0):
        shard = self.shard_of(id)
        return None if shard is None else self.object_in(shard, id, minimum)

    cdef bytes object_in(self, shard, id, uint64_t minimum):
        cdef bytes value = (<dict?>shard.objects).get(id)
        if (value is None or not PyBytes_GET_SIZE(value)) and shard.other_objects:
            value = shard.held_object(id)
        return self.used(value, <uint64_t>id, minimum)

    def objects(self, ids):
        cdef list values = []
        for key in ids:
            shard = self.shard_of(key)
            values.append(None if shard is None else self.object_in(shard, key, 0))
        return values

    cdef bytes list_in(self, shard, id1, atype):
        cdef dict of_type = (<dict?>shard.lists).get(atype)
        return None if of_type is None else of_type.get(id1)

    cdef bytes count_in(self, shard, id1, atype):
        cdef bytes value
        counts = (<dict?>shard.counts).get(atype)
        if counts is None:
            return None
        value = counts.get(id1)
        if value is None or not PyBytes_GET_SIZE(value):
            value = self.list_in(shard, id1, atype)
            if value is not None and PyBytes_GET_SIZE(value) > COUNT_BYTES:
                value = PyBytes_FromStringAndSize(PyBytes_AS_STRING(value), COUNT_BYTES)
        return value

    cdef object beyond(self, shard, id1, atype, uint64_t pos, uint64_t minimum):
        """Answer from the count alone."""
        cdef bytes value = self.used(self.count_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)
        return None if value is None else beyond_of(value, pos)

    def count(self, id1, atype, uint64_t minimum=0):
        shard = self.shard_of(id1)
        if shard is None:
            return None
        return self.used(self.count_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)

    def block(self, id1, atype, uint64_t minimum=0):
        shard = self.shard_of(id1)
        if shard is None:
            return None
        return self.used(self.list_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)

    def range(self, id1, atype, uint64_t pos, uint64_t limit, uint64_t minimum=0):
        cdef bytes block
        shard = self.shard_of(id1)
        if shard is None:
            return None
        block = self.used(self.list_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)
        return self.beyond(shard, id1, atype, pos, minimum) if block is None else range_of(block, pos, limit)

    def time_range(
        self, id1, atype, uint64_t high, uint64_t low, uint64_t limit, uint64_t minimum=0, uint64_t start=0
    ):
        cdef bytes block
        shard = self.shard_of(id1)
        if shard is None:
            return None
        block = self.used(self.list_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)
        if block is None:
            return self.beyond(shard, id1, atype, start - AT_POSITION if start >= AT_POSITION else 0, minimum)
        return time_range_of(block, high, low, limit, start)

    def edge(self, id1, atype, uint64_t id2, uint64_t high, uint64_t low, uint64_t minimum=0):
        cdef bytes block
        shard = self.shard_of(id1)
        if shard is None:
            return None
        block = self.used(self.list_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)
        return self.beyond(shard, id1, atype, 0, minimum) if block is None else edge_of(block, id2, high, low)
