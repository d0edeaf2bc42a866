"""The certificate that is shown to etcd, and the authorities that it is compared with, are those of the files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tao.etcd.client import EtcdClient, EtcdUnavailable
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.etcd.v3 import rpc_pb2 as pb
from tao.wire.tls import TlsFiles
from tests.rigs.certificates import TestAuthority

Context = grpc.aio.ServicerContext[pb.RangeRequest, pb.RangeResponse]
CLUSTER = "spiffe://example.org/tao/main"


class Keys:
    """Has no keys, and notes which ids the certificates of its callers have."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []

    async def range(self, _: pb.RangeRequest, context: Context) -> pb.RangeResponse:
        self.shown += (each for each in context.auth_context()["x509_subject_alternative_name"] if b":" in each)
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
    assert [each.rpartition(b"/")[2] for each in keys.shown] == [b"first", b"first", b"second"]


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
    assert [each.rpartition(b"/")[2] for each in keys.shown] == [b"first", b"first", b"second"]


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
