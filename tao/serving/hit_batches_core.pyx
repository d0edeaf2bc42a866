# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""From the bytes of a read request to the bytes of its answer in one step, for what the cache has of the batch.

Its specification is the usual way, `tao.serving.read_service.ReadService.handle`, which takes whatever is left to it
here by None: the answer is the same, byte by byte (`tests/conformance/test_hit_batches.py`). So only the usual form of
a request is understood here, and everything rare is left over. Queries that the cache cannot answer are returned with
their slots, and the answer to the others is then the first part of the whole.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from tao.model.graph import EXISTS_NOT
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, RangeQuery, TimeRangeQuery
from tao.serving.access import NOTHING_SHOWN

cdef enum:
    SHARD_SHIFT = 47
    OBJECT_BYTES = 12
    LAST_COLUMN = 32
    MOST_ID2S = 6000  # `tao.model.graph.MAX_ID2_SET`
    REQUEST_READ = 10  # field numbers of `Request`, `Answer` and `ReadAnswer`
    ANSWER_NUMBER = 1
    ANSWER_MORE = 2
    ANSWER_READ = 10
    READ_SLOTS = 1
    READ_VALUES = 2
    READ_EPOCH_SHARDS = 5
    READ_VERSION_EPOCHS = 6
    READ_HOT_SLOTS = 9
    READ_HOT_RATES = 10
    READ_SLOW_DOWN_MS = 11
    # of `ReadBatch`
    OBJ_IDS = 1
    COUNT_ID1S = 2
    COUNT_ATYPES = 3
    RANGE_ID1S = 4
    RANGE_ATYPES = 5
    RANGE_POSITIONS = 6
    RANGE_LIMITS = 7
    TIME_RANGE_ID1S = 8
    TIME_RANGE_ATYPES = 9
    TIME_RANGE_HIGHS = 10
    TIME_RANGE_LOWS = 11
    TIME_RANGE_LIMITS = 12
    GET_ID1S = 13
    GET_ATYPES = 14
    GET_ID2_COUNTS = 15
    GET_ID2S = 16
    GET_HIGHS = 17
    GET_LOWS = 18
    TIME_RANGE_STARTS = 19
    MINIMUM_SLOTS = 20
    MINIMUM_VERSIONS = 21
    FOR_FILL = 23
    EXIST_ID1S = 30  # the other numbers between are rare options
    EXIST_ATYPES = 31
    EXIST_ID2S = 32

cdef uint64_t MAX_SIGNED = (<uint64_t>1 << 63) - 1  # the highest time, position and id
cdef uint64_t MAX_UINT32 = (<uint64_t>1 << 32) - 1  # as a deadline: none


cdef struct Span:
    const unsigned char *at
    const unsigned char *end


cdef inline bint take_varint(Span *span, uint64_t *value) noexcept nogil:
    """Take a varint off the span. Returns False when there is none, or one above 64 bits."""
    cdef uint64_t found = 0
    cdef int shift = 0
    cdef unsigned char byte
    while span.at < span.end and shift < 64:
        byte = span.at[0]
        span.at += 1
        if shift == 63 and byte > 1:
            return False
        found |= <uint64_t>(byte & 127) << shift
        if byte < 128:
            value[0] = found
            return True
        shift += 7
    return False


cdef inline bint take_fixed(Span *span, uint64_t *value) noexcept nogil:
    if span.end - span.at < 8:
        return False
    memcpy(value, span.at, 8)
    span.at += 8
    return True


cdef inline bint take_part(Span *span, Span *part) noexcept nogil:
    """Take a length and as many bytes off the span."""
    cdef uint64_t size = 0
    if not take_varint(span, &size) or size > <uint64_t>(span.end - span.at):
        return False
    part.at = span.at
    span.at += size
    part.end = span.at
    return True


cdef struct HotKey:
    uint64_t id1
    uint32_t atype
    uint32_t per_second
    uint32_t pause_ms
    bint is_used


cdef int[6] ID_FIELDS = [OBJ_IDS, COUNT_ID1S, RANGE_ID1S, TIME_RANGE_ID1S, GET_ID1S, EXIST_ID1S]
cdef int[6] ATYPE_FIELDS = [0, COUNT_ATYPES, RANGE_ATYPES, TIME_RANGE_ATYPES, GET_ATYPES, EXIST_ATYPES]


