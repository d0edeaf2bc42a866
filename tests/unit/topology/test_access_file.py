"""The access document in a file: it may be missing at first, and a wrong one never replaces a good one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tao.access.document import AccessDocument
from tao.model.errors import AccessError
from tao.model.ports import DocumentStore
from tao.topology.file_store import AccessFile
from tests.rigs.pacing import PATIENT_SECONDS


class Ear:
    """Hears documents and errors, and lets a test wait for them."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.errors: list[str] = []
        self._news = asyncio.Event()

    def changed(self, document: AccessDocument) -> None:
        self.versions.append(document.version)
        self._news.set()

    def failed(self, error: AccessError) -> None:
        self.errors.append(error.message)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENT_SECONDS):
            while not true():
                self._news.clear()
                await self._news.wait()


def text(version: int, roles: str = "{}") -> str:
    return f"format: 1\nversion: {version}\nroles: {roles}\n"


def write(path: Path, document: str, encoding: str = "utf-8") -> None:
    """Write as an editor does: in place, with a moment in which the file is empty."""
    path.write_text(document, encoding)


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.yaml"


def store(path: Path, ear: Ear, *, required: bool = False) -> AccessFile:
    return AccessFile(path, required=required, poll_seconds=0.01, on_error=ear.failed)


@asynccontextmanager
async def watched(file: AccessFile, ear: Ear) -> AsyncIterator[None]:
    port: DocumentStore[AccessDocument] = file
    stop = port.watch(ear.changed)
    yield
    stop()


async def test_no_document_is_none_unless_one_is_required(path: Path) -> None:
    assert await store(path, Ear()).load_if_there() is None
    with pytest.raises(AccessError, match=r"access.yaml: cannot be read: No such file"):
        await store(path, Ear(), required=True).load_if_there()


async def test_a_wrong_document_is_an_error_also_where_none_is_required(path: Path) -> None:
    write(path, "format: 1\n")
    with pytest.raises(AccessError, match=r"access.yaml:1: version: is missing"):
        await store(path, Ear()).load_if_there()
    write(path, "format: \xff", "latin-1")
    with pytest.raises(AccessError, match="is not UTF-8"):
        await store(path, Ear()).load_if_there()


async def test_a_document_that_appears_is_heard_of_and_one_that_disappears_is_reported(path: Path) -> None:
    ear = Ear()
    file = store(path, ear)
    assert await file.load_if_there() is None
    async with watched(file, ear):
        write(path, text(1))
        await ear.until(lambda: ear.versions == [1])
        assert ear.errors == []
        remove(path)
        await ear.until(lambda: len(ear.errors) == 1)
        assert "cannot be read" in ear.errors[0]
        write(path, text(2))
        await ear.until(lambda: ear.versions == [1, 2])


async def test_a_wrong_document_and_one_without_a_higher_version_are_reported_and_not_used(path: Path) -> None:
    write(path, text(1))
    ear = Ear()
    file = store(path, ear)
    assert (await file.load()).version == 1
    async with watched(file, ear):
        write(path, text(2) + "callers: {web: [reader]}\n")
        await ear.until(lambda: any("there is no role 'reader'" in each for each in ear.errors))
        write(path, text(1, "{reader: {}}"))
        await ear.until(lambda: any("its version 1 is not above 1" in each for each in ear.errors))
        write(path, text(2, "{reader: {}}"))
        await ear.until(lambda: ear.versions == [2])
