# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled implementation of `tao.observability.key_events_python`, which says what it is: same names and
behaviour."""

from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

cdef enum:
    SHARD_SHIFT = 47
    FIRST_ROOM = 64

cdef struct Event:
    uint64_t number
    double seconds
    uint64_t key
    uint64_t atype
    uint64_t version
    PyObject *event
    PyObject *cause

cdef struct Ring:
    Event *events
    Py_ssize_t most
    Py_ssize_t room
    Py_ssize_t length
    Py_ssize_t oldest  # its place; 0 until the ring is full


cdef int append(
    Ring *ring, uint64_t number, double seconds, uint64_t key, uint64_t atype, event, uint64_t version, cause
) except -1:
    """Put an event in, in place of the oldest one when the ring is full."""
    cdef Event *place
    cdef Event *events
    cdef PyObject *old_event
    cdef PyObject *old_cause
    cdef Py_ssize_t room
    if not ring.most:
        return 0
    if ring.length < ring.most:
        if ring.length == ring.room:  # a server that has few keys remembers few events
            room = min(ring.most, max(<Py_ssize_t>FIRST_ROOM, 2 * ring.room))
            events = <Event *>realloc(ring.events, room * sizeof(Event))
            if events == NULL:
                raise MemoryError()
            memset(events + ring.room, 0, (room - ring.room) * sizeof(Event))
            ring.events, ring.room = events, room
        place = &ring.events[ring.length]
        ring.length += 1
    else:
        place = &ring.events[ring.oldest]
        ring.oldest = ring.oldest + 1 if ring.oldest + 1 < ring.most else 0
    old_event, old_cause = place.event, place.cause
    Py_INCREF(event)
    Py_INCREF(cause)
    place.number, place.seconds, place.key, place.atype, place.version = number, seconds, key, atype, version
    place.event, place.cause = <PyObject *>event, <PyObject *>cause
    Py_XDECREF(old_event)
    Py_XDECREF(old_cause)
    return 0


cdef void empty(Ring *ring) noexcept:
    cdef Py_ssize_t place
    for place in range(ring.length):
        Py_XDECREF(ring.events[place].event)
        Py_XDECREF(ring.events[place].cause)
    free(ring.events)
    memset(ring, 0, sizeof(Ring))


cdef class KeyEvents:
    """See `tao.observability.key_events_python.KeyEvents`."""

    cdef public object cause
    cdef object now
    cdef uint64_t number
    cdef Ring keys
    cdef Ring shards

    def __init__(self, Py_ssize_t most_of_keys, Py_ssize_t most_of_shards, now):
        """See `tao.observability.key_events_python.KeyEvents`."""
        if most_of_keys < 0 or most_of_shards < 0:
            raise ValueError("a log has room for 0 events or more")
        empty(&self.keys)
        empty(&self.shards)
        self.cause = ""
        self.now = now
        self.number = 0
        self.keys.most, self.shards.most = most_of_keys, most_of_shards

    def __dealloc__(self):
        empty(&self.keys)
        empty(&self.shards)

    @property
    def of_keys(self):
        """See `tao.observability.key_events_python.KeyEvents.of_keys`."""
        return self.keys.length

    @property
    def of_shards(self):
        """See `tao.observability.key_events_python.KeyEvents.of_shards`."""
        return self.shards.length

    def record_key(self, uint64_t key, uint64_t atype, event not None, uint64_t version):
        """See `tao.observability.key_events_python.KeyEvents.record_key`."""
        self.number += 1
        append(&self.keys, self.number, self.now(), key, atype, event, version, self.cause)

    def record_shard(self, uint64_t shard, event not None, uint64_t version):
        """See `tao.observability.key_events_python.KeyEvents.record_shard`."""
        self.number += 1
        append(&self.shards, self.number, self.now(), shard, 0, event, version, self.cause)

    def events_of(self, uint64_t key, uint64_t atype):
        """See `tao.observability.key_events_python.KeyEvents.events_of`."""
        cdef list found = []
        collect(&self.keys, key, atype, False, found)
        collect(&self.shards, key >> SHARD_SHIFT, 0, True, found)
        found.sort(key=number_of)
        return [event for _, event in found]

    def complete_since(self):
        """See `tao.observability.key_events_python.KeyEvents.complete_since`."""
        if self.keys.length < self.keys.most:
            return None
        return self.keys.events[self.keys.oldest].seconds if self.keys.length else self.now()


cdef int collect(Ring *ring, uint64_t key, uint64_t atype, bint of_shard, list found) except -1:
    """Add the events of a key to those that were found, each with its number."""
    cdef Event each
    cdef Py_ssize_t place
    for place in range(ring.length):
        each = ring.events[place]  # a copy: a tuple may begin a garbage collection, and that may record an event
        if each.key == key and each.atype == atype:
            event, cause = <object>each.event, <object>each.cause
            found.append((each.number, (each.seconds, event, each.version, cause, of_shard)))
    return 0


def number_of(numbered):
    return numbered[0]
