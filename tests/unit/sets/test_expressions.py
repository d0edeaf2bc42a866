"""Expressions and cursors: limits, postfix form, what is refused."""

from __future__ import annotations

import pytest

from tao.model.errors import InvalidArgument, TooLarge
from tao.sets.cursor import Place, make_cursor, read_cursor
from tao.sets.expression import (
    MAX_DEPTH,
    MAX_LEAVES,
    MAX_UNION_LISTS,
    Combination,
    Expression,
    ListTerm,
    SetOperator,
    checksum_of,
    combine,
    from_terms,
    text_of,
    union_of,
)

A, B = ListTerm(1, 7), ListTerm(2, 7)
AND, OR, WITHOUT = SetOperator


def test_an_expression_may_be_an_operand_of_itself() -> None:
    both = combine(AND, A, A)
    assert combine(OR, both, both) == Combination(OR, both, both)


def test_a_chain_of_one_operator_is_one_level_and_sixteen_terms_at_most() -> None:
    chain: Expression = A
    for _ in range(MAX_LEAVES - 1):
        chain = combine(OR, chain, B)
    with pytest.raises(InvalidArgument, match="at most 16 terms, this one 17"):
        combine(OR, chain, B)


def test_more_than_eight_levels_are_refused() -> None:
    nested: Expression = A
    for level in range(MAX_DEPTH):
        nested = combine((AND, WITHOUT)[level % 2], nested, B)
    with pytest.raises(InvalidArgument, match="at most 8 levels, this one 9"):
        combine(AND, nested, B)


def test_a_union_has_one_to_ten_thousand_different_lists() -> None:
    assert union_of([3, 1, 3], 7) == union_of([1, 3], 7)
    union_of(range(1, MAX_UNION_LISTS + 1), 7)
    with pytest.raises(InvalidArgument, match="at least one list"):
        union_of([], 7)
    with pytest.raises(TooLarge, match="at most 10000 lists, this one 10001"):
        union_of(range(1, MAX_UNION_LISTS + 2), 7)


@pytest.mark.parametrize(
    ("terms", "message"),
    [([], "leave 0 sets"), ([A, B], "leave 2 sets"), ([A, AND], r"terms\[1\] is '&'"), ([OR], r"terms\[0\] is '\|'")],
)
def test_terms_that_are_not_one_expression_are_refused(terms: list[ListTerm | SetOperator], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_terms(terms)


def test_what_an_expression_denotes_decides_its_checksum() -> None:
    different: list[Expression] = [
        A,
        B,
        ListTerm(1, 8),
        ListTerm(1, 7, low=1),
        union_of([1], 7),
        union_of([1, 2], 7),
        combine(AND, A, B),
        combine(AND, B, A),
        combine(OR, A, B),
        combine(WITHOUT, A, B),
    ]
    assert len({checksum_of(each) for each in different}) == len(different)
    assert checksum_of(union_of([2, 1], 7, skip_missing=True)) == checksum_of(union_of([1, 2], 7))


def test_a_cursor_holds_its_place() -> None:
    assert read_cursor(make_cursor(9, Place(5, 6)), 9) == Place(5, 6)


def test_a_cursor_with_any_changed_character_is_refused() -> None:
    cursor = make_cursor(9, Place(5, 6))
    for index in range(len(cursor)):
        changed = cursor[:index] + ("A" if cursor[index] != "A" else "B") + cursor[index + 1 :]
        with pytest.raises(InvalidArgument, match="not valid"):
            read_cursor(changed, 9)
    for text in ("", "é", cursor[:-1], cursor + "AAAA"):
        with pytest.raises(InvalidArgument, match="not valid"):
            read_cursor(text, 9)


def test_a_cursor_of_another_expression_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="another set expression"):
        read_cursor(make_cursor(9, Place(5, 6)), 8)


def test_an_expression_reads_as_it_is_written() -> None:
    set_ = combine(WITHOUT, combine(AND, A, B), union_of([1, 2], 7))
    assert text_of(set_, "type {}".format) == "(1.type 7 & 2.type 7) - the union of 2 lists of type 7"
