"""Both implementations of a many-form's work for each item, compiled and in Python, give the same results."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from types import ModuleType
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.client import batches_python as specified
from tao.client.server_queues import JoinedFuture
from tao.model.errors import Unavailable
from tao.model.ids import MAX_ID, SHARD_SHIFT

COMPILED: Final = "tao.client.batches_core"
HAS_COMPILED: Final = importlib.util.find_spec(COMPILED) is not None
needs_compiled = pytest.mark.skipif(not HAS_COMPILED, reason="no compiled core here")
TYPES: Final = {number.to_bytes(4, "little"): f"type {number}" for number in (1, 7)}


@pytest.fixture(params=["tao.client.batches_python", pytest.param(COMPILED, marks=needs_compiled)])
def batches(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def value(otype: int, data: bytes = b"data") -> bytes:
    return bytes(8) + otype.to_bytes(4, "little") + data


class Place:
    """A receiver with a method ``put`` of its own."""

    def __init__(self) -> None:
        self.got: list[tuple[int, bytes]] = []

    def put(self, index: int, got: bytes) -> None:
        self.got.append((index, got))


def test_ids_are_plain_ints_within_their_bounds(batches: ModuleType) -> None:
    assert batches.are_ids(())
    assert batches.are_ids((1, MAX_ID))
    for wrong in (0, -1, MAX_ID + 1, 1 << 64, -(1 << 70), True, 1.0, "1", None):
        assert not batches.are_ids((1, wrong, 2))


def test_rows_are_divided_by_server_in_order_and_each_shard_is_routed_once(batches: ModuleType) -> None:
    asked: list[int] = []

    def reader(shard: int) -> str:
        asked.append(shard)
        return "even" if shard % 2 == 0 else "odd"

    rows = [(shard << SHARD_SHIFT | 9, place) for place, shard in enumerate((2, 2, 1, 4, 3, 2, 65_535))]
    parts = batches.by_server(rows, list("abcdefg"), reader)
    assert list(parts.items()) == [
        ("even", ([rows[0], rows[1], rows[3], rows[5]], ["a", "b", "d", "f"])),
        ("odd", ([rows[2], rows[4], rows[6]], ["c", "e", "g"])),
    ]
    assert asked == [2, 1, 4, 3, 65_535]
    assert batches.by_server([], [], reader) == {}


def test_an_error_of_the_router_is_passed_on(batches: ModuleType) -> None:
    def reader(_shard: int) -> str:
        raise Unavailable("no server")

    with pytest.raises(Unavailable, match="no server"):
        batches.by_server([(1,)], ["a"], reader)


async def test_values_go_to_the_waiters_of_their_slots(batches: ModuleType) -> None:
    loop = asyncio.get_running_loop()
    first, second = JoinedFuture[bytes](2, loop), JoinedFuture[bytes](1, loop)
    alone, cancelled = loop.create_future(), loop.create_future()
    cancelled.cancel()
    place = Place()
    waiters: list[Any] = [(first, 1), alone, (second, 0), None, (first, 0), (place, 5), cancelled, (first, 0)]
    batches.deliver(waiters, [4, 0, 1, 2, 3, 5, 6], [b"0", b"1", b"a", b"2", b"-", b"p", b"-"], JoinedFuture)
    assert waiters == [None] * 7 + [(first, 0)]
    assert await first.future == [b"0", b"1"]
    assert await second.future == [b"2"]
    assert await alone == b"a"
    assert place.got == [(5, b"p")]


async def test_without_slots_values_are_in_order_and_may_end_sooner(batches: ModuleType) -> None:
    joined = JoinedFuture[bytes](3, asyncio.get_running_loop())
    waiters: list[Any] = [(joined, 0), (joined, 1), (joined, 2)]
    batches.deliver(waiters, None, [b"a", b"b"], JoinedFuture)
    assert waiters == [None, None, (joined, 2)]
    assert not joined.future.done()
    batches.deliver(waiters, [2], [b"c"], JoinedFuture)
    assert await joined.future == [b"a", b"b", b"c"]


def test_objects_are_made_of_values_of_known_types(batches: ModuleType) -> None:
    values = [value(1), value(7, b""), value(1, b"x" * 300)]
    made = batches.objects_of((5, 6, 7), values, TYPES, lambda *parts: parts)
    assert made == [(5, "type 1", b"data"), (6, "type 7", b""), (7, "type 1", b"x" * 300)]


@pytest.mark.parametrize("other", [Unavailable("no"), value(2), value(0), value(1)[:11], b"", None])
def test_anything_but_objects_of_known_types_is_left_to_the_caller(batches: ModuleType, other: object) -> None:
    assert batches.objects_of((1, 2), [value(1), other], TYPES, lambda *parts: parts) is None


@pytest.mark.skipif(not HAS_COMPILED, reason="no compiled core here")
@given(
    st.lists(st.tuples(st.integers(1, MAX_ID), st.one_of(st.binary(max_size=40), st.sampled_from((1, 7)).map(value)))),
    st.integers(1, 5),
)
def test_both_make_the_same_of_the_same_values(pairs: list[tuple[int, bytes]], servers: int) -> None:
    compiled = importlib.import_module(COMPILED)
    ids, values = tuple(each for each, _ in pairs), [each for _, each in pairs]
    wanted = specified.objects_of(ids, values, TYPES, lambda *parts: parts)
    found = compiled.objects_of(ids, values, TYPES, lambda *parts: parts)
    assert found == wanted
    rows = [(each,) for each in ids]
    assert list(compiled.by_server(rows, values, servers.__rmod__).items()) == list(
        specified.by_server(rows, values, servers.__rmod__).items()
    )
