"""A client of etcd's calls, each with a deadline, over all endpoints.

A call that an endpoint does not answer is repeated at the next one. So a transaction may be carried out twice, and what
is sent has to bear that: its comparison fails the second time, and the caller recognises its own work. A token that has
expired is renewed once for a call. Calls that follow a change of the certificate files use what they say then, and what
they said before while they cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import grpc

from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.etcd.v3 import rpc_pb2 as pb
from tao.etcd.v3.rpc_pb2_grpc import AuthStub, KVStub, LeaseStub, WatchStub
from tao.model.errors import OperatorError, RetryableError, SettingsError, refuse_passphrase, unreadable

_logger = logging.getLogger(__name__)

MAX_TRANSACTION_OPERATIONS: Final = 128
"""etcd's own bound on the operations of a transaction (``--max-txn-ops``)."""

MAX_TRANSACTION_BYTES: Final = 1_400_000
"""etcd refuses requests of more than 1.5 MiB (``--max-request-bytes``); some of that is overhead."""

_ATTEMPT_SECONDS: Final = 1.0
"""Longest wait for one endpoint while there are others."""

_SILENT_SECONDS: Final = 0.3
"""A caller that gives up after so long, and before `_ATTEMPT_SECONDS`, begins its next call at another endpoint."""

_PAUSE_SECONDS: Final = 0.05
"""Pause after all endpoints have failed, before the first one is tried again."""

_OPTIONS: Final = (
    # etcd cuts off clients that ping more often than every five seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_ELSEWHERE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        # Refusals have codes of their own. UNKNOWN means that the deadline ended in the member, or that no member led.
        grpc.StatusCode.UNKNOWN,
    }
)
_STALE_TOKEN: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")
_Version = tuple[int, int, int]
_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_WITH_LEADER: Final = ("hasleader", "true")
"""Metadata that makes etcd end a watch at a member that is cut off from the others."""


class EtcdUnavailable(RetryableError):
    """No endpoint of etcd answered in time. A transaction may have been carried out all the same."""

    reason = "ETCD_UNAVAILABLE"


class EtcdRefused(OperatorError):
    """etcd refused a call: wrong credentials, a missing right, a full disk, or a request above its bounds."""


class WatchBroken(RetryableError):
    """A watch has ended: its endpoint is gone or has lost the others, or the changes that it was to begin with have
    been compacted. Read again, and watch from there."""

    reason = "WATCH_BROKEN"


