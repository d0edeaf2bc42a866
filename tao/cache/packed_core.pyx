# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled implementation of `tao.cache.packed_python`, which says how it works: same names, behaviour and layout.

Memory comes from `calloc` in segments and is freed with the store; no Python object lies in it. Nothing here releases
the interpreter's lock, so each call is one step to all others.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Size
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memmove, memset

cdef enum:
    WAYS = 8
    SEGMENT_BUCKETS = 512
    ID_BITS = 47
    MAX_NUMBER = 131071
    FIELD_BITS = 22
    SHORT_COUNTER_BITS = 12
    AGES = 16
    LIVE = 1
    DYING = 2
    SWEPT = 3

cdef uint64_t ID_MASK = (<uint64_t>1 << ID_BITS) - 1
cdef uint64_t COUNTER_MASK = (<uint64_t>1 << 48) - 1
cdef uint64_t FIELD_MASK = (<uint64_t>1 << FIELD_BITS) - 1
cdef uint64_t SHORT_MASK = (<uint64_t>1 << SHORT_COUNTER_BITS) - 1

cdef struct Ways:
    int value_bytes
    int stride
    uint32_t limit
    uint32_t buckets
    uint32_t segments
    uint64_t entries
    unsigned char **block


cdef inline uint32_t mixed(uint64_t key) noexcept nogil:
    key = (key ^ (key >> 32)) * <uint64_t>0x9E3779B97F4A7C15
    return <uint32_t>(((key ^ (key >> 32)) * <uint64_t>0xD6E8FEB86659FD93) >> 32)


cdef inline uint32_t mask_for(uint32_t buckets) noexcept nogil:
    cdef uint32_t mask = 7
    while mask < buckets - 1:
        mask = mask << 1 | 1
    return mask


cdef inline unsigned char *bucket_at(Ways *ways, uint32_t place) noexcept nogil:
    return ways.block[place / SEGMENT_BUCKETS] + <size_t>(place % SEGMENT_BUCKETS) * ways.stride


cdef inline uint32_t place_of(Ways *ways, uint32_t hashed) noexcept nogil:
    cdef uint32_t mask = mask_for(ways.buckets)
    cdef uint32_t place = hashed & mask
    return place if place < ways.buckets else place & (mask >> 1)


cdef inline int way_of(unsigned char *bucket, uint64_t key) noexcept nogil:
    cdef uint64_t *keys = <uint64_t *>bucket
    cdef int way
    for way in range(WAYS):
        if keys[way] == key:
            return way
    return -1


cdef inline uint64_t value_at(Ways *ways, unsigned char *bucket, int way) noexcept nogil:
    cdef uint64_t value = 0
    memcpy(&value, bucket + 8 * WAYS + way * ways.value_bytes, ways.value_bytes)
    return value


cdef inline void to_front(Ways *ways, unsigned char *bucket, int way, uint64_t key, uint64_t value) noexcept nogil:
    """Slide the ways before ``way`` down by one, and write the first."""
    cdef int size = ways.value_bytes
    cdef unsigned char *values = bucket + 8 * WAYS
    memmove(bucket + 8, bucket, 8 * way)
    memmove(values + size, values, size * way)
    memcpy(bucket, &key, 8)
    memcpy(values, &value, size)


cdef inline void take_out(Ways *ways, unsigned char *bucket, int way) noexcept nogil:
    cdef int size = ways.value_bytes
    cdef unsigned char *values = bucket + 8 * WAYS
    cdef int after = WAYS - 1 - way
    memmove(bucket + 8 * way, bucket + 8 * (way + 1), 8 * after)
    memmove(values + size * way, values + size * (way + 1), size * after)
    memset(bucket + 8 * (WAYS - 1), 0, 8)
    ways.entries -= 1


cdef bint add_bucket(Ways *ways) except -1:
    cdef uint32_t place = ways.buckets
    cdef unsigned char **block
    if place / SEGMENT_BUCKETS >= ways.segments:
        block = <unsigned char **>realloc(ways.block, (ways.segments + 1) * sizeof(unsigned char *))
        if block == NULL:
            raise MemoryError
        ways.block = block
        block[ways.segments] = <unsigned char *>calloc(SEGMENT_BUCKETS, ways.stride)
        if block[ways.segments] == NULL:
            raise MemoryError
        ways.segments += 1
    ways.buckets += 1
    return True


cdef bint split(Ways *ways) except -1:
    """Add one bucket: half of the entries of the bucket that it is split from move there, in their order."""
    cdef uint32_t place = ways.buckets
    add_bucket(ways)
    cdef uint32_t mask = mask_for(ways.buckets)
    cdef unsigned char *source = bucket_at(ways, place & (mask >> 1))
    cdef unsigned char *target = bucket_at(ways, place)
    cdef uint64_t *keys = <uint64_t *>source
    cdef int way = 0, moved = 0
    cdef uint64_t value
    while way < WAYS and keys[way]:
        if mixed(keys[way]) & mask == place:
            value = value_at(ways, source, way)
            memcpy(target + 8 * moved, &keys[way], 8)
            memcpy(target + 8 * WAYS + moved * ways.value_bytes, &value, ways.value_bytes)
            moved += 1
            take_out(ways, source, way)
            ways.entries += 1
        else:
            way += 1
    return True


