# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""The compiled implementation of `tao.cache.answers_python`, which specifies it: the same answers to the same queries.

It reads the columns where they lie in the block and makes one bytes object, the answer. A block that is not whole, which
`tao.model.edge_block.check_block` would refuse, is a `ValueError` where an answer would have to read beyond it.
"""

from os import urandom

from tao.cache.outcomes import EdgesAnswer

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset

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
    RUN_QUERIES = 8
    SIEVE_BITS = 4  # of a hash, beyond those that choose a place in a table

cdef uint64_t MAX_TIME = (<uint64_t>1 << 63) - 1
cdef uint64_t AT_POSITION = <uint64_t>1 << 63

# Places of ids in the tables of `mark_common` depend on a secret: a caller that chose ids which share one place would
# make a query of thousands of ids quadratic.
cdef uint64_t PLACE_FACTOR = int.from_bytes(urandom(8), "little") | 1

cdef bytes EXISTS = b"\x01"
cdef bytes EXISTS_NOT = b"\x00"

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


cdef inline uint32_t place_of(uint64_t id2, int shift) noexcept nogil:
    cdef uint64_t mixed = id2 * PLACE_FACTOR
    mixed = (mixed ^ (mixed >> 32)) * <uint64_t>0x9E3779B97F4A7C15
    return <uint32_t>(mixed >> shift)


cdef bint mark_common(
    const unsigned char *few, uint64_t few_n, unsigned char *in_few,
    const unsigned char *many, uint64_t many_n, unsigned char *in_many,
) except -1:
    """Set the marks of the ids that both columns hold: hash the shorter column, and pass once over the longer one.

    Of an id that ``few`` holds twice only the first is found; the others are marked in any case, as repetitions."""
    cdef int bits = 3
    cdef uint64_t index, id2
    cdef uint32_t place, mask
    cdef uint32_t *table
    while (<uint64_t>1 << bits) < 2 * few_n:
        bits += 1
    mask = (<uint32_t>1 << bits) - 1
    table = <uint32_t *>PyMem_Malloc(<size_t>4 << bits)
    if table == NULL:
        raise MemoryError
    memset(table, 0, <size_t>4 << bits)
    for index in range(few_n):
        id2 = word(few, index)
        place = place_of(id2, 64 - bits)
        while table[place] and word(few, table[place] - 1) != id2:
            place = (place + 1) & mask
        if table[place]:
            in_few[index] = 1
        else:
            table[place] = <uint32_t>(index + 1)
    for index in range(many_n):
        id2 = word(many, index)
        place = place_of(id2, 64 - bits)
        while table[place]:
            if word(few, table[place] - 1) == id2:
                in_few[table[place] - 1] = 1
                in_many[index] = 1
                break
            place = (place + 1) & mask
    PyMem_Free(table)
    return True


cdef bytes picked(Block *block, const unsigned char *marks, uint64_t m):
    """Return the ``m`` edges whose marks are set, in list order; as `tao.model.edge_block.pick_edges`."""
    cdef uint64_t index, n = block.header.n, data_bytes = 0
    cdef uint32_t begin, end, last = 0
    cdef Header header = block.header
    cdef bytes made
    cdef unsigned char *id2s
    cdef unsigned char *ends
    cdef unsigned char *data
    if header.flags & HAS_DATA:
        for index in range(n):
            if marks[index]:
                begin, end = end_of(block, index - 1) if index else 0, end_of(block, index)
                if end < begin or end > <uint64_t>block.data_bytes:
                    raise ValueError("the data offsets of an edge block are not in order")
                data_bytes += end - begin
        if data_bytes > <uint64_t>block.data_bytes:
            raise ValueError("the data offsets of an edge block are not in order")
    header.n = <uint32_t>m
    header.flags = HAS_DATA if data_bytes else 0
    made = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + 16 * m + (4 * m + data_bytes if data_bytes else 0))
    id2s = <unsigned char *>PyBytes_AS_STRING(made)
    memcpy(id2s, &header, HEADER_BYTES)
    id2s += HEADER_BYTES
    ends = id2s + 16 * m
    data = ends + 4 * m
    for index in range(n):
        if marks[index]:
            memcpy(id2s, block.id2s + 8 * index, 8)
            memcpy(id2s + 8 * m, block.times + 8 * index, 8)
            id2s += 8
            if data_bytes:
                begin, end = end_of(block, index - 1) if index else 0, end_of(block, index)
                memcpy(data, block.data + begin, end - begin)
                data += end - begin
                last += end - begin
                memcpy(ends, &last, 4)
                ends += 4
    return made


cdef object edges_of(bytes block, const unsigned char *wanted, uint64_t m, uint64_t high, uint64_t low):
    """Answer for a column of ``m`` ids."""
    cdef Block held
    opened(block, &held)
    cdef uint64_t n = held.header.n, index, time, found = 0
    cdef unsigned char *is_known = <unsigned char *>PyMem_Malloc(m + n + 1)
    cdef unsigned char *is_found
    cdef tuple missing = ()
    if is_known == NULL:
        raise MemoryError
    try:
        is_found = is_known + m
        memset(is_known, 0, m + n)
        if m <= n:
            mark_common(wanted, m, is_known, held.id2s, n, is_found)
        else:
            mark_common(held.id2s, n, is_found, wanted, m, is_known)
        for index in range(n):
            found += is_found[index]
        if not held.header.flags & COMPLETE and not ends_within(&held, low):
            missing = tuple(dict.fromkeys([word(wanted, index) for index in range(m) if not is_known[index]]))
            if missing and not found:
                return None
        if found and (low or high < MAX_TIME):
            for index in range(n):
                if is_found[index]:
                    time = word(held.times, index)
                    if time > high or time < low:
                        is_found[index] = 0
                        found -= 1
        if found == n:
            return EdgesAnswer(block, missing)
        if not found:
            return EdgesAnswer(no_edges(held.header.version, held.header.count, 0), missing)
        return EdgesAnswer(picked(&held, is_found, found), missing)
    finally:
        PyMem_Free(is_known)


cdef inline uint32_t data_of(Block *block, uint64_t index, uint32_t *begin) except? 0xFFFFFFFF:
    """Return the size of an edge's data and set where it begins."""
    cdef uint32_t end
    begin[0] = 0
    if not block.header.flags & HAS_DATA:
        return 0
    if index:
        begin[0] = end_of(block, index - 1)
    end = end_of(block, index)
    if end < begin[0] or end > <uint64_t>block.data_bytes:
        raise ValueError("the data offsets of an edge block are not in order")
    return end - begin[0]


