"""Write tokens in cookies: a signed token comes back, anything else counts as no token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.client import InvalidArgument, WriteToken
from tao.client.web import CarrierSettings, TokenCarrier
from tao.model.ids import MAX_ID
from tao.model.tokens import MAX_KEYS

OLD, NEW, FOREIGN = (letter * 16 for letter in (b"o", b"n", b"f"))
TOKEN = WriteToken([(1, 0, 2), (3, 4, 5)])
LARGEST = WriteToken([(MAX_ID - n, (1 << 16) - 1, (1 << 64) - 1) for n in range(MAX_KEYS)], range(65_000, 65_040))


class Clock:
    now = 1_800_000_000.5

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def carrier(clock: Clock) -> TokenCarrier:
    return TokenCarrier([OLD], unix_seconds=clock)


def test_a_sealed_token_is_unsealed_unchanged(carrier: TokenCarrier) -> None:
    assert carrier.unseal(carrier.seal(TOKEN)) == TOKEN


@pytest.mark.parametrize("other", ["", "a=b; ", 'x="; y=é,{}; ', "tao_after_=1; "])
def test_the_cookie_is_found_among_others(carrier: TokenCarrier, other: str) -> None:
    cookie = carrier.set_cookie(TOKEN)
    assert cookie is not None
    assert cookie.endswith("; Path=/; Max-Age=60; HttpOnly; SameSite=Lax; Secure")
    assert carrier.from_cookies(f"{other}{cookie.partition(';')[0]}; z=1") == TOKEN


def test_the_largest_token_fits_a_cookie(carrier: TokenCarrier) -> None:
    cookie = carrier.set_cookie(LARGEST)
    assert cookie is not None
    assert len(cookie) < 4_096
    found = carrier.from_cookies(cookie.partition(";")[0])
    assert found is not None
    assert found.is_critical(0)


def test_no_cookie_is_set_for_a_token_that_names_no_writes(carrier: TokenCarrier) -> None:
    assert carrier.set_cookie(WriteToken()) is None
    assert carrier.seal(WriteToken()) == ""


@pytest.mark.parametrize("header", [None, "", "a=b", "tao_after", "tao_after=", "tao_after=x.y.z"])
def test_without_a_cookie_there_is_no_token(carrier: TokenCarrier, header: str | None) -> None:
    assert carrier.from_cookies(header) is None


@given(st.data())
def test_an_altered_token_counts_as_none(data: Any) -> None:
    carrier = TokenCarrier([OLD], unix_seconds=Clock())
    sealed = carrier.seal(TOKEN)
    place = data.draw(st.integers(0, len(sealed)))
    length = data.draw(st.integers(0, 3))
    altered = sealed[:place] + data.draw(st.text(max_size=3)) + sealed[place + length :]
    assert carrier.unseal(altered) == (TOKEN if altered == sealed else None)


def test_a_token_signed_by_another_key_counts_as_none(carrier: TokenCarrier, clock: Clock) -> None:
    assert carrier.unseal(TokenCarrier([FOREIGN], unix_seconds=clock).seal(TOKEN)) is None


def test_rotating_keys_loses_no_token(clock: Clock) -> None:
    before, added, moved, after = (
        TokenCarrier(keys, unix_seconds=clock) for keys in ([OLD], [OLD, NEW], [NEW, OLD], [NEW])
    )
    for signing, reading in ((before, added), (added, moved), (moved, added), (moved, after)):
        assert reading.unseal(signing.seal(TOKEN)) == TOKEN
    assert after.unseal(before.seal(TOKEN)) is None


@pytest.mark.parametrize(("seconds", "known"), [(60, True), (61, False), (-5, True), (-7, False)])
def test_a_token_expires_after_max_age_seconds(
    carrier: TokenCarrier, clock: Clock, seconds: float, known: bool
) -> None:
    sealed = carrier.seal(TOKEN)
    clock.now = int(clock.now) + seconds
    assert (carrier.unseal(sealed) == TOKEN) is known


def test_a_text_that_is_too_long_counts_as_none(carrier: TokenCarrier) -> None:
    assert carrier.unseal("x" * 1_000_000) is None


@pytest.mark.parametrize("keys", [[], [b"short"], [OLD, b""]])
def test_weak_keys_are_refused(keys: list[bytes]) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        TokenCarrier(keys)


@pytest.mark.parametrize("settings", [{"cookie": "a b"}, {"cookie": ""}, {"max_age_seconds": 0}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        CarrierSettings(**settings)
