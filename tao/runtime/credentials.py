"""The credentials that a server accepts: made of its settings, and of files that change while it runs.

A file that becomes wrong changes nothing: the server keeps what it accepted before, and says so in its log. What is no
longer accepted ends the connections that were opened with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tao.model.errors import SettingsError, TaoError
from tao.observability.logs import Logger
from tao.runtime.token_file import parse_tokens
from tao.runtime.watched_file import WatchedFile
from tao.wire.identity import AcceptedCredentials, PeerAuthenticator, SpiffeCluster, read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSources:
    """The settings of a server that say which credentials it accepts."""

    accepted_tokens_file: Path | None = None
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    client_token: str = field(default="", repr=False)
    cluster: SpiffeCluster | None = None

    def __post_init__(self) -> None:
        if self.accepted_tokens_file is not None and self.client_token:
            raise SettingsError(
                "client_token is not accepted beside accepted_tokens_file: add it there with `tao token new CALLER "
                "--existing`, or remove it"
            )


class AcceptedCredentialFiles:
    """Keeps what ``authenticator`` accepts as the settings and the files say."""

    def __init__(self, sources: CredentialSources, log: Logger) -> None:
        self.authenticator: Final = PeerAuthenticator()
        self._sources: Final = sources
        self._log: Final = log
        path = sources.accepted_tokens_file
        self._tokens: Final = None if path is None else WatchedFile(path, SettingsError)

    async def load(self, is_listed: Callable[[str, str, str], bool]) -> None:
        """Accept what the settings and the files say now. ``is_listed`` as in `AcceptedCredentials`. Raises
        `SettingsError`."""
        if self._tokens is None:
            accepted = self._of_secrets()
        else:
            accepted = _with_tokens(AcceptedCredentials(), await self._tokens.read(), str(self._tokens.path))
        self.authenticator.accepted = replace(accepted, cluster=self._sources.cluster, is_listed=is_listed)

    async def look(self) -> None:
        """Check the files once, and accept what they say now."""
        if self._tokens is not None:
            await self._tokens.look(self._use_tokens)

    async def watch(self) -> None:
        """Follow the changes of the files until cancelled; return when there is none."""
        if self._tokens is not None:
            await self._tokens.watch(self._use_tokens)

    def _use_tokens(self, text: str, source: str) -> None:
        authenticator = self.authenticator
        try:
            authenticator.accepted = _with_tokens(authenticator.accepted, text, source)
        except TaoError as error:
            self._log.error("accepted_tokens_refused", reason=error.message)
        else:
            self._log.info(
                "accepted_tokens_changed", tokens=[token.id for token in authenticator.accepted.tokens or ()]
            )

    def _of_secrets(self) -> AcceptedCredentials:
        sources = self._sources
        token = sources.token if sources.token_file is None else read_secret(sources.token_file)
        if token:
            self._log.warning(
                "shared_token_accepted",
                reason="whoever has it can pose as any server",
                instead="set accepted_tokens_file, with a token for each role: tao token new --role",
            )
        return AcceptedCredentials.of_secrets(token, sources.client_token)


def _with_tokens(accepted: AcceptedCredentials, text: str, source: str) -> AcceptedCredentials:
    """Return what is accepted with the tokens of a file in place of the present ones. Raises `SettingsError`."""
    return replace(accepted, tokens=tuple(entry.accepted() for entry in parse_tokens(text, source)))
