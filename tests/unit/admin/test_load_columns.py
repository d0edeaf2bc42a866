"""A column that a load does not use is an error before anything is written, or is left out when that is wanted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tao.admin.connection import ClusterTarget
from tao.admin.documents import example_schema_file
from tao.admin.load import session
from tao.admin.load.pipeline import PipelineSettings
from tao.admin.load.session import EdgeInput, LoadInput, NodeInput, ObjectInput, Summary
from tao.client import AddedObject, EdgeWrite
from tao.model.errors import OperatorError
from tao.schema.registry import load_schema

TARGET = ClusterTarget("127.0.0.1:1")


class FakeGraph:
    """Keeps what is written to it."""

    schema = load_schema(example_schema_file().read_text(), "schema")
    topology = SimpleNamespace(shards=4)

    def __init__(self) -> None:
        self.written: list[Any] = []
        self._ids = count(1)

    async def reserve_ids(self, number: int, *, shard: int) -> list[int]:
        return [shard << 46 | next(self._ids) for _ in range(number)]

    async def obj_add_many(self, objects: Sequence[tuple[Any, ...]]) -> list[AddedObject]:
        self.written += [fields for _, fields, _, _ in objects]
        return [AddedObject(object_id) for *_, object_id in objects]

    async def assoc_add_many(self, edges: Sequence[Any]) -> list[EdgeWrite]:
        self.written += edges
        return [EdgeWrite(False)] * len(edges)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> FakeGraph:
    found = FakeGraph()

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[FakeGraph]:
        yield found

    monkeypatch.setattr(session, "open_graph", opened)
    return found


def _quiet(*_: object) -> None:
    """Show no progress."""


async def load_people(folder: Path, text: str, **options: Any) -> Summary:
    (folder / "people.csv").write_text(text)
    given = LoadInput(folder / "people.csv", **options)
    return await session.load_objects(TARGET, given, ObjectInput("user", "person"), PipelineSettings(), _quiet)


async def test_a_misspelt_column_of_objects_is_refused_with_the_fields_before_anything_is_written(
    graph: FakeGraph, tmp_path: Path
) -> None:
    with pytest.raises(OperatorError) as refused:
        await load_people(tmp_path, "person,name,hoem\na1,Alice,San Francisco\n")
    text = refused.value.message
    assert "people.csv has the column 'hoem', which is neither a field of the type (" in text
    assert "home" in text
    assert text.endswith("correct the name, use --map COLUMN=FIELD, or leave it out with --skip-columns")
    assert graph.written == []


async def test_columns_are_left_out_when_that_is_wanted_and_the_summary_names_them(
    graph: FakeGraph, tmp_path: Path
) -> None:
    text = "person,name,hoem,height\na1,Alice,San Francisco,180\n"
    with pytest.raises(OperatorError, match="the columns 'hoem', 'height', which are neither fields"):
        await load_people(tmp_path, text)
    summary = await load_people(tmp_path, text, skip_columns=True)
    assert (summary.loaded, summary.skipped_columns) == (1, ("hoem", "height"))
    assert graph.written == [{"name": "Alice"}]


async def test_a_mapped_column_is_used_and_so_are_the_columns_that_a_file_of_rejected_lines_adds(
    graph: FakeGraph, tmp_path: Path
) -> None:
    text = "line,reason,person,name,town\n2,WRONG,a1,Alice,San Francisco\n"
    summary = await load_people(tmp_path, text, renamed={"town": "home"})
    assert (summary.loaded, summary.skipped_columns) == (1, ())
    with pytest.raises(OperatorError, match="the column 'reason', which"):
        await load_people(tmp_path, "person,name,reason\na1,Alice,none\n")


@pytest.mark.parametrize(("time", "unused"), [(None, "'at'"), ("at", "")])
async def test_a_column_of_times_is_used_when_the_option_names_it(
    graph: FakeGraph, tmp_path: Path, time: str | None, unused: str
) -> None:
    await load_people(tmp_path, "person\na1\nb2\n")
    (tmp_path / "friends.csv").write_text("one,other,at\na1,b2,5\n")
    given = LoadInput(tmp_path / "friends.csv", keys=tmp_path / "people.csv.keys.sqlite")
    edges = EdgeInput("friend", ("one", "other"), time=time)
    if unused:
        with pytest.raises(OperatorError, match=unused):
            await session.load_edges(TARGET, given, edges, PipelineSettings(), _quiet)
    else:
        summary = await session.load_edges(TARGET, given, edges, PipelineSettings(), _quiet)
        assert (summary.loaded, summary.skipped_columns) == (1, ())


async def test_nodes_have_no_fields_that_a_column_may_be_meant_for(graph: FakeGraph, tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,state,why\n1,archived,asked\n")
    given = LoadInput(tmp_path / "nodes.csv", raw_ids=True)
    with pytest.raises(OperatorError, match="'why', which is not loaded, as there are no fields: leave it out with"):
        await session.load_nodes(TARGET, given, NodeInput("subscribes", "id", "state"), PipelineSettings(), _quiet)
