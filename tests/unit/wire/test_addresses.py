"""Addresses are read as the topology spells them, and written the same."""

import pytest

from tao.model.errors import InvalidArgument
from tao.wire.address import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize("text", ["127.0.0.1:80", "host.example:65535", "[::1]:7000", "unix:/run/tao.sock"])
def test_an_address_survives_reading_and_writing(text: str) -> None:
    assert str(parse_address(text)) == text


def test_both_forms_of_address_are_distinguished() -> None:
    assert parse_address("[::1]:7000") == TcpAddress("::1", 7000)
    assert parse_address("unix:/a:b") == UnixAddress("/a:b")


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "host:65536", "::1:80", "unix:", "host:-1"])
def test_what_is_neither_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)
