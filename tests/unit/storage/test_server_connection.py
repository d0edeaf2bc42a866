"""What a connection does with what arrives while nobody waits for it, and when nothing does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from itertools import combinations
from types import SimpleNamespace

import aiomysql
import pymysql.err
import pytest
from pymysql.converters import decoders

from tao.storage.result_packets import Columns, Row
from tao.storage.server_connection import ServerConnection
from tests.properties.test_result_packets import Column, Result, encode

_ANSWER = encode([Result([Column("data", 252, 63)], [(bytes(60_000),)] * 20)])


class Transport:
    """Records the calls to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self.calls.append("protocol")

    def write(self, data: bytes) -> None:
        return

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


class Driver:
    """The part of an aiomysql connection that is used."""

    encoding = "utf8"
    decoders = decoders

    def __init__(self) -> None:
        self.transport = Transport()
        self._writer = SimpleNamespace(transport=self.transport)
        self.closed = False

    def escape(self, value: object) -> str:
        return repr(value)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (7, "7"),
        (b"", "_binary''"),
        (b"a'b", "_binary'a\\'b'"),
        ([1, -2], "(1,-2)"),
        ([b"x"], "('x')"),
        (None, "NULL"),
    ],
)
async def test_values_are_written_as_the_driver_writes_them(value: object, literal: str) -> None:
    driver = Driver()
    sent: list[bytes] = []
    driver.transport.write = sent.append  # type: ignore[method-assign, assignment]  # only this test looks at it
    driver.escape = aiomysql.Connection(charset="utf8mb4").escape  # type: ignore[method-assign]
    ServerConnection(driver).send("SELECT %s", [value])
    assert sent[0][5:].decode() == f"SELECT {literal}"


def soon() -> float:
    return asyncio.get_running_loop().time() + 60


async def test_rows_that_are_not_read_stay_with_the_server() -> None:
    driver = Driver()
    connection = ServerConnection(driver)
    connection.send("SELECT", ())
    for at in range(0, len(_ANSWER), 50_000):
        if driver.transport.calls[-1] == "pause":
            break
        connection.data_received(_ANSWER[at : at + 50_000])
    assert driver.transport.calls == ["protocol", "pause"]
    assert at < 400_000
    rows: list[Row] = []
    assert await connection.head(soon())
    reading = asyncio.create_task(connection.rows(rows, 100, soon()))
    await asyncio.sleep(0)
    assert driver.transport.calls == ["protocol", "pause", "resume"]
    for start in range(at, len(_ANSWER), 50_000):
        connection.data_received(_ANSWER[start : start + 50_000])
    assert await reading
    assert len(rows) == 20
    assert driver.transport.calls == ["protocol", "pause", "resume"], "who waits for it has it"


async def test_a_later_deadline_is_not_cut_short_by_an_earlier_one() -> None:
    """One alarm serves many answers: it looks at what is waited for when it rings."""
    connection = ServerConnection(Driver())
    loop = asyncio.get_running_loop()
    for seconds in (0.01, 0.02):
        connection.send("SELECT", ())
        with pytest.raises(TimeoutError):
            await connection.head(loop.time() + seconds)
    connection.send("SELECT", ())
    rings = loop.time() + 0.01
    asked = asyncio.create_task(connection.head(rings))
    await asyncio.sleep(0)
    connection.data_received(encode([Result([], [])]))
    assert await asked is False
    connection.send("SELECT", ())
    patient = asyncio.create_task(connection.head(loop.time() + 60))
    rung = asyncio.Event()
    loop.call_at(rings + 0.001, rung.set)  # alarms ring in the order of their times
    await rung.wait()
    assert not patient.done()
    connection.data_received(encode([Result([], [])]))
    assert await patient is False


async def test_an_answer_that_came_before_the_end_of_the_connection_is_read() -> None:
    driver = Driver()
    connection = ServerConnection(driver)
    connection.send("SELECT", ())
    asked = asyncio.create_task(connection.head(soon()))
    await asyncio.sleep(0)
    connection.data_received(encode([Result([], [])]))
    connection.connection_lost(None)
    assert await asked is False
    assert driver.closed
    connection.send("SELECT", ())
    with pytest.raises(pymysql.err.OperationalError, match="Lost connection"):
        await connection.head(soon())


