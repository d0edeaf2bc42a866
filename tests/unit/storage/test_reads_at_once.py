"""Reads without a task: when they begin, what they answer, and which of them are left to `MySqlReadStore.read_each`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    OperatorError,
    Overloaded,
    TaoError,
    UnknownType,
)
from tao.model.ids import make_id
from tao.model.queries import FillRead, ObjectQuery, Query, RangeQuery
from tao.storage.failures import ConnectionLost
from tao.storage.pools import Pools
from tao.storage.reads import MySqlReadStore, ReadSettings
from tao.storage.result_packets import Row

NOW = 1_700_000_000_000
SETTINGS = ReadSettings(max_pending_per_shard=1, max_rows_at_once=200, max_held_bytes=4_096)


def _table_of(atype: int) -> str:
    if atype > 1:
        raise UnknownType(f"there is no type {atype}")
    return "assocs"


class Server:
    """Pools of one server whose session answers when the test says so. The even shards are the server's."""

    def __init__(self) -> None:
        self.is_idle = True
        self.is_down = False
        self.lent = 0
        self.returned: list[BaseException | None] = []
        self.sent: list[str] = []
        self.on_rows: Callable[[list[Row]], None]
        self.on_end: Callable[[TaoError | None], None]
        self.store = MySqlReadStore(self._local_of, lambda _: "db", cast(Pools, self), _table_of, SETTINGS)

    def _local_of(self, shard: int) -> str:
        if shard > 9:
            raise InvalidArgument(f"there is no shard {shard}")
        return "even" if shard % 2 == 0 else "odd"

    def of(self, _: str) -> Server:
        return self

    def lend_at_once(self) -> Server | None:
        if self.is_down:
            raise DatabaseDown("it is down")
        self.lent += self.is_idle
        return self if self.is_idle else None

    def take_back(self, session: Server, error: BaseException | None) -> None:
        assert session is self
        self.returned.append(error)

    def begin_stream(
        self,
        sql: str,
        values: Sequence[Any],
        on_rows: Callable[[list[Row]], None],
        on_end: Callable[[TaoError | None], None],
        **_: object,
    ) -> None:
        self.sent.append(sql)
        self.on_rows, self.on_end = on_rows, on_end


class Read:
    """One read at once."""

    def __init__(self, server: Server, *queries: Query) -> None:
        self.answers: dict[int, bytes] = {}
        self.errors: dict[int, TaoError] = {}
        self.ends = 0
        self.fault: Exception | None = None
        self.has_begun = server.store.read_at_once(
            queries, timeout_seconds=5, on_read=self._take, on_end=self._count_end
        )

    def _take(self, places: Sequence[int], read: FillRead | TaoError) -> None:
        if self.fault is not None:
            raise self.fault
        if isinstance(read, TaoError):
            self.errors.update(dict.fromkeys(places, read))
        else:
            self.answers.update(zip(places, read.values, strict=True))

    def _count_end(self) -> None:
        self.ends += 1


def item(number: int, shard: int = 0) -> ObjectQuery:
    return ObjectQuery(make_id(shard, NOW, number))


def row(query: ObjectQuery, data: bytes = b"x", part: int = 0) -> Row:
    return (part, 1, query.id, 1, 7, 1, data)


async def test_a_read_at_once_answers_and_gives_everything_back() -> None:
    server, query = Server(), item(1)
    for _ in range(2):
        read = Read(server, query)
        assert read.has_begun
        assert not Read(server, query).has_begun, "its shard has one statement at a time"
        server.on_rows([row(query)])
        assert server.store.held_bytes
        assert not read.answers
        server.on_end(None)
        assert (len(read.answers), read.ends, server.store.held_bytes) == (1, 1, 0)
    assert server.returned == [None, None]


async def test_a_list_that_is_longer_than_wanted_takes_a_second_statement_of_the_same_session() -> None:
    server = Server()
    read = Read(server, RangeQuery(item(1).id, 1, 0, 129))
    server.on_rows([(0, 1, None, None, 7, 5_000, None)])
    server.on_end(None)
    assert (len(server.sent), read.ends) == (2, 0)
    server.on_end(None)
    assert (len(read.errors), read.ends, server.returned) == (0, 1, [None])