cdef struct Asked:
    uint64_t number
    uint64_t deadline_ms
    uint64_t topology_version
    uint64_t for_fill
    Span columns[LAST_COLUMN + 1]
    Span whole[LAST_COLUMN + 1]  # the columns, which are read to their ends


cdef bint is_understood(Span request, Asked *asked) noexcept nogil:
    """Take the request apart. Returns False for one that has anything which is not handled here."""
    cdef uint64_t tag = 0, field
    cdef Span read, column
    cdef bint has_read = False
    memset(asked, 0, sizeof(Asked))
    while request.at < request.end:
        if not take_varint(&request, &tag):
            return False
        if tag == 8:
            if asked.number or not take_varint(&request, &asked.number):
                return False
        elif tag == 16:
            if asked.deadline_ms or not take_varint(&request, &asked.deadline_ms):
                return False
        elif tag == 24:
            if asked.topology_version or not take_varint(&request, &asked.topology_version):
                return False
        elif tag == (REQUEST_READ << 3 | 2):
            if has_read or not take_part(&request, &read):
                return False
            has_read = True
        else:
            return False
    if not has_read or not asked.number or not 0 < asked.deadline_ms < MAX_UINT32:
        return False
    while read.at < read.end:
        if not take_varint(&read, &tag):
            return False
        if tag == FOR_FILL << 3:
            if asked.for_fill or not take_varint(&read, &asked.for_fill):
                return False
            continue
        if tag & 7 != 2:
            return False
        field = tag >> 3
        if not 0 < field <= LAST_COLUMN or MINIMUM_VERSIONS < field < EXIST_ID1S:
            return False
        if asked.columns[field].at != NULL or not take_part(&read, &column):
            return False
        asked.columns[field] = asked.whole[field] = column
    return True


cdef inline uint64_t ids_in(Asked *asked, int field) noexcept nogil:
    return <uint64_t>(asked.columns[field].end - asked.columns[field].at) // 8


cdef inline bint has_bit(uint64_t number, bytes bits):
    """Return whether the bit of a type's number is set; see `tao.serving.access.ReadCheck`."""
    return number >> 3 < <uint64_t>PyBytes_GET_SIZE(bits) and (
        PyBytes_AS_STRING(bits)[number >> 3] >> (number & 7)
    ) & 1


