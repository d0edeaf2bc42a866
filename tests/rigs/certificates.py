"""A certificate authority for tests, and its certificates for servers and clients on loopback."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tao.wire.tls import TlsFiles

_LIFE: Final = datetime.timedelta(days=2)
_LOOPBACK: Final = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
_SIGNS_CERTIFICATES: Final = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


class TestAuthority:
    """Issues certificates for 127.0.0.1 and localhost into a folder."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            # Python 3.13 and newer refuse an authority without its usage and identifier.
            .add_extension(_SIGNS_CERTIFICATES, critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / "authority.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, uri: str = "", cluster: str = "") -> TlsFiles:
        """Issue a certificate and its key; the peer that uses it trusts this authority, and knows peers by their ids of
        the ``cluster`` if one is named. ``uri`` is the certificate's own id. A name that was issued before gets another
        certificate in the same files."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(name), self._name, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_alternative_names(uri), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        files = TlsFiles(self._folder / f"{name}.pem", self._folder / f"{name}.key", self.file, cluster=cluster)
        assert files.certificate is not None
        assert files.private_key is not None
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.private_key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files


def encrypt_key(files: TlsFiles) -> None:
    """Encrypt a private key where it is."""
    assert files.private_key is not None
    key = serialization.load_pem_private_key(files.private_key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    files.private_key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )


def _alternative_names(uri: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([*_LOOPBACK, *([x509.UniformResourceIdentifier(uri)] if uri else [])])


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIFE)
        .not_valid_after(now + _LIFE)
    )
