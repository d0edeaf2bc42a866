"""Write tokens of web applications: carried from one request to the next in a signed cookie or header.

A user posts, and the next page is served by another process, perhaps in another region. With the token of the write it
still shows the post. Browsers are not trusted, because anybody who could make tokens could send all reads to the master
region. So tokens are signed, and one that is unsigned, altered, too long or too old counts as missing: the page is
never refused, it is as fresh as any other page. This works under any framework, since it reads and makes header values.

    carrier = TokenCarrier([secret])

    known = carrier.from_cookies(request.headers.get("cookie"))
    with graph.recording() as recording:
        response = await view(request, Consistency.at_least(known))
    if recording.token and (cookie := carrier.set_cookie(recording.renewed(known))) is not None:
        response.headers["set-cookie"] = cookie

Repeat a view that raises `WriteLost` with ``known = None``: the writes that the token names are gone, and every page of
this user would fail until the token expires.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.errors import InvalidArgument
from tao.model.tokens import MAX_TEXT_BYTES, WriteToken

MIN_KEY_BYTES: Final = 16
"""Minimal length of a signing key; a shorter key can be guessed."""

_FORMAT: Final = "1"
_MAC_BYTES: Final = 16
_MAX_SEALED_CHARACTERS: Final = MAX_TEXT_BYTES + 64
"""Maximal length of token, time and signature together. Browsers drop cookies above 4,096 bytes with attributes."""


@dataclass(frozen=True, slots=True)
class CarrierSettings:
    """The settings of the cookie. Raises `InvalidArgument`."""

    cookie: str = "tao_after"
    """Name of the cookie."""

    max_age_seconds: int = 60
    """Lifetime of a token. After it the write is in every region, and reads without a token are cheaper. It is longer
    than a replica lags in a cluster that is well enough to serve."""

    secure: bool = True
    """True: browsers send the cookie over TLS only. Set it to False for development without TLS."""

    clock_skew_seconds: int = 5
    """Seconds by which the clock of the signing process may be ahead of the reading one."""

    def __post_init__(self) -> None:
        if not self.cookie.isascii() or not self.cookie.replace("_", "").replace("-", "").isalnum():
            raise InvalidArgument(f"cookie is {self.cookie!r}; use letters, digits, '-' and '_'")
        if self.max_age_seconds < 1 or self.clock_skew_seconds < 0:
            raise InvalidArgument("max_age_seconds must be at least 1, and clock_skew_seconds at least 0")


class TokenCarrier:
    """Signs tokens, and reads the tokens that this process or another one with the same keys has signed."""

    def __init__(
        self,
        keys: Sequence[bytes],
        settings: CarrierSettings | None = None,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Sign with the first of ``keys``, and accept all of them. To rotate keys, add the new key at the end in every
        process, then move it to the front in every process, and drop the old key ``max_age_seconds`` later. Raises
        `InvalidArgument` for an empty list, and for a key of less than `MIN_KEY_BYTES`."""
        if not keys or any(len(key) < MIN_KEY_BYTES for key in keys):
            raise InvalidArgument(f"a token carrier needs at least one key, each of {MIN_KEY_BYTES} bytes or more")
        self._keys: Final = tuple(keys)
        self._settings: Final = settings or CarrierSettings()
        self._unix_seconds: Final = unix_seconds

    def seal(self, token: WriteToken) -> str:
        """Return the signed token as text for a header: letters, digits, ``-``, ``_`` and ``.``. The text is empty when
        the token names no writes."""
        if not token:
            return ""
        body = f"{_FORMAT}.{int(self._unix_seconds())}.{token.text()}"
        return f"{body}.{_signature(self._keys[0], body)}"

    def unseal(self, sealed: str | None) -> WriteToken | None:
        """Return the token of a signed text, or None when no key known here has signed it, or too long ago."""
        if not sealed or len(sealed) > _MAX_SEALED_CHARACTERS or not sealed.isascii():
            return None
        body, _, signature = sealed.rpartition(".")
        if not self._is_signed(body, signature):
            return None
        form, _, rest = body.partition(".")
        written_at, _, text = rest.partition(".")
        if form != _FORMAT:
            return None  # signed by another version of this code with the same key
        age = self._unix_seconds() - int(written_at)
        if not -self._settings.clock_skew_seconds <= age <= self._settings.max_age_seconds:
            return None
        try:
            return WriteToken.from_text(text)
        except InvalidArgument:
            return None  # a token format that this version does not know

    def set_cookie(self, token: WriteToken) -> str | None:
        """Return the value of a ``Set-Cookie`` header, or None for a token that names no writes. When the request
        carried a token, pass `Recording.renewed` of it, which covers its writes. Set no cookie for a request that has
        only read: it could replace that of a write which was answered meanwhile."""
        if not token:
            return None
        settings = self._settings
        secure = "; Secure" if settings.secure else ""
        return (
            f"{settings.cookie}={self.seal(token)}; Path=/; Max-Age={settings.max_age_seconds}; "
            f"HttpOnly; SameSite=Lax{secure}"
        )

    def delete_cookie(self) -> str:
        """Return the value of a ``Set-Cookie`` header that deletes the cookie: after `WriteLost`, when the request has
        written nothing."""
        return f"{self._settings.cookie}=; Path=/; Max-Age=0; HttpOnly; SameSite=Lax"

    def from_cookies(self, header: str | None) -> WriteToken | None:
        """Return the token in the value of a ``Cookie`` header, or None."""
        return self.unseal(self._value_in(header))

    def is_in(self, header: str | None) -> bool:
        """Return whether a ``Cookie`` header has the cookie, valid or not."""
        return self._value_in(header) is not None

    def _value_in(self, header: str | None) -> str | None:
        # `http.cookies` rejects all cookies when one of another application is ill-formed.
        for each in (header or "").split(";"):
            name, _, value = each.strip().partition("=")
            if name == self._settings.cookie:
                return value
        return None

    def _is_signed(self, body: str, signature: str) -> bool:
        return any(hmac.compare_digest(signature, _signature(key, body)) for key in self._keys)


# `itsdangerous.TimestampSigner` was tried. It rejects a cookie from the future, so a web server whose clock is a second
# behind would drop what another has just written; and it would be a dependency of every application that uses the SDK.
def _signature(key: bytes, body: str) -> str:
    mac = hmac.digest(key, body.encode(), hashlib.sha256)[:_MAC_BYTES]
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")
