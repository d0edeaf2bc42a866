"""Nines are those that were shown, and what is not whole does not look so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.observability.consistency import MeasuredConsistency


@pytest.mark.parametrize(
    ("looks", "wrong", "text"),
    [
        (0, 0, "nothing is known: no entries"),
        (1_000_000, 0, "100 % (at least 5.5 nines) of 1,000,000 entries"),
        (1_000_000, 2, "99.9998 % (5.7 nines) of 1,000,000 entries"),
        (3_000, 1, "99.96 % (3.5 nines) of 3,000 entries"),
        (2, 0, "100 % (at least 0.0 nines) of 2 entries"),
        (10, 10, "0 % (0.0 nines) of 10 entries"),
    ],
)
def test_the_figure_in_words(looks: int, wrong: int, text: str) -> None:
    assert MeasuredConsistency(looks, wrong).text("entries") == text


@given(st.integers(1, 10**12), st.data())
def test_one_more_wrong_is_never_more_nines(looks: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(1, looks))
    found = MeasuredConsistency(looks, wrong)
    assert found.nines <= MeasuredConsistency(looks, wrong - 1).nines or wrong <= 3
    assert not found.percent.startswith("100")
