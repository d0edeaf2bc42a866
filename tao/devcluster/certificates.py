"""The certificates of a development cluster: an authority of its own, and one certificate for each server, for the
operator and for an application, with the SPIFFE ids by which servers know each other.

Each start makes the authority anew where it is missing or about to end, and all certificates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tao.devcluster.layout import Role, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.state_folder import ClusterRecord, StateFolder, service_accounts
from tao.replication.accounts import ServiceAccounts
from tao.storage.tls import DatabaseTls, DatabaseTlsFiles
from tao.wire.tls import TlsFiles

CLUSTER_ID: Final = "spiffe://localhost/tao/dev"
APPLICATION_ID: Final = "spiffe://localhost/app/app"
OPERATOR: Final = "operator"
APPLICATION: Final = "app"

_SERVERS: Final = (Role.LEADER, Role.TAILER, Role.FOLLOWER, Role.WATCHER, Role.WORKER)
_AUTHORITY: Final = "ca"
_PEM: Final = serialization.Encoding.PEM
_LIFE: Final = timedelta(days=365)
_SLACK: Final = timedelta(hours=1)
"""Clocks of virtual machines are set back at times."""


def tls_files(folder: StateFolder, name: str) -> TlsFiles:
    """Return the files of a server, of `OPERATOR` or of `APPLICATION`."""
    certificates = folder.path / "certificates"
    return TlsFiles(
        certificate=certificates / f"{name}.pem",
        private_key=certificates / f"{name}.key",
        authorities=certificates / f"{_AUTHORITY}.pem",
        cluster=CLUSTER_ID,
    )


def cluster_accounts(folder: StateFolder, record: ClusterRecord) -> ServiceAccounts:
    """Return the accounts of the databases as an operator's commands use them: with TLS by the operator's certificate,
    if the cluster has certificates."""
    accounts = service_accounts(record.passwords)
    if not record.options.tls:
        return accounts
    files = tls_files(folder, OPERATOR)
    tls = DatabaseTls(
        DatabaseTlsFiles(authorities=files.authorities, certificate=files.certificate, private_key=files.private_key)
    )
    roles = ("administrator", "leader", "reader", "replicator", "watcher")
    found = {role: replace(account, tls=tls) for role in roles if (account := getattr(accounts, role))}
    return replace(accounts, **found)


def certificate_ids(shape: Shape) -> dict[str, str]:
    """Return who needs a certificate, by the name of its files, with the SPIFFE id in it. Databases have none."""
    ids = {
        member.name: f"{CLUSTER_ID}/{member.region}/{member.role}/{member.name}"
        for role in _SERVERS
        for member in shape.select(role)
    }
    ids |= {member.name: "" for member in shape.select(Role.DATABASE)}
    ids[OPERATOR] = f"{CLUSTER_ID}/{shape.region_names[0]}/operator/{OPERATOR}"
    ids[APPLICATION] = APPLICATION_ID
    return ids


def issue_certificates(folder: StateFolder, ids: Mapping[str, str]) -> None:
    """Write the files of all ``ids``, which `certificate_ids` returns. Raises `OperatorError`."""
    (folder.path / "certificates").mkdir(exist_ok=True)
    key, authority = _authority(folder)
    for name, uri in ids.items():
        own_key = ec.generate_private_key(ec.SECP256R1())
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ip_address(LOOPBACK))]
        names = x509.SubjectAlternativeName([*hosts, *([x509.UniformResourceIdentifier(uri)] if uri else [])])
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(_name(name), authority.subject, own_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .add_extension(uses, critical=False)
            .sign(key, hashes.SHA256())
        )
        _write(folder, name, own_key, certificate)


def add_authority(folder: StateFolder) -> None:
    """Make a new authority, which issues all certificates from now on. Its file keeps the certificates of those before,
    so that what they have issued is trusted until `remove_former_authorities`."""
    file = _authority_file(folder)
    former = file.read_bytes()
    key, authority = _new_authority()
    _write(folder, _AUTHORITY, key, authority)
    folder.write_file(file, file.read_bytes() + former)


def remove_former_authorities(folder: StateFolder) -> None:
    """Trust the newest authority alone."""
    file = _authority_file(folder)
    folder.write_file(file, x509.load_pem_x509_certificate(file.read_bytes()).public_bytes(_PEM))


def _authority_file(folder: StateFolder) -> Path:
    found = tls_files(folder, _AUTHORITY).authorities
    assert found is not None, "every name has it"
    return found


def _authority(folder: StateFolder) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the authority in the folder, whose clients may have its file, or a new one in place of an old."""
    files = tls_files(folder, _AUTHORITY)
    assert files.private_key is not None
    assert files.certificate is not None
    try:
        key = serialization.load_pem_private_key(files.private_key.read_bytes(), password=None)
        authority = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    except (OSError, ValueError):
        pass
    else:
        if isinstance(key, ec.EllipticCurvePrivateKey) and authority.not_valid_after_utc > datetime.now(UTC) + _LIFE:
            return key, authority
    key, authority = _new_authority()
    _write(folder, _AUTHORITY, key, authority)
    return key, authority


def _new_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities in one file need different names: a certificate says who signed it by name alone.
    name = _name(f"tao development cluster {x509.random_serial_number():x}")
    return key, (
        _builder(name, name, key, life=10 * _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )


def _write(folder: StateFolder, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    files = tls_files(folder, name)
    assert files.private_key is not None
    assert files.certificate is not None
    secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    folder.write_file(files.private_key, secret)
    folder.write_file(files.certificate, certificate.public_bytes(_PEM))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta = _LIFE
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + life)
    )
