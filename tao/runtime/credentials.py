"""The credentials that a server accepts: made of its settings, and of files that change while it runs.

A file that becomes wrong changes nothing: the server keeps what it accepted before, and says so in its log. What is no
longer accepted ends the connections that were opened with it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509

from tao.model.errors import SettingsError, TaoError, Unauthorized, Unavailable, unreadable
from tao.observability.logs import Logger
from tao.runtime.signed_tokens import JwtSettings, SignedTokenVerifier
from tao.runtime.token_file import parse_tokens
from tao.runtime.watched_file import WatchedFile
from tao.wire.identity import (
    AcceptedCredentials,
    Credentials,
    PeerAuthenticator,
    ShownCredentials,
    SpiffeCluster,
    identify,
)
from tao.wire.tls import TlsFiles

_Use = Callable[[AcceptedCredentials, str, str], AcceptedCredentials]
"""Returns what is accepted by the text of a changed file; the last argument names the file."""

ACCEPTED_TOKENS: Final = "accepted_tokens"
SIGNING_KEYS: Final = "signing_keys"
"""The kinds of files that say what is accepted."""


class CredentialChange(NamedTuple):
    """What a changed file has changed. ``kind``: `ACCEPTED_TOKENS` or `SIGNING_KEYS`. ``former_sha256`` and ``sha256``
    are digests of the file. ``added`` and ``removed``: tokens by id, role and caller; one that has changed is both. No
    keys: they need not have ids."""

    kind: str
    file: str
    former_sha256: str
    sha256: str
    added: tuple[str, ...]
    removed: tuple[str, ...]


def _ignore(_: CredentialChange) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSources:
    """The settings of a server that say which credentials it accepts, and which token it shows."""

    accepted_tokens_file: Path | None = None
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    cluster: SpiffeCluster | None = None
    jwt: JwtSettings = field(default_factory=JwtSettings)

    def check(self) -> None:
        """Raise `SettingsError` for a server that shows a token and accepts none. Formerly it took the token that it
        shows for a secret of all roles; without that, it would serve everybody."""
        if self.accepted_tokens_file is None and (self.token or self.token_file is not None):
            raise SettingsError(
                "the settings have a token to show (token or token_file), but no tokens to accept: a secret that all "
                "servers share is not accepted any more. List what each role and each application shows in a file, "
                "with `tao token new --role ROLE --existing` and `tao token new CALLER --existing`, and set "
                "accepted_tokens_file to it; or remove the token if peers show certificates, or no credentials"
            )


class AcceptedCredentialFiles:
    """Keeps what ``authenticator`` accepts as the settings and the files say."""

    def __init__(self, sources: CredentialSources, log: Logger) -> None:
        self.authenticator: Final = PeerAuthenticator()
        self._sources: Final = sources
        self._log: Final = log
        path = sources.accepted_tokens_file
        self._tokens: Final = None if path is None else WatchedFile(path, SettingsError)
        keys = sources.jwt.keys_file
        self._keys: Final = None if keys is None else WatchedFile(keys, SettingsError)
        self.digests: Final[dict[str, str]] = {}
        """The SHA-256 of each file that is in use, by its kind."""
        self.on_changed: Callable[[CredentialChange], None] = _ignore
        """Called when a changed file is in use."""

    async def load(self, is_listed: Callable[[str, str, str], bool]) -> None:
        """Accept what the settings and the files say now. ``is_listed`` as in `AcceptedCredentials`. Raises
        `SettingsError`."""
        self._sources.check()
        accepted = AcceptedCredentials()
        if self._tokens is not None:
            text = await self._tokens.read()
            accepted = _with_tokens(accepted, text, str(self._tokens.path))
            self.digests[ACCEPTED_TOKENS] = _digest(text)
        if self._keys is not None:
            text = await self._keys.read()
            accepted = self._with_keys(accepted, text, str(self._keys.path))
            self.digests[SIGNING_KEYS] = _digest(text)
        self.authenticator.accepted = replace(accepted, cluster=self._sources.cluster, is_listed=is_listed)

    async def look(self) -> None:
        """Check the files once, and accept what they say now."""
        for kind, file, use in self._watched():
            await file.look(partial(self._use, kind, use))

    async def watch(self) -> None:
        """Follow the changes of the files until cancelled; return when there is none."""
        await asyncio.gather(*(file.watch(partial(self._use, kind, use)) for kind, file, use in self._watched()))

    def _watched(self) -> list[tuple[str, WatchedFile, _Use]]:
        files = ((ACCEPTED_TOKENS, self._tokens, _with_tokens), (SIGNING_KEYS, self._keys, self._with_keys))
        return [(kind, file, use) for kind, file, use in files if file is not None]

    def _use(self, kind: str, use: _Use, text: str, source: str) -> None:
        former = self.authenticator.accepted
        try:
            self.authenticator.accepted = use(former, text, source)
        except TaoError as error:
            self._log.error("accepted_credentials_refused", reason=error.message)
            return
        self._log.info("accepted_credentials_changed", file=source)
        before, now = _shown_tokens(former), _shown_tokens(self.authenticator.accepted)
        former_sha256, self.digests[kind] = self.digests[kind], _digest(text)
        added, removed = (tuple(each[0] for each in sorted(found)) for found in (now - before, before - now))
        self.on_changed(CredentialChange(kind, source, former_sha256, self.digests[kind], added, removed))

    def _with_keys(self, accepted: AcceptedCredentials, text: str, source: str) -> AcceptedCredentials:
        """Return what is accepted with the keys of a file in place of the present ones. Raises `SettingsError`."""
        return replace(accepted, verify_signed=SignedTokenVerifier(text, source, self._sources.jwt).verify)


def check_own_credentials(
    own: Credentials, tls: TlsFiles, accepted: AcceptedCredentials, region: str, now: float
) -> None:
    """Raise `SettingsError` unless what a server shows to others proves its name, its role and, by a certificate, its
    region, as it would have a peer prove them at ``now``, in seconds since 1970."""

    def is_here(_role: str, _name: str, proven_region: str) -> bool:
        return proven_region in ("", region)

    try:
        shown = ShownCredentials(own.with_token(), _uris_of(tls.certificate))
        identify(shown, replace(accepted, is_listed=is_here), now)
    except (Unauthorized, Unavailable) as error:
        raise SettingsError(
            f"{own.name} cannot join as {own.role} {own.name} of region {region}, because its own credentials do not "
            f"prove that it is that server: {error.message}"
        ) from error


def _uris_of(certificate: Path | None) -> tuple[str, ...]:
    """Return the URIs that a certificate (PEM) names. Raises `SettingsError`."""
    if certificate is None:
        return ()
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    except OSError as error:
        raise SettingsError(unreadable(certificate, error)) from error
    except ValueError as error:
        raise SettingsError(f"{certificate}: is no certificate: {error}") from error
    return tuple(names.get_values_for_type(x509.UniformResourceIdentifier))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown_tokens(accepted: AcceptedCredentials) -> set[tuple[str, str, float]]:
    """Return the tokens by id, role and caller, with their digests and ends, in which they may differ."""
    return {
        (" ".join(filter(None, (each.id, each.role, each.caller))), each.digest.hex(), each.expires_at)
        for each in accepted.tokens or ()
    }


def _with_tokens(accepted: AcceptedCredentials, text: str, source: str) -> AcceptedCredentials:
    """Return what is accepted with the tokens of a file in place of the present ones. Raises `SettingsError`."""
    return replace(accepted, tokens=tuple(entry.accepted() for entry in parse_tokens(text, source)))