cdef void release(Ways *ways) noexcept:
    cdef uint32_t segment
    for segment in range(ways.segments):
        free(ways.block[segment])
    free(ways.block)
    ways.block = NULL
    ways.segments = 0
    ways.buckets = 0
    ways.entries = 0


cdef class PackedStore:
    """See `tao.cache.packed_python.PackedStore`."""

    cdef Ways ways[2]
    cdef unsigned char *states
    cdef list holders
    cdef list unused
    cdef int dying
    cdef int swept
    cdef int sweep_table
    cdef uint32_t sweep_place
    cdef readonly tuple displaced

    def __cinit__(self, uint32_t most_buckets, uint32_t most_short_buckets):
        cdef int table
        memset(self.ways, 0, sizeof(self.ways))
        self.ways[0].value_bytes = 6
        self.ways[1].value_bytes = 2
        self.ways[0].limit = most_buckets
        self.ways[1].limit = most_short_buckets
        for table in range(2):
            self.ways[table].stride = WAYS * (8 + self.ways[table].value_bytes)
        self.states = <unsigned char *>calloc(MAX_NUMBER + 1, 1)
        if self.states == NULL:
            raise MemoryError
        self.holders = [None]
        self.unused = []
        self.displaced = ()

    def __dealloc__(self):
        release(&self.ways[0])
        release(&self.ways[1])
        free(self.states)

    @property
    def size_bytes(self):
        return (
            <uint64_t>self.ways[0].buckets * self.ways[0].stride + <uint64_t>self.ways[1].buckets * self.ways[1].stride
        )

    @property
    def entries(self):
        return self.ways[0].entries + self.ways[1].entries

    def open(self, int version_epoch, dict wide):
        cdef PackedCounts holder = PackedCounts.__new__(PackedCounts)
        cdef uint32_t number = 0
        holder.store = self
        holder.wide = wide
        holder.version_epoch = version_epoch
        if self.unused:
            number = self.unused.pop()
        elif len(self.holders) <= MAX_NUMBER:
            number = len(self.holders)
            self.holders.append(None)
        if number:
            self.holders[number] = holder
            self.states[number] = LIVE
        holder.number = number
        return holder

    def sweep(self, int most_buckets):
        cdef Ways *ways
        cdef unsigned char *bucket
        cdef uint64_t *keys
        cdef int way, number
        if not self.swept:
            if not self.dying:
                return False
            for number in range(1, len(self.holders)):
                if self.states[number] == DYING:
                    self.states[number] = SWEPT
            self.swept, self.dying = self.dying, 0
            self.sweep_table, self.sweep_place = 0, 0
        while most_buckets > 0 and self.sweep_table < 2:
            ways = &self.ways[self.sweep_table]
            if self.sweep_place >= ways.buckets:
                self.sweep_table += 1
                self.sweep_place = 0
                continue
            bucket = bucket_at(ways, self.sweep_place)
            keys = <uint64_t *>bucket
            for way in range(WAYS - 1, -1, -1):
                if keys[way] and self.states[keys[way] >> ID_BITS] == SWEPT:
                    take_out(ways, bucket, way)
            self.sweep_place += 1
            most_buckets -= 1
        if self.sweep_table == 2:
            for number in range(1, len(self.holders)):
                if self.states[number] == SWEPT:
                    self.states[number] = 0
                    self.unused.append(number)
            self.swept = 0
            for number in range(2):
                if not self.ways[number].entries:
                    release(&self.ways[number])
        return bool(self.swept or self.dying)


