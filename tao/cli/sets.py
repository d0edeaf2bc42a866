"""`tao sets`: evaluate an expression over association lists, as `Graph.edge_set` does, and say how."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import click

from tao.cli.connection import on_graph
from tao.cli.frame import show
from tao.cli.options import IntRange, region_options
from tao.client import EdgeCount, EdgeSet, Graph, SetPage
from tao.sets.evaluation import MAX_PAGE
from tao.terminal import print_table

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<ids>\d+(?:,\d+)*)\.(?P<atype>\w+)(?::(?P<state>\w+))?"
    r"(?:\[(?P<low>\d*)\.\.(?P<high>\d*)\])?|(?P<sign>[&|()-]))\s*"
)
_LEVELS: Final = ("|", "&", "-")
"""The operators, as they bind in Python: the last one most."""
_A_LIST: Final = "a list ID.TYPE, where ID is a number, such as 17.friend"
_MAX_OPEN: Final = 50
"""Parentheses that may be open at a time: the parser descends into each."""


@click.command()
@click.argument("expression")
@click.option(
    "--limit", type=IntRange(1, MAX_PAGE), default=50, show_default=True, help="The largest number of edges to show."
)
@click.option("--cursor", help="Show the page after the one that printed this cursor.")
@click.option("--count", "counted", is_flag=True, help="Count the edges up to 20,000 instead of showing them.")
@region_options
def sets(expression: str, limit: int, cursor: str | None, counted: bool) -> None:
    """Evaluate a set expression over association lists, and say how it was done.

    A list is written ID.TYPE, and ID.TYPE[LOW..HIGH] with bounds on its times, either of which may be left out.
    ID.TYPE:STATE is the list of the edges in a state, of a type with states. ID,ID,ID.TYPE is the union of the lists
    of several ids. & is and, | is or, - is without; - binds more than &, and &
    more than |; parentheses group. Quote the expression, so that the shell leaves it alone.

    \b
      tao sets '17.friend & 42.friend - 17.blocks'
      tao sets '17,42,43.authored' --limit 20
      tao sets '17.subscribes | 17.subscribes:archived'
    """
    if counted and cursor is not None:
        raise click.UsageError("--count counts from the first edge: leave --cursor out")

    async def count(graph: Graph) -> EdgeCount:
        return await _parsed(graph, expression).count(20_000)

    async def page(graph: Graph) -> SetPage:
        return await _parsed(graph, expression).page(limit, cursor)

    if counted:
        number = on_graph(count)
        shown = {"count": number.value, "exact": number.exact}
        show(shown, lambda: click.echo(f"{'' if number.exact else 'at least '}{number.value:,}"))
        return
    _show_page(on_graph(page))


def _show_page(found: SetPage) -> None:
    def text() -> None:
        rows = [(each.id2, each.time, each.id1, each.atype) for each in found.edges]
        print_table(("id2", "time", "of", "type"), rows, right=("id2", "time", "of"))
        click.echo(f"examined {found.examined:,} edges: {found.plan or 'read the list'}")
        if found.cursor is None:
            click.echo("there are no more")
        else:
            click.echo(f"for more: --cursor {found.cursor}")

    edges = [{"id1": each.id1, "atype": each.atype, "id2": each.id2, "time": each.time} for each in found.edges]
    figures = {"examined": found.examined, "plan": found.plan, "cut_short": found.cut_short, "cursor": found.cursor}
    show({"edges": edges, **figures}, text)


def _parsed(graph: Graph, text: str) -> EdgeSet:
    """Return the set that the text describes. Raises `click.UsageError` that names the place of a mistake, and as
    `Graph.edge_set`."""
    tokens: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _mistake(text, f"{_A_LIST} or an operator (& | -)" if tokens else _A_LIST, at)
        tokens.append(match)
        at = match.end()
    parser = _Parser(graph, text, tokens)
    found = parser.level(0)
    parser.expect_end()
    return found


class _Parser:
    """A parser by descent: one call of `level` for each level of binding."""

    def __init__(self, graph: Graph, text: str, tokens: Sequence[re.Match[str]]) -> None:
        self._graph = graph
        self._text = text
        self._tokens = tokens
        self._next = 0
        self._open = 0

    def level(self, number: int) -> EdgeSet:
        if number == len(_LEVELS):
            return self._operand()
        left = self.level(number + 1)
        while self._takes(_LEVELS[number]):
            right = self.level(number + 1)
            match _LEVELS[number]:
                case "|":
                    left = left | right
                case "&":
                    left = left & right
                case _:
                    left = left - right
        return left

    def expect_end(self) -> None:
        if self._next < len(self._tokens):
            raise self._mistake("an operator (& | -)")

    def _operand(self) -> EdgeSet:
        if self._takes("("):
            self._open += 1
            if self._open > _MAX_OPEN:
                raise click.UsageError(f"more than {_MAX_OPEN} parentheses are open: nest the expression less")
            inner = self.level(0)
            if not self._takes(")"):
                raise self._mistake("')'")
            self._open -= 1
            return inner
        token = self._tokens[self._next] if self._next < len(self._tokens) else None
        if token is None or token["sign"]:
            raise self._mistake(_A_LIST)
        self._next += 1
        ids = [int(each) for each in token["ids"].split(",")]
        if len(ids) == 1:
            high, low = (int(token[name]) if token[name] else None for name in ("high", "low"))
            if high is not None and low is not None and low > high:
                raise click.UsageError(f"LOW {low} is above HIGH {high}: no edge can match {token[0].strip()!r}")
            return self._graph.edge_set(ids[0], token["atype"], state=token["state"], high=high, low=low)
        if token["low"] is not None:
            raise click.UsageError(f"a union has no bounds on time: write one list for each id instead of {token[0]!r}")
        return self._graph.edge_union(ids, token["atype"], state=token["state"])

    def _takes(self, sign: str) -> bool:
        if self._next < len(self._tokens) and self._tokens[self._next]["sign"] == sign:
            self._next += 1
            return True
        return False

    def _mistake(self, wanted: str) -> click.UsageError:
        at = self._tokens[self._next].start() if self._next < len(self._tokens) else len(self._text)
        return _mistake(self._text, wanted, at)


def _mistake(text: str, wanted: str, at: int) -> click.UsageError:
    """Return the error of a text that has something else than what is wanted at this offset."""
    place = repr(text[at:].strip()) if text[at:].strip() else "the end"
    return click.UsageError(f"{text!r} is not a set expression: expected {wanted}, at {place}")
