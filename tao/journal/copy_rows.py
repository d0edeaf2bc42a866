"""The rows of copies: accepted writes of other followers, which this one keeps on its disk beside its own.

All functions run within a commit of the journal (`JournalStore.run`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tao.journal.entries import Entry
from tao.journal.store import checksum_of, entry_of, insert_entries


class Origin(NamedTuple):
    """The journal that has accepted the writes of some copies: its follower, and its id."""

    acceptor: str
    journal: str


class Copy(NamedTuple):
    """The copy of an entry, and the proof of its receipt."""

    entry: Entry
    proof: bytes


class Agreement(NamedTuple):
    """Of the numbers above ``after`` up to ``up_to``, the acceptor holds only the entries ``held``."""

    after: int
    up_to: int
    held: frozenset[int]


@dataclass(slots=True)
class Kept:
    """What a change of the copies of one origin has done."""

    copies: int = 0
    """Copies more than before."""
    bytes: int = 0
    """Their size, less that of deleted ones."""
    missing: Sequence[int] = ()
    """The entries without a copy, among those that the acceptor holds."""


class Adopted(NamedTuple):
    """Copies that have become entries of this journal."""

    entries: Sequence[Entry]
    copies: int
    """Number of copies that are gone, with those that were damaged."""
    bytes: int
    damaged: Sequence[int]
    """Numbers of those that the disk has damaged; they are set aside in the table ``torn_rows``."""


IS_COPY: Final = 0
NO_COPY: Final = -1
_SELECT: Final = (
    "SELECT priority, shard, accepted_ms, proof, checksum, CAST(body AS BLOB) FROM copies "
    "WHERE acceptor = ? AND journal = ? AND number = ?"
)
_DELETE: Final = "DELETE FROM copies WHERE acceptor = ? AND journal = ? AND number = ? RETURNING length(body)"
_IS_ADOPTED: Final = "SELECT 1 FROM adopted WHERE acceptor = ? AND journal = ? AND number = ?"
_ROW_BYTES: Final = 100
"""Size of a row and its index without its body, about."""


def count_copies(connection: sqlite3.Connection) -> dict[Origin, tuple[int, int]]:
    """Return the number of copies and their size, by origin."""
    rows = connection.execute("SELECT acceptor, journal, count(*), sum(length(body)) FROM copies GROUP BY 1, 2")
    return {Origin(acceptor, journal): (count, size + count * _ROW_BYTES) for acceptor, journal, count, size in rows}


def size_of_copy(body: bytes) -> int:
    """Return how many bytes of the journal a copy takes, about."""
    return len(body) + _ROW_BYTES


def change_copies(
    connection: sqlite3.Connection,
    origin: Origin,
    copies: Sequence[Copy],
    gone: Sequence[int],
    agreement: Agreement | None,
) -> Kept:
    """Insert copies, delete those that are gone, and agree on a range of numbers."""
    kept = Kept()
    for entry, proof in copies:
        _delete(connection, origin, [entry.number], kept)  # it may be sent again
        connection.execute(
            "DELETE FROM adopted WHERE acceptor = ? AND journal = ? AND number = ?", (*origin, entry.number)
        )
        columns = entry.number, int(entry.priority), entry.shard, entry.accepted_ms
        connection.execute(
            "INSERT INTO copies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*origin, *columns, proof, checksum_of(columns, entry.body), entry.body),
        )
        kept.copies += 1
        kept.bytes += size_of_copy(entry.body)
    _delete(connection, origin, gone, kept)
    if agreement is not None:
        rows = connection.execute(
            "SELECT number FROM copies WHERE acceptor = ? AND journal = ? AND number > ? AND number <= ?",
            (*origin, agreement.after, agreement.up_to),
        )
        found = {number for (number,) in rows}
        _delete(connection, origin, sorted(found - agreement.held), kept)
        missing = sorted(agreement.held - found)
        # What was adopted waits in this journal, or is made: a copy of it would be adopted again the next time.
        kept.missing = [
            number for number in missing if connection.execute(_IS_ADOPTED, (*origin, number)).fetchone() is None
        ]
    return kept


def _delete(connection: sqlite3.Connection, origin: Origin, numbers: Sequence[int], kept: Kept) -> None:
    for number in numbers:
        for (size,) in connection.execute(_DELETE, (*origin, number)).fetchall():
            kept.copies -= 1
            kept.bytes -= size + _ROW_BYTES


def _is_whole(columns: Sequence[int], checksum: object, body: bytes) -> bool:
    """Return whether a row is what was written: also its numbers may be none."""
    return all(isinstance(each, int) for each in columns) and checksum == checksum_of(columns, body)


def numbers_adopted_from(connection: sqlite3.Connection, origin: Origin, after: int, up_to: int) -> frozenset[int]:
    """Return the numbers of the entries of this journal, in a range, that were copies of an origin."""
    rows = connection.execute(
        "SELECT own_number, acceptor, journal FROM adopted WHERE own_number > ? AND own_number <= ?", (after, up_to)
    )
    return frozenset(number for number, *found in rows if tuple(found) == origin)


def copied_numbers(connection: sqlite3.Connection, origin: Origin, limit: int) -> list[int]:
    """Return the lowest numbers of the copies of an origin."""
    rows = connection.execute(
        "SELECT number FROM copies WHERE acceptor = ? AND journal = ? ORDER BY number LIMIT ?",
        (*origin, limit),
    )
    return [number for (number,) in rows]


def adopt(connection: sqlite3.Connection, origin: Origin, numbers: Sequence[tuple[int, int]], now_ms: int) -> Adopted:
    """Make entries of this journal of copies. ``numbers``: of each copy, and of the entry that it becomes."""
    entries: list[Entry] = []
    damaged: list[int] = []
    copies = size = 0
    for number, own in numbers:
        row = connection.execute(_SELECT, (*origin, number)).fetchone()
        if row is None:
            continue  # the acceptor has had it deleted meanwhile
        *columns, proof, checksum, body = row
        if _is_whole((number, *columns), checksum, body):
            entries.append(entry_of((own, *columns), 0, body))
            adopted = (*origin, number, proof, own, now_ms)
            connection.execute("REPLACE INTO adopted VALUES (?, ?, ?, ?, ?, ?)", adopted)
        else:
            damaged.append(number)
            torn = (own, *columns, checksum, body, now_ms)
            connection.execute("REPLACE INTO torn_rows VALUES (?, ?, ?, ?, ?, ?, ?)", torn)
        copies += 1
        size += connection.execute(_DELETE, (*origin, number)).fetchone()[0] + _ROW_BYTES
    insert_entries(connection, entries)
    if numbers:
        connection.execute("UPDATE state SET next = max(next, ?)", (numbers[-1][1] + 1,))
    return Adopted(entries, copies, size, damaged)


def undo_adoption(connection: sqlite3.Connection, origin: Origin, numbers: Sequence[tuple[int, int]]) -> None:
    """Make copies again of what `adopt` has made entries, if it has: its commit was reported as failed."""
    for number, own in numbers:
        found = connection.execute(
            "SELECT priority, shard, accepted_ms, proof, CAST(body AS BLOB) FROM entries JOIN adopted "
            "ON own_number = entries.number WHERE entries.number = ? AND acceptor = ? AND journal = ?",
            (own, *origin),
        ).fetchone()
        if found is None:
            continue
        *lane, proof, body = found
        columns = (number, *lane)
        connection.execute(
            "REPLACE INTO copies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*origin, *columns, proof, checksum_of(columns, body), body),
        )
        connection.execute("DELETE FROM entries WHERE number = ?", (own,))
        connection.execute("DELETE FROM adopted WHERE acceptor = ? AND journal = ? AND number = ?", (*origin, number))


def find_copy(connection: sqlite3.Connection, origin: Origin, number: int, proof: bytes) -> int:
    """Return the number under which the copy of an entry was adopted; `IS_COPY` when it is a copy still, and `NO_COPY`
    when there is none. Only who has the receipt has its ``proof``."""
    key = (*origin, number, proof)
    found = connection.execute(
        "SELECT own_number FROM adopted WHERE acceptor = ? AND journal = ? AND number = ? AND proof = ?",
        key,
    ).fetchone()
    if found is not None:
        return int(found[0])
    copy = connection.execute(
        "SELECT 1 FROM copies WHERE acceptor = ? AND journal = ? AND number = ? AND proof = ?",
        key,
    ).fetchone()
    return NO_COPY if copy is None else IS_COPY


class Held(NamedTuple):
    """A page of what a journal holds, for the follower that keeps copies of it."""

    entries: Sequence[Entry]
    damaged: Sequence[int]
    """Numbers of entries that the disk has damaged."""
    up_to: int
    """The last number of the page's range."""


