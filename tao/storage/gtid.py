"""Positions in a binlog by global transaction id, in the two notations there are, and which server has what.

MariaDB counts per domain and only upwards, so the last number of each domain is the whole position. MySQL's numbers
belong to the server that committed, and a set of them may have gaps, so intervals are kept.

To compare two servers (`GtidSet`) MariaDB's position is not enough: after a promotion two histories reach the same
number. The last number *of each committing server* in the domain tells them apart, since a server gives out its
numbers upwards and a replica takes them in order: a history that lacks one lacks all later ones of that server.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import Final

from tao.model.errors import OperatorError
from tao.storage.dialect import Dialect

_FIRST: Final = itemgetter(0)


class MariadbPosition:
    """``domain-server-number`` per domain: ``0-1-4711,7-2-9``."""

    __slots__ = ("_reached",)

    def __init__(self, text: str) -> None:
        self._reached: Final[dict[str, tuple[str, int]]] = {}
        for gtid in _words(text):
            self.advance(gtid)

    def advance(self, gtid: str) -> None:
        """The transaction is behind us. Raises `OperatorError` for what is no GTID."""
        domain, server, number = _mariadb_parts(gtid)
        reached = self._reached.get(domain)
        if reached is None or number > reached[1]:
            self._reached[domain] = (server, number)

    def includes(self, gtid: str) -> bool:
        """Whether the transaction, or a later one of its domain, is behind us."""
        domain, _, number = _mariadb_parts(gtid)
        reached = self._reached.get(domain)
        return reached is not None and number <= reached[1]

    def is_beyond(self, server_is_at: str) -> bool:
        """Whether a server that has come so far cannot be read from here yet. It refuses what it does not know."""
        there = MariadbPosition(server_is_at)
        return not all(there.includes(gtid) for gtid in _words(str(self)))

    def __str__(self) -> str:
        return ",".join(f"{domain}-{server}-{number}" for domain, (server, number) in sorted(self._reached.items()))


class MysqlPosition:
    """A GTID set: ``uuid:1-4711:4713,uuid:1-9``."""

    __slots__ = ("_intervals",)

    def __init__(self, text: str) -> None:
        self._intervals: Final[dict[str, list[tuple[int, int]]]] = {}
        for word in _words(text):
            uuid, *intervals = word.lower().split(":")
            for interval in intervals:
                first, _, last = interval.partition("-")
                if not first.isdecimal() or (last and not last.isdecimal()):
                    raise OperatorError(f"{word!r} is no GTID set that is understood here; tagged GTIDs are not")
                self._add(uuid, int(first), int(last or first))

    def advance(self, gtid: str) -> None:
        """The transaction, or all of a run ``uuid:first-last``, is behind us. Raises `OperatorError` for what is no
        GTID."""
        source, colon, run = gtid.partition(":")
        head, _, last = run.partition("-")
        uuid, first = _mysql_parts(f"{source}{colon}{head}")
        self._add(uuid, first, int(last) if last else first)

    def includes(self, gtid: str) -> bool:
        """Whether the transaction is behind us."""
        uuid, number = _mysql_parts(gtid)
        intervals = self._intervals.get(uuid, [])
        at = bisect_right(intervals, number, key=_FIRST) - 1
        return at >= 0 and number <= intervals[at][1]

    @staticmethod
    def is_beyond(server_is_at: str) -> bool:
        """Whether a server that has come so far cannot be read from here yet. Any can: it sends what the set has not,
        whatever else the set has."""
        del server_is_at
        return False

    def missing(self, other: MysqlPosition) -> list[str]:
        """The transactions of ``other`` that are not behind us, as runs ``uuid:first-last``."""
        found: list[str] = []
        for uuid, intervals in sorted(other._intervals.items()):
            ours = self._intervals.get(uuid, [])
            for first, last in intervals:
                at = first
                for start, end in [*ours, (last + 1, last + 1)]:
                    if end < at:
                        continue
                    if start > at and at <= last:
                        until = min(start - 1, last)
                        found.append(f"{uuid}:{at}" if at == until else f"{uuid}:{at}-{until}")
                    at = max(at, end + 1)
                    if at > last:
                        break
        return found

    def __str__(self) -> str:
        return ",".join(
            ":".join([uuid, *(str(first) if first == last else f"{first}-{last}" for first, last in intervals)])
            for uuid, intervals in sorted(self._intervals.items())
        )

    def _add(self, uuid: str, first: int, last: int) -> None:
        intervals = self._intervals.setdefault(uuid, [])
        if intervals and intervals[-1][0] <= first == intervals[-1][1] + 1:  # the usual case: the next number
            intervals[-1] = (intervals[-1][0], last)
            return
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*intervals, (first, last)]):
            if merged and start <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        intervals[:] = merged


GtidPosition = MariadbPosition | MysqlPosition


def parse_position(dialect: Dialect, text: str) -> GtidPosition:
    """The position that a server of this kind, or its stored form, states. Raises `OperatorError`."""
    return MariadbPosition(text) if dialect is Dialect.MARIADB else MysqlPosition(text)


class GtidSet:
    """The transactions that a server has. Immutable; compared by containment: ``a >= b`` means that a lacks nothing of
    b, and two of which neither contains the other have diverged."""

    __slots__ = ("_last", "_mysql", "_text")

    def __init__(self, dialect: Dialect, *texts: str) -> None:
        """The union of ``texts``: MariaDB's ``gtid_binlog_state`` and positions, MySQL's sets. Raises
        `OperatorError`."""
        self._last: Final[dict[tuple[str, str], int]] = {}
        words = [word for text in texts for word in _words(text)]
        self._mysql: Final = MysqlPosition("" if dialect is Dialect.MARIADB else ",".join(words))
        if dialect is Dialect.MARIADB:
            for word in words:
                domain, server, number = _mariadb_parts(word)
                self._last[domain, server] = max(number, self._last.get((domain, server), 0))
        last = sorted(self._last.items())
        self._text: Final = str(self._mysql) or ",".join(f"{domain}-{server}-{n}" for (domain, server), n in last)

    def __ge__(self, other: GtidSet) -> bool:
        return not self.lacks(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GtidSet) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"GtidSet({self._text!r})"

    def lacks(self, other: GtidSet) -> str:
        """What ``other`` has and this has not, for people; empty when there is nothing."""
        missing = [
            f"{domain}-{server}-{number}" if number == known + 1 else f"{domain}-{server}-({known + 1}…{number})"
            for (domain, server), number in sorted(other._last.items())
            if number > (known := self._last.get((domain, server), 0))
        ]
        return ",".join([*missing, *self._mysql.missing(other._mysql)])


def joined(earlier: str, later: str) -> str | None:
    """One text for `advance` that stands for both, when there is one, so that what waits stays small."""
    if ":" in earlier and ":" in later:
        source, _, run = earlier.partition(":")
        other, _, number = later.partition(":")
        first, _, last = run.partition("-")
        next_first, _, next_last = number.partition("-")
        if source == other and (last or first).isdecimal() and next_first == str(int(last or first) + 1):
            return f"{source}:{first}-{next_last or next_first}"
        return None
    one, two = earlier.split("-"), later.split("-")
    if len(one) != 3 or len(two) != 3 or one[0] != two[0] or not (one[2].isdecimal() and two[2].isdecimal()):
        return None
    return later if int(two[2]) > int(one[2]) else earlier


def history_of(gtid: str) -> tuple[str, int]:
    """Who numbered the transaction, and its number; of a word of a position, the newest one's. Raises
    `OperatorError` for what is no GTID."""
    if ":" in gtid:
        uuid, _, runs = gtid.partition(":")
        return _mysql_parts(f"{uuid}:{runs.rpartition(':')[2].rpartition('-')[2]}")
    domain, server, number = _mariadb_parts(gtid)
    return f"{domain}-{server}", number


def rewound(position: str, history: str, number: int) -> str:
    """The position as it was when transaction ``number`` of ``history`` was the newest of them. Raises
    `OperatorError`."""
    if history.count("-") == 1:
        domain = history.partition("-")[0]
        others = [word for word in _words(position) if _mariadb_parts(word)[0] != domain]
        return ",".join([*others, f"{history}-{number}"])
    kept = []
    for word in _words(position):
        uuid, *intervals = word.lower().split(":")
        if uuid == history:
            bounds = [
                (int(first), int(last or first)) for first, _, last in (each.partition("-") for each in intervals)
            ]
            intervals = [f"{first}-{min(last, number)}" for first, last in bounds if first <= number]
        if intervals:
            kept.append(":".join([uuid, *intervals]))
    return ",".join(kept)


def binlog_state_at(state: str, position: str) -> str:
    """MariaDB's ``gtid_binlog_state`` as it is at a position, from the one that it was before: the last number of each
    committing server, the newest of each domain last, as the server wants it. Raises `OperatorError`."""
    last: dict[tuple[int, str], tuple[int, str]] = {}
    for word in [*_words(state), *_words(position)]:
        domain, server, number = _mariadb_parts(word)
        last[int(domain), server] = max((number, word), last.get((int(domain), server), (0, "")))
    return ",".join(word for (_, _), (_, word) in sorted(last.items(), key=lambda each: (each[0][0], each[1][0])))


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _mariadb_parts(gtid: str) -> tuple[str, str, int]:
    parts = gtid.split("-")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise OperatorError(f"{gtid!r} is no MariaDB GTID; it should look like 0-1-4711")
    return parts[0], parts[1], int(parts[2])


def _mysql_parts(gtid: str) -> tuple[str, int]:
    uuid, _, number = gtid.partition(":")
    if len(uuid) != 36 or not number.isdecimal():
        raise OperatorError(f"{gtid!r} is no MySQL GTID; it should look like 3e11fa47-71ca-11e1-9e33-c80aa9429562:23")
    return uuid.lower(), int(number)
