# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""The compiled implementation of `tao.storage.rows_python`, which specifies it: the same rows of the same bytes."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_Append, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.pyport cimport PY_SSIZE_T_MAX
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport uint64_t

from tao.storage.rows_python import broken_row

cdef enum:
    HEADER_BYTES = 4
    WHOLE = 0xFFFFFF
    OK = 0
    END = 0xFE
    END_BYTES = 5
    END_BELOW = 9
    ERROR = 0xFF
    MORE_RESULTS = 8
    STATE_CHANGED = 0x40
    NO_VALUE = 251
    MOST_DIGITS = 18

cdef PyObject *INT = <PyObject *>int


cdef object number_of(const unsigned char *at, Py_ssize_t length):
    """Make a number of ASCII digits, as `int` does."""
    cdef uint64_t value = 0
    cdef Py_ssize_t index = 0
    cdef bint negative = length > 0 and at[0] == c"-"
    if negative:
        index = 1
    if length == index or length - index > MOST_DIGITS:
        return int(PyBytes_FromStringAndSize(<const char *>at, length))
    while index < length:
        if at[index] < c"0" or at[index] > c"9":
            return int(PyBytes_FromStringAndSize(<const char *>at, length))
        value = value * 10 + (at[index] - c"0")
        index += 1
    return -<long long>value if negative else <long long>value


cdef inline Py_ssize_t width_after(unsigned char first):
    """Return the bytes of a length after its first byte; -1 for one that begins no length."""
    if first < NO_VALUE:
        return 0
    return 2 if first == 252 else 3 if first == 253 else 8 if first == 254 else -1


cdef tuple row_of(const unsigned char *at, const unsigned char *stop, tuple decoders):
    cdef Py_ssize_t column, width, place, columns = PyTuple_GET_SIZE(decoders)
    cdef uint64_t length
    cdef tuple row = PyTuple_New(columns)
    cdef object value
    cdef PyObject *decode
    for column in range(columns):
        if at >= stop:
            raise broken_row()
        length = at[0]
        at += 1
        decode = <PyObject *>PyTuple_GET_ITEM(decoders, column)
        if length == NO_VALUE:
            value = None
        else:
            if length > NO_VALUE:
                width = width_after(<unsigned char>length)
                if width < 0 or stop - at < width:
                    raise broken_row()
                length = 0
                for place in range(width):
                    length |= <uint64_t>at[place] << 8 * place
                at += width
            if length > <uint64_t>(stop - at):
                raise broken_row()
            if decode == INT:
                value = number_of(at, length)
            else:
                value = PyBytes_FromStringAndSize(<const char *>at, length)
                if decode != <PyObject *>None:
                    value = (<object>decode)(value)
            at += length
        Py_INCREF(value)
        PyTuple_SET_ITEM(row, column, value)
    if at != stop:
        raise broken_row()
    return row


cdef Py_ssize_t columns_after(
    const unsigned char *start, Py_ssize_t arrived, Py_ssize_t at, int *number, Py_ssize_t *count
):
    """Skip the packets of columns as `skip_columns` does, and return where it stopped."""
    cdef Py_ssize_t first, stop
    while count[0]:
        first = at + HEADER_BYTES
        if first >= arrived or start[at + 3] != (number[0] + 1) & 0xFF or start[first] == ERROR or start[at + 2]:
            break
        stop = first + (start[at] | start[at + 1] << 8)
        if stop == first or stop > arrived:
            break
        number[0] = start[at + 3]
        count[0] -= 1
        at = stop
    return at


def skip_columns(bytes data not None, Py_ssize_t at, int number, Py_ssize_t count):
    """See `tao.storage.rows_python.skip_columns`."""
    at = columns_after(<const unsigned char *>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), at, &number, &count)
    return at, number, count


cdef Py_ssize_t done_after(const unsigned char *start, Py_ssize_t arrived, Py_ssize_t at, int number, Py_ssize_t *status):
    """Return where the packet without rows ends that begins at ``at``, and set the place of its status; -1 when there
    is none in its turn."""
    cdef Py_ssize_t first = at + HEADER_BYTES, stop, place, width
    if first >= arrived or start[first] != OK or start[at + 2]:
        return -1
    stop = first + (start[at] | start[at + 1] << 8)
    if stop > arrived or start[at + 3] != (number + 1 if number >= 0 else 1) & 0xFF:
        return -1
    place = first + 1
    for _ in range(2):
        width = width_after(start[place]) if place < stop else -1
        if width < 0:
            return -1
        place += 1 + width
    status[0] = place
    return -1 if place + 2 > stop else stop


