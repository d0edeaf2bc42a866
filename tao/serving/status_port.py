"""The port of a watcher or a tailer, at which watchers ask it about itself.

What it answers decides which servers are marked down and when a lease has run out. So it listens for frames where the
topology says, knows its peers by their credentials, and answers one kind of request, to watchers and operators alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from tao.model.errors import InvalidArgument, TaoError, Unauthorized
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.runtime.credentials import AcceptedCredentialFiles, CredentialSources
from tao.serving.audit import AuditTrail
from tao.serving.requests import Listeners, Rules, check_exposure, check_role, kind_for_observer
from tao.wire.identity import PeerIdentity
from tao.wire.session import Reply, RequestHandler
from tao.wire.settings import ServingSettings
from tao.wire.tls import TlsFiles
from tao.wire.v1 import session_pb2 as pb

_ASKING: Final = frozenset({"watcher", "operator"})


class StatusPortSettings(Protocol):
    """The settings of a process that say who may ask it, and how."""

    @property
    def accepted_tokens_file(self) -> Path | None: ...
    @property
    def token_file(self) -> Path | None: ...
    @property
    def token(self) -> str: ...
    @property
    def tls(self) -> TlsFiles: ...
    @property
    def insecure(self) -> bool: ...


class StatusPort:
    """Listens at the address that the topology has for a process; without one it accepts nobody."""

    def __init__(self, settings: StatusPortSettings, log: Logger) -> None:
        self._settings: Final = settings
        self._tls: Final = settings.tls.if_set
        sources = CredentialSources(
            accepted_tokens_file=settings.accepted_tokens_file,
            token=settings.token,
            token_file=settings.token_file,
            cluster=settings.tls.spiffe_cluster,
        )
        self._accepted: Final = AcceptedCredentialFiles(sources, log)
        self._server: CacheServer | None = None
        self._listeners: Listeners | None = None

    @property
    def accepted(self) -> AcceptedCredentialFiles:
        """Return the credentials that peers may show."""
        return self._accepted

    async def load(self, server: CacheServer | None, is_listed: Callable[[str, str, str], bool]) -> None:
        """Load the credentials that peers may show. ``server`` is the address in the topology, if it has one; without
        one there is nothing to load. Raises `SettingsError`, also when others reach this process, and it asks for no
        credentials or takes them unencrypted."""
        self._server = server
        if server is None:
            return
        await self._accepted.load(is_listed)
        if not self._settings.insecure:
            has_credentials = self._accepted.authenticator.accepted.are_in_use
            check_exposure(server, self._settings.tls, has_credentials=has_credentials)

    async def start(
        self,
        handler: RequestHandler,
        topology_version: Callable[[], int],
        on_refused: Callable[[PeerIdentity, TaoError], None],
    ) -> None:
        """Listen. ``on_refused`` as in `ServingSettings`. Raises `OSError` when the address is taken."""
        if self._server is None:
            return
        settings = ServingSettings(authenticator=self._accepted.authenticator, on_refused=on_refused)
        self._listeners = Listeners(self._server, handler, settings, topology_version, lambda: 0, tls=self._tls)
        await self._listeners.start()

    def listing_changed(self) -> None:
        """Identify the peers again: what the topology lists has changed."""
        self._accepted.authenticator.listing_changed()

    async def follow_credentials(self) -> None:
        """Follow the changes of the files of credentials until cancelled."""
        if self._server is not None:
            await self._accepted.watch()

    async def close(self) -> None:
        """Close every connection."""
        if self._listeners is not None:
            await self._listeners.close()


class StatusService:
    """The `RequestHandler` of such a port."""

    def __init__(self, kind: str, answer: Callable[[], pb.Answer], audit: AuditTrail) -> None:
        """``answer`` returns the answer to requests of ``kind``, the only ones that are served."""
        self._kind: Final = kind
        self._rules: Final[Rules] = {kind: _ASKING}
        self._answer: Final = answer
        self._audit: Final = audit

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Answer. Raises `Unauthorized` for a peer that is neither watcher nor operator, `InvalidArgument` for any
        other request."""
        kind = kind_for_observer(request.WhichOneof("body") or "nothing", request)
        try:
            check_role(self._rules, kind, reply.peer.role)
        except Unauthorized as error:
            self._audit.request_refused(kind, request, reply.peer, error)
            raise
        if kind != self._kind:
            raise InvalidArgument(f"this process serves no {kind!r} requests; ask a follower")
        reply.send(self._answer())
