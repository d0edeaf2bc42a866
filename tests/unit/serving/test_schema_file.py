"""The schema file, watched through trouble."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tao.devcluster.schema_copy import example_schema_file
from tao.model.errors import SchemaError
from tao.serving.schema_file import SchemaFile


async def test_a_listener_that_fails_does_not_keep_the_next_change_from_being_noticed(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    text = example_schema_file().read_text()
    path.write_text(text)
    file = SchemaFile(path, poll_seconds=0.001)
    await file.load()
    heard: asyncio.Queue[str] = asyncio.Queue()

    def listen(changed: str, source: str) -> None:
        heard.put_nowait(changed)
        if "first" in changed:
            raise RuntimeError("a listener's bug")

    watching = asyncio.create_task(file.watch(listen))
    for word in ("first", "second"):
        (tmp_path / "new").write_text(f"# {word}\n{text}")
        (tmp_path / "new").replace(path)
        assert word in await asyncio.wait_for(heard.get(), 10)
    watching.cancel()


async def test_a_file_that_cannot_be_read_is_told_of_in_words(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    with pytest.raises(SchemaError, match=r"schema\.yaml: cannot be read: No such file or directory$"):
        await SchemaFile(path).load()
    path.write_bytes(b"types: \xff")
    with pytest.raises(SchemaError, match=r"schema\.yaml: is not UTF-8: invalid start byte at byte 7$"):
        await SchemaFile(path).load()
