# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""The compiled implementation of `tao.wire.messages_python`, which specifies it: the same messages, and the same bytes.

It reads and writes the bytes of changes of lists, which most messages are. Where a shard has another message, or
anything is unusual, all of its messages are left to the implementation in Python, which raises what there is to raise.
The tags are those of `ShardMessages`, `Message` and `ListChange` in `protos/tao/wire/v1/session.proto`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memmove

from tao.model.changes import GoneEdge, ListChange
from tao.model.graph import Edge
from tao.wire import messages_python

cdef enum:
    SHARD = 0x08
    VERSION_EPOCH = 0x10
    MESSAGES = 0x1A
    LIST_CHANGE = 0x12
    ID1 = 0x09
    ATYPE = 0x10
    BEFORE = 0x18
    AFTER = 0x20
    COUNT = 0x28
    GONE_ID2S = 0x32
    GONE_TIMES = 0x3A
    PUT_ID2S = 0x42
    PUT_TIMES = 0x4A
    PUT_DATA = 0x52
    VARINT_BYTES = 10
    FIXED_BYTES = 8
    FIELDS_BYTES = 64  # more than all fields of one value take together

cdef object new_change = ListChange
cdef object new_edge = Edge
cdef object new_gone = GoneEdge


cdef class Buffer:
    """Bytes that grow at the end."""

    cdef unsigned char *at
    cdef Py_ssize_t size
    cdef Py_ssize_t room

    def __cinit__(self):
        self.at = NULL
        self.size = self.room = 0

    def __dealloc__(self):
        PyMem_Free(self.at)

    cdef int reserve(self, Py_ssize_t more) except -1:
        """Have room for so many more bytes."""
        cdef Py_ssize_t room
        cdef void *moved
        if self.size + more > self.room:
            room = 2 * (self.size + more)
            moved = PyMem_Realloc(self.at, room)
            if moved == NULL:
                raise MemoryError()
            self.at, self.room = <unsigned char *>moved, room
        return 0

    # The following need room.

    cdef void put_varint(self, uint64_t value) noexcept:
        while value >= 0x80:
            self.at[self.size] = <unsigned char>(value & 0x7F | 0x80)
            self.size += 1
            value >>= 7
        self.at[self.size] = <unsigned char>value
        self.size += 1

    cdef void put_number(self, unsigned char tag, uint64_t value) noexcept:
        """Put a field; the value 0 is left out."""
        if value:
            self.at[self.size] = tag
            self.size += 1
            self.put_varint(value)

    cdef void put_fixed(self, uint64_t value) noexcept:
        cdef int place
        for place in range(FIXED_BYTES):
            self.at[self.size + place] = <unsigned char>(value >> 8 * place)
        self.size += FIXED_BYTES

    cdef void put_bytes(self, unsigned char tag, const void *content, Py_ssize_t length) noexcept:
        self.at[self.size] = tag
        self.size += 1
        self.put_varint(length)
        memcpy(self.at + self.size, content, length)
        self.size += length


cdef uint64_t whole(object number) except? 0:
    """Return a number. The conversion of Cython alone would cut off a fraction."""
    if type(number) is not int:
        raise TypeError()
    return number


cdef int put_columns(Buffer to, unsigned char id2s, unsigned char times, tuple edges) except -1:
    """Put the columns of the ids and times of edges."""
    cdef Py_ssize_t first, length, count = len(edges)
    if not count:
        return 0
    to.reserve(count * (FIXED_BYTES + VARINT_BYTES) + FIELDS_BYTES)
    to.at[to.size] = id2s
    to.size += 1
    to.put_varint(count * FIXED_BYTES)
    for edge in edges:
        to.put_fixed(whole(edge.id2))
    to.at[to.size] = times
    to.size += 1
    # The length comes first, and takes a byte in nearly all changes.
    first = to.size
    to.size += VARINT_BYTES
    for edge in edges:
        to.put_varint(whole(edge.time))
    length = to.size - first - VARINT_BYTES
    to.size = first
    to.put_varint(length)
    memmove(to.at + to.size, to.at + first + VARINT_BYTES, length)
    to.size += length
    return 0


