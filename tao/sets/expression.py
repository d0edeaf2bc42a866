"""Set expressions: lists, unions of many lists, and the three operators; their limits, postfix form and checksum."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Final
from zlib import crc32

import msgspec

from tao.model.errors import InvalidArgument, TooLarge
from tao.model.graph import MAX_TIME

MAX_DEPTH: Final = 8
MAX_LEAVES: Final = 16
MAX_UNION_LISTS: Final = 10_000

_LIST = struct.Struct("<BQIQQ")
_UNION = struct.Struct("<BII")


class SetOperator(Enum):
    """An operator on two sets. Its value is its sign in texts."""

    AND = "&"
    """The ids in both sets, with the edges of the left one."""
    OR = "|"
    """All ids; an id in both sets has the newer of its two edges."""
    WITHOUT = "-"
    """The left set without the ids of the right one."""


class ListTerm(msgspec.Struct, frozen=True):
    """The edges of one list with ``high >= time >= low``."""

    id1: int
    atype: int
    high: int = MAX_TIME
    low: int = 0


class UnionTerm(msgspec.Struct, frozen=True):
    """All edges of many lists of one type; an id in several lists has its newest edge, of equal times that of the
    lowest id1. ``skip_missing``: a list that cannot be read counts as empty, and the answer names it. Made by
    `union_of`."""

    id1s: tuple[int, ...]
    atype: int
    skip_missing: bool = False


class Combination(msgspec.Struct, frozen=True):
    """Two sets and an operator. Made by `combine`."""

    operator: SetOperator
    left: Expression
    right: Expression


Expression = ListTerm | UnionTerm | Combination


def union_of(id1s: Iterable[int], atype: int, *, skip_missing: bool = False) -> UnionTerm:
    """Return the union of the lists of some ids. Raises `InvalidArgument` for no id, `TooLarge` above 10,000."""
    ids = tuple(sorted(set(id1s)))
    if not ids:
        raise InvalidArgument("a union has at least one list; this one has none")
    if len(ids) > MAX_UNION_LISTS:
        raise TooLarge(f"a union has at most {MAX_UNION_LISTS} lists, this one {len(ids)}: ask in several")
    return UnionTerm(ids, atype, skip_missing)


def combine(operator: SetOperator, left: Expression, right: Expression) -> Combination:
    """Return two sets combined. Raises `InvalidArgument` for an expression that is too deep or has too many terms."""
    made = Combination(operator, left, right)
    leaves = sum(1 for each in terms_of(made) if not isinstance(each, SetOperator))
    if leaves > MAX_LEAVES:
        raise InvalidArgument(f"a set expression has at most {MAX_LEAVES} terms, this one {leaves}")
    depth = _depth(made)
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"a set expression nests at most {MAX_DEPTH} levels, this one {depth}")
    return made


def _depth(expression: Expression) -> int:
    """Return the number of nested operators. A chain of one operator, as ``a & b & c``, is one level."""
    if not isinstance(expression, Combination):
        return 0
    left = expression.left
    continues = isinstance(left, Combination) and left.operator is expression.operator
    return max(_depth(left) + (not continues), _depth(expression.right) + 1)


Term = ListTerm | UnionTerm | SetOperator
"""An item of the postfix form."""


def terms_of(expression: Expression) -> Iterator[Term]:
    """Yield the postfix form: both operands, then their operator."""
    if isinstance(expression, Combination):
        yield from terms_of(expression.left)
        yield from terms_of(expression.right)
        yield expression.operator
    else:
        yield expression


def from_terms(terms: Iterable[Term]) -> Expression:
    """Return the expression of a postfix form. Raises `InvalidArgument` when the form is not one expression."""
    stack: list[Expression] = []
    for index, term in enumerate(terms):
        if not isinstance(term, SetOperator):
            stack.append(term)
            continue
        if len(stack) < 2:
            raise InvalidArgument(
                f"terms[{index}] is {term.value!r}, which needs two sets before it; {len(stack)} is left"
            )
        right, left = stack.pop(), stack.pop()
        stack.append(combine(term, left, right))
    if len(stack) != 1:
        raise InvalidArgument(f"the terms leave {len(stack)} sets; they must leave one, so each pair needs an operator")
    return stack[0]


def checksum_of(expression: Expression) -> int:
    """Return a checksum of what the expression denotes, by which a cursor knows its own expression."""
    checksum = 0
    for term in terms_of(expression):
        if isinstance(term, ListTerm):
            packed = _LIST.pack(1, term.id1, term.atype, term.high, term.low)
        elif isinstance(term, UnionTerm):
            packed = _UNION.pack(2, term.atype, len(term.id1s)) + struct.pack(f"<{len(term.id1s)}Q", *term.id1s)
        else:
            packed = b"\x03" + term.value.encode()
        checksum = crc32(packed, checksum)
    return checksum


def text_of(expression: Expression, type_name: Callable[[int], str]) -> str:
    """Return the expression as people read it; ``type_name`` names an association type."""
    if isinstance(expression, ListTerm):
        return f"{expression.id1}.{type_name(expression.atype)}"
    if isinstance(expression, UnionTerm):
        return f"the union of {len(expression.id1s)} lists of {type_name(expression.atype)}"
    parts = [
        f"({text_of(each, type_name)})" if isinstance(each, Combination) else text_of(each, type_name)
        for each in (expression.left, expression.right)
    ]
    return f" {expression.operator.value} ".join(parts)
