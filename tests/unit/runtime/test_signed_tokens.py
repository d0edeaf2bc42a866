"""Signed tokens (JWT): what is verified, and what a server that takes them does when one runs out."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tao.model.errors import SettingsError, Unauthorized
from tao.observability.logs import logger
from tao.runtime import signed_tokens
from tao.runtime.credentials import AcceptedCredentialFiles, CredentialChange, CredentialSources
from tao.runtime.signed_tokens import JwtSettings, SignedTokenVerifier
from tao.wire.identity import AcceptedCredentials, Credentials, PeerIdentity, ShownCredentials, SignedToken, identify

EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
NOW = 1_000.0
CLAIMS: dict[str, Any] = {"sub": "team/web", "aud": "tao-main", "iss": "https://issuer", "exp": 1_060, "nbf": 900}
SETTINGS = JwtSettings(keys_file=Path("keys.json"), audience="tao-main", issuer="https://issuer")


def public(algorithm: type[Any], key: Any, **fields: str) -> dict[str, Any]:
    return {**json.loads(algorithm.to_jwk(key.public_key())), **fields}


KEYS = json.dumps(
    {
        "keys": [
            public(RSAAlgorithm, RSA_KEY, kid="rsa"),
            public(ECAlgorithm, EC_KEY, kid="ec", alg="ES256", use="sig"),
            public(OKPAlgorithm, ED_KEY, kid="ed"),
        ]
    }
)
VERIFIER = SignedTokenVerifier(KEYS, "keys.json", SETTINGS)


def signed(key: Any = EC_KEY, algorithm: str = "ES256", kid: str | None = "ec", **claims: Any) -> str:
    chosen = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(chosen, key, algorithm=algorithm, headers={"kid": kid} if kid else None)


@pytest.mark.parametrize(
    "token",
    [
        signed(),
        signed(kid=None),
        signed(ED_KEY, "EdDSA", "ed"),
        signed(ED_KEY, "EdDSA", None),
        signed(aud=["x", "tao-main"]),
    ],
    ids=["ES256", "ES256 without a key's id", "EdDSA", "EdDSA without a key's id", "several audiences"],
)
def test_a_token_of_the_issuer_names_the_caller(token: str) -> None:
    assert VERIFIER.verify(token) == SignedToken("team/web", 900.0, 1_060.0)


NESTED = b64encode(b"[" * 2_400).decode() + ".e30.eA"
"""A token whose header is deeper than Python's stack, and within the bound of a token's length."""


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (signed(OTHER_KEY), "Signature"),
        (signed(OTHER_KEY, kid="other"), "none of the keys"),
        (signed(RSA_KEY, "RS256", "rsa"), "none of the keys"),
        (signed(RSA_KEY, "RS256", None), "alg"),
        (jwt.encode(CLAIMS, "", algorithm="none"), "alg"),
        (jwt.encode(CLAIMS, "a secret of thirty-two bytes, or more", algorithm="HS256"), "alg"),
        (signed(aud="another"), "[Aa]udience"),
        (signed(aud=None), "aud"),
        (signed(iss="https://another"), "[Ii]ssuer"),
        (signed(iss=None), "iss"),
        (signed(exp=None), "exp"),
        (signed(sub=None), "sub"),
        (signed(sub="operator/alice"), "cannot be a caller's name"),
        (signed(sub="leader"), "cannot be a caller's name"),
        (signed(sub="app/web"), "cannot be a caller's name"),
        (signed(exp=math.nan), "exp is not a time"),
        (signed(exp=math.inf), "exp is not a time"),
        (signed(exp=10**400), "exp is not a time"),
        (signed(nbf=math.nan), "nbf is not a time"),
        (signed(sub="two words"), "cannot be a caller's name"),
        ("not.a.token", "not accepted"),
        (NESTED, "not accepted"),
        (signed()[:-4] + "AAAA", "Signature"),
    ],
)
def test_any_other_token_is_refused(token: str, says: str) -> None:
    with pytest.raises(Unauthorized, match=says):
        VERIFIER.verify(token)


def test_a_verified_token_is_not_verified_again_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, decoded = SignedTokenVerifier(KEYS, "keys.json", SETTINGS), []
    decode = jwt.decode

    def counting(token: str, *args: Any, **options: Any) -> Any:
        decoded.append(token)
        return decode(token, *args, **options)

    monkeypatch.setattr(jwt, "decode", counting)
    monkeypatch.setattr(signed_tokens, "MAX_REMEMBERED", 2)
    first, second, third = (signed(sub=name) for name in ("a", "b", "c"))
    for token in (first, first, second, first, third, third, first):
        verifier.verify(token)
    assert decoded == [first, second, third, first]
    for _ in range(2):
        with pytest.raises(Unauthorized):
            verifier.verify(signed(OTHER_KEY))
    assert verifier.remembered == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "JSON Web Key Set"),
        ('{"keys": []}', "no key for ES256 or EdDSA"),
        (json.dumps({"keys": [public(RSAAlgorithm, RSA_KEY)]}), "no key for ES256 or EdDSA"),
        (json.dumps({"keys": [json.loads(ECAlgorithm.to_jwk(EC_KEY))]}), "secret key"),
        ('{"keys": [{"kty": "EC", "crv": "P-256", "kid": "x"}]}', "the key 'x' is wrong"),
    ],
)
def test_a_wrong_key_file_is_rejected(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        SignedTokenVerifier(text, "keys.json", SETTINGS)


def test_keys_need_an_audience() -> None:
    with pytest.raises(SettingsError, match=r"jwt\.audience"):
        JwtSettings(keys_file=Path("keys.json"))


def test_times_are_compared_with_the_server_s_clock() -> None:
    accepted = AcceptedCredentials(verify_signed=VERIFIER.verify)
    shown = ShownCredentials(Credentials("web-17", "client", signed()))
    assert identify(shown, accepted, NOW) == PeerIdentity("web-17", "client", "", "team/web", 1_060.0)
    assert identify(shown, accepted, 880.0).caller == "team/web"
    for now, says in ((1_060.0, "expired"), (800.0, "not valid yet")):
        with pytest.raises(Unauthorized, match=says):
            identify(shown, accepted, now)
    with pytest.raises(Unauthorized, match="that of a client"):
        identify(ShownCredentials(Credentials("x", "operator", signed())), accepted, NOW)
    for token in ("", "secret", "a.b", "a.b." + "c" * 10_000):
        with pytest.raises(Unauthorized, match="missing or wrong"):
            identify(ShownCredentials(Credentials("x", "client", token)), accepted, NOW)


async def test_a_server_follows_the_key_file_and_keeps_its_keys_when_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(KEYS)
    settings = JwtSettings(keys_file=path, audience="tao-main")
    files = AcceptedCredentialFiles(CredentialSources(jwt=settings), logger("test"))
    await files.load(lambda *_: False)
    changes: list[CredentialChange] = []
    files.on_changed = changes.append
    shown = ShownCredentials(Credentials("web", "client", signed()))
    assert identify(shown, files.authenticator.accepted, NOW).caller == "team/web"
    path.write_text("{")
    await files.look()
    assert identify(shown, files.authenticator.accepted, NOW).caller == "team/web"
    path.write_text(json.dumps({"keys": [public(ECAlgorithm, OTHER_KEY, kid="ec")]}))
    await files.look()
    with pytest.raises(Unauthorized, match="Signature"):
        identify(shown, files.authenticator.accepted, NOW)
    ((kind, file, former, now, added, removed),) = changes
    assert (f"{kind}_changed", file, added, removed) == ("signing_keys_changed", str(path), (), ())
    assert (former, now) == tuple(sha256(each.encode()).hexdigest() for each in (KEYS, path.read_text()))