cdef class PackedCounts:
    """See `tao.cache.packed_python.PackedCounts`."""

    cdef PackedStore store
    cdef dict wide
    cdef uint64_t version_epoch
    cdef readonly uint32_t number
    cdef readonly uint64_t live

    cdef bytes encoded(self, uint64_t field, int table):
        cdef uint64_t words[2]
        words[0] = self.version_in(field, table)
        words[1] = 0 if table else field & FIELD_MASK
        return PyBytes_FromStringAndSize(<char *>words, 16)

    cdef uint64_t version_in(self, uint64_t field, int table):
        cdef uint64_t counter, age
        if table:
            counter, age = field & SHORT_MASK, field >> SHORT_COUNTER_BITS
        else:
            counter, age = field >> FIELD_BITS & FIELD_MASK, field >> (2 * FIELD_BITS)
        return (self.version_epoch - age) << 48 | counter if counter else 0

    cdef bytes look(self, uint64_t key_id, bint use):
        cdef uint64_t key, field
        cdef uint32_t hashed
        cdef Ways *ways
        cdef unsigned char *bucket
        cdef int table, way
        if self.number:
            key = <uint64_t>self.number << ID_BITS | (key_id & ID_MASK)
            hashed = mixed(key)
            for table in range(2):
                ways = &self.store.ways[table]
                if ways.entries:
                    bucket = bucket_at(ways, place_of(ways, hashed))
                    way = way_of(bucket, key)
                    if way >= 0:
                        field = value_at(ways, bucket, way)
                        if use and way:
                            to_front(ways, bucket, way, key, field)
                        return self.encoded(field, table)
        return None

    def get(self, uint64_t key_id):
        cdef bytes found = self.look(key_id, True)
        if found is None and PyDict_Size(self.wide):
            return self.wide.get(key_id)
        return found

    def peek(self, uint64_t key_id):
        cdef bytes found = self.look(key_id, False)
        if found is None and PyDict_Size(self.wide):
            return self.wide.get(key_id)
        return found

    def put(self, uint64_t key_id, bytes value):
        cdef uint64_t words[2]
        cdef uint64_t counter, age, count, field, key, last
        cdef int table, way, steps
        cdef uint32_t hashed
        cdef Ways *ways
        cdef unsigned char *bucket
        cdef PackedCounts holder
        if len(value) != 16:
            raise ValueError("a count value has 16 bytes")
        memcpy(words, PyBytes_AS_STRING(value), 16)
        count, counter = words[1], words[0] & COUNTER_MASK
        age = self.version_epoch - (words[0] >> 48) if words[0] else 0
        table = -1
        if self.number and age < AGES and (counter or not words[0]):
            if not count and counter <= SHORT_MASK and self.store.ways[1].limit:
                table = 1
            elif count <= FIELD_MASK and counter <= FIELD_MASK and self.store.ways[0].limit:
                table = 0
        self.drop_but(key_id, table)
        if table < 0:
            return 0
        if table:
            field = counter | age << SHORT_COUNTER_BITS
        else:
            field = count | counter << FIELD_BITS | age << (2 * FIELD_BITS)
        ways = &self.store.ways[table]
        key = <uint64_t>self.number << ID_BITS | (key_id & ID_MASK)
        hashed = mixed(key)
        while ways.buckets < WAYS and ways.buckets < ways.limit:
            add_bucket(ways)
        bucket = bucket_at(ways, place_of(ways, hashed))
        way = way_of(bucket, key)
        if way >= 0:
            to_front(ways, bucket, way, key, field)
            return 1
        steps = 0
        while steps < 4 and ways.buckets < ways.limit:
            if ways.entries < 3 * <uint64_t>ways.buckets and not (<uint64_t *>bucket)[WAYS - 1]:
                break
            split(ways)
            bucket = bucket_at(ways, place_of(ways, hashed))
            steps += 1
        last = (<uint64_t *>bucket)[WAYS - 1]
        self.live += 1
        if not last:
            ways.entries += 1
            to_front(ways, bucket, WAYS - 1, key, field)
            return 1
        counter = value_at(ways, bucket, WAYS - 1)
        to_front(ways, bucket, WAYS - 1, key, field)
        if self.store.states[last >> ID_BITS] != LIVE:
            return 1
        holder = self.store.holders[last >> ID_BITS]
        holder.live -= 1
        self.store.displaced = (holder.number, last & ID_MASK, holder.version_in(counter, table))
        return 2

    cdef bint drop_but(self, uint64_t key_id, int kept):
        cdef uint64_t key
        cdef Ways *ways
        cdef unsigned char *bucket
        cdef int table, way
        cdef uint32_t hashed
        cdef bint found = False
        if self.number:
            key = <uint64_t>self.number << ID_BITS | (key_id & ID_MASK)
            hashed = mixed(key)
            for table in range(2):
                ways = &self.store.ways[table]
                if table != kept and ways.entries:
                    bucket = bucket_at(ways, place_of(ways, hashed))
                    way = way_of(bucket, key)
                    if way >= 0:
                        take_out(ways, bucket, way)
                        self.live -= 1
                        found = True
        return found

    def drop(self, uint64_t key_id):
        return self.drop_but(key_id, -1)

    def close(self):
        if self.number:
            self.store.holders[self.number] = None
            if self.live:
                self.store.states[self.number] = DYING
                self.store.dying += 1
            else:
                self.store.states[self.number] = 0
                self.store.unused.append(self.number)
            self.number = 0
            self.live = 0

    def scan(self, uint64_t place, uint32_t most_buckets):
        cdef list found = []
        cdef Ways *ways
        cdef uint64_t *keys
        cdef int table = 0, way
        if place >= self.store.ways[0].buckets:
            table = 1
            place -= self.store.ways[0].buckets
        ways = &self.store.ways[table]
        while most_buckets and self.live:
            if place >= ways.buckets:
                if table:
                    break
                table, place = 1, 0
                ways = &self.store.ways[1]
                continue
            keys = <uint64_t *>bucket_at(ways, <uint32_t>place)
            for way in range(WAYS):
                if keys[way] >> ID_BITS == self.number:
                    found.append(keys[way] & ID_MASK)
            place += 1
            most_buckets -= 1
        if not self.live or (place >= ways.buckets and (table or not self.store.ways[1].buckets)):
            return found, -1
        return found, place + (self.store.ways[0].buckets if table else 0)
