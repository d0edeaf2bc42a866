"""TLS out of the same PEM files on both transports, with certificates demanded of both ends."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tao.model.errors import SettingsError, Unavailable
from tao.model.topology import CacheServer
from tao.peers.links import Links, LinkSettings
from tao.wire.frames_server import FrameServer
from tao.wire.grpc_server import GrpcServer
from tao.wire.settings import ServingSettings
from tao.wire.tls import TlsFiles
from tests.conformance.transport_rig import ME, PATIENT_SECONDS, Handler, read


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A certificate that is its own authority, for 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=tao-test", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command = [openssl, "req", "-x509", *curve, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return TlsFiles(certificate, key, certificate)


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_peers_with_certificates_talk_and_others_do_not(transport: str, files: TlsFiles) -> None:
    settings, handler = ServingSettings(), Handler()
    server: FrameServer | GrpcServer
    if transport == "frames":
        server = FrameServer(handler, settings, name="s", topology_version=lambda: 1, tls=files.server_context())
        address = await server.start("127.0.0.1:0")
        advertised = CacheServer(name="s", grpc="127.0.0.1:1", frames=address)
    else:
        server = GrpcServer(
            handler,
            settings,
            name="s",
            topology_version=lambda: 1,
            choose_shard=lambda: 0,
            credentials=files.server_credentials(),
        )
        address = await server.start("127.0.0.1:0")
        advertised = CacheServer(name="s", grpc=address)
    trusted, bare = Links(LinkSettings(), ME, files), Links(LinkSettings(), ME)
    assert (await trusted.to(advertised).ask(read(1), PATIENT_SECONDS)).read.values == [b"v1"]
    with pytest.raises(Unavailable):
        await bare.to(advertised).ask(read(1), PATIENT_SECONDS)
    await trusted.close()
    await bare.close()
    await server.close()


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = TlsFiles(tmp_path / "no.pem", tmp_path / "no.key")
    for use in (missing.server_context, missing.client_context, missing.server_credentials):
        with pytest.raises(SettingsError, match=r"no\.(pem|key)"):
            use()
    with pytest.raises(SettingsError, match="private key"):
        TlsFiles().server_context()
