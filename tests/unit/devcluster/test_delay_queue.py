"""The queue of the delay line delivers in order and on time, under a clock that the tests set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tao.devcluster.delay_line import DelayQueue


def test_a_chunk_is_delivered_when_it_is_due_and_not_before() -> None:
    queue = DelayQueue(max_bytes=100)
    queue.put(b"a", 10.0)
    queue.put(b"b", 10.5)
    assert queue.next_due == 10.0
    assert queue.take(9.999) == b""
    assert queue.take(10.0) == b"a"
    assert queue.next_due == 10.5
    assert queue.take(11.0) == b"b"
    assert queue.next_due is None


def test_chunks_on_their_way_together_are_all_delayed_by_the_same() -> None:
    queue = DelayQueue(max_bytes=100)
    for sent_at in (0.0, 1.0, 2.0):
        queue.put(b"x", sent_at + 29.0)
    assert [queue.take(now) for now in (28.0, 29.0, 30.0, 31.0)] == [b"", b"x", b"x", b"x"]


def test_a_shorter_delay_lets_nothing_overtake() -> None:
    queue = DelayQueue(max_bytes=100)
    queue.put(b"slow", 10.0)
    queue.put(b"fast", 1.0)
    queue.end(2.0)
    assert queue.take(9.0) == b""
    assert not queue.has_ended(9.0)
    assert queue.take(10.0) == b"slowfast"
    assert queue.has_ended(10.0)


def test_nothing_is_due_before_the_handshake_is_over() -> None:
    queue = DelayQueue(max_bytes=100, first_due=5.0)
    queue.put(b"a", 1.0)
    assert queue.next_due == 5.0


def test_the_end_waits_its_time_and_for_everything_to_be_taken() -> None:
    queue = DelayQueue(max_bytes=100)
    queue.put(b"a", 1.0)
    queue.end(2.0)
    queue.end(9.0)
    assert not queue.has_ended(3.0)
    assert queue.take(1.0) == b"a"
    assert queue.next_due == 2.0
    assert [queue.has_ended(now) for now in (1.5, 2.0)] == [False, True]


def test_a_full_queue_says_so_and_has_room_again_at_half() -> None:
    queue = DelayQueue(max_bytes=4)
    queue.put(b"aa", 1.0)
    states = [(queue.is_full, queue.has_room)]
    queue.put(b"bb", 2.0)
    queue.put(b"c", 3.0)
    for now in (0.0, 1.0, 2.0):
        queue.take(now)
        states.append((queue.is_full, queue.has_room))
    assert states == [(False, True), (True, False), (False, False), (False, True)]
    assert queue.held_bytes == 1


@given(
    st.lists(st.tuples(st.binary(max_size=5), st.floats(0, 3), st.floats(0, 3)), max_size=30),
    st.lists(st.floats(0, 200), max_size=20),
)
def test_every_chunk_arrives_once_in_order_and_none_early(
    sent: list[tuple[bytes, float, float]], looks: list[float]
) -> None:
    queue = DelayQueue(max_bytes=10)
    now, due_bytes = 0.0, []
    for chunk, pause, delay in sent:
        now += pause
        queue.put(chunk, now + delay)
        due_bytes += [now + delay] * len(chunk)
    arrived = b""
    for look in sorted(looks):
        arrived += queue.take(look)
        assert all(due <= look for due in due_bytes[: len(arrived)])
    arrived += queue.take(float("inf"))
    assert arrived == b"".join(chunk for chunk, _, _ in sent)
    assert queue.held_bytes == 0
