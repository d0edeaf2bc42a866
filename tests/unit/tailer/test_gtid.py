"""Positions in both notations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import OperatorError
from tao.storage.dialect import Dialect
from tao.tailer.gtid import MariadbPosition, MysqlPosition, joined, parse_position

A, B = "3e11fa47-71ca-11e1-9e33-c80aa9429562", "3e11fa47-71ca-11e1-9e33-c80aa9429563"


def test_mariadb_counts_upwards_in_each_domain() -> None:
    position = MariadbPosition("0-1-7, 5-2-9")
    assert [position.includes(gtid) for gtid in ("0-1-7", "0-3-6", "0-1-8", "5-2-9", "6-1-1")] == [
        *(True, True, False, True, False),
    ]
    position.advance("0-4-8")
    position.advance("0-4-3")
    position.advance("6-1-1")
    assert str(position) == "0-4-8,5-2-9,6-1-1"


def test_mysql_keeps_intervals() -> None:
    position = MysqlPosition(f"{A}:1-4:7,\n{B.upper()}:2")
    assert [position.includes(f"{A}:{number}") for number in (1, 4, 5, 6, 7, 8)] == [
        *(True, True, False, False, True, False),
    ]
    position.advance(f"{A}:6")
    assert str(position) == f"{A}:1-4:6-7,{B}:2"
    position.advance(f"{A}:5")
    position.advance(f"{B}:3")
    assert str(position) == f"{A}:1-7,{B}:2-3"


@given(st.lists(st.integers(1, 30), max_size=40))
def test_a_mysql_position_is_the_set_of_what_is_behind_it(numbers: list[int]) -> None:
    position = MysqlPosition("")
    for number in numbers:
        position.advance(f"{A}:{number}")
    again = MysqlPosition(str(position))
    for number in range(1, 32):
        assert position.includes(f"{A}:{number}") == again.includes(f"{A}:{number}") == (number in numbers)


@pytest.mark.parametrize("dialect", Dialect)
def test_an_empty_position_has_nothing_behind_it(dialect: Dialect) -> None:
    position = parse_position(dialect, "")
    assert str(position) == ""
    assert not position.includes("0-1-1" if dialect is Dialect.MARIADB else f"{A}:1")


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (Dialect.MARIADB, f"{A}:1"),
        (Dialect.MARIADB, "0-1"),
        (Dialect.MYSQL, f"{A}:1-3:tag:4"),
        (Dialect.MYSQL, f"{A}:x"),
    ],
)
def test_what_is_another_servers_notation_is_refused(dialect: Dialect, text: str) -> None:
    with pytest.raises(OperatorError):
        parse_position(dialect, text)


@pytest.mark.parametrize(
    ("earlier", "later", "both"),
    [
        ("0-1-7", "0-2-8", "0-2-8"),
        ("0-1-7", "0-1-5", "0-1-7"),
        ("0-1-7", "1-1-8", None),
        (f"{A}:4", f"{A}:5", f"{A}:4-5"),
        (f"{A}:4-5", f"{A}:6", f"{A}:4-6"),
        (f"{A}:4-5", f"{A}:6-9", f"{A}:4-9"),
        (f"{A}:4-5", f"{A}:7", None),
        (f"{A}:4", f"{B}:5", None),
        ("t1", "t2", None),
    ],
)
def test_neighbours_are_joined_where_one_text_says_both(earlier: str, later: str, both: str | None) -> None:
    assert joined(earlier, later) == both


def test_a_run_of_transactions_is_behind_us_at_once() -> None:
    position = MysqlPosition(f"{A}:1-3")
    position.advance(f"{A}:4-9")
    assert str(position) == f"{A}:1-9"
    with pytest.raises(OperatorError):
        position.advance(A)
