"""Counters against a naive model: a counter is the sum of all totals that were flushed, whatever comes in which order.

Flushes arrive in any order, any number of times, and some never; slots are folded at any time. In the end each life
counts what the last of its flushes that arrived said, and nothing twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.counters import FOLDED_SLOT, SlotTotals, slot_of_life
from tao.model.errors import OperationTooOld
from tao.model.writes import FlushCounter, FoldCounter
from tests.rigs.effort import examples
from tests.unit.planning.stored_rows import LOW, NOW
from tests.unit.planning.test_counters import GONE_MS, VIEWS, run, slots, stored_rows, value

LIVES = [slot_of_life(NOW // 1000, tag) for tag in range(3)]
flushes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)).filter(lambda each: any(each[1:])),
    max_size=12,
)


def flushes_of(adds: list[tuple[int, int, int]]) -> list[FlushCounter]:
    """Return what followers flush that count so: totals, numbered by life."""
    totals = [(0, 0, 0)] * len(LIVES)
    found = []
    for life, plus, minus in adds:
        number, had_plus, had_minus = totals[life]
        totals[life] = (number + 1, had_plus + plus, had_minus + minus)
        found.append(FlushCounter(LOW, VIEWS, LIVES[life], *totals[life]))
    return found


@settings(max_examples=examples(200), deadline=None)
@given(flushes, st.data())
def test_any_order_of_flushes_gives_the_same_sum(adds: list[tuple[int, int, int]], data: st.DataObject) -> None:
    sent = flushes_of(adds)
    arriving = data.draw(st.lists(st.sampled_from(sent), max_size=30)) if sent else []
    stored = stored_rows()
    newest: dict[int, FlushCounter] = {}
    for write in arriving:
        run(stored, write)
        known = newest.get(write.slot)
        newest[write.slot] = write if known is None or write.number > known.number else known
        if folded := data.draw(st.lists(st.sampled_from(LIVES), max_size=3, unique=True)):
            run(stored, FoldCounter(LOW, VIEWS, tuple(folded)))
        expected = sum(each.plus - each.minus for each in newest.values())
        assert value(stored) == expected
    expected = sum(each.plus - each.minus for each in newest.values())
    run(stored, FoldCounter(LOW, VIEWS, tuple(LIVES)), now=GONE_MS)
    rest = {FOLDED_SLOT: SlotTotals(max(expected, 0), max(-expected, 0))} if expected else {}
    assert slots(stored) == rest
    for write in sent:  # a day late, when nothing of its life is known any more
        try:
            run(stored, write, now=GONE_MS)
        except OperationTooOld:
            continue
        raise AssertionError(f"{write} was counted again")
    assert slots(stored) == rest
