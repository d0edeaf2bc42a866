"""The versions of the lists that a pair filter covers."""

from __future__ import annotations

from array import array
from typing import Final

_U64: Final = (1 << 64) - 1
_MIX: Final = 0x9E3779B97F4A7C15
_FIRST_SLOTS: Final = 64
_MAX_SLOTS: Final = 4096
"""Slots of one table of versions: it is split within about two milliseconds."""
_MAX_DEPTH: Final = 24


class _VersionTable:
    """A hash table from ids to versions, at most two thirds full. All of its ids begin with the same ``depth`` bits of
    their hash."""

    __slots__ = ("depth", "ids", "lists", "size", "versions")

    def __init__(self, depth: int, size: int) -> None:
        self.depth = depth
        self.size = size
        self.lists = 0
        self.ids = array("Q", bytes(8 * size))
        self.versions = array("Q", bytes(8 * size))

    @property
    def is_full(self) -> bool:
        return 3 * self.lists > 2 * self.size

    def put(self, id1: int, mixed: int, version: int) -> None:
        ids, size = self.ids, self.size
        place = mixed >> 20
        while (held := ids[place % size]) and held != id1:
            place += 1
        self.lists += not held
        ids[place % size] = id1
        self.versions[place % size] = version


class ListVersions:
    """A map from lists (by id1) to versions, of 16 bytes an entry.

    It is many small hash tables, found by the first bits of the id's hash. A table that is full is made twice as
    large, and one of the largest size is split in two. So no `put` moves more than one small table, however many lists
    there are (extendible hashing)."""

    __slots__ = ("_bits", "_slots", "_tables")

    def __init__(self) -> None:
        self._bits = 0
        self._tables = [_VersionTable(0, _FIRST_SLOTS)]
        self._slots = _FIRST_SLOTS

    @property
    def size_bytes(self) -> int:
        return 16 * self._slots + 8 * len(self._tables)

    def get(self, id1: int) -> int:
        """Return the version, 0 for a list that is not named."""
        mixed = id1 * _MIX & _U64
        table = self._tables[mixed >> 64 - self._bits]
        ids, size, place = table.ids, table.size, mixed >> 20
        while (held := ids[place % size]) != id1:
            if not held:
                return 0
            place += 1
        return table.versions[place % size]

    def put(self, id1: int, version: int) -> None:
        mixed = id1 * _MIX & _U64
        table = self._tables[mixed >> 64 - self._bits]
        while table.is_full:
            self._grow(table, mixed)
            table = self._tables[mixed >> 64 - self._bits]
        table.put(id1, mixed, version)

    def _grow(self, table: _VersionTable, mixed: int) -> None:
        """Replace a full table, which is the one of this hash."""
        depth, bits = table.depth, self._bits
        if table.size < _MAX_SLOTS or depth == _MAX_DEPTH:
            new = [_VersionTable(depth, 2 * table.size)]
        else:
            new = [_VersionTable(depth + 1, table.size) for _ in range(2)]
            if depth == bits:
                self._tables = [each for each in self._tables for _ in range(2)]
                self._bits = bits = bits + 1
        for id1, version in zip(table.ids, table.versions, strict=True):
            if id1:
                hash_of_it = id1 * _MIX & _U64
                new[len(new) - 1 and hash_of_it >> 63 - depth & 1].put(id1, hash_of_it, version)
        self._slots += sum(each.size for each in new) - table.size
        named = 1 << bits - depth  # so many places name the table, one after another
        first = mixed >> 64 - depth << bits - depth
        each_named = named // len(new)
        self._tables[first : first + named] = [each for each in new for _ in range(each_named)]
