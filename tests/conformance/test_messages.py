"""Both converters of maintenance messages, compiled and in Python, make the same of the same."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tao.model.changes import (
    GoneEdge,
    ListChange,
    ListInvalidation,
    Message,
    ObjectChange,
    ShardInvalidation,
)
from tao.model.errors import ProtocolError
from tao.model.graph import Edge
from tao.wire import messages_python as specified
from tao.wire.v1 import session_pb2 as pb

COMPILED: Final = "tao.wire.messages_core"
needs_compiled = pytest.mark.skipif(importlib.util.find_spec(COMPILED) is None, reason="no compiled core here")
SHARD: Final = 77

numbers = st.integers(0, 2**64 - 1)
types = st.integers(0, 2**32 - 1)
data = st.just(b"") | st.binary(max_size=200)
list_changes = st.builds(
    ListChange,
    *(numbers, types, numbers, numbers, numbers),
    st.lists(st.builds(GoneEdge, numbers, numbers), max_size=4).map(tuple),
    st.lists(st.builds(Edge, numbers, numbers, data), max_size=20).map(tuple),
)
others: st.SearchStrategy[Message] = st.one_of(
    st.builds(ObjectChange, numbers, numbers, numbers, types, st.none() | data),
    st.builds(ListInvalidation, numbers, types, numbers),
    st.builds(ShardInvalidation, st.just(SHARD), st.lists(types, max_size=3).map(tuple)),
)
mostly_list_changes = st.lists(list_changes, max_size=8) | st.lists(list_changes | others, max_size=8)


@pytest.fixture(scope="module", params=["tao.wire.messages_python", pytest.param(COMPILED, marks=needs_compiled)])
def converter(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def written(converter: ModuleType, messages: list[Message]) -> pb.ShardMessages:
    to = pb.ShardMessages(shard=SHARD, version_epoch=3)
    converter.write_messages(tuple(messages), to)
    return to


def read_or_error(converter: ModuleType, found: pb.ShardMessages) -> tuple[Message, ...] | str:
    try:
        messages: tuple[Message, ...] = converter.read_messages(found)
    except ProtocolError as error:
        return error.message
    return messages


@given(mostly_list_changes)
@example([])
@example([ListChange(0, 0, 0, 0, 0)])
@example([ListChange(5, 2, 1, 2, 3000, (), tuple(Edge(each, 2**63 - each) for each in range(3000)))])
def test_messages_are_written_as_in_python_and_read_as_they_were(
    converter: ModuleType, messages: list[Message]
) -> None:
    to = written(converter, messages)
    assert to.SerializeToString() == written(specified, messages).SerializeToString()
    assert converter.read_messages(to) == tuple(messages)
    assert converter.read_messages(pb.ShardMessages.FromString(to.SerializeToString())) == tuple(messages)


@given(list_changes)
def test_messages_are_appended(converter: ModuleType, change: ListChange) -> None:
    to = written(converter, [change])
    converter.write_messages((change,), to)
    assert converter.read_messages(to) == (change, change)


def longer_column(change: pb.ListChange) -> None:
    change.put_times.append(1)


def shorter_column(change: pb.ListChange) -> None:
    change.gone_times.pop()


def data_of_one_edge(change: pb.ListChange) -> None:
    change.put_data.pop()


def no_data(change: pb.ListChange) -> None:
    del change.put_data[:]


def unknown_field(change: pb.ListChange) -> None:
    change.MergeFromString(b"\xfa\x01\x03new")


@pytest.mark.parametrize("spoil", [longer_column, shorter_column, data_of_one_edge, no_data, unknown_field])
def test_what_is_unusual_in_a_change_of_a_list_is_read_as_in_python(
    converter: ModuleType, spoil: Callable[[pb.ListChange], None]
) -> None:
    change = ListChange(9, 2, 3, 4, 5, (GoneEdge(6, 7),), (Edge(8, 9, b"a"), Edge(10, 11, b"")))
    found = written(specified, [change, change])
    spoil(found.messages[1].list_change)
    assert read_or_error(converter, found) == read_or_error(specified, found)


@pytest.mark.parametrize("raw", [b"\x1a\x00", b"\x1a\x03\xfa\x01\x00", b"\x1a\x04\x12\x00\x12\x00", b"\xfa\x01\x00"])
def test_what_is_unusual_in_a_message_is_read_as_in_python(converter: ModuleType, raw: bytes) -> None:
    found = pb.ShardMessages.FromString(b"\x08\x4d\x10\x03\x1a\x02\x12\x00" + raw)
    assert read_or_error(converter, found) == read_or_error(specified, found)


@pytest.mark.parametrize(
    "change",
    [
        ListChange(2**64, 2, 3, 4, 5),
        ListChange(-1, 2, 3, 4, 5),
        ListChange(1, 2**32, 3, 4, 5),
        ListChange(1, 2, 3, 4, 5, (), (Edge(1, -2),)),
        ListChange(1, 2, 3, 4, 5, (), (Edge(1, 2, "text"),)),  # type: ignore[arg-type]
        ListChange(1, 2, 3, 4, 5, (), (Edge(1, 2, None),)),  # type: ignore[arg-type]
        ListChange(1, 2, 3, 4, 5, (), (Edge(1, 2.5),)),  # type: ignore[arg-type]
        ListChange(1, 2, 3, 4, 5.0),  # type: ignore[arg-type]
        ListChange(True, 2, 3, 4, 5),
        ListChange(None, 2, 3, 4, 5),  # type: ignore[arg-type]
    ],
)
def test_what_protobuf_cannot_hold_is_refused_as_in_python(converter: ModuleType, change: ListChange) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        written(specified, [change])
    with pytest.raises((TypeError, ValueError)) as raised:
        written(converter, [change])
    assert raised.type is expected.type
