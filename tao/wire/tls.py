"""TLS for both transports from the same PEM files: certificates are issued once per server, not per protocol.

With ``authorities`` a server demands a certificate of its peers, and a client trusts those authorities instead of the
system's. A server is both: it shows the same certificate to its callers and to the servers that it calls. Files that
change are used for new connections within a second, and files that have become wrong are not used.

Servers speak TLS 1.3 only, over both transports: TLS ends before gRPC (`tao.wire.grpc_proxy`). The start of a handshake
costs a server a key exchange and a signature, and a client that replays its own nothing. So at the frames port it waits
until the client's first message has arrived, and for its turn (`tao.wire.handshake_turns`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from asyncio import BaseTransport
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

import grpc

from tao.model.errors import SettingsError, is_tls_refusal, refuse_passphrase, unreadable
from tao.wire.address import TcpAddress, parse_address
from tao.wire.identity import ExpectedServer, SpiffeCluster, check_server

_logger = logging.getLogger(__name__)

RECORD_HEAD_BYTES: Final = 5
"""The type of a TLS record, its version and its length."""
UNEXPECTED_MESSAGE: Final = b"\x15\x03\x03\x00\x02\x02\x0a"
"""The alert with which TLS answers what is no TLS, as a record (RFC 8446, 6). Peers without TLS can read it."""
_HANDSHAKE: Final = b"\x16"
_MAX_RECORD_BYTES: Final = 1 << 14
_REFUSAL_SECONDS: Final = 1.0
"""The time in which a server ends a connection whose certificate it refuses: it has all that it needs for that."""

Stamp = tuple[bytes | None, ...]
"""Identifies a state of some files: a digest of each; None for one that cannot be read. The times of files are too
coarse for it: two changes within some milliseconds would be taken for one."""


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

    cluster: str = ""
    """``spiffe://DOMAIN/tao/CLUSTER``: peers are known by the SPIFFE ids in their certificates, a server as
    ``spiffe://DOMAIN/tao/CLUSTER/REGION/ROLE/NAME``, an application as ``spiffe://DOMAIN/app/NAME``. Empty:
    certificates identify nobody, and tokens do."""

    def __post_init__(self) -> None:
        if self.cluster:
            SpiffeCluster.parse(self.cluster)
            if self.authorities is None:
                raise SettingsError("tls.cluster needs tls.authorities, which sign the certificates with its ids")

    @property
    def if_set(self) -> TlsFiles | None:
        """Return the TLS files, or None when no file is named: plain connections."""
        return None if self == TlsFiles() else self

    @property
    def spiffe_cluster(self) -> SpiffeCluster | None:
        """Return the cluster whose SPIFFE ids identify peers; None: certificates identify nobody."""
        return SpiffeCluster.parse(self.cluster) if self.cluster else None

    def server_context(self) -> ssl.SSLContext:
        """Return the server's context for both transports. Raises `SettingsError` when a file cannot be used."""
        certificate, private_key = self._own_pair()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])  # gRPC's clients demand it; those of frames do not ask
        context.num_tickets = 0  # no client resumes; two, the default, are a fifth of what a handshake costs
        self._load(context, certificate, private_key)
        if self.authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED if self.demand_certificates else ssl.CERT_OPTIONAL
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the client's context for frames. Raises `SettingsError` when a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.authorities is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        self._load(context, self.certificate, self.private_key)
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the client's credentials for gRPC. Raises `SettingsError` when a file cannot be read."""
        return grpc.ssl_channel_credentials(*self.contents())

    def contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return what the files of the authorities, the private key and the certificate contain. Raises
        `SettingsError`."""
        authorities, key, certificate = (
            None if file is None else _read(file) for file in (self.authorities, self.private_key, self.certificate)
        )
        return authorities, key, certificate

    def stamp(self) -> Stamp:
        """Return what changes whenever a file does."""
        files = (self.certificate, self.private_key, self.authorities)
        return tuple(_stamp_of(file) for file in files if file is not None)

    def _own_pair(self) -> tuple[Path, Path]:
        if self.certificate is None or self.private_key is None:
            raise SettingsError("TLS for a server needs both its certificate and its private key")
        return self.certificate, self.private_key

    def _load(self, context: ssl.SSLContext, certificate: Path | None, private_key: Path | None) -> None:
        for file in (certificate, private_key, self.authorities):
            if file is not None:
                _read(file)  # its error names the file, and those of OpenSSL do not
        if certificate is not None:
            key = private_key or certificate
            with_key = f"with the private key {key}" if private_key else "alone: no private key is named"
            with _naming(f"the certificate {certificate} cannot be used {with_key}"):
                context.load_cert_chain(certificate, private_key, password=refuse_passphrase(key))
        if self.authorities is not None:
            with _naming(f"the authorities {self.authorities} cannot be used"):
                context.load_verify_locations(self.authorities)


class ServerTls:
    """What a server's listeners need of its TLS files, and the files as they were read last."""

    _stamp: Stamp

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises `SettingsError`."""
        self._files: Final = files
        self._read()

    def reread(self) -> bool:
        """Read the files again if they have changed. Returns whether they have, and can be used: what cannot is logged
        once, and what was read before stays in use."""
        if self._files.stamp() == self._stamp:
            return False
        try:
            self._read()
        except SettingsError as error:
            _logger.warning("the changed certificate files are not used: %s", error.message)
            return False
        _logger.warning("the changed certificate files are used for new connections")
        return True

    def _read(self) -> None:
        self._stamp = self._files.stamp()  # before the files: a change meanwhile is read the next time
        self.context = self._files.server_context()


class ClientTls:
    """What connections to servers need of TLS files; `refresh` before each connection."""

    _stamp: Stamp

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises `SettingsError`."""
        self._files: Final = files
        self.cluster: Final = files.spiffe_cluster
        self._read()

    def refresh(self) -> None:
        """Read the files again if they have changed; what cannot be used is logged once, and not used."""
        if self._files.stamp() == self._stamp:
            return
        try:
            self._read()
        except SettingsError as error:
            _logger.warning("the changed certificate files are not used: %s", error.message)

    def _read(self) -> None:
        self._stamp = self._files.stamp()
        context, http2_context = self._files.client_context(), self._files.client_context()
        contents = self._files.contents()
        # gRPC has to get what the contexts have checked: it ends the process when a key is empty, as one is while it is
        # rewritten.
        if self._files.stamp() != self._stamp:
            raise SettingsError(f"the TLS files were changed while they were read ({self._files})")
        http2_context.set_alpn_protocols(["h2"])
        self.context, self._http2_context, self._contents = context, http2_context, contents

    async def look(self, address: str, expected: ExpectedServer) -> bytes:
        """Return the certificate (PEM) of the expected server at a gRPC port; empty without a cluster.

        gRPC's client checks the host of a certificate and shows it to nobody. So it is looked at over a connection of
        our own, and the channel then trusts that one certificate alone. Raises `Unauthorized` for another server's, and
        `OSError` when none can be looked at."""
        if self.cluster is None:
            return b""
        _, writer = await self._open(address)
        try:
            check_server(uris_of(writer.transport), self.cluster, expected)
            shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.transport.abort()
        return ssl.DER_cert_to_PEM_cert(shown).encode()

    async def is_refused(self, address: str, within_seconds: float) -> bool:
        """Return whether a gRPC port ends a connection of this process when TLS is established."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(within_seconds, _REFUSAL_SECONDS)):
                try:
                    reader, writer = await self._open(address)
                except OSError:
                    return False
                try:
                    return not await reader.read(1)
                except OSError as error:  # reset by a server that has died, or an alert
                    return is_tls_refusal(error)
                finally:
                    writer.transport.abort()
        return False

    async def _open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to a gRPC port, on which nothing is sent. Raises `OSError`."""
        where, context = parse_address(address), self._http2_context
        if isinstance(where, TcpAddress):
            return await asyncio.open_connection(where.host, where.port, ssl=context)
        return await asyncio.open_unix_connection(where.path, ssl=context, server_hostname="localhost")

    def channel_credentials(self, shown: bytes = b"") -> grpc.ChannelCredentials:
        """Return the credentials for a gRPC channel to the server that has ``shown`` this certificate, and to no other;
        empty: to any that the authorities vouch for."""
        authorities, key, certificate = self._contents
        return grpc.ssl_channel_credentials(shown or authorities, key, certificate)


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """How a connection of frames is encrypted, and whose certificate must be at its other end."""

    context: ssl.SSLContext
    cluster: SpiffeCluster | None = None
    expected: ExpectedServer = field(default_factory=ExpectedServer)

    def check(self, transport: BaseTransport) -> None:
        """Raise `Unauthorized` when another server's certificate is at the other end."""
        if self.cluster is not None:
            check_server(uris_of(transport), self.cluster, self.expected)


