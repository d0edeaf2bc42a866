"""Writes that are refused before they are queued."""

import pytest

from tao.model.errors import InvalidArgument, InvalidField, RequestError, TooLarge, UnknownType
from tao.model.graph import MAX_TIME
from tao.model.ids import MAX_ID
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    ForgetIntent,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    SettleEdge,
    Write,
)
from tao.planning.write_plan import validate
from tao.schema.registry import load_schema
from tests.unit.planning.stored_rows import FOLLOWS, HIGH, LIKES, LOW, NOTE, PAGE, SCHEMA, USER

LONG = b"\x81\x01\xda\x01\x2c" + b"x" * 300
HUGE = b"\x81\x01\xdb\x00\x10\x00\x00" + b"x" * 2**20


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (ObjAdd(0, USER, b"", False), InvalidArgument),
        (ObjAdd(MAX_ID + 1, USER, b"", False), InvalidArgument),
        (ObjAdd(LOW, 99, b"", False), UnknownType),
        (ObjAdd(LOW, USER, b"\x81\x01\x05", False), InvalidField),
        (ObjAdd(LOW, USER, b"\xff\x00", False), InvalidField),
        (ObjAdd(LOW, USER, HUGE, False), TooLarge),
        (ObjUpdate(LOW, 99, b""), UnknownType),
        (ObjUpdate(LOW, PAGE, b"\x81\x01\xa1x"), InvalidField),
        (ObjUpdate(LOW, 0, HUGE), TooLarge),
        (ObjUpdate(-1, USER, b""), InvalidArgument),
        (ObjDelete(-1), InvalidArgument),
        (ObjDelete(LOW, 99), UnknownType),
        (AssocAdd(LOW, 99, HIGH, 1, b""), UnknownType),
        (AssocAdd(0, LIKES, HIGH, 1, b""), InvalidArgument),
        (AssocAdd(LOW, LIKES, -5, 1, b""), InvalidArgument),
        (AssocAdd(LOW, LIKES, HIGH, -1, b""), InvalidArgument),
        (AssocAdd(LOW, LIKES, HIGH, MAX_TIME + 1, b""), InvalidArgument),
        (AssocAdd(LOW, NOTE, HIGH, 1, LONG), TooLarge),
        (AssocAdd(LOW, NOTE, HIGH, 1, b"\x81\x01\x05"), InvalidField),
        (AssocDelete(LOW, 99, HIGH), UnknownType),
        (AssocDelete(LOW, LIKES, 0), InvalidArgument),
        (AssocChangeType(LOW, 99, HIGH, LIKES), UnknownType),
        (AssocChangeType(LOW, LIKES, HIGH, 99), UnknownType),
        (AssocChangeType(LOW, LIKES, 0, LIKES), InvalidArgument),
        (SettleEdge(LOW, 99, HIGH, False), UnknownType),
        (SettleEdge(LOW, LIKES, HIGH, True, -1), InvalidArgument),
        (ForgetIntent(HIGH, LOW, 1), InvalidArgument),
        (ForgetIntent(LOW, LOW, 1), InvalidArgument),
        (ForgetIntent(LOW, HIGH, -1), InvalidArgument),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else type(each).__name__,
)
def test_an_invalid_write_is_refused_with_its_kind_of_error(write: Write, error: type[RequestError]) -> None:
    with pytest.raises(error):
        validate(write, SCHEMA)


@pytest.mark.parametrize(
    "write",
    [
        ObjAdd(MAX_ID, USER, b"\x81\x01\xa3Ann", False),
        ObjUpdate(LOW, USER, b"\x81\x01\xc0"),
        ObjUpdate(LOW, 0, b"\x81\x01\xc0"),
        AssocAdd(LOW, LIKES, LOW, 0, b""),
        AssocAdd(LOW, FOLLOWS, HIGH, MAX_TIME, b""),
        AssocChangeType(LOW, LIKES, HIGH, FOLLOWS),
        SettleEdge(LOW, LIKES, HIGH, False),
        ForgetIntent(LOW, HIGH, 0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_valid_write_passes(write: Write) -> None:
    validate(write, SCHEMA)


STRICT = load_schema(
    """
format: 1
objects:
  user: {number: 1, fields: {name: {number: 1, type: str, required: true}, age: {number: 2, type: int}}}
associations:
  tie: {number: 1, fields: {text: {number: 1, type: str, required: true}}}
""",
    "strict.yaml",
)


@pytest.mark.parametrize(
    ("write", "field"),
    [
        (ObjAdd(LOW, 1, b"", False), "name"),
        (ObjAdd(LOW, 1, b"\x81\x02\x05", False), "name"),
        (ObjUpdate(LOW, 1, b"\x81\x01\xc0"), "name"),
        (AssocAdd(LOW, 1, HIGH, 1, b""), "text"),
    ],
)
def test_a_write_without_a_required_field_is_refused_by_name(write: Write, field: str) -> None:
    with pytest.raises(InvalidField, match=f"field '{field}' of type .* is required"):
        validate(write, STRICT)


def test_an_accepted_edge_is_settled_without_a_field_that_became_required() -> None:
    validate(SettleEdge(LOW, 1, HIGH, True, 1, b""), STRICT)
    validate(ObjUpdate(LOW, 1, b"\x81\x02\x05"), STRICT)
