"""The chain of the audit log: whatever is done to its lines is found, given a hash that was published."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.observability.audit_records import (
    CHAIN_START,
    AuditEvent,
    ChainEnd,
    Fault,
    Outcome,
    encode,
    record_end,
    verify,
)
from tests.rigs.effort import examples

EVENTS = st.builds(
    AuditEvent,
    time_ms=st.integers(0, 1 << 42),
    server=st.text(max_size=8),
    caller=st.text(max_size=8),
    action=st.text(max_size=8),
    outcome=st.sampled_from(Outcome),
    message=st.text(max_size=8),
    reason=st.text(max_size=4),
    shards=st.lists(st.integers(0, 65535), max_size=3).map(tuple),
    details=st.dictionaries(st.text(max_size=4), st.text(max_size=4) | st.integers(), max_size=2),
)


def chain_of(events: list[AuditEvent]) -> tuple[list[bytes], ChainEnd]:
    lines, end = [], CHAIN_START
    for event in events:
        line, end = encode(event, end)
        lines.append(line)
    return lines, end


CHAINS = st.lists(EVENTS, min_size=1, max_size=6).map(chain_of)


@given(CHAINS)
def test_what_was_written_is_whole(chain: tuple[list[bytes], ChainEnd]) -> None:
    lines, end = chain
    assert verify(lines, newest=end.hash) == (len(lines), end, None, 0, "")
    assert [record_end(line) for line in lines][-1] == end
    for number in range(1, len(lines)):
        rest, before = lines[number:], record_end(lines[number - 1])
        assert before is not None
        assert verify(rest, newest=end.hash, after=before.hash).fault is None
        assert verify(rest, newest=end.hash).fault is Fault.GAP, "the older lines were not said to be missing"


@given(CHAINS, st.data())
@settings(max_examples=examples(300))
def test_a_changed_byte_is_found_in_its_line(chain: tuple[list[bytes], ChainEnd], data: st.DataObject) -> None:
    lines, _ = chain
    number = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.integers(0, len(lines[number]) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda each: each not in (lines[number][place], ord("\n"))))
    changed = lines[number][:place] + bytes([byte]) + lines[number][place + 1 :]
    found = verify([*lines[:number], changed, *lines[number + 1 :]])
    assert (found.line, found.records) == (number + 1, number)


@given(CHAINS, st.data())
def test_removed_swapped_repeated_and_inserted_lines_are_found(
    chain: tuple[list[bytes], ChainEnd], data: st.DataObject
) -> None:
    lines, end = chain
    edited = list(lines)
    for _ in range(data.draw(st.integers(1, 3))):
        at, other = (data.draw(st.integers(0, len(edited) - 1)) for _ in range(2))
        match data.draw(st.sampled_from(["remove", "swap", "repeat"])):
            case "remove":
                del edited[at]
            case "swap":
                edited[at], edited[other] = edited[other], edited[at]
            case _:
                edited.insert(other, edited[at])
        if not edited:
            break
    found = verify(edited, newest=end.hash)
    assert (found.fault is None) == (edited == lines)


@given(CHAINS, st.data())
def test_a_log_that_is_cut_off_anywhere_is_found_by_its_newest_hash(
    chain: tuple[list[bytes], ChainEnd], data: st.DataObject
) -> None:
    lines, end = chain
    text = b"".join(lines)
    left = text[: data.draw(st.integers(0, len(text) - 1))].splitlines(keepends=True)
    torn = bool(left) and not left[-1].endswith(b"\n")
    assert verify(left, newest=end.hash).fault is (Fault.TORN if torn else Fault.TRUNCATED)


@given(CHAINS, CHAINS)
def test_a_log_that_is_written_anew_from_some_record_on_is_found_by_its_newest_hash(
    chain: tuple[list[bytes], ChainEnd], other: tuple[list[bytes], ChainEnd]
) -> None:
    lines, end = chain
    forged, after = list(lines[:-1]), record_end(lines[-2]) if len(lines) > 1 else CHAIN_START
    assert after is not None
    for line in other[0]:
        event = AuditEvent(time_ms=json.loads(line)["time"], server="s", caller="forger", action="nothing happened")
        text, after = encode(event, after)
        forged.append(text)
    assert verify(forged).fault is None
    assert verify(forged, newest=end.hash).fault is Fault.TRUNCATED


@given(CHAINS, EVENTS, st.data())
def test_a_record_of_another_chain_is_detached(
    chain: tuple[list[bytes], ChainEnd], event: AuditEvent, data: st.DataObject
) -> None:
    lines, _ = chain
    number = data.draw(st.integers(0, len(lines) - 1))
    foreign, _ = encode(event, ChainEnd(number, "f" * 64))
    found = verify([*lines[:number], foreign])
    assert (found.fault, found.line) == (Fault.DETACHED, number + 1)


@given(st.lists(st.binary(max_size=20).map(lambda each: each.replace(b"\n", b"") + b"\n"), max_size=3))
def test_lines_that_are_no_records_are_unreadable_and_never_an_error(lines: list[bytes]) -> None:
    found = verify(lines)
    assert (found.fault, found.line) == ((Fault.UNREADABLE, 1) if lines else (None, 0))
