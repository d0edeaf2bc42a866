"""`tao list` reports lists that are cut off; `tao stats` reports servers that cannot be asked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import pytest
from click.testing import CliRunner, Result

from tao.admin.documents import example_schema_file, read_schema
from tao.cli.commands import tao
from tao.model.errors import WrongType
from tao.model.topology import CacheServer, Region, Tier, Topology
from tao.schema.registry import Schema

SCHEMA = read_schema(example_schema_file())[0]
LIMIT = SCHEMA.atype("note").limit


@dataclass
class Edge:
    id2: int
    time: int = 1
    fields: dict[str, int] = field(default_factory=dict)


class Edges(list[Edge]):
    limit_cut = True
    list_count = 0


@dataclass
class FakeGraph:
    """One list, of which it answers no more than the type allows; asked for too many always."""

    topology: Topology
    length: int = 0
    schema: Schema = SCHEMA
    deleted: list[tuple[int, str | None]] = field(default_factory=list)

    async def obj_delete(self, object_id: int, otype: str | None = None) -> bool:
        self.deleted.append((object_id, otype))
        if otype not in (None, "user"):
            raise WrongType(f"object {object_id} is of type 'user', not {otype!r}")
        return True

    async def assoc_range(self, _id1: int, _atype: str, pos: int, limit: int, *, state: str | None) -> Edges:
        assert state is None
        found = Edges(Edge(number) for number in range(self.length)[pos : pos + min(limit, LIMIT)])
        found.list_count = self.length
        return found

    async def assoc_time_range(
        self, id1: int, atype: str, _high: int, _low: int, limit: int, *, state: str | None
    ) -> Edges:
        return await self.assoc_range(id1, atype, 0, limit, state=state)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> FakeGraph:
    servers = tuple(CacheServer(name=name, grpc="127.0.0.1:1") for name in ("follower-1a", "follower-1b"))
    region = Region(name="east", leaders=Tier(name="leaders", servers=()), followers=(Tier(name="t", servers=servers),))
    fake = FakeGraph(Topology(version=1, shards=1, regions=(region,), databases=()))

    async def current_topology(_: object) -> Topology:
        return fake.topology

    monkeypatch.setattr("tao.cli.graph.on_graph", lambda work: asyncio.run(work(fake)))
    monkeypatch.setattr("tao.cli.stats.target_of", lambda: None)
    monkeypatch.setattr("tao.cli.stats.current_topology", current_topology)
    return fake


def call(*arguments: str) -> Result:
    return CliRunner().invoke(tao, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize(
    ("length", "options", "cut_off"),
    [
        (1, (), False),
        (LIMIT, (), False),
        (LIMIT + 1, (), True),
        (LIMIT + 1, ("--pos", "1"), False),
        (LIMIT - 1, ("--low", "0"), False),
    ],
    ids=str,
)
def test_only_a_list_with_more_edges_is_reported_as_cut_off(
    graph: FakeGraph, length: int, options: tuple[str, ...], cut_off: bool
) -> None:
    graph.length = length
    command = ("list", "1", "note", "--limit", "99999", *options)
    assert ("as many as the type allows" in call(*command).stdout) == cut_off
    assert json.loads(call(*command, "--json").stdout)["limit_cut"] == cut_off


def test_a_delete_passes_the_expected_type_on(graph: FakeGraph) -> None:
    assert call("delete", "object", "7", "--otype", "user", "--yes").exit_code == 0
    assert call("delete", "object", "7", "--yes").exit_code == 0
    wrong = call("delete", "object", "7", "--otype", "checkin", "--yes")
    assert wrong.exit_code != 0
    assert "object 7 is of type 'user', not 'checkin'" in wrong.output
    assert graph.deleted == [(7, "user"), (7, None), (7, "checkin")]


def test_one_edge_is_counted_in_the_singular(graph: FakeGraph) -> None:
    graph.length = 1
    assert call("list", "1", "friend").stdout.endswith("1 of 1 edge\n")


def test_a_server_without_an_admin_address_is_reported_below_the_table(graph: FakeGraph) -> None:
    result = call("stats")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "follower-1b: has no admin address in the topology"
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("follower-1a "))
    assert row.split() == ["follower-1a", "east/t", *"-------"]