_SEVERAL = [Result([], []), Result([Column("data", 252, 63)], [(b"one",), (b"two",)]), Result([], [])]


async def test_all_results_wake_who_waits_once_however_they_arrive() -> None:
    answer = encode(_SEVERAL)
    for size in (1, 7, len(answer)):
        connection = ServerConnection(Driver())
        connection.send("several", ())
        results: list[list[Row]] = []
        reading = asyncio.create_task(connection.results(results, soon()))
        for start in range(0, len(answer), size):
            await asyncio.sleep(0)
            assert not reading.done()
            connection.data_received(answer[start : start + size])
        await reading
        assert results == [[], [(b"one",), (b"two",)], []]


async def test_all_results_are_read_wherever_the_answer_was_torn() -> None:
    results = [Result([Column("data", 252, 63)], [(b"a row that is longer than what follows",)]), Result([], [])]
    answer = encode(results)
    for first, second in combinations(range(len(answer)), 2):
        connection = ServerConnection(Driver())
        connection.send("several", ())
        found: list[list[Row]] = []
        reading = asyncio.create_task(connection.results(found, soon()))
        await asyncio.sleep(0)
        for piece in filter(None, (answer[:first], answer[first:second], answer[second:])):
            connection.data_received(piece)
        await asyncio.sleep(0)
        assert reading.done(), f"it waits, with all {len(answer)} bytes there, torn at {first} and {second}"
        assert found == [list(each.rows) for each in results]


async def test_results_before_one_that_is_refused_are_known_and_the_connection_goes_on() -> None:
    connection = ServerConnection(Driver())
    for arrived_before in (False, True):
        connection.send("several", ())
        results: list[list[Row]] = []
        if arrived_before:
            connection.data_received(encode([*_SEVERAL, Result([], [], error=1205)]))
        reading = asyncio.create_task(connection.results(results, soon()))
        await asyncio.sleep(0)
        if not arrived_before:
            connection.data_received(encode([*_SEVERAL, Result([], [], error=1205)]))
        with pytest.raises(pymysql.err.MySQLError):
            await reading
        assert len(results) == 3


async def test_results_that_do_not_come_are_given_up_at_the_deadline() -> None:
    connection = ServerConnection(Driver())
    connection.send("several", ())
    results: list[list[Row]] = []
    reading = asyncio.create_task(connection.results(results, asyncio.get_running_loop().time() + 0.01))
    await asyncio.sleep(0)
    connection.data_received(encode(_SEVERAL)[:20])
    with pytest.raises(TimeoutError):
        await reading


async def test_a_statement_that_affects_many_rows_says_whether_another_follows() -> None:
    for affected, last_id in (
        (b"\xfa", b"\x00"),
        (b"\xfc\x00\x10", b"\xfd\x01\x00\x00"),
        (b"\xfe" + bytes(8), b"\x01"),
    ):
        connection = ServerConnection(Driver())
        connection.send("two", ())
        for number, status in ((1, b"\x0a\x00"), (2, b"\x02\x00")):
            payload = b"\x00" + affected + last_id + status + b"\x00\x00"
            connection.data_received(len(payload).to_bytes(3, "little") + bytes([number]) + payload)
        results: list[list[Row]] = []
        await connection.results(results, soon())
        assert results == [[], []]
    connection = ServerConnection(Driver())
    connection.send("torn", ())
    connection.data_received(b"\x03\x00\x00\x01\x00\xfc\x01")
    with pytest.raises(pymysql.err.InternalError):
        await connection.results([], soon())


