"""A client's HTTP/2 bytes are split at the frames that need a turn, however they arrive."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import ProtocolError
from tao.wire.http2_calls import FREE_BYTES, FREE_FRAMES, TurnSplitter
from tao.wire.http2_refusal import PREFACE

DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, 0, 1) + payload


def waits(splitter: TurnSplitter) -> bool:
    """Return whether the next frame needs a turn."""
    return splitter.needs_turn


def passed_in(splitter: TurnSplitter, data: bytes, turns: int) -> bytes:
    """Pass in bytes and return what passes with so many turns."""
    splitter.feed(data)
    passed = splitter.take()
    for _ in range(turns):
        if not waits(splitter):
            break
        splitter.grant()
        passed += splitter.take()
    return passed


def test_what_is_no_call_passes_and_each_call_waits() -> None:
    splitter = TurnSplitter()
    before = PREFACE + frame(SETTINGS, b"123456")
    before_calls = [splitter.is_before_calls]
    assert passed_in(splitter, before + frame(HEADERS, b"first") + frame(HEADERS), 0) == before
    assert splitter.needs_turn
    before_calls.append(splitter.is_before_calls)
    splitter.grant()
    assert splitter.take() == frame(HEADERS, b"first")
    before_calls.append(splitter.is_before_calls)
    assert before_calls == [False, True, False]
    assert splitter.needs_turn
    assert splitter.rest() == frame(HEADERS)
    assert not splitter.needs_turn


def test_frames_without_calls_need_turns_as_well() -> None:
    splitter = TurnSplitter()
    pings = frame(PING, bytes(8)) * (3 * FREE_FRAMES)
    assert len(passed_in(splitter, PREFACE + pings, 0)) == len(PREFACE) + FREE_FRAMES * 17
    assert splitter.needs_turn
    splitter.grant()
    assert len(splitter.take()) == FREE_FRAMES * 17
    assert splitter.needs_turn


def test_a_large_message_needs_turns_until_its_call_is_admitted() -> None:
    splitter = TurnSplitter()
    call, part = frame(HEADERS, b"first"), frame(DATA, bytes(1 << 14))
    sent = call + part * 30
    parts_of_a_turn = FREE_BYTES // (1 << 14)
    assert passed_in(splitter, PREFACE + sent, 1) == PREFACE + call + part * parts_of_a_turn
    assert splitter.needs_turn
    splitter.grant()
    assert splitter.take() == part * parts_of_a_turn
    assert splitter.rest() == part * (30 - 2 * parts_of_a_turn)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/1", b"\x16\x03\x01", bytes(100)])
def test_a_client_of_another_protocol_is_refused(data: bytes) -> None:
    splitter = TurnSplitter()
    splitter.feed(data)
    with pytest.raises(ProtocolError, match="gRPC port"):
        splitter.take()


FRAMES = st.lists(
    st.tuples(st.sampled_from([DATA, HEADERS, SETTINGS, PING]), st.binary(max_size=40)), max_size=FREE_FRAMES - 1
)


@given(FRAMES, st.lists(st.integers(1, 60), min_size=1), st.integers(0, 5))
def test_the_bytes_up_to_the_first_call_without_a_turn_pass(
    frames: list[tuple[int, bytes]], cuts: list[int], turns: int
) -> None:
    sent = PREFACE + b"".join(frame(*each) for each in frames)
    calls = [at for at, (kind, _) in enumerate(frames) if kind == HEADERS]
    whole = frames if len(calls) <= turns else frames[: calls[turns]]
    splitter, passed, at = TurnSplitter(), b"", 0
    left = turns
    for number in range(len(sent)):
        if at >= len(sent) or waits(splitter):
            break
        size = cuts[number % len(cuts)]
        passed += passed_in(splitter, sent[at : at + size], 0)
        at += size
        while waits(splitter) and left:
            left -= 1
            splitter.grant()
            passed += splitter.take()
    assert passed == PREFACE + b"".join(frame(*each) for each in whole)
    assert passed + splitter.rest() + sent[at:] == sent
