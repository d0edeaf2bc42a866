"""The TLS files of connections to databases: what they need to be, and how a change of them is taken."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from tao.model.errors import SettingsError
from tao.storage.session import ServerAccount
from tao.storage.tls import DatabaseTls, DatabaseTlsFiles
from tests.rigs.certificates import TestAuthority


@pytest.fixture
def files(tmp_path: Path) -> DatabaseTlsFiles:
    issued = TestAuthority(tmp_path).issue("leader-1")
    return DatabaseTlsFiles(
        authorities=issued.authorities, certificate=issued.certificate, private_key=issued.private_key
    )


def test_without_files_and_over_a_socket_connections_are_plain(files: DatabaseTlsFiles) -> None:
    assert DatabaseTlsFiles().if_set is None
    assert ServerAccount("db", 3306, "tao_reader", "x", socket="", tls=None).ssl_context() is None
    assert ServerAccount("db", 3306, "tao_reader", "x", "/run/db.sock", files.if_set).ssl_context() is None
    assert ServerAccount("db", 3306, "tao_reader", "x", tls=files.if_set, socket="").ssl_context() is not None


def test_the_certificate_of_a_server_is_verified_and_its_host_unless_that_is_left_out(files: DatabaseTlsFiles) -> None:
    for verify_host in (True, False):
        tls = DatabaseTlsFiles(authorities=files.authorities, verify_host=verify_host).if_set
        assert tls is not None
        context = tls.context()
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, verify_host)


def test_files_that_do_not_belong_together_or_cannot_be_read_are_refused(
    files: DatabaseTlsFiles, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="a certificate and its private key"):
        DatabaseTlsFiles(authorities=files.authorities, certificate=files.certificate)
    with pytest.raises(SettingsError, match="the authorities"):
        DatabaseTlsFiles(certificate=files.certificate, private_key=files.private_key)
    with pytest.raises(SettingsError, match=r"no\.pem"):
        DatabaseTls(DatabaseTlsFiles(authorities=tmp_path / "no.pem"))
    other = TestAuthority(tmp_path / "other").issue("leader-2")
    with pytest.raises(SettingsError, match="cannot be used"):
        DatabaseTls(
            DatabaseTlsFiles(
                authorities=files.authorities, certificate=files.certificate, private_key=other.private_key
            )
        )


def test_changed_files_are_used_for_the_next_connection_and_wrong_ones_are_logged_once(
    files: DatabaseTlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = DatabaseTls(files)
    first = tls.context()
    assert tls.context() is first
    assert files.certificate is not None
    before = files.certificate.read_bytes()
    files.certificate.write_text("not a certificate")
    with caplog.at_level(logging.WARNING):
        assert [tls.context() is first for _ in range(2)] == [True, True]
    assert len(caplog.records) == 1
    files.certificate.write_bytes(before)
    TestAuthority(tmp_path).issue("leader-1")
    second = tls.context()
    assert second is not first
    assert [each["serialNumber"] for each in second.get_ca_certs()] != [
        each["serialNumber"] for each in first.get_ca_certs()
    ]
