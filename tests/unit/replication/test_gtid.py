"""Positions in both notations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import OperatorError
from tao.replication.gtid import GtidSet, MariadbPosition, MysqlPosition, binlog_state_at, joined, parse_position
from tao.storage.dialect import Dialect

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


def maria(*texts: str) -> GtidSet:
    return GtidSet(Dialect.MARIADB, *texts)


def mysql(*texts: str) -> GtidSet:
    return GtidSet(Dialect.MYSQL, *texts)


def test_a_server_that_has_more_contains_the_other() -> None:
    assert maria("1-1-105") >= maria("1-1-103")
    assert not maria("1-1-103") >= maria("1-1-105")
    assert maria("1-1-103,1-2-110") >= maria("1-1-103")
    assert maria("1-1-103", "1-1-107") >= maria("1-1-107")
    assert mysql(f"{A}:1-9,{B}:1") >= mysql(f"{A}:2-9")
    assert not mysql(f"{A}:1-9") >= mysql(f"{A}:2-9,{B}:1")


def test_an_old_master_that_wrote_on_has_diverged_from_the_new_one_although_its_number_is_lower() -> None:
    old, new = maria("1-1-105"), maria("1-1-103,1-2-110")
    assert not new >= old
    assert not old >= new
    assert new.lacks(old) == "1-1-(104…105)"
    assert mysql(f"{A}:1-103,{B}:1-7").lacks(mysql(f"{A}:1-105")) == f"{A}:104-105"


def test_equal_sets_are_equal_however_they_are_written() -> None:
    assert maria("1-2-7,1-1-3") == maria("1-1-3", "1-2-7")
    assert mysql(f"{A}:1-2:3-4") == mysql(f"{A.upper()}:1-4")
    assert str(maria()) == "" == maria().lacks(maria())


@given(*(st.sets(st.integers(1, 40), max_size=30) for _ in range(2)))
def test_what_a_mysql_set_lacks_is_the_difference(ours: set[int], theirs: set[int]) -> None:
    one, other = (mysql(",".join(f"{A}:{number}" for number in numbers)) for numbers in (ours, theirs))
    lacked = MysqlPosition(one.lacks(other))
    assert {number for number in range(1, 42) if lacked.includes(f"{A}:{number}")} == theirs - ours
    assert (one >= other) == (ours >= theirs)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50))),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50))),
)
def test_containment_of_mariadb_sets_is_a_partial_order(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    a, b = (maria(*(f"1-{server}-{number}" for server, number in numbers)) for numbers in (one, other))
    union = maria(str(a), str(b))
    assert union >= a
    assert union >= b
    assert (a >= b and b >= a) == (a == b)
    assert (a >= b) == (union == a)


def test_a_mariadb_server_is_read_from_no_position_that_it_has_not_reached() -> None:
    position = parse_position(Dialect.MARIADB, "0-1-5,7-2-9")
    assert not position.is_beyond("0-1-5,7-2-9")
    assert not position.is_beyond("0-9-6,7-2-9,8-1-1")
    assert position.is_beyond("0-1-4,7-2-9")
    assert position.is_beyond("0-1-5")
    assert not parse_position(Dialect.MARIADB, "").is_beyond("")


def test_a_mysql_server_is_read_from_any_position_since_sets_say_exactly_what_is_behind_us() -> None:
    assert not parse_position(Dialect.MYSQL, "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5:7").is_beyond("")


def test_a_binlog_state_is_brought_up_to_a_position_and_ends_each_domain_with_its_newest() -> None:
    assert binlog_state_at("1-2-7,1-1-9,3-1-2", "1-1-12,3-1-2") == "1-2-7,1-1-12,3-1-2"
    assert binlog_state_at("1-1-9", "1-2-10") == "1-1-9,1-2-10", "another is master by now"
    assert binlog_state_at("", "") == ""
