"""Keeps the ids of external keys, and the progress of each load, in an SQLite file beside the input.

Ids are stored durably before anything is written to the graph under them. That makes a repetition idempotent, and lets
edges be loaded from files that have only the external keys.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from tao.model.errors import OperatorError

_Item = TypeVar("_Item")
KEY_MAP_SUFFIX: Final = ".keys.sqlite"
_FORMAT: Final = 1
_KEYS_PER_STATEMENT: Final = 500
_BUSY_SECONDS: Final = 1.0
_TABLES: Final = """
    CREATE TABLE IF NOT EXISTS keys (
        otype TEXT NOT NULL, key TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (otype, key)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX IF NOT EXISTS keys_by_id ON keys (id);
    CREATE TABLE IF NOT EXISTS loads (source TEXT NOT NULL PRIMARY KEY, progress BLOB NOT NULL) WITHOUT ROWID;
"""


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a load: all records before ``offset`` are acknowledged or rejected.

    ``fingerprint``: a hash of the content and the options. ``started_unix``: when the first run began, in Unix seconds;
    repetitions keep it. ``witness``: the last item written, which a resumed load looks for in the cluster.
    ``finished``: the end of the file was reached.
    """

    fingerprint: str
    started_unix: int
    offset: int = 0
    lines: int = 0
    loaded: int = 0
    rejected: int = 0
    rejects_bytes: int = 0
    witness: str = ""
    finished: bool = False


class KeyMap:
    """An open key map; a context manager. One process at a time may open it.

    Every method raises `OperatorError` when the file cannot be read or written."""

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        self._path = path
        if must_exist and not path.exists():
            raise OperatorError(
                f"there is no key map {path}: load the objects first, and name the map of that load with --keys"
            )
        with self._errors_reported():
            self._database = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                # Two loads would reserve different ids for one key.
                self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA synchronous = FULL")
                (found,) = self._database.execute("PRAGMA user_version").fetchone()
                if found not in (0, _FORMAT):
                    raise OperatorError(f"{path} has format {found}, this program knows {_FORMAT}")
                self._database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT")
            except BaseException:
                self._database.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def otypes(self) -> list[str]:
        """Return the object types that have keys in the map."""
        with self._errors_reported():
            return [otype for (otype,) in self._database.execute("SELECT DISTINCT otype FROM keys ORDER BY otype")]

    def ids_of(self, otype: str, keys: Iterable[str]) -> dict[str, int]:
        """Return the ids of those keys that have one."""
        found: dict[str, int] = {}
        with self._errors_reported():
            for some in _chunks(list(dict.fromkeys(keys))):
                marks = ",".join("?" * len(some))
                rows = self._database.execute(
                    f"SELECT key, id FROM keys WHERE otype = ? AND key IN ({marks})",  # noqa: S608 - only placeholders
                    (otype, *some),
                )
                found.update(rows.fetchall())
        return found

    def keys_of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the external keys of those ids that have one, of any type."""
        found: dict[int, str] = {}
        with self._errors_reported():
            for some in _chunks(list(dict.fromkeys(ids))):
                marks = ",".join("?" * len(some))
                rows = self._database.execute(
                    f"SELECT id, key FROM keys WHERE id IN ({marks})",  # noqa: S608 - only placeholders
                    tuple(some),
                )
                found.update(rows.fetchall())
        return found

    def note_ids(self, otype: str, ids: Mapping[str, int]) -> None:
        """Store new keys durably."""
        with self._errors_reported():
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(
                "INSERT INTO keys (otype, key, id) VALUES (?, ?, ?)",
                ((otype, key, object_id) for key, object_id in ids.items()),
            )
            self._database.execute("COMMIT")

    def progress(self, source: str) -> LoadProgress | None:
        """Return the progress of the load of ``source``, or None when there was no load."""
        with self._errors_reported():
            row = self._database.execute("SELECT progress FROM loads WHERE source = ?", (source,)).fetchone()
        try:
            return None if row is None else msgspec.json.decode(row[0], type=LoadProgress)
        except msgspec.MsgspecError as error:
            raise OperatorError(f"the key map {self._path} is damaged: {error}") from error

    def note_progress(self, source: str, progress: LoadProgress) -> None:
        """Store the progress durably."""
        with self._errors_reported():
            self._database.execute(
                "INSERT INTO loads (source, progress) VALUES (?, ?) "
                "ON CONFLICT (source) DO UPDATE SET progress = excluded.progress",
                (source, msgspec.json.encode(progress)),
            )

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise OperatorError(
                    f"the key map {self._path} is in use by another load: wait until it ends"
                ) from error
            raise OperatorError(f"the key map {self._path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise OperatorError(f"{self._path} is not a key map, or is damaged: {error}") from error


def _chunks(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), _KEYS_PER_STATEMENT):
        yield items[start : start + _KEYS_PER_STATEMENT]