def uris_of(transport: BaseTransport) -> tuple[str, ...]:
    """Return the URIs in the certificate of the peer, which has been verified; none when it has shown none."""
    connection = transport.get_extra_info("ssl_object")
    shown = None if connection is None else connection.getpeercert()
    names = (shown or {}).get("subjectAltName", ())
    return tuple(value for kind, value in names if kind == "URI")


def first_record_bytes(head: bytes) -> int:
    """Return the length of the first TLS record of a client, which is its ClientHello, of its first `RECORD_HEAD_BYTES`
    or fewer. What cannot be one has the length 1: TLS says what is wrong with it."""
    if not head.startswith(_HANDSHAKE):
        return 1
    if len(head) < RECORD_HEAD_BYTES:
        return RECORD_HEAD_BYTES
    length = int.from_bytes(head[3:RECORD_HEAD_BYTES], "big")
    return RECORD_HEAD_BYTES + length if length <= _MAX_RECORD_BYTES else 1


def may_begin_handshake(accepted: socket.socket) -> bool:
    """Return whether what a client has sent first may be a ClientHello, of a connection that has something to read."""
    try:
        return first_record_bytes(accepted.recv(RECORD_HEAD_BYTES, socket.MSG_PEEK)) > 1
    except OSError:  # the client has gone
        return False


@contextmanager
def _naming(failure: str) -> Iterator[None]:
    """Raise `SettingsError`, which begins with the failure, for an error of OpenSSL."""
    try:
        yield
    except OSError as error:  # among them SSLError
        raise SettingsError(f"{failure} ({error})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(unreadable(path, error)) from error


def _stamp_of(path: Path) -> bytes | None:
    try:
        return sha256(path.read_bytes()).digest()
    except OSError:
        return None
