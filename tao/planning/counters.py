"""Plan the writes of counters: flushes of followers, and folds. `tao.model.counters` says what a slot is.

The order of the writes of a counter does not matter, and neither do repetitions. A flush with a lower number than its
slot changes nothing. A fold moves what a slot adds to the counter into slot 0, in one transaction, and leaves the slot
with the number of its last flush and with how much of it is folded. So a flush that comes later adds the difference
only, whenever slots are folded. Such a slot is removed once no leader accepts a first flush of its life any more."""

from __future__ import annotations

from typing import Final

import msgspec

from tao.model.counters import (
    FOLDED_SLOT,
    MAX_COUNTED,
    SlotTotals,
    born_unix_s,
    decode_totals,
    encode_totals,
    may_be_dropped,
    may_begin,
)
from tao.model.edge_states import EdgeRegisters, State
from tao.model.errors import InvalidArgument, OperationTooOld
from tao.model.graph import MAX_TIME, Edge, EdgeKey
from tao.model.ids import check_id
from tao.model.writes import FlushCounter, FoldCounter, WriteOutcome
from tao.planning.draft import Draft, PlacedEdge
from tao.schema.registry import Schema

MAX_FOLDED_SLOTS: Final = 500
"""Slots that one fold counts: their rows are locked together."""


def validate_counter(write: FlushCounter | FoldCounter, schema: Schema) -> None:
    """Check a write of a counter without its rows. Raises `InvalidArgument` or `UnknownType`."""
    check_id(write.id)
    schema.counter(write.counter)
    if isinstance(write, FoldCounter):
        _check_number(len(write.slots), "the number of slots", 1, MAX_FOLDED_SLOTS)
        for slot in write.slots:
            _check_number(slot, "slot", 1, MAX_TIME)
        return
    for name in ("slot", "number"):
        _check_number(getattr(write, name), name, 1, MAX_TIME)
    for name in ("plus", "minus"):
        _check_number(getattr(write, name), name, 0, MAX_COUNTED)


def flush_counter(draft: Draft, write: FlushCounter, now_unix_ms: int) -> WriteOutcome:
    """Set the totals of a slot. ``superseded``: a flush with a higher number was there. Raises `OperationTooOld` for
    the first flush of a life that began too long ago: a flush of it may have been folded and forgotten since."""
    key = EdgeKey(write.id, write.counter, write.slot)
    edge, number = _slot(draft, key)
    if edge is None:
        if not may_begin(write.slot, now_unix_ms // 1000):
            raise OperationTooOld(
                f"the life of slot {write.slot} began at {born_unix_s(write.slot)} (Unix seconds), too long ago for a "
                f"first flush of counter {write.counter} of {write.id}: begin a new life, and compare the clocks"
            )
        folded = 0
    elif write.number <= number:
        draft.name_list(key)
        return WriteOutcome(found=True, superseded=write.number < number)
    else:
        folded = decode_totals(edge.data).folded
    _put(draft, key, SlotTotals(write.plus, write.minus, folded), write.number)
    return WriteOutcome(found=edge is not None)


def fold_counter(draft: Draft, write: FoldCounter, now_unix_ms: int) -> WriteOutcome:
    """Count slots in slot 0. ``found``: it was done; a sum that has no room in 63 bits is left in its slots."""
    target = EdgeKey(write.id, write.counter, FOLDED_SLOT)
    edge, number = _slot(draft, target)
    before = 0 if edge is None else decode_totals(edge.data).value
    after, found = before, {}
    for slot in write.slots:
        key = EdgeKey(write.id, write.counter, slot)
        row, of_flush = _slot(draft, key)
        if row is not None:
            found[key] = decode_totals(row.data), of_flush
            after += found[key][0].value
    draft.name_list(target)
    if not found or abs(after) > MAX_COUNTED:
        return WriteOutcome()
    for key, (totals, of_flush) in found.items():
        if may_be_dropped(key.id2, now_unix_ms // 1000):
            _remove(draft, key)
        elif totals.value:
            _put(draft, key, msgspec.structs.replace(totals, folded=totals.net), of_flush)
    if after != before:
        if after:
            _put(draft, target, SlotTotals(max(after, 0), max(-after, 0)), number + 1)
        else:
            _remove(draft, target)
    return WriteOutcome(found=True)


def _slot(draft: Draft, key: EdgeKey) -> tuple[Edge | None, int]:
    """Return the current row of a slot, and the number of its last flush."""
    edge = draft.edge(key)
    if edge is None:
        return None, 0
    placed = draft.states.get(key)
    registers = draft.existing.registers.get(key) if placed is None else placed.registers
    return edge, 0 if registers is None else registers.payload_us


def _put(draft: Draft, key: EdgeKey, totals: SlotTotals, number: int) -> None:
    data = encode_totals(totals)
    draft.set_edge(key, Edge(key.id2, 0, data))
    draft.states[key] = PlacedEdge(EdgeRegisters(State.NORMAL, number, number, 0, data), key.atype)


def _remove(draft: Draft, key: EdgeKey) -> None:
    draft.set_edge(key, None)
    draft.states.pop(key, None)


def _check_number(value: int, name: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}; it must be {low} to {high}")