def parse_done(bytes data not None, Py_ssize_t at, int number):
    """See `tao.storage.rows_python.parse_done`."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t status = 0
    cdef Py_ssize_t stop = done_after(start, PyBytes_GET_SIZE(data), at, number, &status)
    return None if stop < 0 else (stop, start[at + 3], bool(start[status] & MORE_RESULTS))


cdef Py_ssize_t rows_after(bytes data, Py_ssize_t at, int number, list rows, Py_ssize_t limit, tuple decoders) except -1:
    """Append rows as `parse_rows` does, and return where it stopped."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t arrived = PyBytes_GET_SIZE(data), first, length
    while PyList_GET_SIZE(rows) < limit:
        first = at + HEADER_BYTES
        if first > arrived:
            break
        length = start[at] | start[at + 1] << 8 | start[at + 2] << 16
        if not 0 < length < WHOLE or first + length > arrived:
            break
        if start[at + 3] != (number + 1) & 0xFF or start[first] >= END:
            break
        PyList_Append(rows, row_of(start + first, start + first + length, decoders))
        number = start[at + 3]
        at = first + length
    return at


def parse_rows(bytes data not None, Py_ssize_t at, int number, list rows not None, Py_ssize_t limit, tuple decoders not None):
    """See `tao.storage.rows_python.parse_rows`."""
    cdef Py_ssize_t before = PyList_GET_SIZE(rows)
    cdef Py_ssize_t stop = rows_after(data, at, number, rows, limit, decoders)
    cdef Py_ssize_t parsed = PyList_GET_SIZE(rows) - before
    return stop, (number + parsed) & 0xFF if parsed else number


cdef Py_ssize_t end_after(const unsigned char *start, Py_ssize_t arrived, Py_ssize_t at, int number) noexcept:
    """Return where the packet ends that ends columns or rows and begins at ``at``; -1 when there is none in its turn."""
    cdef Py_ssize_t first = at + HEADER_BYTES, stop
    if first + END_BYTES > arrived or start[first] != END or start[at + 1] or start[at + 2]:
        return -1
    stop = first + start[at]
    if not first + END_BYTES <= stop < first + END_BELOW or stop > arrived or start[at + 3] != (number + 1) & 0xFF:
        return -1
    return stop


cdef Py_ssize_t end_of_result(
    bytes data, Py_ssize_t at, int number, list rows, Py_ssize_t limit, tuple decoders
) except -2:
    """Append the rows of a result as `parse_result` does, and return where the packet begins that ends it, or -1."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t arrived = PyBytes_GET_SIZE(data), first = at + HEADER_BYTES, stop, before
    cdef Py_ssize_t columns = PyTuple_GET_SIZE(decoders)
    if first >= arrived or start[at] != 1 or start[at + 1] or start[at + 2] or start[first] != columns:
        return -1
    if columns >= NO_VALUE or start[at + 3] != (number + 1 if number >= 0 else 1) & 0xFF:
        return -1
    number = start[at + 3]
    at = columns_after(start, arrived, first + 1, &number, &columns)
    stop = -1 if columns else end_after(start, arrived, at, number)
    if stop < 0:
        return -1
    number = start[at + 3]
    before = PyList_GET_SIZE(rows)
    at = rows_after(data, stop, number, rows, limit, decoders)
    return -1 if end_after(start, arrived, at, number + <int>(PyList_GET_SIZE(rows) - before)) < 0 else at


def parse_result(
    bytes data not None, Py_ssize_t at, int number, list rows not None, Py_ssize_t limit, tuple decoders not None
):
    """See `tao.storage.rows_python.parse_result`."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef list found = []
    cdef Py_ssize_t end = end_of_result(data, at, number, found, limit, decoders)
    if end < 0:
        return None
    rows.extend(found)
    return end + HEADER_BYTES + start[end], start[end + 3], bool(start[end + HEADER_BYTES + 3] & MORE_RESULTS)


def parse_results(bytes data not None, Py_ssize_t at, int number, list results not None, tuple decoders not None):
    """See `tao.storage.rows_python.parse_results`."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t arrived = PyBytes_GET_SIZE(data), stop, status = 0, end
    cdef bint more = True
    cdef list changes = [], rows
    while more:
        rows = []
        stop = done_after(start, arrived, at, number, &status)
        if stop >= 0:
            if start[status + 1] & STATE_CHANGED:
                changes.append((at + HEADER_BYTES, stop))
            end = at
        else:
            end = end_of_result(data, at, number, rows, PY_SSIZE_T_MAX, decoders)
            if end < 0:
                break
            stop = end + HEADER_BYTES + start[end]
            status = end + HEADER_BYTES + 3
        PyList_Append(results, rows)
        number = start[end + 3]
        more = (start[status] & MORE_RESULTS) != 0
        at = stop
    return at, number, more, changes
