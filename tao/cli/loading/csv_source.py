"""Records of a CSV file or stream, with their line and the byte where the next one begins.

The byte offset is what makes a load resumable without reading again what is done. What cannot be read is a record with
a fault, not the end of the file.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final, NamedTuple

from tao.cli.output import counted
from tao.model.errors import OperatorError

MAX_CELL_CHARACTERS: Final = 2 << 20
"""Twice the largest object; a quote that is never closed ends here, and not with the memory."""
_MAX_LINE_BYTES: Final = 8 << 20
_FINGERPRINT_BYTES: Final = 1 << 16
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Place(NamedTuple):
    """Where reading goes on: a byte offset and the number of lines before it."""

    offset: int
    lines: int


class Record(NamedTuple):
    """One record. ``line``: where it begins, from 1; ``end``: where the next one does. ``fault``: why it cannot be
    used, or empty."""

    line: int
    end: Place
    cells: list[str]
    fault: str = ""


class CsvSource:
    """An open CSV file with a header. ``size`` in bytes is 0 when nobody knows (standard input)."""

    def __init__(self, file: BinaryIO, name: str, *, delimiter: str = ",", size: int = 0) -> None:
        """Reads the header. Raises `OperatorError` when there is none, or it names a column twice."""
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
            raise OperatorError(f"{name} has no header line that names its columns")
        self.columns = [column.strip() for column in header.cells]
        twice = sorted({column for column in self.columns if self.columns.count(column) > 1})
        if twice:
            raise OperatorError(f"{name} has the column {twice[0]!r} twice")

    @property
    def start(self) -> Place:
        """The place behind the header, as long as no record was read."""
        return self._place

    @property
    def _place(self) -> Place:
        return Place(self._offset, self._lines)

    def fingerprint(self, modified_ns: int, options: Mapping[str, object]) -> str:
        """Names this content under these options: progress noted under another name means nothing here."""
        position = self._file.tell()
        self._file.seek(0)
        head = self._file.read(_FINGERPRINT_BYTES)
        self._file.seek(position)
        told = f"{self.size}\n{modified_ns}\n{self._delimiter}\n{sorted(options.items())!r}\n"
        return hashlib.sha256(told.encode(errors="surrogateescape") + head).hexdigest()

    def index_of(self, column: str) -> int:
        """The place of a column. Raises `OperatorError` naming those that there are."""
        try:
            return self.columns.index(column)
        except ValueError:
            raise OperatorError(f"{self.name} has no column {column!r}: it has {', '.join(self.columns)}") from None

    def records(self, place: Place) -> Iterator[Record]:
        """The records from ``place`` on, which is `start` or the end of one read before."""
        if place.offset != self._offset:
            self._file.seek(place.offset)
            self._offset, self._lines = place.offset, place.lines
        width = len(self.columns)
        for record in self._records():
            if not record.fault and len(record.cells) != width:
                yield record._replace(fault=f"has {counted(len(record.cells), 'cell')}, the header {width}")
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
                yield Record(line, self._place, [], f"is no CSV: {error}")
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
                # Kept byte for byte, for the file of rejected lines.
                yield raw.decode(errors="surrogateescape")
