"""Answers to queries for edges that a list's cached prefix could not decide, kept beside the prefix.

A page of an intersection asks a long list which of some ids it has. The next page, and the same page when it is read
again, ask the list for the same ids. Without the answer each of them costs a query of the database.

An answer is true of one version of its list. It is kept with the very object of the prefix that is the list's entry at
that moment, and is found only while that object still is the entry. Every change, fill, eviction, drop and invalidation
of a list replaces its entry or removes it, so an answer ends with the entry, and none of these has to know of answers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_ANSWER_BYTES: Final = 300  # the objects of an answer and its key
_LIST_BYTES: Final = 400  # the objects of a list's answers


class Asked(NamedTuple):
    """A query for edges of one list. ``id2s`` is a column of ids, as edge blocks have them."""

    id2s: bytes
    high: int
    low: int


class _OfList:
    """The answers beside one prefix, the least recently used first."""

    __slots__ = ("answers", "prefix", "size_bytes")

    def __init__(self, prefix: bytes) -> None:
        self.prefix: Final = prefix
        self.answers: Final[dict[Asked, bytes]] = {}
        self.size_bytes = _LIST_BYTES + len(prefix)  # counted, because it may have left the cache


class KeptAnswers:
    """The kept answers of one cache, in at most so many bytes. The list that was used least recently leaves first."""

    __slots__ = ("_lists", "_max_bytes", "size_bytes", "used")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._lists: Final[dict[tuple[int, int], _OfList]] = {}
        self.size_bytes = 0
        self.used = 0
        """Number of queries that were answered."""

    def has(self, id1: int, atype: int) -> bool:
        """Return whether answers are kept of the list, which may have changed since."""
        return (id1, atype) in self._lists

    def find(self, prefix: bytes, id1: int, atype: int, asked: Asked) -> bytes | None:
        """Return the answer that is kept beside ``prefix``, the list's entry."""
        key = id1, atype
        of_list = self._lists.get(key)
        if of_list is None:
            return None
        if of_list.prefix is not prefix:
            self._drop(key)
            return None
        answer = of_list.answers.pop(asked, None)
        if answer is not None:
            of_list.answers[asked] = answer
            self._lists[key] = self._lists.pop(key)
            self.used += 1
        return answer

    def put(self, prefix: bytes, id1: int, atype: int, asked: Asked, answer: bytes) -> None:
        """Keep an answer beside ``prefix``, the list's entry, whose version the answer has."""
        key = id1, atype
        of_list = self._lists.pop(key, None)
        if of_list is None or of_list.prefix is not prefix:
            self.size_bytes -= 0 if of_list is None else of_list.size_bytes
            of_list = _OfList(prefix)
            self.size_bytes += of_list.size_bytes
        self._lists[key] = of_list
        self._resize(of_list, _size(asked, answer) if asked not in of_list.answers else 0)
        of_list.answers[asked] = answer
        self._make_room()

    def _make_room(self) -> None:
        while self.size_bytes > self._max_bytes:
            key, of_list = next(iter(self._lists.items()))
            if len(of_list.answers) > 1:
                asked = next(iter(of_list.answers))
                self._resize(of_list, -_size(asked, of_list.answers.pop(asked)))
            else:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self.size_bytes -= self._lists.pop(key).size_bytes

    def _resize(self, of_list: _OfList, by_bytes: int) -> None:
        of_list.size_bytes += by_bytes
        self.size_bytes += by_bytes


def _size(asked: Asked, answer: bytes) -> int:
    return _ANSWER_BYTES + len(asked.id2s) + len(answer)
