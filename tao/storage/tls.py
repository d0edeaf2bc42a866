"""TLS for connections to database servers: the files, and the driver's connections, made to insist on it.

Both drivers go on in plain text when they were given certificates and the server offers no TLS, so an
attacker between the two could remove it. The connections here refuse that before they send anything.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiomysql
import pymysql.connections
import pymysql.err
from pymysql.constants import CLIENT, CR

from tao.model.errors import SettingsError, is_tls_refusal, refuse_passphrase, unreadable

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseTlsFiles:
    """PEM files for connections to database servers. Without any the connections are plain."""

    authorities: Path | None = None
    """The authorities that sign the certificates of the database servers. None: connect without TLS. With it a server
    that shows no certificate of theirs is refused."""

    certificate: Path | None = None
    """Shown to the servers, whose accounts may demand one (``REQUIRE X509``)."""

    private_key: Path | None = None
    """The certificate's key, readable by this process's account only."""

    verify_host: bool = True
    """Whether a server's certificate must name the host by which the topology reaches it. False: any certificate of the
    authorities is taken, as through a tunnel, where the host is that of the tunnel."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise SettingsError("TLS for databases needs a certificate and its private key, or neither")
        if self.certificate is not None and self.authorities is None:
            raise SettingsError("TLS for databases needs the authorities that sign the servers' certificates")

    @property
    def if_set(self) -> DatabaseTls | None:
        """Return TLS for connections by these files, or None when none are named. Raises `SettingsError` for files that
        cannot be used."""
        return None if self.authorities is None else DatabaseTls(self)


class DatabaseTls:
    """The files as they were read last. Those that have changed are used for new connections."""

    def __init__(self, files: DatabaseTlsFiles) -> None:
        """Read the files. Raises `SettingsError`."""
        self.files: Final = files
        self._contents = self._read()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context of a new connection. Changed files that cannot be used are logged once; what was read
        before stays in use."""
        try:
            contents = self._read()
            if contents != self._contents:
                self._contents = contents
                self._context = self._load()
        except SettingsError as error:
            _logger.warning("the changed certificate files for databases are not used: %s", error.message)
        return self._context

    def _read(self) -> list[bytes]:
        files = (self.files.authorities, self.files.certificate, self.files.private_key)
        try:
            return [file.read_bytes() for file in files if file is not None]
        except OSError as error:
            raise SettingsError(unreadable(error.filename, error)) from error

    def _load(self) -> ssl.SSLContext:
        files = self.files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = files.verify_host
        try:
            context.load_verify_locations(files.authorities)
            if files.certificate is not None:
                key = files.private_key
                context.load_cert_chain(files.certificate, key, password=refuse_passphrase(key))
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"a TLS file for databases cannot be used ({files}): {error}") from error
        return context


class BinlogConnection(pymysql.connections.Connection):
    """A connection of pymysql that is made over TLS, or not at all, when it has a context."""

    def _request_authentication(self) -> None:
        if self.ssl:
            _require_tls(self.server_capabilities)  # type: ignore[attr-defined]  # the stubs have no private parts
        super()._request_authentication()  # type: ignore[misc]


class SessionConnection(aiomysql.Connection):  # type: ignore[misc]  # aiomysql has no types
    """A connection of aiomysql that is made over TLS, or not at all, when it has a context. The server's answers name
    changes of the session's state."""

    async def _request_authentication(self) -> None:
        if self._ssl_context is not None:
            _require_tls(self.server_capabilities)
        # The answer to COMMIT may then name the transaction's GTID, see `tao.storage.result_packets`.
        self.client_flag |= self.server_capabilities & CLIENT.SESSION_TRACK
        try:
            await super()._request_authentication()
        except ssl.SSLError as error:  # aiomysql would say that it cannot connect, and not why
            if is_tls_refusal(error):
                raise _failed(str(error)) from error
            raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, f"lost during the TLS handshake: {error}") from error


def _require_tls(capabilities: int) -> None:
    if not capabilities & CLIENT.SSL:
        raise _failed("the server offers no TLS; set ssl_cert, ssl_key and ssl_ca there")


def _failed(why: str) -> pymysql.err.OperationalError:
    return pymysql.err.OperationalError(CR.CR_SSL_CONNECTION_ERROR, f"no TLS with the server: {why}")
