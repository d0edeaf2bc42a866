"""A wrong argument fails before anything is sent, and the message names it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tao.client import (
    ClientSettings,
    Graph,
    InvalidArgument,
    InvalidField,
    RequestError,
    TooLarge,
    UnknownType,
    connect,
)
from tao.model.errors import TopologyError
from tests.unit.client.fakes import FakeCluster, make_id

Call = Callable[[Graph], Awaitable[object]]
HUGE = 1 << 63

WRONG: list[tuple[type[RequestError], str, Call]] = [
    (InvalidArgument, r"id is 0; it must be 1 to 2\^63 - 1", lambda g: g.obj_get(0)),
    (InvalidArgument, "id is -1", lambda g: g.obj_get(-1)),
    (InvalidArgument, "id is 9223372036854775808", lambda g: g.obj_get(HUGE)),
    (InvalidArgument, "id must be an int, not True", lambda g: g.obj_get(True)),
    (InvalidArgument, "id must be an int, not '7'", lambda g: g.obj_get("7")),  # type: ignore[arg-type]
    (InvalidArgument, "there is no shard 16; .* 0 to 15", lambda g: g.obj_get(make_id(1, 16))),
    (InvalidArgument, r"ids\[1\] is 0", lambda g: g.obj_get_many([1, 0])),
    (InvalidArgument, r"ids\[0\] must be an int, not False", lambda g: g.obj_get_many([False])),
    (InvalidArgument, "ids must be a sequence of ids", lambda g: g.obj_get_many("12")),  # type: ignore[arg-type]
    (InvalidArgument, "of shard 16", lambda g: g.obj_get_many([make_id(1, 16), 1])),
    (InvalidArgument, "id1 is 0", lambda g: g.assoc_count(0, "friend")),
    (UnknownType, "unknown association type 'freind'; did you mean 'friend'", lambda g: g.assoc_count(1, "freind")),
    (UnknownType, "it is an object type", lambda g: g.assoc_count(1, "user")),
    (InvalidArgument, "atype must be the name of a type, not 1", lambda g: g.assoc_count(1, 1)),  # type: ignore[arg-type]
    (InvalidArgument, "max_staleness_ms is 0; it must be 1 to", lambda g: g.obj_get(1, max_staleness_ms=0)),
    (InvalidArgument, "max_staleness_ms is -1", lambda g: g.assoc_count_many([(1, "friend")], max_staleness_ms=-1)),
    (InvalidArgument, "max_staleness_ms must be an int", lambda g: g.obj_get(1, max_staleness_ms=0.5)),  # type: ignore[arg-type]
    (InvalidArgument, r"pos is -1", lambda g: g.assoc_range(1, "friend", -1, 5)),
    (InvalidArgument, r"pos is 9223372036854775808", lambda g: g.assoc_range(1, "friend", HUGE, 5)),
    (InvalidArgument, r"limit is -5", lambda g: g.assoc_range(1, "friend", 0, -5)),
    (InvalidArgument, "limit is 4294967296; .* 0 to 4294967295", lambda g: g.assoc_range(1, "friend", 0, 1 << 32)),
    (InvalidArgument, "limit must be an int, not None", lambda g: g.assoc_range(1, "friend", 0, None)),  # type: ignore[arg-type]
    (InvalidArgument, "high is -1", lambda g: g.assoc_time_range(1, "friend", -1, 0, 5)),
    (InvalidArgument, "low is 92233720368547758", lambda g: g.assoc_time_range(1, "friend", None, HUGE, 5)),
    (InvalidArgument, r"pos is -1; .* 0 to 2\^63 - 1", lambda g: g.assoc_time_range(1, "friend", None, None, 5, -1)),
    (InvalidArgument, "pos is 92233720368547758", lambda g: g.assoc_time_range(1, "friend", None, None, 5, HUGE)),
    (InvalidArgument, "pos must be an int", lambda g: g.assoc_time_range(1, "friend", None, None, 5, False)),
    (InvalidArgument, "item 0: pos is -1", lambda g: g.assoc_time_range_many([(1, "friend", 9, 0, 5, -1)])),
    (InvalidArgument, r"id2s\[2\] is -4", lambda g: g.assoc_get(1, "friend", [2, 3, -4])),
    (TooLarge, "id2s holds 6001 ids; .* at most 6000", lambda g: g.assoc_get(1, "friend", range(1, 6002))),
    (InvalidArgument, "id2 is 0", lambda g: g.assoc_exists(1, "friend", 0)),
    (UnknownType, "stranger", lambda g: g.assoc_exists(1, "stranger", 2)),
    (InvalidArgument, "item 1: id2 is -4", lambda g: g.assoc_exists_many([(1, "friend", 2), (1, "friend", -4)])),
    (TooLarge, "6001 edges .* at most 6000", lambda g: g.assoc_exists_many([(1, "friend", 2)] * 6001)),
    (InvalidArgument, "low is -1", lambda g: g.assoc_get(1, "friend", [2], None, -1)),
    (InvalidArgument, "item 0 must be a tuple of 4 to 5 arguments", lambda g: g.assoc_range_many([(1,)])),  # type: ignore[list-item]
    (InvalidArgument, "item 1: limit is -1", lambda g: g.assoc_range_many([(1, "friend", 0, 5), (1, "friend", 0, -1)])),
    (UnknownType, "unknown object type 'usr'", lambda g: g.obj_add("usr")),
    (UnknownType, "unknown object type 'usr'", lambda g: g.obj_delete(1, "usr")),
    (UnknownType, "unknown object type 'usr'", lambda g: g.obj_delete_many([1], otype="usr")),
    (InvalidField, "type 'user' has no field 'nmae'; did you mean 'name'", lambda g: g.obj_add("user", {"nmae": "a"})),
    (InvalidField, "field 'name' of type 'user'", lambda g: g.obj_add("user", {"name": 7})),
    (InvalidField, "field 'lat' of type 'location'", lambda g: g.obj_add("location", {"lat": True})),
    (InvalidArgument, "fields must be a mapping", lambda g: g.obj_add("user", ["name"])),  # type: ignore[arg-type]
    (TooLarge, "data of type 'user'", lambda g: g.obj_add("user", {"name": "x" * (1 << 20)})),
    (InvalidArgument, "near is 0", lambda g: g.obj_add("user", near=0)),
    (InvalidArgument, "leave one out", lambda g: g.obj_add("user", near=make_id(1, 2), id=make_id(1, 3))),
    (InvalidArgument, "id .* is of shard 16", lambda g: g.obj_add("user", id=make_id(1, 16))),
    (InvalidField, "has no field", lambda g: g.obj_update(1, {"x": 1}, "user")),
    (UnknownType, "item 0: unknown object type 'x'", lambda g: g.obj_update_many([(1, {}, "x")])),
    (InvalidArgument, "id is 0", lambda g: g.obj_delete(0)),
    (InvalidArgument, "id2 is 0", lambda g: g.assoc_add(1, "friend", 0)),
    (InvalidArgument, "id2 .* is of shard 20", lambda g: g.assoc_add(1, "friend", make_id(1, 20))),
    (InvalidArgument, "time is -1", lambda g: g.assoc_add(1, "friend", 2, time=-1)),
    (InvalidArgument, "time is 9223372036854775808", lambda g: g.assoc_add(1, "friend", 2, time=HUGE)),
    (InvalidArgument, "time must be an int, not 1.5", lambda g: g.assoc_add(1, "friend", 2, time=1.5)),  # type: ignore[arg-type]
    (InvalidField, "has no field 'x'", lambda g: g.assoc_add(1, "friend", 2, 3, {"x": 1})),
    (TooLarge, "at most 16384", lambda g: g.assoc_add(1, "note", 2, 3, {"text": "x" * 17_000})),
    (UnknownType, "unknown association type 'x'", lambda g: g.assoc_delete(1, "x", 2)),
    (UnknownType, "unknown association type 'x'", lambda g: g.assoc_change_type(1, "friend", 2, "x")),
    (InvalidArgument, "new_atype must be the name", lambda g: g.assoc_change_type(1, "friend", 2, None)),  # type: ignore[arg-type]
    (InvalidArgument, "count is 0", lambda g: g.reserve_ids(0)),
    (InvalidArgument, "count is 10001; it must be 1 to 10000", lambda g: g.reserve_ids(10_001)),
    (InvalidArgument, "shard is 16; it must be 0 to 15", lambda g: g.reserve_ids(1, shard=16)),
    (InvalidArgument, "near and shard both", lambda g: g.reserve_ids(1, near=1, shard=0)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), WRONG, ids=[message for _, message, _ in WRONG])
async def test_a_wrong_argument_is_named_and_nothing_is_sent(
    graph: Graph, cluster: FakeCluster, error: type[RequestError], message: str, call: Call
) -> None:
    with pytest.raises(error, match=message):
        await call(graph)
    assert cluster.batches() == []


async def test_an_int_enum_is_an_int(graph: Graph) -> None:
    class Limit(int):
        pass

    assert list(await graph.assoc_range(1, "friend", 0, Limit(5))) == []


@pytest.mark.parametrize("field", ["timeout_seconds", "max_attempts", "max_batch_queries", "watch_retry_seconds"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_settings_must_be_above_zero_and_finite(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} is .* above 0"):
        ClientSettings(**{field: value})  # type: ignore[arg-type]


def test_first_attempt_share_must_be_at_most_one() -> None:
    with pytest.raises(InvalidArgument, match="first_attempt_share"):
        ClientSettings(first_attempt_share=1.5)


@pytest.mark.parametrize("target", ["", "localhost", "localhost:", "localhost:http", "frames:nowhere", "::1:80"])
async def test_a_text_that_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(InvalidArgument):
        await connect(target)


async def test_a_missing_topology_file_is_named() -> None:
    with pytest.raises(TopologyError, match=r"/nowhere/topology.json: cannot be read: No such file"):
        await connect("file:/nowhere/topology.json")


def test_a_graph_used_without_await_says_how_to_open_it() -> None:
    for name in ("obj_get", "close", "recording"):
        with pytest.raises(AttributeError, match=r"not open yet.* await it .* or use `SyncGraph`"):
            getattr(connect("host:1"), name)
    with pytest.raises(TypeError, match="await it"), connect("host:1"):  # type: ignore[attr-defined]
        pass


def test_what_is_no_operation_is_an_ordinary_missing_attribute_of_a_graph_that_is_not_open() -> None:
    assert not hasattr(connect("host:1"), "__len__")
    assert not hasattr(connect("host:1"), "_private")
