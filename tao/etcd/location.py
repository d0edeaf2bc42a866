"""Where the documents of a cluster are kept: in a file of this machine, or in etcd under a prefix, and how to connect.

One option names either: a path, or ``etcd://HOST:PORT,HOST:PORT/PREFIX`` (``etcds://`` with TLS). Credentials are not
part of it: they come from settings, files or the environment, because a command line is visible to everybody on a
machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator

from tao.model.errors import SettingsError, unreadable

_SCHEMES: Final = {"etcd://": False, "etcds://": True}
_DEFAULT_PORT: Final = "2379"


@dataclass(frozen=True, slots=True)
class EtcdLocation:
    """A prefix of keys in an etcd cluster. ``endpoints``: ``host:port`` of its members, in the order in which they are
    tried."""

    endpoints: tuple[str, ...]
    prefix: str
    tls: bool = False

    def __str__(self) -> str:
        return f"{'etcds' if self.tls else 'etcd'}://{','.join(self.endpoints)}{self.prefix}"

    def key(self, name: str) -> bytes:
        """Return the key of what has this name under the prefix."""
        return f"{self.prefix}/{name}".encode()


def parse_location(text: object) -> object:
    """Return the place that a URL or a path names; a value of another type is returned as it is. Raises `ValueError`
    for a wrong URL."""
    if not isinstance(text, str):
        return text
    for scheme, tls in _SCHEMES.items():
        if text.startswith(scheme):
            return _parse_url(text, scheme, tls)
    return Path(text.removeprefix("file:"))


Location = Annotated[Path | EtcdLocation, BeforeValidator(parse_location)]
"""The place of a document: a path, or a prefix in etcd."""


def location_of(text: str) -> Path | EtcdLocation:
    """Return the place that a person has named. Raises `SettingsError` for a wrong URL."""
    try:
        found = parse_location(text)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    assert isinstance(found, Path | EtcdLocation)
    return found


def is_etcd_url(text: str) -> bool:
    """Return whether a text is meant to be a prefix in etcd."""
    return text.startswith(tuple(_SCHEMES))


def _parse_url(text: str, scheme: str, tls: bool) -> EtcdLocation:
    hosts, _, prefix = text.removeprefix(scheme).partition("/")
    if "@" in hosts:
        raise ValueError("an etcd URL holds no user and password: set them under `etcd`, or in TAO_ETCD_USER and so on")
    endpoints = tuple(_endpoint(host, text) for host in hosts.split(","))
    if not prefix.strip("/"):
        raise ValueError(f"{text}: names no prefix; write {scheme}{','.join(endpoints)}/tao, for example")
    return EtcdLocation(endpoints, f"/{prefix.strip('/')}", tls)


def _endpoint(text: str, url: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, _DEFAULT_PORT
    if not host or not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"{url}: {text!r} is no address; write HOST:PORT,HOST:PORT")
    return f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """How to connect to etcd, where the topology or another document is kept there."""

    user: str = ""
    """The user of etcd. Empty: none, or the one that the certificate names."""

    password_file: Path | None = None
    """File of the user's password, readable by this process's account only. It is read for each log-in."""

    password: str = field(default="", repr=False)
    """The password itself, in place of ``password_file``."""

    authorities: Path | None = None
    """PEM file of the authorities whose certificates are trusted, with ``etcds://``. None: the system's."""

    certificate: Path | None = None
    """PEM file of a certificate to show to etcd, with its ``private_key``."""

    private_key: Path | None = None
    """PEM file, readable by this process's account only."""

    insecure: bool = False
    """Connect to etcd at other machines without TLS (``etcd://``), because nobody else can reach that network. A user
    who can change packets there controls the cluster. A password is never sent without TLS."""

    timeout_seconds: float = 3.0
    """Longest time of one call, over all endpoints. A commit takes milliseconds, and an election two seconds."""

    def __post_init__(self) -> None:
        if (self.certificate is None) is not (self.private_key is None):
            raise SettingsError("etcd: a certificate needs its private_key, and the other way around")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> EtcdSettings:
        """Return the settings of a command, from ``TAO_ETCD_USER``, ``…_PASSWORD``, ``…_PASSWORD_FILE``,
        ``…_AUTHORITIES``, ``…_CERTIFICATE``, ``…_PRIVATE_KEY`` and ``…_INSECURE`` (1)."""

        def path(name: str) -> Path | None:
            found = environment.get(f"TAO_ETCD_{name}")
            return Path(found) if found else None

        return cls(
            user=environment.get("TAO_ETCD_USER", ""),
            password=environment.get("TAO_ETCD_PASSWORD", ""),
            password_file=path("PASSWORD_FILE"),
            authorities=path("AUTHORITIES"),
            certificate=path("CERTIFICATE"),
            private_key=path("PRIVATE_KEY"),
            insecure=environment.get("TAO_ETCD_INSECURE") == "1",
        )

    def read_password(self) -> str:
        """Return the password. Raises `SettingsError` when its file cannot be read."""
        if self.password_file is None:
            return self.password
        try:
            return self.password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(unreadable(self.password_file, error)) from error

    def check(self, location: EtcdLocation) -> None:
        """Raise `SettingsError` when documents, or the password, would pass a network as they are."""
        exposed = [each for each in location.endpoints if not _is_loopback(each)]
        if location.tls or not exposed:
            return
        if self.user:
            raise SettingsError(f"{location}: a password is sent to {exposed[0]} over TLS only: write etcds://")
        if not self.insecure:
            raise SettingsError(
                f"{location}: {exposed[0]} would be asked without TLS, and an attacker could change the topology. "
                "Write etcds://, or set `insecure: true` under `etcd` (TAO_ETCD_INSECURE=1) if nobody else can reach "
                "that network"
            )


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
