"""The settings of a server that registers itself, and what its credentials have to prove."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tao.follower.settings import FollowerSettings
from tao.model.errors import SettingsError
from tao.runtime.credentials import check_own_credentials
from tao.runtime.settings import parse_settings
from tao.wire.identity import AcceptedCredentials, AcceptedToken, Credentials, SpiffeCluster, digest_of
from tao.wire.tls import TlsFiles
from tests.rigs.certificates import TestAuthority

CLUSTER: Final = "spiffe://example.org/tao/one"
PLAIN: Final = TlsFiles()


def settings(**registration: object) -> FollowerSettings:
    found = {"name": "f-1", "topology_file": "t.json", "schema_file": "s.yaml", "registration": registration}
    return parse_settings(found, FollowerSettings, "follower.yaml")


def test_registration_is_off_by_default_and_needs_a_tier_and_an_address() -> None:
    assert not settings().registration.join
    assert settings(join=True, tier="web", grpc="host:7000").registration.share == 1.0
    for lacking in ({"tier": "web"}, {"grpc": "host:7000"}):
        with pytest.raises(SettingsError, match=r"registration\.join needs registration\.tier"):
            settings(join=True, **lacking)


def check(own: Credentials, accepted: AcceptedCredentials, tls: TlsFiles = PLAIN, region: str = "east") -> None:
    check_own_credentials(own, tls, accepted, region, now=1.0)


def test_without_credentials_every_name_may_be_registered() -> None:
    check(Credentials("f-1", "follower"), AcceptedCredentials())


def test_a_token_must_be_that_of_the_name_and_role() -> None:
    accepted = AcceptedCredentials(
        (
            AcceptedToken("a", "follower", digest_of("of f-1"), caller="f-1"),
            AcceptedToken("b", "follower", digest_of("of any follower")),
        )
    )
    check(Credentials("f-1", "follower", "of f-1"), accepted)
    check(Credentials("f-2", "follower", "of any follower"), accepted)
    with pytest.raises(SettingsError, match=r"f-2 cannot join as follower f-2 of region east.*that of f-1"):
        check(Credentials("f-2", "follower", "of f-1"), accepted)
    with pytest.raises(SettingsError, match=r"l-1 cannot join as leader.*that of a follower"):
        check(Credentials("l-1", "leader", "of any follower"), accepted)
    with pytest.raises(SettingsError, match="token is missing or wrong"):
        check(Credentials("f-1", "follower", "unknown"), accepted)


def test_a_certificate_must_be_that_of_the_name_the_role_and_the_region(tmp_path: Path) -> None:
    tls = TestAuthority(tmp_path).issue("f-1", f"{CLUSTER}/east/follower/f-1", CLUSTER)
    accepted = AcceptedCredentials(cluster=SpiffeCluster.parse(CLUSTER))
    check(Credentials("f-1", "follower"), accepted, tls)
    for name, role, region, reason in (
        ("f-2", "follower", "east", "that of f-1"),
        ("f-1", "leader", "east", "that of a follower"),
        ("f-1", "follower", "west", "of region east"),
    ):
        with pytest.raises(SettingsError, match=reason):
            check(Credentials(name, role), accepted, tls, region)


def test_a_certificate_that_cannot_be_read_or_says_nothing_proves_nothing(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    accepted = AcceptedCredentials(cluster=SpiffeCluster.parse(CLUSTER))
    with pytest.raises(SettingsError, match="cannot join"):
        check(Credentials("f-1", "follower"), accepted, authority.issue("f-1", cluster=CLUSTER))
    (tmp_path / "f-1.pem").write_text("no certificate")
    with pytest.raises(SettingsError, match=r"f-1\.pem: is no certificate: "):
        check(Credentials("f-1", "follower"), accepted, TlsFiles(tmp_path / "f-1.pem", tmp_path / "f-1.key"))
