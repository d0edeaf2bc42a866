"""The spans of a tailer's parts, and its answers to leaders that ask where a shard continues."""

from __future__ import annotations

from tao.model.delivery import Span
from tao.tailer.continuity import Continuity

H = "db@1:0-1"


def begun(position: str = "0-1-100") -> Continuity:
    continuity = Continuity("db", lambda: 1, (1, 2).__contains__)
    continuity.begin(position)
    return continuity


def test_each_part_of_a_shard_continues_where_the_previous_one_ended() -> None:
    continuity = begun()
    assert continuity.spans_of("0-1-103", [1, 2]) == [Span(1, H, 100, 103), Span(2, H, 100, 103)]
    assert continuity.spans_of("0-1-104", [2]) == [Span(2, H, 103, 104)]
    assert continuity.spans_of("0-1-107", [1]) == [Span(1, H, 103, 107)]


def test_only_the_last_part_of_a_transaction_covers_it() -> None:
    continuity = begun()
    spans = continuity.spans_of("0-1-103", [1, 2, 1, 1])
    assert spans == [
        Span(1, H, 100, 102, more=True),
        Span(2, H, 100, 103),
        Span(1, H, 102, 102, more=True, within=True),
        Span(1, H, 102, 103, within=True),
    ]


def test_transactions_numbered_by_another_server_or_under_another_epoch_are_another_history() -> None:
    epochs = [1]
    continuity = Continuity("db", lambda: epochs[0], lambda _: True)
    continuity.begin("0-1-100")
    continuity.spans_of("0-1-101", [1])
    assert continuity.spans_of("0-2-102", [1]) == [Span(1, "db@1:0-2", 101, 102)]
    epochs[0] = 2
    assert continuity.spans_of("0-2-103", [1]) == [Span(1, "db@2:0-2", 102, 103)]


def test_a_part_without_a_position_neither_continues_a_history_nor_is_continued() -> None:
    continuity = begun()
    continuity.spans_of("0-1-101", [1])
    assert continuity.spans_of("", [1]) == [Span(1, "", 0, 0)]
    assert continuity.spans_of("0-1-105", [1]) == [Span(1, H, 104, 105)]


def test_after_a_part_without_a_position_the_next_heartbeat_gives_the_position_of_the_shard() -> None:
    continuity = begun()
    continuity.proven("0-1-101")
    continuity.spans_of("", [1])
    assert continuity.answer(Span(1, H, 100, 100)) == (None, None)
    continuity.proven("0-1-104")
    assert continuity.answer(Span(1, H, 100, 100)) == (Span(1, H, 104, 104), None)
    assert continuity.spans_of("0-1-105", [1]) == [Span(1, H, 104, 105)]


def test_a_shard_without_newer_messages_continues_without_reading_the_binlog_again() -> None:
    continuity = begun()
    assert continuity.answer(Span(1, H, 100, 100)) == (Span(1, H, 100, 100), None)
    (span,) = continuity.spans_of("0-1-103", [1])
    assert continuity.answer(Span(1, H, 100, 100)) == (None, None), "the queued part is the answer"
    continuity.acknowledge(span)
    assert continuity.answer(Span(1, H, 103, 103)) == (Span(1, H, 103, 103), None)
    assert continuity.answer(Span(1, H, 250, 250)) == (Span(1, H, 103, 103), None)


def test_messages_that_another_leader_received_are_read_again_as_far_back_as_possible() -> None:
    continuity = begun()
    for number in (103, 105):
        (span,) = continuity.spans_of(f"0-1-{number}", [1])
        continuity.acknowledge(span)
    assert continuity.answer(Span(1, H, 101, 101)) == (None, Span(1, H, 101, 105))
    assert continuity.answer(Span(1, "db@0:0-1", 101, 101)) == (Span(1, H, 105, 105), None), "of another history"
    continuity.mark_unreadable(Span(1, H, 101, 105))
    assert continuity.answer(Span(1, H, 101, 101)) == (Span(1, H, 105, 105), None)


def test_messages_sent_before_a_restart_of_the_tailer_are_read_again_too() -> None:
    continuity = begun("0-1-100")
    assert continuity.answer(Span(1, H, 98, 98)) == (None, Span(1, H, 98, 100))
    (span,) = continuity.spans_of("0-1-103", [1])
    continuity.acknowledge(span)
    assert continuity.answer(Span(1, H, 98, 98)) == (None, Span(1, H, 98, 103))


def test_messages_from_before_a_restart_that_cannot_be_read_are_requested_once() -> None:
    continuity = begun("0-1-100")
    _, again = continuity.answer(Span(1, H, 98, 98))
    assert again is not None
    continuity.mark_unreadable(again)
    assert continuity.answer(Span(1, H, 98, 98)) == (Span(1, H, 100, 100), None)
    assert continuity.spans_of("0-1-103", [1]) == [Span(1, H, 100, 103)]


def test_a_shard_that_never_changed_is_in_the_history_of_the_newest_heartbeat() -> None:
    continuity = begun("")
    assert continuity.answer(Span(1, "", 0, 0)) == (None, None), "nothing is known yet"
    assert continuity.proven("0-1-50") == (H, 50)
    assert continuity.answer(Span(1, "", 0, 0)) == (Span(1, H, 49, 49), None)


def test_a_shard_of_another_database_gets_no_answer() -> None:
    """That database's tailer may have sent messages that this one never reads."""
    continuity = begun()
    continuity.proven("0-1-110")
    for source, number in (("", 0), (H, 90), ("db2@1:0-1", 90)):
        assert continuity.answer(Span(3, source, number, number)) == (None, None)


def test_mysql_positions_are_parsed() -> None:
    uuid = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
    continuity = begun(f"{uuid}:1-4:6-90")
    assert continuity.spans_of(f"{uuid}:95", [1]) == [Span(1, f"db@1:{uuid}", 90, 95)]


def test_a_shard_that_comes_back_from_another_database_continues_no_position_from_before() -> None:
    """What was written while another database held it is not in this binlog."""
    continuity = begun()
    continuity.spans_of("0-1-103", [1])
    continuity.acknowledge(Span(1, H, 100, 103))
    continuity.proven("0-1-110")
    continuity.gain([1])
    assert continuity.answer(Span(1, H, 103, 103)) == (None, None), "not before the next proof"
    continuity.proven("0-1-111")
    assert continuity.answer(Span(1, H, 103, 103)) == (Span(1, H, 111, 111), None), "it has to start anew"
    assert continuity.spans_of("0-1-120", [1]) == [Span(1, H, 111, 120)]
