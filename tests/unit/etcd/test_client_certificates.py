"""The certificate that is shown to etcd, and the authorities that it is compared with, are those of the files."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tao.etcd.client import EtcdClient, EtcdUnavailable
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import SettingsError
from tao.wire.tls import TlsFiles
from tests.rigs.certificates import TestAuthority, encrypt_key

Context = grpc.aio.ServicerContext[pb.RangeRequest, pb.RangeResponse]
CLUSTER = "spiffe://example.org/tao/main"


class Keys:
    """Has no keys, and notes which names the certificates of its callers have."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []
        self.failures_left = 0

    async def range(self, _: pb.RangeRequest, context: Context) -> pb.RangeResponse:
        if self.failures_left:
            self.failures_left -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no leader")
        ids = (each for each in context.auth_context()["x509_subject_alternative_name"] if b":" in each)
        self.shown += (each.rpartition(b"/")[2] for each in ids)
        return pb.RangeResponse()

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(
            self.range, pb.RangeRequest.FromString, pb.RangeResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler("etcdserverpb.KV", {"Range": method})


@asynccontextmanager
async def etcd(files: TlsFiles, keys: Keys) -> AsyncIterator[EtcdLocation]:
    assert files.certificate is not None
    assert files.private_key is not None
    assert files.authorities is not None
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([keys.handler()])
    pair = files.private_key.read_bytes(), files.certificate.read_bytes()
    credentials = grpc.ssl_server_credentials([pair], files.authorities.read_bytes(), require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield EtcdLocation((f"127.0.0.1:{port}",), "/tao", tls=True)
    finally:
        await server.stop(None)


def settings_of(files: TlsFiles) -> EtcdSettings:
    return EtcdSettings(
        authorities=files.authorities,
        certificate=files.certificate,
        private_key=files.private_key,
        timeout_seconds=20.0,
    )


async def test_calls_after_a_change_of_the_files_show_the_new_certificate(tmp_path: Path) -> None:
    authority, keys = TestAuthority(tmp_path), Keys()
    own = authority.issue("tao", f"{CLUSTER}/east/leader/first")
    async with etcd(authority.issue("etcd"), keys) as location:
        client = EtcdClient(location, settings_of(own))
        await client.read(b"/tao/x")
        await client.read(b"/tao/x")
        authority.issue("tao", f"{CLUSTER}/east/leader/second")
        await client.read(b"/tao/x")
        await client.close()
    assert keys.shown == [b"first", b"first", b"second"]


async def test_a_file_that_is_missing_while_it_is_replaced_fails_no_call(tmp_path: Path) -> None:
    authority, keys = TestAuthority(tmp_path), Keys()
    own = authority.issue("tao", f"{CLUSTER}/east/leader/first")
    assert own.certificate is not None
    async with etcd(authority.issue("etcd"), keys) as location:
        client = EtcdClient(location, settings_of(own))
        await client.read(b"/tao/x")
        own.certificate.unlink()
        await client.read(b"/tao/x")
        authority.issue("tao", f"{CLUSTER}/east/leader/second")
        await client.read(b"/tao/x")
        await client.close()
    assert keys.shown == [b"first", b"first", b"second"]


async def test_an_authority_that_is_trusted_no_longer_is_not_believed_from_the_next_call_on(tmp_path: Path) -> None:
    authority, other, keys = TestAuthority(tmp_path / "a"), TestAuthority(tmp_path / "b"), Keys()
    own = authority.issue("tao", f"{CLUSTER}/east/leader/first")
    async with etcd(authority.issue("etcd"), keys) as location:
        settings = settings_of(own)
        client = EtcdClient(location, settings)
        await client.read(b"/tao/x")
        authority.file.write_bytes(other.file.read_bytes())
        object.__setattr__(settings, "timeout_seconds", 0.5)
        with pytest.raises(EtcdUnavailable):
            await client.read(b"/tao/x")
        await client.close()


Spoil = Callable[[TestAuthority, TlsFiles], None]


def empty_key(_: TestAuthority, files: TlsFiles) -> None:
    assert files.private_key is not None
    files.private_key.write_bytes(b"")


def cut_key(_: TestAuthority, files: TlsFiles) -> None:
    assert files.private_key is not None
    files.private_key.write_bytes(files.private_key.read_bytes()[:100])


def key_of_another_pair(authority: TestAuthority, files: TlsFiles) -> None:
    other = authority.issue("other").private_key
    assert other is not None
    assert files.private_key is not None
    files.private_key.write_bytes(other.read_bytes())


def encrypted_key(_: TestAuthority, files: TlsFiles) -> None:
    encrypt_key(files)


def cut_certificate(_: TestAuthority, files: TlsFiles) -> None:
    assert files.certificate is not None
    files.certificate.write_bytes(files.certificate.read_bytes()[:100])


def empty_authorities(_: TestAuthority, files: TlsFiles) -> None:
    assert files.authorities is not None
    files.authorities.write_bytes(b"")


SPOILS = [empty_key, cut_key, key_of_another_pair, encrypted_key, cut_certificate, empty_authorities]


@pytest.mark.parametrize("spoil", SPOILS)
async def test_changed_files_that_cannot_be_used_are_logged_once_and_those_before_stay_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Spoil
) -> None:
    authority, keys = TestAuthority(tmp_path), Keys()
    own = authority.issue("tao", f"{CLUSTER}/east/leader/first")
    trusted = authority.file.read_bytes()
    async with etcd(authority.issue("etcd"), keys) as location:
        client = EtcdClient(location, settings_of(own))
        await client.read(b"/tao/x")
        spoil(authority, own)
        await client.read(b"/tao/x")
        keys.failures_left = 1  # so that the endpoint is connected anew
        await client.read(b"/tao/x")
        (logged,) = [each.message for each in caplog.records if each.name == "tao.etcd.client"]
        assert logged.startswith("the changed certificate files are not used: ")
        assert "etcd: a certificate file cannot be used" in logged or f"{own.private_key} is encrypted" in logged
        authority.file.write_bytes(trusted)
        authority.issue("tao", f"{CLUSTER}/east/leader/second")
        await client.read(b"/tao/x")
        await client.close()
    assert keys.shown == [b"first", b"first", b"first", b"second"]


@pytest.mark.parametrize("spoil", SPOILS)
async def test_files_that_cannot_be_used_at_first_are_an_error_until_they_can(tmp_path: Path, spoil: Spoil) -> None:
    authority, keys = TestAuthority(tmp_path), Keys()
    own = authority.issue("tao", f"{CLUSTER}/east/leader/first")
    trusted = authority.file.read_bytes()
    async with etcd(authority.issue("etcd"), keys) as location:
        spoil(authority, own)
        client = EtcdClient(location, settings_of(own))
        for _ in range(2):
            with pytest.raises(SettingsError, match=r"a certificate file cannot be used|is encrypted"):
                await client.read(b"/tao/x")
        authority.file.write_bytes(trusted)
        authority.issue("tao", f"{CLUSTER}/east/leader/second")
        await client.read(b"/tao/x")
        await client.close()
    assert keys.shown == [b"second"]


async def test_files_that_become_whole_between_reading_and_checking_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, keys = TestAuthority(tmp_path), Keys()
    own = authority.issue("tao", f"{CLUSTER}/east/leader/first")

    class LateContext(ssl.SSLContext):
        def load_cert_chain(self, *files: Any, **options: Any) -> None:
            if keys.shown == [b"first"]:
                authority.issue("tao", f"{CLUSTER}/east/leader/second")
            super().load_cert_chain(*files, **options)

    async with etcd(authority.issue("etcd"), keys) as location:
        client = EtcdClient(location, settings_of(own))
        await client.read(b"/tao/x")
        monkeypatch.setattr("tao.etcd.client.ssl.SSLContext", LateContext)
        cut_key(authority, own)
        for _ in range(2):
            await client.read(b"/tao/x")
        await client.close()
    assert keys.shown == [b"first", b"first", b"second"]
