"""The SQLite file beside an input: external key → id, and how far each load has come.

Ids are noted, durably, before anything is written under them. That makes a repeat idempotent, and lets edges be loaded
from files that know only the external keys.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from tao.model.errors import OperatorError

_Item = TypeVar("_Item")
SUFFIX: Final = ".keys.sqlite"
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


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a load has come: all records before ``offset`` are acknowledged or rejected.

    ``fingerprint``: of the content and options. ``started_unix``: when its first run began; stays over repeats.
    ``witness``: the last thing written, to be found again in the cluster. ``finished``: to the end of the file.
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
    """An open map; a context manager. One process at a time has it. Every method raises `OperatorError` when the file
    cannot be read or written."""

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        self._path = path
        if must_exist and not path.exists():
            raise OperatorError(
                f"there is no key map {path}: load the objects first, and name the map of that load with --keys"
            )
        with self._told():
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._database.close()

    def otypes(self) -> list[str]:
        """Object types that have keys here."""
        with self._told():
            return [otype for (otype,) in self._database.execute("SELECT DISTINCT otype FROM keys ORDER BY otype")]

    def ids_of(self, otype: str, keys: Iterable[str]) -> dict[str, int]:
        """The ids of those keys that have one."""
        found: dict[str, int] = {}
        with self._told():
            for some in _chunks(list(dict.fromkeys(keys))):
                marks = ",".join("?" * len(some))
                rows = self._database.execute(
                    f"SELECT key, id FROM keys WHERE otype = ? AND key IN ({marks})",  # noqa: S608 - marks alone
                    (otype, *some),
                )
                found.update(rows.fetchall())
        return found

    def keys_of(self, ids: Iterable[int]) -> dict[int, str]:
        """The external keys of those ids that have one, of whatever type."""
        found: dict[int, str] = {}
        with self._told():
            for some in _chunks(list(dict.fromkeys(ids))):
                marks = ",".join("?" * len(some))
                rows = self._database.execute(
                    f"SELECT id, key FROM keys WHERE id IN ({marks})",  # noqa: S608 - marks alone
                    tuple(some),
                )
                found.update(rows.fetchall())
        return found

    def note_ids(self, otype: str, ids: Mapping[str, int]) -> None:
        """Note new keys, durably."""
        with self._told():
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(
                "INSERT INTO keys (otype, key, id) VALUES (?, ?, ?)",
                ((otype, key, object_id) for key, object_id in ids.items()),
            )
            self._database.execute("COMMIT")

    def progress(self, source: str) -> Progress | None:
        """How far the load of ``source`` came; None when there was none."""
        with self._told():
            row = self._database.execute("SELECT progress FROM loads WHERE source = ?", (source,)).fetchone()
        try:
            return None if row is None else msgspec.json.decode(row[0], type=Progress)
        except msgspec.MsgspecError as error:
            raise OperatorError(f"the key map {self._path} is damaged: {error}") from error

    def note_progress(self, source: str, progress: Progress) -> None:
        """Note it, durably."""
        with self._told():
            self._database.execute(
                "INSERT INTO loads (source, progress) VALUES (?, ?) "
                "ON CONFLICT (source) DO UPDATE SET progress = excluded.progress",
                (source, msgspec.json.encode(progress)),
            )

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise OperatorError(f"the key map {self._path} is in use by another load: wait for its end") from error
            raise OperatorError(f"the key map {self._path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise OperatorError(f"{self._path} is no key map, or damaged: {error}") from error


def _chunks(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), _KEYS_PER_STATEMENT):
        yield items[start : start + _KEYS_PER_STATEMENT]
