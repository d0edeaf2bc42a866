"""Large read answers travel in parts."""

from tao.wire.answer_parts import read_parts
from tao.wire.convert import join_answers
from tao.wire.v1 import session_pb2 as pb


def answer_of(sizes: list[int], **more: object) -> pb.Answer:
    return pb.Answer(number=3, read=pb.ReadAnswer(values=[b"x" * size for size in sizes], **more))  # type: ignore[arg-type]


def test_every_value_comes_once_in_parts_of_bounded_size() -> None:
    whole = answer_of(
        [400, 300, 500, 10], missed_slots=[1, 3], served_by="leader", epoch_shards=[2], version_epochs=[7]
    )
    parts = read_parts(whole, 800, 900, 10_000)
    assert [len(part.read.values) for part in parts] == [2, 2, 0]
    assert [part.more for part in parts] == [True, True, False]
    assert all(part.read.epoch_shards == [2] and part.read.served_by == "leader" for part in parts[:-1])
    joined = join_answers(parts).read
    assert list(joined.slots) == [0, 1, 2, 3]
    assert list(joined.values) == list(whole.read.values)
    assert list(joined.missed_slots) == [1, 3]


def test_a_value_that_fits_no_message_fails_alone() -> None:
    parts = read_parts(answer_of([5, 2000, 6], failed_slots=[3], errors=[pb.Error(reason="NOT_MINE")]), 800, 900, 9000)
    joined = join_answers(parts).read
    assert list(joined.slots) == [0, 2]
    assert list(joined.failed_slots) == [3, 1]
    assert [error.reason for error in joined.errors] == ["NOT_MINE", "TOO_LARGE"]


def test_what_exceeds_the_bound_of_one_answer_is_said_not_to_fit() -> None:
    joined = join_answers(read_parts(answer_of([600] * 4), 800, 900, 1500)).read
    assert list(joined.slots) == [0, 1]
    assert [error.reason for error in joined.errors] == ["ANSWER_FULL", "ANSWER_FULL"]


def test_an_answer_with_more_to_come_says_so_in_its_last_part() -> None:
    whole = answer_of([600, 600])
    whole.more = True
    assert [part.more for part in read_parts(whole, 800, 900, 9000)] == [True, True, True]
