"""Frames come out as they went in, however the stream was cut; what is oversized is refused at its header."""

import pytest

from tao.model.errors import ProtocolError
from tao.wire import framing
from tao.wire.framing import FrameDecoder, frame

FRAMES = [(framing.HELLO, b"hi"), (framing.PING, b""), (framing.ANSWER, b"x" * 300), (framing.REQUEST, b"q")]
STREAM = b"".join(frame(kind, payload) for kind, payload in FRAMES)


def test_a_header_is_little_endian_and_counts_the_payload() -> None:
    assert frame(framing.REQUEST, b"abc") == b"\x03\x00\x00\x00\x03abc"


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_stream_cut_at_any_byte_gives_the_same_frames(cut: int) -> None:
    decoder = FrameDecoder(1000)
    assert decoder.feed(STREAM[:cut]) + decoder.feed(STREAM[cut:]) == FRAMES


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 64])
def test_a_stream_in_small_pieces_gives_the_same_frames(piece: int) -> None:
    decoder = FrameDecoder(1000)
    found = [each for at in range(0, len(STREAM), piece) for each in decoder.feed(STREAM[at : at + piece])]
    assert found == FRAMES
    assert all(type(payload) is bytes for _, payload in found)


def test_a_payload_of_exactly_the_bound_is_accepted_and_one_more_is_not() -> None:
    assert FrameDecoder(10).feed(frame(framing.REQUEST, b"x" * 10)) == [(framing.REQUEST, b"x" * 10)]
    with pytest.raises(ProtocolError):
        FrameDecoder(10).feed(framing.pack_header(11, framing.REQUEST))


def test_control_frames_have_a_smaller_bound_than_messages() -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder(1 << 24).feed(framing.pack_header(framing.MAX_CONTROL_BYTES + 1, framing.HELLO))
