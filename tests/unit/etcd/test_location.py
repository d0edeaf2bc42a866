"""Where documents are kept: a path or the URL of etcd, in settings and commands, and credentials apart from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tao.etcd.location import EtcdLocation, EtcdSettings, location_of
from tao.model.errors import SettingsError
from tao.runtime.settings import parse_settings
from tao.tailer.settings import TailerSettings


def test_a_url_names_endpoints_and_a_prefix_and_everything_else_is_a_path() -> None:
    found = location_of("etcd://10.0.0.1:2379,etcd-2:2380,[::1]:2379/tao/east/")
    assert found == EtcdLocation(("10.0.0.1:2379", "etcd-2:2380", "[::1]:2379"), "/tao/east")
    assert str(found) == "etcd://10.0.0.1:2379,etcd-2:2380,[::1]:2379/tao/east"
    assert location_of("etcds://etcd-1/tao") == EtcdLocation(("etcd-1:2379",), "/tao", tls=True)
    assert location_of("/etc/tao/topology.json") == location_of("file:/etc/tao/topology.json")
    assert location_of("topology.json") == Path("topology.json")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd://host:2379", "names no prefix"),
        ("etcd:///tao", "'' is no address"),
        ("etcd://host:port/tao", "'host:port' is no address"),
        ("etcd://tao:secret@host/tao", "holds no user and password"),
    ],
)
def test_a_wrong_url_is_refused(url: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        location_of(url)


def settings(**more: object) -> TailerSettings:
    found = {"name": "t", "region": "east", "database_server": "db", "state_folder": "/tmp", "password": "p"}
    return parse_settings({**found, "schema_file": "schema.yaml", **more}, TailerSettings, "tailer.yaml")


def test_one_setting_takes_both_forms() -> None:
    assert settings(topology_file="topology.json").topology_file == Path("topology.json")
    found = settings(topology_file="etcds://etcd-1/tao", etcd={"user": "tao", "password_file": "/etc/tao/password"})
    assert found.topology_file == EtcdLocation(("etcd-1:2379",), "/tao", tls=True)
    assert found.etcd == EtcdSettings(user="tao", password_file=Path("/etc/tao/password"))
    with pytest.raises(SettingsError, match=r"tailer.yaml: topology_file.*: .*names no prefix"):
        settings(topology_file="etcd://etcd-1")


def test_commands_take_credentials_from_the_environment() -> None:
    environment = {"TAO_ETCD_USER": "tao", "TAO_ETCD_PASSWORD": "secret", "TAO_ETCD_AUTHORITIES": "/ca.pem"}
    found = EtcdSettings.from_environment(environment)
    assert found == EtcdSettings(user="tao", password="secret", authorities=Path("/ca.pem"))
    assert "secret" not in repr(found)
    with pytest.raises(SettingsError, match="private_key"):
        EtcdSettings.from_environment({"TAO_ETCD_CERTIFICATE": "/c.pem"})


def test_a_password_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    assert EtcdSettings(password_file=tmp_path / "password").read_password() == "secret"
    with pytest.raises(SettingsError, match="none: cannot be read: No such file or directory"):
        EtcdSettings(password_file=tmp_path / "none").read_password()


def test_other_machines_are_asked_over_tls_unless_the_settings_say_that_nobody_is_between() -> None:
    loopback = EtcdLocation(("127.0.0.1:2379", "[::1]:2379"), "/tao")
    plain = EtcdLocation(("127.0.0.1:2379", "etcd-2:2379"), "/tao")
    EtcdSettings().check(loopback)
    EtcdSettings().check(replace(plain, tls=True))
    EtcdSettings(insecure=True).check(plain)
    EtcdSettings.from_environment({"TAO_ETCD_INSECURE": "1"}).check(plain)
    with pytest.raises(SettingsError, match="etcd-2:2379 would be asked without TLS"):
        EtcdSettings().check(plain)
    with pytest.raises(SettingsError, match="a password is sent to etcd-2:2379 over TLS only"):
        EtcdSettings(user="tao", insecure=True).check(plain)
