"""Where a tailer goes on after a restart: a position on disk, written whole or not at all (DESIGN.md §7)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from tao.model.errors import OperatorError


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    position: str
    written_unix_ms: int


class Checkpoint:
    """The file of one database server's position. Blocking; its callers use a thread."""

    def __init__(self, folder: Path, server: str) -> None:
        """``server``: the database server's name; a position of another one means nothing."""
        self._server: Final = server
        self.path: Final = folder / f"{server}.position.json"

    def load(self) -> str | None:
        """The position stored last; None when there is none, or none that can be used: then everything told so far is
        unknown. Raises `OperatorError` when the file may not be read."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OperatorError(f"{self.path}: cannot be read: {error.strerror}") from error
        try:
            stored = msgspec.json.decode(text, type=_Stored)
        except msgspec.MsgspecError:
            return None
        return stored.position if stored.server == self._server else None

    def store(self, position: str, now_unix_ms: int) -> None:
        """Put it on disk: it is there, whole, when this returns. Raises `OperatorError`."""
        text = msgspec.json.encode(_Stored(server=self._server, position=position, written_unix_ms=now_unix_ms))
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{self.path.name}.")
            temporary = Path(name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            directory = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise OperatorError(f"{self.path}: the position cannot be stored: {error}") from error