class _CertificateFiles:
    """The certificate files, as they were last when they could be used."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings: Final = settings
        self._files: Final = (settings.authorities, settings.private_key, settings.certificate)
        self._versions: tuple[_Version, ...] = ()
        self._credentials: grpc.ChannelCredentials | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for channels: another object whenever the files were changed and can be used. Changed
        files that cannot be used are logged once. Raises `SettingsError` when none could be used so far."""
        # Look at the versions before the contents, so that a change meanwhile is noticed by the next call.
        versions = tuple(_version_of(file) for file in self._files if file is not None)
        if self._credentials is None:
            self._credentials = self._read()
        elif versions != self._versions:
            try:
                self._credentials = self._read()
            except SettingsError as error:
                _logger.warning("the changed certificate files are not used: %s", error.message)
        self._versions = versions
        return self._credentials

    def _read(self) -> grpc.ChannelCredentials:
        """Read and check the files. Raises `SettingsError`.

        gRPC ends the process when a key is empty, as one is while it is rewritten. With other files that it cannot use,
        it opens channels that never connect."""
        contents = self._contents()
        settings, context = self._settings, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if settings.certificate is not None:
                key = settings.private_key
                context.load_cert_chain(settings.certificate, key, password=refuse_passphrase(key))
            if settings.authorities is not None:
                context.load_verify_locations(settings.authorities)
        except (OSError, ValueError) as error:  # those of `ssl` are such errors
            named = ", ".join(str(file) for file in self._files if file is not None)
            raise SettingsError(f"etcd: a certificate file cannot be used ({named}): {error}") from error
        if self._contents() != contents:
            raise SettingsError("etcd: the certificate files were changed while they were read")
        return grpc.ssl_channel_credentials(*contents)

    def _contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of the authorities, the private key and the certificate. Raises `SettingsError`."""
        authorities, key, certificate = (None if file is None else _read(file) for file in self._files)
        return authorities, key, certificate


class _Endpoint:
    """The channel to one member, opened when it is first used."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        """``credentials``: None without TLS."""
        self.address: Final = address
        self.credentials: Final = credentials
        if credentials is not None:
            self.channel = grpc.aio.secure_channel(address, credentials, _OPTIONS)
        else:
            self.channel = grpc.aio.insecure_channel(address, _OPTIONS)
        self.kv: Final = KVStub(self.channel)
        self.lease: Final = LeaseStub(self.channel)
        self.watch: Final = WatchStub(self.channel)
        self.auth: Final = AuthStub(self.channel)


_Method = Callable[[_Endpoint], grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer]]


class EtcdClient:
    """Calls to one etcd cluster. Close it at the end."""

    def __init__(self, location: EtcdLocation, settings: EtcdSettings) -> None:
        self._location: Final = location
        self._settings: Final = settings
        self._files: Final = _CertificateFiles(settings)
        self._endpoints: Final[dict[str, _Endpoint]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._order: Final = list(location.endpoints)
        """The endpoint that is tried first comes first."""
        self._token = ""

    async def close(self) -> None:
        """Close all connections."""
        for endpoint in self._endpoints.values():
            await endpoint.channel.close()
        self._endpoints.clear()

    async def read(self, key: bytes, range_end: bytes = b"") -> pb.RangeResponse:
        """Return a key, or the keys up to ``range_end``, as of the last commit."""
        return await self.call(lambda each: each.kv.Range, pb.RangeRequest(key=key, range_end=range_end))

    async def transact(
        self, compare: Sequence[pb.Compare], success: Sequence[pb.RequestOp], failure: Sequence[pb.RequestOp] = ()
    ) -> pb.TxnResponse:
        """Carry out ``success`` if all comparisons hold, else ``failure``, as one transaction.

        Raises `EtcdUnavailable` when it is not known whether it was carried out."""
        request = pb.TxnRequest(compare=compare, success=success, failure=failure)
        return await self.call(lambda each: each.kv.Txn, request)

    async def grant_lease(self, seconds: int) -> int:
        """Begin a lease of at least this length, and return its id."""
        wanted = secrets.randbits(62) + 1
        try:
            request = pb.LeaseGrantRequest(TTL=seconds, ID=wanted)
            await self.call(lambda each: each.lease.LeaseGrant, request)
        except EtcdRefused as error:
            if "lease already exists" not in error.message:  # granted by an attempt whose answer was lost
                raise
        return wanted

    async def keep_lease(self, lease: int) -> bool:
        """Renew a lease once. Returns False when it has ended."""

        async def once(endpoint: _Endpoint, seconds: float) -> pb.LeaseKeepAliveResponse:
            async with asyncio.timeout(seconds):
                stream = endpoint.lease.LeaseKeepAlive(
                    iter((pb.LeaseKeepAliveRequest(ID=lease),)), timeout=seconds, metadata=self._metadata()
                )
                async for answer in stream:
                    stream.cancel()
                    return answer
                raise TimeoutError

        return (await self._over_endpoints(once)).TTL > 0

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, and with it the keys that are bound to it."""
        try:
            await self.call(lambda each: each.lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=lease))
        except EtcdRefused as error:
            if "lease not found" not in error.message:  # it has ended already
                raise

    async def watch(
        self, key: bytes, range_end: bytes, start_revision: int, idle_seconds: float
    ) -> AsyncGenerator[pb.WatchResponse | None, None]:
        """Yield all changes from a revision on, each revision whole; None whenever nothing came for ``idle_seconds``.

        Raises `WatchBroken` when it ends, and `EtcdRefused` when it is not allowed."""
        endpoint = self._endpoint(self._order[0])
        create = pb.WatchCreateRequest(key=key, range_end=range_end, start_revision=start_revision)
        stream = endpoint.watch.Watch(metadata=(*self._metadata(), _WITH_LEADER))
        reading: asyncio.Future[object] | None = None
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await stream.write(pb.WatchRequest(create_request=create))
            while True:
                # Cancelling a read would cancel the stream.
                reading = reading or asyncio.ensure_future(stream.read())
                done, _ = await asyncio.wait((reading,), timeout=idle_seconds)
                if not done:
                    yield None
                    continue
                answer, reading = reading.result(), None
                if not isinstance(answer, pb.WatchResponse):
                    raise WatchBroken(f"{endpoint.address}: ended the watch")
                if answer.canceled:
                    raise WatchBroken(f"{endpoint.address}: ended the watch: {answer.cancel_reason or 'compacted'}")
                if answer.events:
                    yield answer
        except TimeoutError:
            self._try_later(endpoint.address)
            raise WatchBroken(f"{endpoint.address}: does not answer") from None
        except grpc.aio.AioRpcError as error:
            if error.code() in _ELSEWHERE:
                self._try_later(endpoint.address)
            else:
                self._token = ""
            raise WatchBroken(f"{endpoint.address}: {error.details()}") from error
        finally:
            stream.cancel()
            if reading is not None:
                reading.cancel()

    async def call(self, method: _Method[_Request, _Answer], request: _Request) -> _Answer:
        """Make one call. Raises `EtcdUnavailable` or `EtcdRefused`."""

        async def once(endpoint: _Endpoint, seconds: float) -> _Answer:
            answer: _Answer = await method(endpoint)(request, timeout=seconds, metadata=self._metadata())
            return answer

        return await self._over_endpoints(once)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    async def _over_endpoints(self, once: Callable[[_Endpoint, float], Awaitable[_Answer]]) -> _Answer:
        """Make a call at one endpoint after another until one answers or the time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.timeout_seconds
        failed, may_log_in, problem = 0, True, ""
        while (left := deadline - loop.time()) > 0:
            endpoint = self._endpoint(self._order[0])
            seconds = min(left, _ATTEMPT_SECONDS) if len(self._order) > 1 else left
            began = loop.time()
            try:
                if self._settings.user and not self._token:
                    await self._log_in(endpoint, seconds)
                return await once(endpoint, seconds)
            except asyncio.CancelledError:
                if loop.time() - began >= _SILENT_SECONDS:
                    self._try_later(endpoint.address)
                raise
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                details = error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else "no answer in time"
                if isinstance(error, grpc.aio.AioRpcError) and error.code() not in _ELSEWHERE:
                    if not (may_log_in and self._settings.user and any(each in details for each in _STALE_TOKEN)):
                        raise EtcdRefused(f"{self._location}: etcd refused it: {details}") from error
                    self._token, may_log_in = "", False
                    continue
                problem = f"{endpoint.address}: {details}"
                self._try_later(endpoint.address)
                failed += 1
                if failed % len(self._order) == 0:
                    await asyncio.sleep(_PAUSE_SECONDS)
        raise EtcdUnavailable(
            f"{self._location}: etcd did not answer within {self._settings.timeout_seconds:g} s: {problem}"
        )

    async def _log_in(self, endpoint: _Endpoint, seconds: float) -> None:
        request = pb.AuthenticateRequest(name=self._settings.user, password=self._settings.read_password())
        self._token = (await endpoint.auth.Authenticate(request, timeout=seconds)).token

    def _endpoint(self, address: str) -> _Endpoint:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a command may run several loops, and a channel belongs to one of them
            self._loop = loop
            self._endpoints.clear()
        credentials = self._files.credentials() if self._location.tls else None
        found = self._endpoints.get(address)
        if found is None or found.credentials is not credentials:
            self._settings.check(self._location)
            # A former channel closes when its last call ends.
            found = self._endpoints[address] = _Endpoint(address, credentials)
        return found

    def _try_later(self, address: str) -> None:
        """Try the other endpoints first from now on. With TLS this one is connected anew, with the files of then."""
        if self._location.tls:
            self._endpoints.pop(address, None)
        if self._order[0] == address:
            self._order.append(self._order.pop(0))


def end_of(prefix: bytes) -> bytes:
    """Return the end of the range of all keys with a prefix."""
    assert prefix[-1] < 0xFF, "prefixes end in a character"
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    """Return the operation that stores a key, bound to a lease unless that is 0."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes, range_end: bytes = b"") -> pb.RequestOp:
    """Return the operation that removes a key, or the keys up to ``range_end``."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=range_end))


def is_absent(key: bytes, range_end: bytes = b"") -> pb.Compare:
    """Return the comparison that a key, or each key up to ``range_end``, does not exist."""
    return pb.Compare(
        key=key, range_end=range_end, target=pb.Compare.CREATE, result=pb.Compare.EQUAL, create_revision=0
    )


def is_at(key: bytes, mod_revision: int) -> pb.Compare:
    """Return the comparison that a key was changed last at this revision; 0 means that it does not exist."""
    return pb.Compare(key=key, target=pb.Compare.MOD, result=pb.Compare.EQUAL, mod_revision=mod_revision)


def has_value(key: bytes, value: bytes) -> pb.Compare:
    """Return the comparison that a key has this value."""
    return pb.Compare(key=key, target=pb.Compare.VALUE, result=pb.Compare.EQUAL, value=value)


def is_unchanged_since(key: bytes, range_end: bytes, revision: int) -> pb.Compare:
    """Return the comparison that no key up to ``range_end`` was changed after this revision."""
    return pb.Compare(
        key=key, range_end=range_end, target=pb.Compare.MOD, result=pb.Compare.LESS, mod_revision=revision + 1
    )


def _version_of(file: Path) -> _Version:
    """Return what is different when a file was written or replaced; nothing where it cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SettingsError(unreadable(file, error)) from error