cdef class HitBatches:
    """Answers what one cache has of batches. Made anew when the schema changes."""

    cdef object cache
    cdef object hits
    cdef dict limits
    cdef dict hot
    cdef HotKey *hot_keys
    cdef uint64_t hot_mask
    cdef uint64_t max_bytes

    def __init__(self, cache, dict limits not None, uint64_t max_bytes):
        """``limits`` maps association types to the bound on a query's limit. ``max_bytes`` bounds the values of an
        answer."""
        self.cache = cache
        self.hits = cache.hits
        self.limits = limits
        self.max_bytes = max_bytes

    def __dealloc__(self):
        PyMem_Free(self.hot_keys)

    def answer(
        self,
        bytes request not None,
        uint64_t newest_version,
        long long max_queries,
        rates,
        check,
        bint for_fill,
    ):
        """Return the encoded answer, the number of queries of each operation, the slots that are missed and their
        queries, the minimum versions by slot, and the bytes of all values; None when the request is for the usual way.
        Of a batch of misses the answer is empty.

        ``newest_version`` is the topology's. A batch of more than ``max_queries`` is left over. ``rates`` are the read
        rates of this server, a `tao.routing.read_rates.ReadRates`, by whose hot keys an answer is marked. ``check`` is
        the caller's `ReadCheck`, None for everything. ``for_fill``: True to answer only what another cache asks for
        itself, False to answer only the other batches."""
        otypes = None if check is None else check.otypes
        atypes = None if check is None else check.atypes
        cdef Asked asked
        cdef Span whole
        whole.at = <const unsigned char *>PyBytes_AS_STRING(request)
        whole.end = whole.at + PyBytes_GET_SIZE(request)
        if max_queries <= 0 or not is_understood(whole, &asked) or asked.topology_version > newest_version:
            return None
        if asked.for_fill != <uint64_t>for_fill:
            return None
        cdef uint64_t objects = ids_in(&asked, OBJ_IDS), counts = ids_in(&asked, COUNT_ID1S)
        cdef uint64_t ranges = ids_in(&asked, RANGE_ID1S), windows = ids_in(&asked, TIME_RANGE_ID1S)
        cdef uint64_t gets = ids_in(&asked, GET_ID1S), exists = ids_in(&asked, EXIST_ID1S)
        cdef uint64_t queries = objects + counts + ranges + windows + gets + exists
        if not 0 < queries <= <uint64_t>max_queries:
            return None
        cdef dict minimums = None
        if asked.columns[MINIMUM_SLOTS].at != NULL:
            minimums = self.minimums_of(&asked)
            if minimums is None:
                return None
        cdef list values = [], denials = [], unknown_edges = []
        cdef int field
        if not (
            self.add_objects(&asked, objects, values, minimums, otypes)
            and self.add_lists(&asked, counts, ranges, windows, gets, values, unknown_edges, minimums, atypes)
            and self.add_exists(&asked, exists, values, denials, minimums, atypes)
        ):
            return None
        for field in range(1, LAST_COLUMN + 1):  # every column was read to its end
            if asked.columns[field].at != asked.columns[field].end:
                return None
        if not self.ask_filters(unknown_edges, values):
            return None
        cdef Py_ssize_t place
        cdef list missed = [place for place in range(len(values)) if values[place] is None]
        cdef list missed_queries = []
        if missed and not add_missed_queries(&asked, values, missed_queries):
            return None
        cdef uint64_t total = 0
        for each in values:
            if each is not None:
                total += PyBytes_GET_SIZE(<bytes?>each)
        if total > self.max_bytes:
            return None
        for denial in denials:
            self.cache.count_denial(denial)
        cdef bytes last_fields = b""
        if for_fill:
            last_fields = self.encoded_epochs(&asked)
        else:
            hot = rates.hot
            if hot:
                last_fields = self.encoded_hot(&asked, rates, <dict?>hot, values, check is not None)
        cdef bytes message = self.encoded(asked.number, values, last_fields, <bint>missed)
        return message, (objects, counts, ranges, windows, gets, exists), missed, missed_queries, minimums or {}, total

    cdef bint ask_filters(self, list unknown_edges, list values) except -1:
        """Put the edges in their slots that membership filters decide, which no entry has decided; False when they are
        more than one answer holds."""
        cdef int64_t room = self.max_bytes
        for slot, id1, atype, id2s, high, low, minimum in unknown_edges:
            if len(id2s) == 1:
                values[slot] = self.cache.edge(id1, atype, id2s[0], high, low, minimum)
            else:
                found = self.cache.edges(id1, atype, id2s, high, low, minimum)
                values[slot] = found.block if found is not None and not found.missing else None
            if values[slot] is not None:
                room -= PyBytes_GET_SIZE(<bytes?>values[slot])
                if room < 0:
                    return False
        return True

    cdef dict minimums_of(self, Asked *asked):
        cdef dict found = {}
        cdef uint64_t slot = 0, version = 0
        while asked.columns[MINIMUM_SLOTS].at < asked.columns[MINIMUM_SLOTS].end:
            if not take_varint(&asked.columns[MINIMUM_SLOTS], &slot) or slot > MAX_UINT32:
                return None
            if not take_varint(&asked.columns[MINIMUM_VERSIONS], &version):
                return None
            found[slot] = version
        return found

    cdef bint add_objects(self, Asked *asked, uint64_t count, list values, dict minimums, otypes) except -1:
        cdef list ids = []
        cdef uint64_t id = 0, version = 0, slot
        cdef uint32_t otype
        cdef bytes value
        for slot in range(count):
            take_fixed(&asked.columns[OBJ_IDS], &id)
            ids.append(id)
        if not ids:
            return True
        values.extend(self.hits.objects(ids))
        for slot in range(count):
            each = values[slot]
            if each is None:
                continue
            value = <bytes?>each
            if PyBytes_GET_SIZE(value) < OBJECT_BYTES:
                return False
            if otypes is not None:
                memcpy(&otype, PyBytes_AS_STRING(value) + 8, 4)
                if not has_bit(otype, <bytes>otypes):
                    return False
            if minimums is not None:
                memcpy(&version, PyBytes_AS_STRING(value), 8)
                if version < <uint64_t>minimums.get(slot, 0):
                    values[slot] = None
        return True

    cdef bint add_lists(
        self,
        Asked *asked,
        uint64_t counts,
        uint64_t ranges,
        uint64_t windows,
        uint64_t gets,
        list values,
        list unknown_edges,
        dict minimums,
        atypes,
    ) except -1:
        """Append the value of each query on a list, None for a miss; False when one is left over. Queries for edges
        that no entry decides, of lists with a filter, go to ``unknown_edges``."""
        cdef Span *columns = asked.columns
        cdef uint64_t slot, left, id1 = 0, atype = 0, pos = 0, limit = 0, high = 0, low = 0, size = 0, id2 = 0, start
        cdef uint64_t minimum = 0, index
        cdef int64_t room = self.max_bytes  # parts of lists are copied: no more than one answer holds
        cdef Span id2s
        cdef bytes id2_column
        cdef int ids_field, atypes_field
        cdef bint has_starts = columns[TIME_RANGE_STARTS].at != NULL
        if not counts + ranges + windows + gets:
            return True
        hits = self.hits
        for operation, left in ((0, counts), (1, ranges), (2, windows), (3, gets)):
            ids_field = (COUNT_ID1S, RANGE_ID1S, TIME_RANGE_ID1S, GET_ID1S)[operation]
            atypes_field = (COUNT_ATYPES, RANGE_ATYPES, TIME_RANGE_ATYPES, GET_ATYPES)[operation]
            while left:
                left -= 1
                slot = len(values)
                take_fixed(&columns[ids_field], &id1)
                if not take_varint(&columns[atypes_field], &atype) or atype > MAX_UINT32:
                    return False
                if atypes is not None and not has_bit(atype, <bytes>atypes):
                    return False
                if minimums is not None:
                    minimum = minimums.get(slot, 0)
                if operation == 0:
                    value = hits.count(id1, atype, minimum)
                elif operation == 1:
                    if not take_varint(&columns[RANGE_POSITIONS], &pos) or pos > MAX_SIGNED:
                        return False
                    if not take_varint(&columns[RANGE_LIMITS], &limit) or not self.is_within(atype, limit):
                        return False
                    value = hits.range(id1, atype, pos, limit, minimum)
                elif operation == 2:
                    start = 0
                    if has_starts and not take_fixed(&columns[TIME_RANGE_STARTS], &start):
                        return False
                    if not take_varint(&columns[TIME_RANGE_HIGHS], &high) or high > MAX_SIGNED:
                        return False
                    if not take_varint(&columns[TIME_RANGE_LOWS], &low) or low > MAX_SIGNED:
                        return False
                    if not take_varint(&columns[TIME_RANGE_LIMITS], &limit) or not self.is_within(atype, limit):
                        return False
                    value = hits.time_range(id1, atype, high, low, limit, minimum, start)
                else:
                    if not take_varint(&columns[GET_ID2_COUNTS], &size) or not 0 < size <= MOST_ID2S:
                        return False
                    id2s.at = columns[GET_ID2S].at
                    for index in range(size):
                        if not take_fixed(&columns[GET_ID2S], &id2) or not 0 < id2 <= MAX_SIGNED:
                            return False
                    if not take_varint(&columns[GET_HIGHS], &high) or high > MAX_SIGNED:
                        return False
                    if not take_varint(&columns[GET_LOWS], &low) or low > MAX_SIGNED:
                        return False
                    if size == 1:
                        value = hits.edge(id1, atype, id2, high, low, minimum)
                    else:
                        id2_column = PyBytes_FromStringAndSize(<const char *>id2s.at, 8 * size)
                        value = self.cache.kept_edges(id1, atype, id2_column, high, low, minimum)
                        if value is None:
                            value = hits.edges(id1, atype, id2_column, high, low, minimum)
                    if value is None and self.cache.has_filter(id1, atype):
                        unknown_edges.append((slot, id1, atype, ids_of(id2s.at, size), high, low, minimum))
                if value is not None:
                    room -= PyBytes_GET_SIZE(<bytes?>value)
                    if room < 0:
                        return False
                values.append(value)
        return True

    cdef bint add_exists(
        self, Asked *asked, uint64_t count, list values, list denials, dict minimums, atypes
    ) except -1:
        """Append whether each edge exists, a byte each, None for a miss, and what filters deny to ``denials``; False at
        the first that is left over."""
        cdef uint64_t id1 = 0, atype = 0, id2 = 0, minimum = 0
        cdef Py_ssize_t slot, first = len(values)
        cdef list found
        cdef Span id1_column = asked.columns[EXIST_ID1S], id2_column = asked.columns[EXIST_ID2S]
        if not count:
            return True
        cdef bytes atype_column = PyBytes_FromStringAndSize(NULL, 8 * count)
        cdef unsigned char *atype_at = <unsigned char *>PyBytes_AS_STRING(atype_column)
        for slot in range(<Py_ssize_t>count):
            take_fixed(&asked.columns[EXIST_ID1S], &id1)
            if not take_varint(&asked.columns[EXIST_ATYPES], &atype) or atype > MAX_UINT32:
                return False
            if not take_fixed(&asked.columns[EXIST_ID2S], &id2) or not 0 < id2 <= MAX_SIGNED:
                return False
            if atypes is not None and not has_bit(atype, <bytes>atypes):
                return False
            memcpy(atype_at + 8 * slot, &atype, 8)
        if minimums is None:
            found = self.hits.exist_all(
                PyBytes_FromStringAndSize(<const char *>id1_column.at, 8 * count),
                atype_column,
                PyBytes_FromStringAndSize(<const char *>id2_column.at, 8 * count),
            )
        else:
            found = [None] * count
        for slot in range(<Py_ssize_t>count):
            if found[slot] is not None:
                continue
            memcpy(&id1, id1_column.at + 8 * slot, 8)
            memcpy(&atype, atype_at + 8 * slot, 8)
            memcpy(&id2, id2_column.at + 8 * slot, 8)
            if minimums is not None:
                minimum = minimums.get(first + slot, 0)
                found[slot] = self.hits.exists(id1, atype, id2, minimum)
                if found[slot] is not None:
                    continue
            denial = self.cache.denial(id1, atype, id2, minimum)
            if denial:
                denials.append(denial)
                found[slot] = EXISTS_NOT
        values.extend(found)
        return True

    cdef bint is_within(self, uint64_t atype, uint64_t limit) except -1:
        """Return whether a limit is not cut to that of the type."""
        if limit > MAX_UINT32:
            return False
        bound = self.limits.get(atype)
        return bound is None or limit <= <uint64_t>bound

    cdef bytes encoded_hot(self, Asked *asked, rates, dict hot, list values, bint is_checked):
        """Return the marks of hot items as the last fields of the `ReadAnswer`. ``is_checked``: for a caller who may not
        read everything, of whose queries only those are marked that show something."""
        cdef uint64_t id1 = 0, atype, slot = 0, marked = 0
        cdef Span ids, types
        cdef HotKey *key
        cdef int place
        cdef uint32_t *slots = <uint32_t *>PyMem_Malloc(12 * len(values))
        if slots == NULL:
            raise MemoryError
        cdef uint32_t *per_second = slots + len(values)
        cdef uint32_t *pauses = per_second + len(values)
        try:
            self.learn_hot(hot, rates)
            for place in range(6):
                ids = asked.whole[ID_FIELDS[place]]
                types = asked.whole[ATYPE_FIELDS[place]]
                while take_fixed(&ids, &id1):
                    atype = 0
                    if place:
                        take_varint(&types, &atype)
                    key = self.hot_key(id1, atype)
                    if key.is_used and not (is_checked and values[slot] in NOTHING_SHOWN):
                        slots[marked] = <uint32_t>slot
                        per_second[marked] = key.per_second
                        pauses[marked] = key.pause_ms
                        marked += 1
                    slot += 1
            if not marked:
                return b""
            return (
                packed_column(READ_HOT_SLOTS, slots, marked)
                + packed_column(READ_HOT_RATES, per_second, marked)
                + packed_column(READ_SLOW_DOWN_MS, pauses, marked)
            )
        finally:
            PyMem_Free(slots)

    cdef HotKey *hot_key(self, uint64_t id1, uint64_t atype) noexcept:
        """Return the place of a key in the table of hot keys, which is not used for a key that is not hot."""
        cdef uint64_t place = (id1 ^ id1 >> 29) + atype * 31
        cdef HotKey *key
        while True:
            key = self.hot_keys + (place & self.hot_mask)
            if not key.is_used or (key.id1 == id1 and key.atype == atype):
                return key
            place += 1

    cdef int learn_hot(self, dict hot, rates) except -1:
        """Put the hot keys into a table of their own with their marks. The dictionary is replaced when it changes."""
        cdef uint64_t id1, atype, size = 16
        cdef HotKey *key
        if hot is self.hot:
            return 0
        while size < <uint64_t>(4 * len(hot)):
            size *= 2
        self.hot = None
        PyMem_Free(self.hot_keys)
        self.hot_keys = <HotKey *>PyMem_Calloc(size, sizeof(HotKey))
        if self.hot_keys == NULL:
            raise MemoryError
        self.hot_mask = size - 1
        for (id1, atype), rate in hot.items():
            key = self.hot_key(id1, atype)
            key.id1, key.atype = id1, <uint32_t>atype
            key.per_second, key.pause_ms = round(rate), rates.slow_down_ms(rate)
            key.is_used = True
        self.hot = hot
        return 0

    cdef bytes encoded_epochs(self, Asked *asked):
        """Return the version epochs of all shards that are asked, as the last fields of the `ReadAnswer`."""
        cdef set shards = set()
        cdef list numbers
        cdef Span ids
        cdef uint64_t id1 = 0
        cdef int field
        for field in (OBJ_IDS, COUNT_ID1S, RANGE_ID1S, TIME_RANGE_ID1S, GET_ID1S, EXIST_ID1S):
            ids = asked.whole[field]
            while take_fixed(&ids, &id1):
                shards.add(id1 >> SHARD_SHIFT)
        numbers = list(shards)
        return packed(READ_EPOCH_SHARDS, numbers) + packed(
            READ_VERSION_EPOCHS, [self.cache.version_epoch(shard) for shard in numbers]
        )

    cdef bytes encoded(self, uint64_t number, list values, bytes last_fields, bint is_part):
        """Return the `Answer` with the values that are there; ``is_part``: as the first part of it, with their
        slots."""
        cdef uint64_t body = 0, slots = 0, size, slot
        cdef bytes message, value
        cdef unsigned char *at
        for slot in range(<uint64_t>len(values)):
            if values[slot] is None:
                continue
            size = PyBytes_GET_SIZE(<bytes?>values[slot])
            body += 1 + varint_bytes(size) + size
            if is_part:
                slots += varint_bytes(slot)
        if not body:
            return b""
        if is_part:
            body += 1 + varint_bytes(slots) + slots
        body += PyBytes_GET_SIZE(last_fields)
        size = 2 + 2 * is_part + varint_bytes(number) + varint_bytes(body) + body
        message = PyBytes_FromStringAndSize(NULL, size)
        at = <unsigned char *>PyBytes_AS_STRING(message)
        at[0] = ANSWER_NUMBER << 3
        at = put_varint(at + 1, number)
        if is_part:
            at[0] = ANSWER_MORE << 3
            at[1] = 1
            at += 2
        at[0] = ANSWER_READ << 3 | 2
        at = put_varint(at + 1, body)
        if is_part:
            at[0] = READ_SLOTS << 3 | 2
            at = put_varint(at + 1, slots)
            for slot in range(<uint64_t>len(values)):
                if values[slot] is not None:
                    at = put_varint(at, slot)
        for each in values:
            if each is None:
                continue
            value = <bytes>each
            size = PyBytes_GET_SIZE(value)
            at[0] = READ_VALUES << 3 | 2
            at = put_varint(at + 1, size)
            memcpy(at, PyBytes_AS_STRING(value), size)
            at += size
        memcpy(at, PyBytes_AS_STRING(last_fields), PyBytes_GET_SIZE(last_fields))
        return message