@pytest.mark.parametrize(
    "queries",
    [
        [item(1), item(1, shard=1)],
        [item(1, shard=10)],
        [RangeQuery(item(1).id, 1, 0, 129), RangeQuery(item(2).id, 1, 0, 129)],
    ],
    ids=["of two servers", "of a shard that does not exist", "too many rows"],
)
async def test_what_takes_more_than_one_statement_for_one_server_is_not_read_at_once(queries: list[Query]) -> None:
    server = Server()
    refused = Read(server, *queries)
    assert (refused.has_begun, refused.ends, server.lent) == (False, 0, 0)
    assert Read(server, item(1)).has_begun, "nothing was left behind at the shard"


async def test_a_query_of_an_unknown_type_gives_its_session_back() -> None:
    server = Server()
    assert not Read(server, RangeQuery(item(1).id, 9, 0, 10)).has_begun
    assert (server.lent, server.returned, server.sent) == (1, [None], [])
    assert Read(server, item(1)).has_begun


async def test_nothing_waits_for_a_session_or_a_server_that_is_down() -> None:
    server = Server()
    server.is_idle = False
    assert not Read(server, item(1)).has_begun
    server.is_idle, server.is_down = True, True
    assert not Read(server, item(1)).has_begun
    server.is_down = False
    assert Read(server, item(1)).has_begun


@pytest.mark.parametrize(
    ("error", "shards", "is_reported"),
    [
        (ConnectionLost("gone"), [0], False),
        (OperatorError("refused"), [0, 2], False),
        (OperatorError("refused"), [0], True),
        (DeadlineExceeded("late"), [0, 2], True),
        (Overloaded("too many bytes"), [0, 0], True),
    ],
)
async def test_an_error_is_reported_unless_another_connection_or_statement_may_do_better(
    error: TaoError, shards: list[int], is_reported: bool
) -> None:
    server = Server()
    read = Read(server, *[item(number, shard) for number, shard in enumerate(shards)])
    server.on_end(error)
    assert set(read.errors.values()) == ({error} if is_reported else set())
    assert (read.answers, read.ends, server.returned) == ({}, 1, [error])


async def test_rows_beyond_the_bound_of_all_reads_are_refused_and_released() -> None:
    server, query = Server(), item(1)
    read = Read(server, query)
    with pytest.raises(Overloaded) as refused:
        server.on_rows([row(query, bytes(5_000))])
    server.on_end(refused.value)
    assert (read.errors, server.store.held_bytes) == ({0: refused.value}, 0)


async def test_a_fault_of_the_one_who_asked_gives_everything_back() -> None:
    server, query = Server(), item(1)
    read = Read(server, query)
    read.fault = LookupError("a bug above")
    server.on_rows([row(query)])
    server.on_end(None)
    assert (read.ends, server.store.held_bytes, len(server.returned)) == (1, 0, 1)
    assert Read(server, query).has_begun


async def test_too_many_rows_together_are_read_one_by_one_and_those_of_other_reads_are_waited_for() -> None:
    server, queries = Server(), (item(1), item(2))
    read = Read(server, *queries)
    with pytest.raises(Overloaded) as refused:
        server.on_rows([row(query, bytes(2_500)) for query in queries])
    server.on_end(refused.value)
    assert (read.errors, read.ends) == ({}, 1), "its own rows are too many"


@pytest.mark.parametrize("error", [UnknownType("the schema has changed"), LookupError("a bug of the planner")])
async def test_a_second_statement_that_cannot_be_made_ends_the_read(error: Exception) -> None:
    server, asked = Server(), 0

    def tables(atype: int) -> str:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise error
        return _table_of(atype)

    server.store.edge_tables = tables  # type: ignore[misc]
    query = RangeQuery(item(1).id, 1, 0, 129)
    read = Read(server, query)
    server.on_rows([(0, 1, None, None, 7, 5_000, None)])
    server.on_end(None)
    assert asked == 2
    reported = read.errors[0]
    assert reported is error or isinstance(reported, InternalError)
    assert (read.ends, server.store.held_bytes, server.returned) == (1, 0, [reported])
    server.store.edge_tables = _table_of  # type: ignore[misc]
    assert Read(server, query).has_begun
