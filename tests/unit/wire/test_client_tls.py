"""The files of a client are used for frames and for gRPC as they were at one time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.wire.tls import ClientTls, TlsFiles
from tests.rigs.certificates import TestAuthority


def test_a_key_that_is_emptied_after_it_was_checked_does_not_reach_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = TestAuthority(tmp_path)
    files = authority.issue("web")
    tls, contents, first = ClientTls(files), TlsFiles.contents, files.contents()

    def emptied(self: TlsFiles) -> tuple[bytes | None, bytes | None, bytes | None]:
        assert self.private_key is not None
        self.private_key.write_bytes(b"")
        return contents(self)

    authority.issue("web")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(TlsFiles, "contents", emptied)
        tls.refresh()
    assert vars(tls)["_contents"] == first
    assert len(caplog.records) == 1
    tls.channel_credentials()
    authority.issue("web")
    tls.refresh()
    assert vars(tls)["_contents"] == files.contents()
