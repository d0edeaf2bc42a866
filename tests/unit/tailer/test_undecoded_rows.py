"""Undecoded rows are read once, even if several threads ask for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from tao.planning.row_events import RowEvent
from tao.tailer.binlog import BinlogTransaction, UndecodedRows

ROWS = [RowEvent(3, "objects", None, {"id": number}) for number in range(2)]


class LazyRows:
    """Reads rows as the binlog's library does: a second reader finds the list that the first one is filling, and
    after a failure the rows that came before it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.rows: list[RowEvent] | None = None
        self.reached = Event()
        self.go_on = Event()

    def read(self) -> BinlogTransaction:
        if self.rows is None:
            self.rows = ROWS[:1]
            self.reached.set()
            assert self.go_on.wait(60)
            if self.fails:
                raise ValueError("no such column")
            self.rows = ROWS
        return BinlogTransaction(gtid="", events=self.rows)


def test_a_second_thread_gets_all_rows_while_the_first_one_reads_them() -> None:
    lazy = LazyRows()
    undecoded = UndecodedRows(3, 300, lazy.read)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(undecoded.decode)
        assert lazy.reached.wait(60)
        second = threads.submit(undecoded.decode)
        while not second.running() and not second.done():
            pass
        lazy.go_on.set()
        assert first.result().events == second.result().events == ROWS


def test_rows_that_cannot_be_read_make_their_shard_invalid_however_often_they_are_decoded() -> None:
    lazy = LazyRows(fails=True)
    lazy.go_on.set()
    undecoded = UndecodedRows(3, 300, lazy.read)
    for _ in range(2):
        decoded = undecoded.decode()
        assert not decoded.events
        assert decoded.invalid_shards == {3}
