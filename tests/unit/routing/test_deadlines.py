"""Every hop gives up before whoever asked it does (DESIGN.md §9)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import DeadlineExceeded
from tao.routing.deadlines import LEAST_MARGIN_SECONDS, LEAST_WORK_SECONDS, work_seconds


@given(st.integers(10, (1 << 32) - 1))
def test_time_shrinks_from_hop_to_hop(deadline_ms: int) -> None:
    left = work_seconds(deadline_ms)
    assert LEAST_WORK_SECONDS <= left <= deadline_ms / 1000 - LEAST_MARGIN_SECONDS


@pytest.mark.parametrize("deadline_ms", [0, 1, 9])
def test_what_cannot_suffice_is_refused_and_may_be_tried_again(deadline_ms: int) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        work_seconds(deadline_ms)
    assert caught.value.retryable


def test_from_a_client_down_to_the_database_there_is_time_for_every_answer() -> None:
    hops = [2.0]
    for _ in range(3):  # follower, slave leader, master leader
        hops.append(work_seconds(int(hops[-1] * 1000)))
    assert hops == pytest.approx([2.0, 1.9, 1.805, 1.715], abs=0.002)
