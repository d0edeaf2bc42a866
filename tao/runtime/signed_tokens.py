"""Tokens that an issuer has signed (JWT), verified against the issuer's public keys in a local file (JWKS).

Only ES256 and EdDSA are accepted: a key has one algorithm, and the token's header does not choose it. A token must have
an end, an audience and a subject, which is the caller. It vouches for applications only.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jwt
import msgspec
from jwt.exceptions import PyJWTError

from tao.model.errors import SettingsError, Unauthorized
from tao.wire.identity import SERVER_ROLES, SignedToken, digest_of

ALGORITHMS: Final = frozenset({"ES256", "EdDSA"})

MAX_REMEMBERED: Final = 10_000
"""Verified tokens that are remembered, some 300 bytes each: as many as a server takes connections."""

_SUBJECT: Final = re.compile(r"[A-Za-z0-9._:@|/-]{1,255}")
_RESERVED: Final = SERVER_ROLES | {"app"}
"""Names, also before a slash, of callers that show other credentials: certificates, and servers' tokens."""
_CHECKS: Final = {
    "require": ["exp", "aud", "sub"],
    # `tao.wire.identity` compares the times with the clock that it is given.
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtSettings:
    """Which signed tokens (JWT) applications may show."""

    keys_file: Path | None = None
    """The issuer's public keys (JWKS), for ES256 and EdDSA. A change is in use within a second. None: no signed token
    is accepted."""

    audience: str = ""
    """The audience (``aud``) that a token must name, such as the cluster's name: a token for another service is not
    one for this cluster."""

    issuer: str = ""
    """The issuer (``iss``) that a token must name. Empty: any issuer that has one of the keys."""

    def __post_init__(self) -> None:
        if self.keys_file is not None and not self.audience:
            raise SettingsError("jwt.keys_file needs jwt.audience: without it a token for another service is accepted")


class _KeySet(msgspec.Struct, frozen=True):
    keys: list[dict[str, object]]


class SignedTokenVerifier:
    """Verifies tokens by the keys of one JWKS document."""

    def __init__(self, text: str, source: str, settings: JwtSettings) -> None:
        """``source`` names the document in errors. Raises `SettingsError`, also when no key can be used."""
        self._settings: Final = settings
        try:
            documents = msgspec.json.decode(text, type=_KeySet).keys
        except msgspec.MsgspecError as error:
            raise SettingsError(f"{source}: is not a JSON Web Key Set: {error}") from error
        if any("d" in each or each.get("kty") == "oct" for each in documents):
            raise SettingsError(f"{source}: holds a secret key; servers need the public keys only")
        self._remembered: Final[dict[bytes, SignedToken]] = {}  # by digest; the oldest first
        self._keys: Final = [key for each in documents if (key := _key_in(each, source)) is not None]
        if not self._keys:
            raise SettingsError(f"{source}: has no key for {' or '.join(sorted(ALGORITHMS))}")

    @property
    def remembered(self) -> int:
        """Return the number of tokens that are remembered."""
        return len(self._remembered)

    def verify(self, token: str) -> SignedToken:
        """Return what the token says, whose times are not checked here. Raises `Unauthorized`.

        What was verified is remembered, which a token's end does not change; strangers cannot fill that memory."""
        digest = digest_of(token)
        found = self._remembered.get(digest)
        if found is None:
            found = self._verified(token)
            if len(self._remembered) >= MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[digest] = found
        return found

    def _verified(self, token: str) -> SignedToken:
        try:
            wanted = jwt.get_unverified_header(token).get("kid")
            keys = [key for key in self._keys if wanted is None or key.key_id in (None, wanted)]
            claims = self._claims(token, keys)
        except PyJWTError as error:
            raise Unauthorized(f"the signed token is not accepted: {error}") from error
        subject = str(claims["sub"])
        if not _SUBJECT.fullmatch(subject) or subject.partition("/")[0] in _RESERVED:
            raise Unauthorized(f"the signed token's subject {subject!r} cannot be a caller's name; have another issued")
        return SignedToken(subject, _time(claims, "nbf"), _time(claims, "exp"))

    def _claims(self, token: str, keys: list[jwt.PyJWK]) -> dict[str, object]:
        failure: PyJWTError = jwt.InvalidKeyError("none of the keys is the one that signed it")
        for key in keys:
            try:
                found: dict[str, object] = jwt.decode(
                    token,
                    key,
                    algorithms=[key.algorithm_name],
                    audience=self._settings.audience,
                    issuer=self._settings.issuer or None,
                    options=_CHECKS,  # type: ignore[arg-type]  # a TypedDict, whose keys are those
                )
            except (jwt.InvalidSignatureError, jwt.InvalidAlgorithmError) as error:
                failure = error
            else:
                return found
        raise failure


def _key_in(document: dict[str, object], source: str) -> jwt.PyJWK | None:
    """Return a key; None for one of another algorithm, which other services may need."""
    kind = str(document.get("kty")), str(document.get("crv"))
    algorithm = {("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}.get(kind)
    if algorithm is None or document.get("alg", algorithm) not in (algorithm, "Ed25519"):
        return None
    try:
        return jwt.PyJWK({**document, "alg": algorithm})
    except (PyJWTError, ValueError, TypeError) as error:
        raise SettingsError(f"{source}: the key {document.get('kid')!r} is wrong: {error}") from error


def _time(claims: dict[str, object], name: str) -> float:
    value = claims.get(name, 0)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(seconds := float(value)):
                return seconds
    raise Unauthorized(f"the signed token's {name} is not a time in seconds; have another issued")