cdef bint add_missed_queries(Asked *asked, list values, list queries) except -1:
    """Append the query of each slot without a value; False when one has an id that no query may carry. The columns were
    read once and are whole."""
    cdef uint64_t slot = 0, id1 = 0, id2 = 0, atype = 0, pos = 0, limit = 0, high = 0, low = 0, size = 0, start = 0
    cdef Span columns[LAST_COLUMN + 1]
    cdef Span id2s
    cdef int place
    memcpy(columns, asked.whole, sizeof(columns))
    for place in range(6):
        while take_fixed(&columns[ID_FIELDS[place]], &id1):
            if place:
                take_varint(&columns[ATYPE_FIELDS[place]], &atype)
            if place == 2:
                take_varint(&columns[RANGE_POSITIONS], &pos)
                take_varint(&columns[RANGE_LIMITS], &limit)
            elif place == 3:
                take_fixed(&columns[TIME_RANGE_STARTS], &start)  # it stays 0 without that column
                take_varint(&columns[TIME_RANGE_HIGHS], &high)
                take_varint(&columns[TIME_RANGE_LOWS], &low)
                take_varint(&columns[TIME_RANGE_LIMITS], &limit)
            elif place == 4:
                take_varint(&columns[GET_ID2_COUNTS], &size)
                id2s.at = columns[GET_ID2S].at
                columns[GET_ID2S].at += 8 * size
                take_varint(&columns[GET_HIGHS], &high)
                take_varint(&columns[GET_LOWS], &low)
            elif place == 5:
                take_fixed(&columns[EXIST_ID2S], &id2)
            slot += 1
            if values[slot - 1] is not None:
                continue
            if not 0 < id1 <= MAX_SIGNED:
                return False
            if place == 0:
                queries.append(ObjectQuery(id1))
            elif place == 1:
                queries.append(CountQuery(id1, atype))
            elif place == 2:
                queries.append(RangeQuery(id1, atype, pos, limit))
            elif place == 3:
                queries.append(TimeRangeQuery(id1, atype, high, low, limit, start))
            elif place == 4:
                queries.append(EdgesQuery(id1, atype, tuple(dict.fromkeys(ids_of(id2s.at, size))), high, low))
            else:
                queries.append(EdgesQuery(id1, atype, (id2,)))
    return True