cdef int put_change(Buffer to, object change) except -1:
    cdef uint64_t id1 = whole(change.id1), atype = whole(change.atype)
    cdef tuple put = change.put
    cdef bytes data
    cdef bint has_data = False
    if atype > 0xFFFFFFFF:
        raise OverflowError()
    to.reserve(FIELDS_BYTES)
    if id1:
        to.at[to.size] = ID1
        to.size += 1
        to.put_fixed(id1)
    to.put_number(ATYPE, atype)
    to.put_number(BEFORE, whole(change.before))
    to.put_number(AFTER, whole(change.after))
    to.put_number(COUNT, whole(change.count))
    put_columns(to, GONE_ID2S, GONE_TIMES, change.gone)
    put_columns(to, PUT_ID2S, PUT_TIMES, put)
    for edge in put:
        data = <bytes?>edge.data  # None has no size
        if PyBytes_GET_SIZE(data):
            has_data = True
            break
    if has_data:
        for edge in put:
            data = <bytes?>edge.data
            to.reserve(PyBytes_GET_SIZE(data) + FIELDS_BYTES)
            to.put_bytes(PUT_DATA, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
    return 0


def write_messages(tuple messages, to):
    """See `tao.wire.messages_python.write_messages`."""
    cdef Buffer change = Buffer(), written = Buffer()
    cdef Py_ssize_t head
    try:
        for message in messages:
            if type(message) is not new_change:
                break
            change.size = 0
            put_change(change, message)
            written.reserve(change.size + FIELDS_BYTES)
            written.at[written.size] = MESSAGES
            written.size += 1
            head = 2
            while change.size >> 7 * (head - 1):
                head += 1
            written.put_varint(head + change.size)
            written.put_bytes(LIST_CHANGE, change.at, change.size)
        else:
            to.MergeFromString(PyBytes_FromStringAndSize(<const char *>written.at, written.size))
            return
    except (AttributeError, OverflowError, TypeError):
        pass
    messages_python.write_messages(messages, to)


cdef struct Reader:
    # Bytes of which the first ones have been read. Where they end too early, `is_broken` is set, and 0 is read.
    const unsigned char *at
    const unsigned char *stop
    bint is_broken


cdef struct Columns:
    # The columns of edges: where they are (NULL: nowhere), and their sizes in bytes.
    const unsigned char *id2s
    const unsigned char *times
    Py_ssize_t id2s_bytes
    Py_ssize_t times_bytes


cdef uint64_t read_varint(Reader *reader) noexcept:
    cdef uint64_t value = 0
    cdef int shift = 0
    cdef unsigned char byte
    while reader.at < reader.stop and shift < 7 * VARINT_BYTES:
        byte = reader.at[0]
        reader.at += 1
        value |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    reader.is_broken = True
    return 0


cdef uint64_t read_fixed(Reader *reader) noexcept:
    cdef uint64_t value = 0
    cdef int place
    if reader.stop - reader.at < FIXED_BYTES:
        reader.is_broken = True
        return 0
    for place in range(FIXED_BYTES):
        value |= <uint64_t>reader.at[place] << 8 * place
    reader.at += FIXED_BYTES
    return value


cdef Py_ssize_t read_length(Reader *reader) noexcept:
    """Read the length of a field. So many bytes are there."""
    cdef uint64_t length = read_varint(reader)
    if length > <uint64_t>(reader.stop - reader.at):
        reader.is_broken = True
        return 0
    return <Py_ssize_t>length


cdef const unsigned char *find_column(Reader *reader, const unsigned char *found, Py_ssize_t *size) noexcept:
    """Return where a column is, and skip it. ``found``: where it has been found before; a second one is unusual."""
    cdef const unsigned char *column
    size[0] = read_length(reader)
    column = reader.at
    reader.at += size[0]
    if found != NULL:
        reader.is_broken = True
    return column


cdef tuple edges_of(Columns *columns, object new, list data):
    """Return the edges, or None when the columns differ in length. ``data``: that of each edge; none has any where the
    list is empty."""
    cdef Py_ssize_t index, count = columns.id2s_bytes // FIXED_BYTES
    cdef Reader id2s, times
    cdef uint64_t id2, time
    cdef list found = []
    if data and len(data) != count:
        return None
    id2s.at, id2s.stop, id2s.is_broken = columns.id2s, columns.id2s + columns.id2s_bytes, False
    times.at, times.stop, times.is_broken = columns.times, columns.times + columns.times_bytes, False
    for index in range(count):
        id2, time = read_fixed(&id2s), read_varint(&times)
        found.append(new(id2, time, data[index]) if data else new(id2, time))
    is_whole = not times.is_broken and id2s.at == id2s.stop and times.at == times.stop
    return tuple(found) if is_whole else None


cdef object change_of(Reader reader):
    """Read a change to the end; return None for one that is unusual."""
    cdef uint64_t id1 = 0, atype = 0, before = 0, after = 0, count = 0
    cdef Columns gone = Columns(NULL, NULL, 0, 0), put = Columns(NULL, NULL, 0, 0)
    cdef unsigned char tag
    cdef Py_ssize_t length
    cdef list data = []
    while reader.at < reader.stop and not reader.is_broken:
        tag = reader.at[0]
        reader.at += 1
        if tag == ID1:
            id1 = read_fixed(&reader)
        elif tag == ATYPE:
            atype = read_varint(&reader)
        elif tag == BEFORE:
            before = read_varint(&reader)
        elif tag == AFTER:
            after = read_varint(&reader)
        elif tag == COUNT:
            count = read_varint(&reader)
        elif tag == PUT_ID2S:
            put.id2s = find_column(&reader, put.id2s, &put.id2s_bytes)
        elif tag == PUT_TIMES:
            put.times = find_column(&reader, put.times, &put.times_bytes)
        elif tag == GONE_ID2S:
            gone.id2s = find_column(&reader, gone.id2s, &gone.id2s_bytes)
        elif tag == GONE_TIMES:
            gone.times = find_column(&reader, gone.times, &gone.times_bytes)
        elif tag == PUT_DATA:
            length = read_length(&reader)
            data.append(PyBytes_FromStringAndSize(<const char *>reader.at, length))
            reader.at += length
        else:
            return None
    if reader.is_broken:
        return None
    lost, won = edges_of(&gone, new_gone, []), edges_of(&put, new_edge, data)
    return None if lost is None or won is None else new_change(id1, atype, before, after, count, lost, won)


cdef object message_of(const unsigned char *at, Py_ssize_t size):
    """Read a message that is a change of a list; return None for any other one."""
    cdef Reader reader = Reader(at, at + size, False)
    cdef Py_ssize_t length
    if not size or at[0] != LIST_CHANGE:
        return None
    reader.at += 1
    length = read_length(&reader)
    return None if reader.is_broken or length != reader.stop - reader.at else change_of(reader)


def read_messages(found):
    """See `tao.wire.messages_python.read_messages`."""
    cdef bytes content = found.SerializeToString()
    cdef Reader reader
    cdef list messages = []
    cdef unsigned char tag
    cdef Py_ssize_t length
    reader.at, reader.is_broken = <const unsigned char *>PyBytes_AS_STRING(content), False
    reader.stop = reader.at + PyBytes_GET_SIZE(content)
    while reader.at < reader.stop:
        tag = reader.at[0]
        reader.at += 1
        if tag == SHARD or tag == VERSION_EPOCH:
            read_varint(&reader)
            continue
        change = None
        if tag == MESSAGES:
            length = read_length(&reader)
            change = message_of(reader.at, length)
            reader.at += length
        if change is None:
            return messages_python.read_messages(found)
        messages.append(change)
    return tuple(messages)
