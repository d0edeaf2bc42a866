"""`tao sets`: the syntax of expressions, its mistakes, and what is printed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.client import Graph
from tao.model.edge_states import State
from tao.model.graph import Edge
from tests.unit.client.fakes import SCHEMA, FakeCluster

FRIEND, SUBSCRIBES = SCHEMA.atype("friend").number, SCHEMA.atype("subscribes").number
ARCHIVED = SCHEMA.atype("subscribes").states[State.ARCHIVED]


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()
    for id1, ids in ((1, range(1, 20)), (2, range(10, 30)), (3, range(15, 18))):
        cluster.lists[id1, FRIEND] = [Edge(id2, id2) for id2 in reversed(ids)]

    cluster.lists[1, SUBSCRIBES] = [Edge(7, 7)]
    cluster.lists[1, ARCHIVED] = [Edge(9, 9), Edge(8, 8)]

    async def connected(work: Callable[[Graph], Awaitable[object]]) -> object:
        async with await cluster.connect() as graph:
            return await work(graph)

    monkeypatch.setattr("tao.cli.sets.on_graph", lambda work: asyncio.run(connected(work)))
    return cluster


def call(*arguments: str) -> Result:
    return CliRunner().invoke(tao, ["sets", *arguments])


def ids(expression: str, *options: str) -> list[int]:
    found = json.loads(call(expression, "--json", *options).stdout)
    return [edge["id2"] for edge in found["edges"]]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("3.friend", [17, 16, 15]),
        ("1.friend & 3.friend", [17, 16, 15]),
        ("1.friend[..12]&2.friend", [12, 11, 10]),
        ("1.friend[18..]", [19, 18]),
        ("1.friend & 2.friend - 3.friend", [19, 18, 14, 13, 12, 11, 10]),
        ("3.friend | 1.friend[18..18] & 2.friend", [18, 17, 16, 15]),
        ("(3.friend | 1.friend[18..18]) & 3.friend", [17, 16, 15]),
        ("2,3.friend - 2.friend", []),
        ("1.friend - 2.friend - 1.friend[..7]", [9, 8]),
        ("1.subscribes:archived", [9, 8]),
        ("1.subscribes:archived[9..] | 1.subscribes", [9, 7]),
        ("1,2.subscribes:archived", [9, 8]),
    ],
)
def test_operators_bind_as_in_python(expression: str, expected: list[int]) -> None:
    assert ids(expression) == expected


def test_the_text_says_how_it_was_done_and_how_to_go_on() -> None:
    first = call("1.friend & 2.friend", "--limit", "4").stdout.splitlines()
    assert first[1].split() == ["19", "19", "1", "friend"]
    assert "examined 39 edges: read 2.friend whole (20 edges), and 1.friend page by page" in first
    *_, cursor = first[-1].split()
    assert first[-1] == f"for more: --cursor {cursor}"
    rest = call("1.friend & 2.friend", "--cursor", cursor).stdout.splitlines()
    assert rest[1].split()[0] == "15"
    assert rest[-1] == "there are no more"


def test_bounds_that_are_equal_match_the_edges_of_that_time() -> None:
    assert ids("1.friend[7..7]") == [7]


def test_the_plan_names_both_operands_of_which_one_is_empty() -> None:
    plan = json.loads(call("(1.friend - 2.friend) & 4.friend", "--json").stdout)["plan"]
    assert plan.startswith("one operand is empty: ")
    assert plan.endswith(", or 4.friend")


def test_counts_are_printed_with_what_they_are_worth() -> None:
    assert call("1.friend & 2.friend", "--count").stdout == "10\n"
    assert json.loads(call("1.friend", "--count", "--json").stdout) == {"count": 19, "exact": True}


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "expected a list ID.TYPE, where ID is a number, such as 17.friend, at the end"),
        ("1.friend &", "expected a list ID.TYPE, where ID is a number, such as 17.friend, at the end"),
        ("Alice.friend", "expected a list ID.TYPE, where ID is a number, such as 17.friend, at 'Alice.friend'"),
        ("1.friend & Bob.friend", "such as 17.friend or an operator (& | -), at 'Bob.friend'"),
        ("1.friend 2.friend", "expected an operator (& | -), at '2.friend'"),
        ("(1.friend", "expected ')', at the end"),
        ("1.friend ^ 2.friend", "or an operator (& | -), at '^ 2.friend'"),
        ("1.friend[20..1]", "LOW 20 is above HIGH 1: no edge can match '1.friend[20..1]'"),
        ("1,2.friend[3..]", "a union has no bounds on time"),
        ("1.friend:[3..]", "or an operator (& | -), at ':[3..]'"),
    ],
)
def test_a_mistake_in_the_expression_is_named_with_its_place(expression: str, message: str) -> None:
    result = call(expression)
    assert result.exit_code == 2
    assert message in result.output


def test_parentheses_may_be_nested_fifty_deep_and_no_deeper() -> None:
    many = " | ".join(["(3.friend)"] * 9)
    assert ids(f"{'(' * 49}{many}{')' * 49}") == [17, 16, 15]
    for depth in (51, 5_000):
        result = call(f"{'(' * depth}3.friend{')' * depth}")
        assert result.exit_code == 2
        assert "more than 50 parentheses are open" in result.output


def test_what_the_sdk_refuses_is_an_error_of_the_command() -> None:
    assert "UNKNOWN_TYPE" in call("1.freind").output
    assert "another set expression" in call("1.friend", "--cursor", str(cursor_of("2.friend"))).output
    assert call("1.friend", "--count", "--cursor", "x").exit_code == 2


def cursor_of(expression: str) -> object:
    return json.loads(call(expression, "--limit", "1", "--json").stdout)["cursor"]
