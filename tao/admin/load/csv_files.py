"""Reads the records of a CSV file or stream, and writes the rejected ones to a CSV file beside it.

Each record comes with the byte offset of the next one, so that a load can be resumed without reading again what was
loaded. A record that cannot be read has a fault; reading goes on behind it. The file of rejected records has the
columns of the input and two more, ``line`` and ``reason``; columns are found by name, so the file can be corrected and
loaded as it is.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from tao.model.errors import OperatorError, unwritable

MAX_CELL_CHARACTERS: Final = 2 << 20
"""Twice the largest object. It bounds a cell whose quote is never closed."""
_MAX_LINE_BYTES: Final = 8 << 20
_FINGERPRINT_BYTES: Final = 1 << 16
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_REJECT_COLUMNS: Final = ("line", "reason")
"""The columns that a file of rejected records has before those of the input."""


class Place(NamedTuple):
    """A place between two records: its byte offset and the number of lines before it."""

    offset: int
    lines: int


class Record(NamedTuple):
    """One record. ``line``: its first line, counted from 1. ``end``: the place behind it. ``fault``: why it cannot be
    used; empty when it can."""

    line: int
    end: Place
    cells: list[str]
    fault: str = ""


class CsvSource:
    """An open CSV file with a header line. ``size``: its size in bytes, 0 when unknown (standard input)."""

    def __init__(self, file: BinaryIO, name: str, *, delimiter: str = ",", size: int = 0) -> None:
        """Read the header. Raises `OperatorError` when there is none, or when it names a column twice."""
        self.name = name
        self.size = size
        self._file = file
        self._delimiter = delimiter
        self._offset = 0
        self._lines = 0
        self._undecodable = False
        csv.field_size_limit(MAX_CELL_CHARACTERS)
        header = next(self._records(), None)
        if header is None or header.fault:
            why = f": its first line {header.fault}" if header is not None else ": it is empty"
            raise OperatorError(f"{name} has no header line that names its columns{why}")
        self.columns = [column.strip() for column in header.cells]
        twice = sorted({column for column in self.columns if self.columns.count(column) > 1})
        if twice:
            raise OperatorError(f"{name} has the column {twice[0]!r} twice")

    @property
    def start(self) -> Place:
        """The place behind the header, as long as no record has been read."""
        return self._place

    @property
    def _place(self) -> Place:
        return Place(self._offset, self._lines)

    def fingerprint(self, modified_ns: int, options: Mapping[str, object]) -> str:
        """Return a hash of the content and the options. Progress noted under another fingerprint is not valid."""
        position = self._file.tell()
        self._file.seek(0)
        head = self._file.read(_FINGERPRINT_BYTES)
        self._file.seek(position)
        text = f"{self.size}\n{modified_ns}\n{self._delimiter}\n{sorted(options.items())!r}\n"
        return hashlib.sha256(text.encode(errors="surrogateescape") + head).hexdigest()

    def index_of(self, column: str) -> int:
        """Return the index of a column. Raises `OperatorError` that names the columns there are."""
        try:
            return self.columns.index(column)
        except ValueError:
            if len(self.columns) == 1:
                has = f"one column, {self.columns[0]!r}; is --delimiter {self._delimiter!r} right?"
            else:
                has = ", ".join(self.columns)
            raise OperatorError(f"{self.name} has no column {column!r}: it has {has}") from None

    def unused_columns(self, used: Collection[int]) -> list[str]:
        """Return the columns whose index is not in ``used``, without the two that a file of rejected records adds."""
        is_of_rejects = tuple(self.columns[: len(_REJECT_COLUMNS)]) == _REJECT_COLUMNS
        first = len(_REJECT_COLUMNS) if is_of_rejects else 0
        return [self.columns[index] for index in range(first, len(self.columns)) if index not in used]

    def records(self, place: Place) -> Iterator[Record]:
        """Yield the records from ``place`` on, which is `start` or the end of a record read before."""
        if place.offset != self._offset:
            self._file.seek(place.offset)
            self._offset, self._lines = place.offset, place.lines
        width = len(self.columns)
        for record in self._records():
            if not record.fault and len(record.cells) != width:
                cells, lines = len(record.cells), record.end.lines - record.line + 1
                fault = f"has {cells} cell{'s' * (cells != 1)}, the header {width}"
                if lines > 1:
                    fault += f"; a cell in quotes goes on for {lines} lines: is a quote not closed?"
                yield record._replace(fault=fault)
            else:
                yield record

    def _records(self) -> Iterator[Record]:
        rows = csv.reader(self._text_lines(), delimiter=self._delimiter)
        while True:
            line = self._lines + 1
            self._undecodable = False
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Record(line, self._place, [], f"is not CSV: {error}")
                continue
            if cells:
                yield Record(line, self._place, cells, "is not UTF-8 text" if self._undecodable else "")

    def _text_lines(self) -> Iterator[str]:
        while raw := self._file.readline(_MAX_LINE_BYTES):
            if self._offset == 0 and raw.startswith(_BYTE_ORDER_MARK):
                self._offset = len(_BYTE_ORDER_MARK)
                raw = raw[len(_BYTE_ORDER_MARK) :]
            self._offset += len(raw)
            self._lines += 1
            try:
                yield raw.decode()
            except UnicodeDecodeError:
                self._undecodable = True
                # Every byte is kept, for the file of rejected records.
                yield raw.decode(errors="surrogateescape")


REJECTS_SUFFIX: Final = ".rejected.csv"


class RejectFile:
    """The file of rejected records, created with the first of them.

    ``size``: its length in bytes up to the last `add`. Content beyond it is left from an interrupted run and is
    removed."""

    def __init__(self, path: Path, columns: Sequence[str], *, delimiter: str = ",", size: int = 0) -> None:
        self.path = path
        self.size = size
        self._columns = columns
        self._delimiter = delimiter
        try:
            if size:
                with path.open("r+b") as file:
                    file.truncate(size)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise OperatorError(unwritable(self.path, error)) from error

    def add(self, rejected: Iterable[tuple[Record, str]]) -> None:
        """Append records with their reasons. Raises `OperatorError` when the file cannot be written."""
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self._delimiter, lineterminator="\n")
        if not self.size:
            own = [column for column in self._columns if column not in _REJECT_COLUMNS]
            writer.writerow([*_REJECT_COLUMNS, *own])
        kept = [index for index, column in enumerate(self._columns) if column not in _REJECT_COLUMNS]
        for record, reason in rejected:
            whole = len(record.cells) == len(self._columns)
            cells = [record.cells[index] for index in kept] if whole else record.cells
            writer.writerow([record.line, reason, *cells])
        # Text that could not be decoded becomes its original bytes again.
        content = text.getvalue().encode(errors="surrogateescape")
        try:
            with self.path.open("ab") as file:
                file.write(content)
        except OSError as error:
            raise OperatorError(unwritable(self.path, error)) from error
        self.size += len(content)
