"""Carries write tokens from one web request to the next, in a signed cookie or header, under any framework.

A user posts, and the next page is served by another process, perhaps in another region; with the token of what was
written it still shows the post. Browsers are not trusted: a token that anybody could make would let anybody send all
reads to the master region. So what is handed out is signed, and what comes back unsigned, altered, too long or too old
counts as none: a page is never refused because of it, it is as fresh as any other.

    carrier = TokenCarrier([secret])

    known = carrier.from_cookies(request.headers.get("cookie"))
    with graph.recording() as recording:
        response = await view(request, after=known)
    if (cookie := carrier.set_cookie(recording.token, known)) is not None:
        response.headers["set-cookie"] = cookie

A view that raises `WriteLost` is best repeated with ``known = None``: what the token names is gone, and every page of
this user would fail until its time is up.
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
"""Of a signing key; a shorter one can be guessed."""

_FORMAT: Final = "1"
_MAC_BYTES: Final = 16
_MAX_SEALED_CHARACTERS: Final = MAX_TEXT_BYTES + 64
"""Of token, time and signature. A browser drops cookies above 4,096 bytes, name and attributes included."""


@dataclass(frozen=True, slots=True)
class CarrierSettings:
    """How tokens are handed to browsers. Raises `InvalidArgument`."""

    cookie: str = "tao_after"
    """Name of the cookie."""

    max_age_seconds: int = 60
    """After that the write is everywhere, and reads are cheaper without a token: longer than a replica lags when all is
    well enough to serve."""

    secure: bool = True
    """Whether browsers send the cookie over TLS only. Off for development without TLS."""

    clock_skew_seconds: int = 5
    """How far the clock of the process that signed may be ahead of the one that reads."""

    def __post_init__(self) -> None:
        if not self.cookie.isascii() or not self.cookie.replace("_", "").replace("-", "").isalnum():
            raise InvalidArgument(f"cookie is {self.cookie!r}; use letters, digits, '-' and '_'")
        if self.max_age_seconds < 1 or self.clock_skew_seconds < 0:
            raise InvalidArgument("max_age_seconds must be at least 1, and clock_skew_seconds at least 0")


class TokenCarrier:
    """Signs tokens and reads those it, or another process with one of its keys, has signed."""

    def __init__(
        self,
        keys: Sequence[bytes],
        settings: CarrierSettings | None = None,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """``keys``: the first signs, all are accepted. To rotate: add the new key at the end everywhere, move it to the
        front everywhere, and drop the old one ``max_age_seconds`` later. Raises `InvalidArgument` for none, or one of
        less than `MIN_KEY_BYTES`."""
        if not keys or any(len(key) < MIN_KEY_BYTES for key in keys):
            raise InvalidArgument(f"a token carrier needs at least one key, each of {MIN_KEY_BYTES} bytes or more")
        self._keys: Final = tuple(keys)
        self._settings: Final = settings or CarrierSettings()
        self._unix_seconds: Final = unix_seconds

    def seal(self, token: WriteToken) -> str:
        """For a header: letters, digits, ``-``, ``_`` and ``.``; empty when the token says nothing."""
        if not token:
            return ""
        body = f"{_FORMAT}.{int(self._unix_seconds())}.{token.text()}"
        return f"{body}.{_signature(self._keys[0], body)}"

    def unseal(self, sealed: str | None) -> WriteToken | None:
        """The token, or None when this is nothing that a key known here has signed of late."""
        if not sealed or len(sealed) > _MAX_SEALED_CHARACTERS or not sealed.isascii():
            return None
        body, _, signature = sealed.rpartition(".")
        if not self._is_signed(body, signature):
            return None
        form, _, rest = body.partition(".")
        written_at, _, text = rest.partition(".")
        if form != _FORMAT:
            return None  # of another version of this code, with the same key
        age = self._unix_seconds() - int(written_at)
        if not -self._settings.clock_skew_seconds <= age <= self._settings.max_age_seconds:
            return None
        try:
            return WriteToken.from_text(text)
        except InvalidArgument:
            return None  # a format of tokens that this version does not know

    def set_cookie(self, token: WriteToken, known: WriteToken | None = None) -> str | None:
        """The value of a ``Set-Cookie`` header, or None when nothing was written, so that the browser keeps what it has
        until its time is up. ``known``: what the request carried, which goes on being asked for."""
        if not token:
            return None
        settings = self._settings
        sealed = self.seal(token if known is None else known.merged(token))
        secure = "; Secure" if settings.secure else ""
        return f"{settings.cookie}={sealed}; Path=/; Max-Age={settings.max_age_seconds}; HttpOnly; SameSite=Lax{secure}"

    def from_cookies(self, header: str | None) -> WriteToken | None:
        """The token in the value of a ``Cookie`` header, or None."""
        # Not `http.cookies`: it gives up all cookies for one of another application that is ill-formed.
        for each in (header or "").split(";"):
            name, _, value = each.strip().partition("=")
            if name == self._settings.cookie:
                return self.unseal(value)
        return None

    def _is_signed(self, body: str, signature: str) -> bool:
        return any(hmac.compare_digest(signature, _signature(key, body)) for key in self._keys)


def _signature(key: bytes, body: str) -> str:
    mac = hmac.digest(key, body.encode(), hashlib.sha256)[:_MAC_BYTES]
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")
