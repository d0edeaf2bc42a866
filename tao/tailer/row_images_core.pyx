# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""The compiled implementation of `tao.tailer.row_images_python`, which specifies it: the same images of the same bytes."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_SetItem
from cpython.list cimport PyList_Append
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int64_t, uint64_t

from tao.tailer.row_images_python import broken_rows

cdef enum:
    SIGNED = 0x10
    BYTES = 0x20
    WIDTH = 0x0F
    LARGEST_COUNT = 250


cdef inline bint has_bit(const unsigned char *bits, Py_ssize_t place):
    return bits[place >> 3] >> (place & 7) & 1


cdef inline uint64_t number_at(const unsigned char *at, Py_ssize_t width):
    cdef uint64_t number = 0
    cdef Py_ssize_t place
    for place in range(width):
        number |= <uint64_t>at[place] << 8 * place
    return number


cdef inline object signed_number(uint64_t number, Py_ssize_t width):
    cdef int unused = 64 - 8 * <int>width
    return <int64_t>(number << unused) >> unused


cdef object image_at(
    const unsigned char **place, const unsigned char *stop, tuple names, const unsigned char *forms,
    const unsigned char *present,
):
    cdef Py_ssize_t column, width, columns = PyTuple_GET_SIZE(names), held = 0, index = 0
    cdef const unsigned char *at = place[0]
    cdef const unsigned char *nulls = at
    cdef unsigned char form
    cdef uint64_t number
    cdef dict image = {}
    cdef object value
    for column in range(columns):
        held += has_bit(present, column)
    if (held + 7) // 8 > stop - at:
        raise broken_rows()
    at += (held + 7) // 8
    for column in range(columns):
        value = None
        if has_bit(present, column):
            if not has_bit(nulls, index):
                form = forms[column]
                width = form & WIDTH
                if width > stop - at:
                    raise broken_rows()
                number = number_at(at, width)
                at += width
                if form & BYTES:
                    if number > <uint64_t>(stop - at):
                        raise broken_rows()
                    value = PyBytes_FromStringAndSize(<const char *>at, number)
                    at += number
                elif form & SIGNED:
                    value = signed_number(number, width)
                else:
                    value = number
            index += 1
        PyDict_SetItem(image, <object>PyTuple_GET_ITEM(names, column), value)
    place[0] = at
    return image


def row_images(bytes data not None, Py_ssize_t at, Py_ssize_t stop, tuple names not None, bytes forms not None, int sides):
    """See `tao.tailer.row_images_python.row_images`."""
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef const unsigned char *kinds = <const unsigned char *>PyBytes_AS_STRING(forms)
    cdef Py_ssize_t count = PyTuple_GET_SIZE(names), width = (count + 7) // 8
    cdef const unsigned char *place
    cdef const unsigned char *begun
    cdef const unsigned char *end
    cdef const unsigned char *present
    cdef int side
    cdef list images = []
    if not 0 < count <= LARGEST_COUNT or PyBytes_GET_SIZE(forms) != count:
        raise broken_rows()
    if not 0 <= at < stop <= PyBytes_GET_SIZE(data) or start[at] != count or at + 1 + sides * width > stop:
        raise broken_rows()
    present = start + at + 1
    place = present + sides * width
    end = start + stop
    while place < end:
        begun = place
        for side in range(sides):
            PyList_Append(images, image_at(&place, end, names, kinds, present + side * width))
        if place == begun:
            raise broken_rows()
    return images