def merged_block(bytes one not None, bytes other not None):
    """See `tao.cache.answers_python.merged_block`."""
    cdef Block first, second
    cdef Block *taken
    opened(one, &first)
    opened(other, &second)
    cdef uint64_t n = first.header.n, m = second.header.n, i = 0, j = 0, index
    cdef uint64_t data_bytes = 0, time, their_time, id2
    cdef uint32_t begin = 0, size, last = 0
    for index in range(n):
        data_bytes += data_of(&first, index, &begin)
    for index in range(m):
        data_bytes += data_of(&second, index, &begin)
    cdef Header header = Header(second.header.version, second.header.count, <uint32_t>(n + m), HAS_DATA if data_bytes else 0)
    cdef bytes made = PyBytes_FromStringAndSize(
        NULL, HEADER_BYTES + 16 * (n + m) + (4 * (n + m) + data_bytes if data_bytes else 0)
    )
    cdef unsigned char *id2s = <unsigned char *>PyBytes_AS_STRING(made)
    memcpy(id2s, &header, HEADER_BYTES)
    id2s += HEADER_BYTES
    cdef unsigned char *ends = id2s + 16 * (n + m)
    cdef unsigned char *data = ends + 4 * (n + m)
    while i < n or j < m:
        taken = &first
        if i == n:
            taken = &second
        elif j < m:
            time, their_time = word(first.times, i), word(second.times, j)
            if time < their_time or (time == their_time and word(first.id2s, i) < word(second.id2s, j)):
                taken = &second
        if taken == &first:
            index = i
            i += 1
        else:
            index = j
            j += 1
        id2, time = word(taken.id2s, index), word(taken.times, index)
        memcpy(id2s, &id2, 8)
        memcpy(id2s + 8 * (n + m), &time, 8)
        id2s += 8
        if data_bytes:
            size = data_of(taken, index, &begin)
            memcpy(data, taken.data + begin, size)
            data += size
            last += size
            memcpy(ends, &last, 4)
            ends += 4
    return made