class Passed:
    """What `ServerConnection.pass_rows` has passed on."""

    def __init__(
        self,
        connection: ServerConnection,
        limit: int = 100,
        *,
        deadline: float | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.sizes: list[int] = []
        self.rows: list[list[Row]] = []
        self.ends: list[Exception | None] = []
        self.fault: Exception | None = None
        self.ended = asyncio.Event()
        connection.send("SELECT", (), columns)
        connection.pass_rows(self._take, self._end, limit, soon() if deadline is None else deadline)

    def _take(self, rows: list[Row]) -> None:
        self.sizes.append(len(rows))
        self.rows.append(rows)
        if self.fault is not None:
            raise self.fault

    def _end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.ended.set()


_NUMBERS = encode([Result([Column("number", 3, 63)], [(str(number).encode(),) for number in range(25)])])


async def test_rows_are_passed_on_as_they_arrive_and_a_bounded_number_in_a_turn() -> None:
    connection = ServerConnection(Driver())
    passed = Passed(connection, limit=10)
    for at in range(0, len(_NUMBERS), 7):
        connection.data_received(_NUMBERS[at : at + 7])
    assert passed.sizes == [10], "the rest waits for the next turn"
    await passed.ended.wait()
    assert (passed.sizes, passed.ends) == ([10, 10, 5], [None])
    again = Passed(connection, limit=100)
    connection.data_received(_NUMBERS)
    assert (again.sizes, again.ends) == ([25], [None]), "in the turn in which they have arrived"


async def test_a_small_answer_after_a_large_one_in_pieces_is_passed_on_in_the_turn_in_which_it_arrives() -> None:
    connection = ServerConnection(Driver())
    large = Passed(connection)
    for at in range(0, len(_ANSWER), 50_000):
        connection.data_received(_ANSWER[at : at + 50_000])
    assert large.ends == [None]
    small = Passed(connection)
    connection.data_received(_NUMBERS)
    assert (small.sizes, small.ends) == ([25], [None])


@pytest.mark.parametrize("limit", [10, 25, 100])
async def test_rows_of_expected_columns_are_passed_on_alike_however_they_arrive(limit: int) -> None:
    columns = Columns(("number",), (int,))
    connection = ServerConnection(Driver())
    for at in range(len(_NUMBERS)):
        passed = Passed(connection, limit, columns=columns)
        connection.data_received(_NUMBERS[:at])
        connection.data_received(_NUMBERS[at:])
        await passed.ended.wait()
        assert passed.ends == [None]
        assert [number for rows in passed.rows for number in rows] == [(number,) for number in range(25)]


async def test_an_answer_with_other_columns_than_expected_is_refused() -> None:
    connection = ServerConnection(Driver())
    passed = Passed(connection, columns=Columns(("a", "b"), (int, int)))
    connection.data_received(_NUMBERS)
    assert [type(end) for end in passed.ends] == [pymysql.err.InternalError]


async def test_rows_that_arrive_between_two_turns_do_not_begin_another_one() -> None:
    connection = ServerConnection(Driver())
    passed = Passed(connection, limit=10)
    connection.data_received(_NUMBERS[:200])
    connection.data_received(_NUMBERS[200:])
    assert passed.sizes == [10]
    await passed.ended.wait()
    assert passed.sizes == [10, 10, 5]


async def test_who_is_passed_rows_hears_of_the_end_once_however_it_comes() -> None:
    fault = LookupError("a bug above the driver")
    raising = Passed(connection := ServerConnection(Driver()))
    raising.fault = fault
    connection.data_received(_NUMBERS)
    assert raising.ends == [fault]
    connection.connection_lost(None)
    assert raising.ends == [fault]

    lost = Passed(connection := ServerConnection(Driver()))
    connection.data_received(_NUMBERS[:100])
    connection.connection_lost(None)
    assert [type(end) for end in lost.ends] == [pymysql.err.OperationalError]

    connection = ServerConnection(Driver())
    connection.connection_lost(None)
    late = Passed(connection)
    assert [type(end) for end in late.ends] == [pymysql.err.OperationalError]

    silent = Passed(ServerConnection(Driver()), deadline=asyncio.get_running_loop().time() + 0.01)
    await silent.ended.wait()
    assert [type(end) for end in silent.ends] == [TimeoutError]


async def test_an_idle_connection_keeps_nothing_of_its_last_answer() -> None:
    class Asker:
        pass

    asker, connection = Asker(), ServerConnection(Driver())
    kept, ended = weakref.ref(asker), asyncio.Event()

    def take(_: object, asker: Asker = asker) -> None:
        pass

    def end(_: object, asker: Asker = asker) -> None:
        ended.set()

    connection.send("SELECT", ())
    connection.pass_rows(take, end, 100, soon())
    connection.data_received(_NUMBERS)
    await ended.wait()
    del asker, take, end
    gc.collect()
    assert kept() is None
