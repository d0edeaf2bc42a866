# cython: language_level=3, cdivision=True, embedsignature=False
"""The compiled implementation of `tao.client.batches_python`, which specifies it: the same batches and the same values."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

cdef enum:
    OBJECT_BYTES = 12
    SHARD_SHIFT = 47


def are_ids(tuple ids not None):
    """See `tao.client.batches_python.are_ids`."""
    cdef long long value
    for each in ids:
        if type(each) is not int:
            return False
        try:
            value = each
        except OverflowError:
            return False
        if value <= 0:
            return False
    return True


def by_server(rows, waiters, reader):
    """See `tao.client.batches_python.by_server`."""
    cdef dict parts = {}, part_of_shard = {}
    cdef long long shard, last_shard = -1
    cdef list own_rows = None, own_waiters = None
    cdef Py_ssize_t index = 0
    for row in rows:
        shard = <long long>((<tuple>row)[0]) >> SHARD_SHIFT
        if shard != last_shard:
            part = part_of_shard.get(shard)
            if part is None:
                server = reader(shard)
                part = parts.get(server)
                if part is None:
                    part = parts[server] = ([], [])
                part_of_shard[shard] = part
            own_rows, own_waiters = <list>(<tuple>part)[0], <list>(<tuple>part)[1]
            last_shard = shard
        own_rows.append(row)
        own_waiters.append(waiters[index])
        index += 1
    return parts


def deliver(list waiters not None, slots, values, type joined):
    """See `tao.client.batches_python.deliver`."""
    cdef Py_ssize_t at = 0, slot, arrived = 0
    cdef bint in_order = slots is None
    current = None
    cdef list results = None
    for value in values:
        slot = at if in_order else slots[at]
        at += 1
        waiter = waiters[slot]
        if waiter is None:
            continue
        waiters[slot] = None
        if type(waiter) is not tuple:
            if not waiter.done():
                waiter.set_result(value)
            continue
        place = <tuple>waiter
        to = place[0]
        if type(to) is not joined:
            to.put(place[1], value)
            continue
        if to is not current:
            if arrived:
                current.note_arrived(arrived)
                arrived = 0
            current = to
            results = to.results
        results[<Py_ssize_t>place[1]] = value
        arrived += 1
    if arrived:
        current.note_arrived(arrived)


def objects_of(ids, values, dict types not None, make):
    """See `tao.client.batches_python.objects_of`."""
    cdef list made = []
    cdef Py_ssize_t index = 0, size
    cdef uint32_t number, last_number = 0
    cdef const char *start
    last_type = None
    for value in values:
        if type(value) is not bytes:
            return None
        size = PyBytes_GET_SIZE(<bytes>value)
        if size < OBJECT_BYTES:
            return None
        start = PyBytes_AS_STRING(<bytes>value)
        memcpy(&number, start + 8, 4)
        if last_type is None or number != last_number:
            last_type = types.get(PyBytes_FromStringAndSize(start + 8, 4))
            if last_type is None:
                return None
            last_number = number
        made.append(make(ids[index], last_type, PyBytes_FromStringAndSize(start + OBJECT_BYTES, size - OBJECT_BYTES)))
        index += 1
    return made
