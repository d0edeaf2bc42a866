"""Records that could not be loaded, with line and reason, in a CSV file with the columns of the input.

Columns are known by name, so the file can be corrected and loaded as it is.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tao.cli.loading.csv_source import Record
from tao.model.errors import OperatorError

SUFFIX: Final = ".rejected.csv"


class RejectFile:
    """Made with the first rejected record. ``size``: bytes up to the last `add`; what lies beyond it is from a run that
    was cut off, and is removed."""

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
            raise self._failed(error) from error

    def add(self, rejected: Iterable[tuple[Record, str]]) -> None:
        """Append records with their reasons. Raises `OperatorError`."""
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self._delimiter, lineterminator="\n")
        if not self.size:
            own = [column for column in self._columns if column not in ("line", "reason")]
            writer.writerow(["line", "reason", *own])
        kept = [index for index, column in enumerate(self._columns) if column not in ("line", "reason")]
        for record, reason in rejected:
            whole = len(record.cells) == len(self._columns)
            cells = [record.cells[index] for index in kept] if whole else record.cells
            writer.writerow([record.line, reason, *cells])
        # Not decodable text goes back to the bytes it came from.
        content = text.getvalue().encode(errors="surrogateescape")
        try:
            with self.path.open("ab") as file:
                file.write(content)
        except OSError as error:
            raise self._failed(error) from error
        self.size += len(content)

    def _failed(self, error: OSError) -> OperatorError:
        return OperatorError(f"cannot write the rejected lines to {self.path}: {error.strerror}")
