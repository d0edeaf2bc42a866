"""TLS for both transports from the same PEM files: certificates are issued once per server, not per protocol.

With ``authorities`` a server demands a certificate of its peers, and a client trusts those authorities instead of the
system's. A server is both: it shows the same certificate to its callers and to the servers that it calls. Files are
read when a process starts.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from tao.model.errors import SettingsError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. A server needs certificate and key; a client needs them when the servers demand a certificate."""

    certificate: Path | None = None
    """Shown to peers, with the chain up to the authority. It names the host that the topology advertises."""

    private_key: Path | None = None
    """Readable by this process's account only."""

    authorities: Path | None = None
    """The authorities whose certificates are trusted. None: the system's; a server then asks its peers for no
    certificate."""

    demand_certificates: bool = True
    """False: a server with ``authorities`` accepts peers without a certificate too, and tokens prove their identity."""

    @property
    def if_set(self) -> TlsFiles | None:
        """Return the TLS files, or None when no file is named: plain connections."""
        return None if self == TlsFiles() else self

    def server_context(self) -> ssl.SSLContext:
        """Return the server's context for frames. Raises `SettingsError` when a file cannot be used."""
        certificate, private_key = self._own_pair()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._load(context, certificate, private_key)
        if self.demanding:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the client's context for frames. Raises `SettingsError` when a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.authorities is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        self._load(context, self.certificate, self.private_key)
        return context

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the server's credentials for gRPC. Raises `SettingsError` when a file cannot be read."""
        certificate, private_key = self._own_pair()
        pair = (_read(private_key), _read(certificate))
        authorities = _read(self.authorities) if self.authorities is not None and self.demanding else None
        return grpc.ssl_server_credentials([pair], authorities, require_client_auth=self.demanding)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the client's credentials for gRPC. Raises `SettingsError` when a file cannot be read."""
        authorities = None if self.authorities is None else _read(self.authorities)
        private_key = None if self.private_key is None else _read(self.private_key)
        certificate = None if self.certificate is None else _read(self.certificate)
        return grpc.ssl_channel_credentials(authorities, private_key, certificate)

    @property
    def demanding(self) -> bool:
        """Return whether a server demands a certificate of its peers."""
        return self.authorities is not None and self.demand_certificates

    def _own_pair(self) -> tuple[Path, Path]:
        if self.certificate is None or self.private_key is None:
            raise SettingsError("TLS for a server needs both its certificate and its private key")
        return self.certificate, self.private_key

    def _load(self, context: ssl.SSLContext, certificate: Path | None, private_key: Path | None) -> None:
        try:
            if certificate is not None:
                context.load_cert_chain(certificate, private_key)
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"a TLS file cannot be used ({self}): {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"TLS file {path} cannot be read: {error}") from error
