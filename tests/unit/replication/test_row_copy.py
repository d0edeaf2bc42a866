"""How many rows a statement of a copy inserts, what it takes to find out, and when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.replication.move_statements import CopiedTable
from tao.replication.row_copy import CopyEnds, CopyPace, PacedStarts, _RowCopy, _Writer, rows_of_statement
from tao.storage.session import DatabaseSession, ServerAccount

BATCH_BYTES = 512 << 10


@given(st.lists(st.integers(1, 2 * BATCH_BYTES), max_size=40), st.integers(1, 64))
def test_a_statement_has_a_power_of_two_of_rows_and_two_batches_at_most(sizes: list[int], most_rows: int) -> None:
    rows = [bytes(size) for size in sizes]
    count = rows_of_statement(rows, most_rows, 2 * BATCH_BYTES)
    assert bool(count) is bool(rows)
    assert count & (count - 1) == 0
    assert count <= min(len(rows), most_rows)
    assert count <= 1 or sum(sizes[:count]) <= 2 * BATCH_BYTES


def test_as_many_rows_go_into_a_statement_as_fit() -> None:
    assert rows_of_statement([b"x"] * 100, 4_096, 2 * BATCH_BYTES) == 64
    assert rows_of_statement([b"x"] * 100, 40, 2 * BATCH_BYTES) == 32
    assert rows_of_statement([bytes(BATCH_BYTES)] * 4, 4_096, 2 * BATCH_BYTES) == 2
    assert rows_of_statement([bytes(5 * BATCH_BYTES)] * 4, 4_096, 2 * BATCH_BYTES) == 1


def test_a_slow_copy_sends_small_statements() -> None:
    assert CopyPace(1.0).batch_bytes == BATCH_BYTES
    assert CopyPace(1.0, bytes_per_second=1e9).batch_bytes == BATCH_BYTES
    assert CopyPace(1.0, bytes_per_second=3e7).batch_bytes == 210_000
    assert CopyPace(1.0, bytes_per_second=1e3).batch_bytes == 64 << 10


def statements_until(starts: PacedStarts, end: float) -> int:
    """Begin statements of 100 bytes at the earliest times, and return how many begin before the end."""
    count = 0
    while starts.next_at < end:
        starts.begun(100, starts.next_at)
        count += 1
    return count


def test_a_copy_with_a_pace_holds_it_on_average() -> None:
    starts = PacedStarts(1_000.0, 50.0)
    assert statements_until(starts, 59.95) == 100


def test_a_copy_makes_up_for_a_short_delay_and_is_a_quarter_faster_meanwhile() -> None:
    starts = PacedStarts(1_000.0, 50.0)
    starts.begun(100, 50.0)
    starts.begun(100, 50.6)  # the server took half a second longer than the pace has it
    assert starts.next_at == pytest.approx(50.68)
    assert statements_until(starts, 50.95) == 4
    assert statements_until(starts, 59.95) == 100 - 2 - 4


def test_a_copy_makes_up_for_a_second_of_a_long_delay() -> None:
    starts = PacedStarts(1_000.0, 50.0)
    starts.begun(100, 50.0)
    starts.begun(100, 90.0)
    assert statements_until(starts, 99.95) == 100 - 1 + 10


def test_a_copy_without_a_pace_never_waits() -> None:
    starts = PacedStarts(0.0, 50.0)
    starts.begun(100, 90.0)
    assert starts.next_at == 50.0


class CountedRow(bytes):
    """Counts how often its size is asked for."""

    asked = 0

    def __len__(self) -> int:
        CountedRow.asked += 1
        return super().__len__()


class Source:
    """A server whose table has these rows."""

    def __init__(self, rows: list[bytes]) -> None:
        self.rows = rows

    async def select_packed(self, sql: str, *, deadline: float) -> None:
        pass

    async def take_packed(self, rows: int, *, deadline: float) -> tuple[list[bytes], bool]:
        taken, self.rows = self.rows[:rows], self.rows[rows:]
        return taken, not self.rows


class Target:
    """Keeps the rows of each statement."""

    def __init__(self) -> None:
        self.statements: list[list[bytes]] = []

    async def insert(self, table: str, columns: Sequence[str], rows: Sequence[bytes], deadline: float) -> None:
        self.statements.append(list(rows))


async def test_the_sizes_of_rows_are_added_up_a_few_times_however_many_fit_into_a_statement() -> None:
    rows: list[bytes] = [CountedRow(b"%07d" % number) for number in range(10_000)]
    account = cast(ServerAccount, None)
    copied: list[int] = []
    copy = _RowCopy(CopyEnds(0, account, "a", account, "b"), CopyPace(60.0), copied.append)
    target = Target()
    copy.writers.append(cast(_Writer, target))
    CountedRow.asked = 0
    await copy.copy_table(cast(DatabaseSession, Source(rows)), CopiedTable("objects", ("id", "data"), ("id",)))
    assert CountedRow.asked <= 4 * len(rows)
    assert [row for statement in target.statements for row in statement] == rows
    assert len(target.statements[0]) == 4_096
    assert copied[-1] == 7 * len(rows)


async def test_a_statement_of_large_rows_is_bounded_by_their_bytes_again_and_again() -> None:
    rows = [bytes(100_000) for _ in range(200)]
    account = cast(ServerAccount, None)
    copy = _RowCopy(CopyEnds(0, account, "a", account, "b"), CopyPace(60.0), lambda _: None)
    target = Target()
    copy.writers.append(cast(_Writer, target))
    await copy.copy_table(cast(DatabaseSession, Source(rows)), CopiedTable("objects", ("id", "data"), ("id",)))
    assert {len(statement) for statement in target.statements} == {8}
    assert sum(map(len, target.statements)) == len(rows)
