"""The files of a backup, and the two documents that list them with their sizes and hashes.

    manifest.json                   what the backup holds; written last, so a folder without it is no backup
    topology.json, schema.yaml      the documents of the cluster at that time; access.yaml where there was one
    DATABASE.sql.gz                 the dump of a database
    binlogs.json                    the binlog files since then, replaced after each copy
    binlogs/DATABASE/SERVER/FILE    a binlog file

Files are readable by their owner only: they hold the whole graph.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Self, TypeVar, cast

import msgspec

from tao.model.errors import OperatorError, unreadable

MANIFEST: Final = "manifest.json"
BINLOG_INDEX: Final = "binlogs.json"
FORMAT: Final = 1
_GZIP: Final = 31
"""The window of zlib that means gzip's format."""
_FAST: Final = 1
"""The level of compression: hexadecimal digits become half as long at once, and hardly shorter with more work."""

_Document = TypeVar("_Document", bound=msgspec.Struct)


class BackupUnusable(OperatorError):
    """The folder holds no backup, or one that is incomplete or damaged. The message names the file."""

    reason = "BACKUP_UNUSABLE"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a backup. ``name``: its path within the folder."""

    name: str
    size_bytes: int
    sha256: str


class DatabaseDump(msgspec.Struct, frozen=True, kw_only=True):
    """The dump of a database. ``snapshot_unix_ms``: a time by which its snapshot had been taken; every write that was
    acknowledged before the backup began is in it. ``position``: the GTIDs of the snapshot."""

    name: str
    server: str
    region: str
    dialect: str
    position: str
    version_epoch: int
    shards: tuple[tuple[int, int], ...]
    snapshot_unix_ms: int
    statement_bytes: int
    file: FileEntry


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds. ``shards``: the number of shards of the cluster."""

    format: int = FORMAT
    tao_version: str
    begun_unix_ms: int
    ended_unix_ms: int
    shards: int
    documents: tuple[FileEntry, ...]
    databases: tuple[DatabaseDump, ...]


class BinlogCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Binlog files of a database from one server, oldest first and without a gap, from the dump's position on.

    ``covers_until_unix_ms``: every write that was acknowledged before is in the dump or in them."""

    database: str
    server: str
    covers_until_unix_ms: int
    files: tuple[FileEntry, ...]


class BinlogIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The binlog files of a backup."""

    format: int = FORMAT
    copies: tuple[BinlogCopy, ...] = ()

    def of(self, database: str) -> BinlogCopy | None:
        """Return the copy that reaches furthest; None when there is none of that database."""
        found = [each for each in self.copies if each.database == database]
        return max(found, key=lambda each: each.covers_until_unix_ms, default=None)


class FileFault(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a backup that is not as it was written."""

    file: str
    fault: str


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a backup. Raises `BackupUnusable`."""
    if not (folder / MANIFEST).exists():
        raise BackupUnusable(f"{folder} has no {MANIFEST}: it holds no backup, or one that was interrupted")
    return _read(folder / MANIFEST, Manifest)


def read_index(folder: Path) -> BinlogIndex:
    """Return the list of binlog files, which is empty before the first copy. Raises `BackupUnusable`."""
    return _read(folder / BINLOG_INDEX, BinlogIndex) if (folder / BINLOG_INDEX).exists() else BinlogIndex()


def _read(path: Path, kind: type[_Document]) -> _Document:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise BackupUnusable(unreadable(path, error)) from error
    except msgspec.MsgspecError as error:
        raise BackupUnusable(f"{path}: is damaged: {error}") from error
    version = getattr(found, "format", FORMAT)
    if version != FORMAT:
        raise BackupUnusable(f"{path} has format {version}, and this version of tao reads {FORMAT}")
    return found


def write_document(path: Path, document: msgspec.Struct) -> None:
    """Replace a document of a backup, so that a crash leaves the former one or the new one."""
    incoming = path.with_name(f".{path.name}.new")
    write_file(incoming, msgspec.json.format(msgspec.json.encode(document)) + b"\n", replace=True)
    incoming.rename(path)
    sync_folder(path.parent)


def write_file(path: Path, content: bytes, *, replace: bool = False) -> FileEntry:
    """Write a small file durably."""
    with _created(path, replace=replace) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into an `OperatorError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise OperatorError(f"cannot write to {folder}: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Make the folder of a new backup. Raises `OperatorError` when it has files."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        is_backup = (folder / MANIFEST).exists()
        more = "" if is_backup else f" (it has no {MANIFEST}: if a backup that failed has left it, remove it)"
        raise OperatorError(f"{folder} is not empty: a backup needs a folder of its own{more}")


def _created(path: Path, *, replace: bool = False) -> IO[bytes]:
    kind = os.O_TRUNC if replace else os.O_EXCL
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | kind, 0o600), "wb")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class GzipWriter:
    """Writes a compressed file, and computes its hash. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._file = _created(path)
        self._compress = zlib.compressobj(_FAST, zlib.DEFLATED, _GZIP)
        self._hash = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, chunk: bytes) -> None:
        """Write some bytes; nothing ends the file durably."""
        packed = self._compress.compress(chunk) if chunk else self._compress.flush()
        self._file.write(packed)
        self._hash.update(packed)
        self._size += len(packed)
        if not chunk:
            self._file.flush()
            os.fsync(self._file.fileno())

    @property
    def entry(self) -> FileEntry:
        """The entry of the file, once it is complete."""
        return FileEntry(name=self._path.name, size_bytes=self._size, sha256=self._hash.hexdigest())


def open_dump(path: Path) -> IO[bytes]:
    """Open a compressed dump for reading."""
    return cast("IO[bytes]", gzip.open(path, "rb"))


def entry_of(path: Path, folder: Path) -> FileEntry:
    """Return the entry of a file as it is now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(name=str(path.relative_to(folder)), size_bytes=path.stat().st_size, sha256=digest)


def entries(manifest: Manifest, index: BinlogIndex) -> Iterator[FileEntry]:
    """Yield all files of a backup but the two documents that list them."""
    yield from manifest.documents
    yield from (each.file for each in manifest.databases)
    yield from (file for each in index.copies for file in each.files)


def fault_of(entry: FileEntry, folder: Path) -> FileFault | None:
    """Compare a file with its entry. None: it is as it was written."""
    path = folder / entry.name
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            return FileFault(file=entry.name, fault=f"it has {size:,} bytes instead of {entry.size_bytes:,}")
        if entry_of(path, folder).sha256 != entry.sha256:
            return FileFault(file=entry.name, fault="its content was changed: its SHA-256 is another one")
    except OSError as error:
        return FileFault(file=entry.name, fault=f"it cannot be read: {error.strerror}")
    return None