cdef bytes packed(int field, list numbers):
    """Return a packed field of numbers."""
    cdef uint64_t size = 0, number
    cdef bytes message
    cdef unsigned char *at
    for number in numbers:
        size += varint_bytes(number)
    message = PyBytes_FromStringAndSize(NULL, 1 + varint_bytes(size) + size)
    at = <unsigned char *>PyBytes_AS_STRING(message)
    at[0] = field << 3 | 2
    at = put_varint(at + 1, size)
    for number in numbers:
        at = put_varint(at, number)
    return message


cdef bytes packed_column(int field, const uint32_t *numbers, uint64_t count):
    """Return a packed field of the numbers of an array."""
    cdef uint64_t size = 0, index
    cdef bytes message
    cdef unsigned char *at
    for index in range(count):
        size += varint_bytes(numbers[index])
    message = PyBytes_FromStringAndSize(NULL, 1 + varint_bytes(size) + size)
    at = <unsigned char *>PyBytes_AS_STRING(message)
    at[0] = field << 3 | 2
    at = put_varint(at + 1, size)
    for index in range(count):
        at = put_varint(at, numbers[index])
    return message


cdef list ids_of(const unsigned char *column, uint64_t count):
    """Return the ids of a column."""
    cdef uint64_t id = 0, index
    cdef list ids = []
    for index in range(count):
        memcpy(&id, column + 8 * index, 8)
        ids.append(id)
    return ids


cdef inline int varint_bytes(uint64_t value) noexcept nogil:
    cdef int found = 1
    while value > 127:
        value >>= 7
        found += 1
    return found


cdef inline unsigned char *put_varint(unsigned char *at, uint64_t value) noexcept nogil:
    while value > 127:
        at[0] = <unsigned char>(value & 127 | 128)
        value >>= 7
        at += 1
    at[0] = <unsigned char>value
    return at + 1