def possible_ids(const uint64_t[::1] words not None, const uint64_t[::1] masks not None, ids):
    """See `tao.cache.answers_python.possible_ids`."""
    cdef uint64_t size = words.shape[0], id2, mixed, mask
    cdef list found = []
    for each in ids:
        id2 = each
        mixed = (id2 ^ id2 >> 31) * <uint64_t>0x7FB5D329728EA185
        mixed = (mixed ^ mixed >> 27) * <uint64_t>0x81DADEF4BC2DD44D
        mask = masks[mixed & 4095]
        if words[(mixed >> 32) % size] & mask != mask:
            continue
        mask = masks[mixed >> 36 & 4095]
        if words[(mixed & 0xFFFFFFFF) * size >> 32] & mask == mask:
            found.append(each)
    return tuple(found)


cdef object existence_of(bytes block, uint64_t id2):
    cdef Block held
    cdef uint64_t at = 0, n
    opened(block, &held)
    n = held.header.n
    while at < n and word(held.id2s, at) != id2:
        at += 1
    if at < n:
        return EXISTS
    return EXISTS_NOT if held.header.flags & COMPLETE else None


cdef int existences_of(bytes block, const unsigned char *id2s, uint64_t m, list values) except -1:
    """Append the values of a column of ``m`` ids, by one pass over the block for all of them.

    Most ids of a long block are none of the wanted ones: a bitmap of a few bits an id, which stays in the nearest cache
    of the processor, turns them away before the table is asked."""
    cdef Block held
    opened(block, &held)
    cdef uint64_t n = held.header.n, index, id2
    cdef int bits = 3
    while (<uint64_t>1 << bits) < 2 * m:
        bits += 1
    cdef uint64_t slots = <uint64_t>1 << bits
    cdef int sieve_shift = 64 - bits - SIEVE_BITS
    # The wanted ids, their table, the first one of equal ids, the sieve, and whether each is found.
    cdef uint64_t *wanted = <uint64_t *>PyMem_Malloc(8 * m + 4 * slots + 4 * m + slots * (1 << SIEVE_BITS) // 8 + m)
    cdef uint32_t *table
    cdef uint32_t *first
    cdef unsigned char *sieve
    cdef unsigned char *is_found
    cdef uint32_t place, mask = <uint32_t>(slots - 1)
    if wanted == NULL:
        raise MemoryError
    try:
        table = <uint32_t *>(wanted + m)
        first = table + slots
        sieve = <unsigned char *>(first + m)
        is_found = sieve + slots * (1 << SIEVE_BITS) // 8
        memset(table, 0, 4 * slots)
        memset(sieve, 0, slots * (1 << SIEVE_BITS) // 8 + m)
        for index in range(m):
            id2 = wanted[index] = word(id2s, index)
            place = place_of(id2, 64 - bits)
            while table[place] and wanted[table[place] - 1] != id2:
                place = (place + 1) & mask
            if not table[place]:
                table[place] = <uint32_t>(index + 1)
            first[index] = table[place] - 1
            place = place_of(id2, sieve_shift)
            sieve[place >> 3] |= 1 << (place & 7)
        for index in range(n):
            id2 = word(held.id2s, index)
            place = place_of(id2, sieve_shift)
            if not sieve[place >> 3] >> (place & 7) & 1:
                continue
            place >>= SIEVE_BITS
            while table[place]:
                if wanted[table[place] - 1] == id2:
                    is_found[table[place] - 1] = 1
                    break
                place = (place + 1) & mask
        absent = EXISTS_NOT if held.header.flags & COMPLETE else None
        for index in range(m):
            values.append(EXISTS if is_found[first[index]] else absent)
    finally:
        PyMem_Free(wanted)
    return 0


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


def edges_answer(bytes block not None, id2s, uint64_t high, uint64_t low):
    if len(id2s) == 1:  # "Does she like this?", the most frequent query, needs no table.
        answer = edge_of(block, id2s[0], high, low)
        return None if answer is None else EdgesAnswer(answer)
    cdef list ids = id2s if type(id2s) is list else list(id2s)
    cdef uint64_t m = len(ids), index
    cdef uint64_t *wanted = <uint64_t *>PyMem_Malloc(8 * m + 1)
    if wanted == NULL:
        raise MemoryError
    try:
        for index in range(m):
            wanted[index] = ids[index]
        return edges_of(block, <unsigned char *>wanted, m, high, low)
    finally:
        PyMem_Free(wanted)


def existence_answer(bytes block not None, uint64_t id2):
    return existence_of(block, id2)


def beyond_answer(bytes count_value not None, uint64_t pos):
    return beyond_of(count_value, pos)


cdef bint is_older(bytes value, uint64_t minimum) noexcept:
    cdef uint64_t version = 0
    if not minimum:
        return False
    memcpy(&version, PyBytes_AS_STRING(value), min(PyBytes_GET_SIZE(value), 8))
    return version < minimum


def has_foreign_id(list ids):
    """See `tao.cache.answers_python.has_foreign_id`."""
    cdef uint64_t number
    for each in ids:
        number = each
        if number - 1 >= MAX_TIME:
            return True
    return False


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

    def edges(self, id1, atype, bytes id2s not None, uint64_t high, uint64_t low, uint64_t minimum=0):
        cdef bytes block
        shard = self.shard_of(id1)
        if shard is None:
            return None
        block = self.used(self.list_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)
        if block is None:
            return self.beyond(shard, id1, atype, 0, minimum)
        found = edges_of(
            block, <const unsigned char *>PyBytes_AS_STRING(id2s), PyBytes_GET_SIZE(id2s) // 8, high, low
        )
        return None if found is None or found.missing else found.block

    cdef object existence_by_count(self, shard, id1, atype, uint64_t minimum):
        cdef bytes value = self.used(self.count_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)
        return EXISTS_NOT if value is not None and beyond_of(value, 0) is not None else None

    def exists(self, id1, atype, uint64_t id2, uint64_t minimum=0):
        cdef bytes block
        shard = self.shard_of(id1)
        if shard is None:
            return None
        block = self.used(self.list_in(shard, id1, atype), <uint64_t>id1 + <uint64_t>atype, minimum)
        return self.existence_by_count(shard, id1, atype, minimum) if block is None else existence_of(block, id2)

    def exist_all(self, bytes id1s not None, bytes atypes not None, bytes id2s not None):
        cdef list values = []
        cdef uint64_t start = 0, stop, n = PyBytes_GET_SIZE(id1s) // 8, id1, atype
        cdef uint64_t known_shard = ~<uint64_t>0
        cdef const unsigned char *id1_column = <const unsigned char *>PyBytes_AS_STRING(id1s)
        cdef const unsigned char *atype_column = <const unsigned char *>PyBytes_AS_STRING(atypes)
        cdef const unsigned char *id2_column = <const unsigned char *>PyBytes_AS_STRING(id2s)
        cdef bytes block
        shard = None
        if PyBytes_GET_SIZE(atypes) != PyBytes_GET_SIZE(id1s) or PyBytes_GET_SIZE(id2s) != PyBytes_GET_SIZE(id1s):
            raise ValueError("columns differ in length")
        while start < n:
            id1, atype = word(id1_column, start), word(atype_column, start)
            stop = start + 1
            while stop < n and id1 == word(id1_column, stop) and atype == word(atype_column, stop):
                stop += 1
            if stop - start < RUN_QUERIES:
                stop = start + 1
            if id1 >> SHARD_SHIFT != known_shard:
                known_shard = id1 >> SHARD_SHIFT
                shard = self.shards.get(known_shard)
            if shard is None:
                values.extend([None] * (stop - start))
                start = stop
                continue
            key = id1
            block = self.used(self.list_in(shard, key, atype), id1 + atype, 0)
            if block is None:
                while start < stop:
                    values.append(self.existence_by_count(shard, key, atype, 0))
                    start += 1
            elif stop - start == 1:
                values.append(existence_of(block, word(id2_column, start)))
            else:
                existences_of(block, id2_column + 8 * start, stop - start, values)
                while start + 1 < stop:
                    self.use(id1 + atype)
                    start += 1
            start = stop
        return values
