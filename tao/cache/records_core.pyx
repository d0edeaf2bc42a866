# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled implementation of `tao.cache.records_python`, which says how it works: same names and behaviour, slot
for slot."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from tao.cache import records_python

cdef enum:
    CHUNK_RECORDS = 512
    UNIT_BYTES = 256
    PARTS = 4
    LEAST_SLOTS = 251
    MOST_SLOTS = 1_048_573
    BYTES_PER_SLOT = 1024
    MOST_DEPARTED_SLOTS = 0x7FFFFFFF

cdef int PARTS_OF_BUDGET[PARTS]
PARTS_OF_BUDGET[:] = records_python.RETURN_PARTS

cdef struct Record:
    uint64_t number
    uint64_t key

cdef struct Chunk:
    Chunk *next
    double began
    int size
    Record records[CHUNK_RECORDS]


cdef Chunk *new_chunk(double now) except NULL:
    cdef Chunk *chunk = <Chunk *>malloc(sizeof(Chunk))
    if chunk == NULL:
        raise MemoryError()
    chunk.next, chunk.began, chunk.size = NULL, now, 0
    return chunk


cdef class RecordQueue:
    """See `tao.cache.records_python.RecordQueue`."""

    cdef readonly Py_ssize_t length
    cdef Chunk *head
    cdef Chunk *tail
    cdef int at

    def __cinit__(self):
        self.length = self.at = 0
        self.head = self.tail = new_chunk(0.0)

    def __dealloc__(self):
        cdef Chunk *next
        while self.head != NULL:
            next = self.head.next
            free(self.head)
            self.head = next

    @property
    def began(self):
        return self.head.began

    def append(self, uint64_t number, uint64_t key, double now):
        """See `tao.cache.records_python.RecordQueue.append`."""
        cdef Chunk *tail = self.tail
        if not self.length:  # then there is one chunk
            self.at = tail.size = 0
            tail.began = now
        if tail.size == CHUNK_RECORDS:
            self.tail = tail.next = new_chunk(now)
            tail = self.tail
        tail.records[tail.size].number, tail.records[tail.size].key = number, key
        tail.size += 1
        self.length += 1

    def pop(self):
        """See `tao.cache.records_python.RecordQueue.pop`."""
        cdef Chunk *head = self.head
        cdef Record *record
        if not self.length:
            raise IndexError("no record in the queue")
        if self.at == head.size:
            self.head = head.next
            free(head)
            head, self.at = self.head, 0
        record = &head.records[self.at]
        self.at += 1
        self.length -= 1
        return record.number, record.key


cdef inline uint64_t hash_of(uint64_t key, uint64_t atype) noexcept nogil:
    cdef uint64_t mixed = key ^ atype * <uint64_t>0x9E3779B97F4A7C15
    mixed = (mixed ^ mixed >> 32) * <uint64_t>0xD6E8FEB86659FD93
    return mixed ^ mixed >> 32


cdef class Ghosts:
    """See `tao.cache.records_python.Ghosts`."""

    cdef uint64_t budget_bytes
    cdef uint64_t gone_bytes
    cdef uint64_t slots
    cdef uint64_t *held
    cdef uint64_t counted[PARTS]

    def __cinit__(self, uint64_t budget_bytes):
        self.budget_bytes, self.gone_bytes = budget_bytes, 0
        self.slots = min(<uint64_t>MOST_SLOTS, max(<uint64_t>LEAST_SLOTS, budget_bytes / BYTES_PER_SLOT | 1))
        self.held = <uint64_t *>calloc(self.slots, sizeof(uint64_t))
        if self.held == NULL:
            raise MemoryError()
        memset(self.counted, 0, sizeof(self.counted))

    def __dealloc__(self):
        free(self.held)

    @property
    def returns(self):
        return [self.counted[place] for place in range(PARTS)]

    def leaves(self, uint64_t key, uint64_t atype, uint64_t size_bytes):
        """See `tao.cache.records_python.Ghosts.leaves`."""
        cdef uint64_t hashed = hash_of(key, atype)
        self.gone_bytes += size_bytes
        self.held[(hashed >> 32) % self.slots] = hashed << 32 | <uint32_t>(self.gone_bytes / UNIT_BYTES)

    def returned(self, uint64_t key, uint64_t atype):
        """See `tao.cache.records_python.Ghosts.returned`."""
        cdef uint64_t hashed = hash_of(key, atype)
        cdef uint64_t slot = (hashed >> 32) % self.slots
        cdef uint64_t held = self.held[slot]
        cdef uint64_t gone
        cdef int place
        if not held or held >> 32 != <uint32_t>hashed:
            return False
        self.held[slot] = 0
        gone = <uint64_t><uint32_t>(self.gone_bytes / UNIT_BYTES - held) * UNIT_BYTES
        for place in range(PARTS):
            if gone * PARTS_OF_BUDGET[place] <= self.budget_bytes:
                self.counted[place] += 1
                return True
        return False


cdef struct Departed:
    uint64_t id
    uint64_t atype
    uint64_t version


cdef class DepartedVersions:
    """See `tao.cache.records_python.DepartedVersions`."""

    cdef uint64_t slots
    cdef Departed *held

    def __cinit__(self, uint64_t slots):
        if not 0 < slots <= MOST_DEPARTED_SLOTS:
            raise ValueError(f"there may be 1 to {<uint64_t>MOST_DEPARTED_SLOTS} slots for versions, not {slots}")
        self.slots = slots
        self.held = <Departed *>calloc(slots, sizeof(Departed))
        if self.held == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.held)

    cdef inline Departed *at(self, uint64_t key_id, uint64_t atype) noexcept:
        # Both factors are below 2 to the 31st.
        return &self.held[(key_id % self.slots * ((<uint64_t>1 << 32) % self.slots) + atype) % self.slots]

    def clear(self):
        """See `tao.cache.records_python.DepartedVersions.clear`."""
        memset(self.held, 0, self.slots * sizeof(Departed))

    def record(self, uint64_t key_id, uint64_t atype, uint64_t version):
        """See `tao.cache.records_python.DepartedVersions.record`."""
        cdef Departed *held = self.at(key_id, atype)
        if held.id != key_id or held.atype != atype:
            held.id, held.atype, held.version = key_id, atype, version
        elif held.version < version:
            held.version = version

    def get(self, uint64_t key_id, uint64_t atype):
        """See `tao.cache.records_python.DepartedVersions.get`."""
        cdef Departed *held = self.at(key_id, atype)
        return held.version if held.id == key_id and held.atype == atype else 0