def held_entries(connection: sqlite3.Connection, after: int, up_to: int, limit: int) -> Held:
    """Return the entries that wait or are parked with numbers above ``after``, at most ``limit`` of them."""
    columns = "SELECT number, priority, shard, accepted_ms, attempts, checksum, CAST(body AS BLOB) FROM"
    within = "WHERE number > ? AND number <= ?"
    rows = connection.execute(
        f"SELECT * FROM ({columns} entries {within} UNION ALL {columns} parked {within}) ORDER BY 1 LIMIT ?",  # noqa: S608 - of constants
        (after, up_to, after, up_to, limit),
    ).fetchall()
    last = rows[-1][0] if len(rows) == limit else up_to
    # All of the page's range: copies of numbers that are not named are deleted.
    within = "WHERE number > ? AND number <= ? ORDER BY number LIMIT ?"
    found = connection.execute(f"SELECT number FROM torn_rows {within}", (after, last, limit))  # noqa: S608 - of constants
    torn = [number for (number,) in found]
    if len(torn) == limit:
        last = torn[-1]
    entries, damaged = [], []
    for *values, attempts, checksum, body in rows:
        if values[0] > last:
            break
        if _is_whole(values, checksum, body):
            entries.append(entry_of(values, attempts, body))
        else:
            damaged.append(values[0])
    return Held(entries, [*damaged, *torn], last)
