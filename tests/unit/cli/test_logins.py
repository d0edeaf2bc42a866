"""The accounts of commands: wherever they are taken from, their connections are encrypted if that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from tao.cli.logins import administrator_login, mastership_login, mover_login, passwords_of
from tao.devcluster.certificates import OPERATOR, issue_certificates
from tao.devcluster.layout import Shape, StartOptions
from tao.devcluster.state_folder import ClusterRecord, StateFolder, new_passwords
from tao.etcd.location import location_of
from tao.model.errors import OperatorError
from tao.replication.accounts import Account
from tests.rigs.certificates import TestAuthority

Give = Callable[..., None]


@pytest.fixture
def give() -> Iterator[Give]:
    """Sets shared options of the running command."""
    with click.Context(click.Command("command")) as context:
        yield lambda **options: context.meta.update({f"tao.{name}": value for name, value in options.items()})


def all_logins() -> list[Account]:
    _, accounts = mastership_login()
    _, moving, leader = mover_login()
    assert moving == accounts
    return [accounts.administrator, accounts.replicator, administrator_login(), leader]


def test_the_environment_encrypts_every_account_of_a_cluster_in_etcd(
    give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(file=location_of("etcd://127.0.0.1:2379/tao"), state_dir=tmp_path)
    for name in ("ADMIN", "REPLICATOR", "LEADER"):
        monkeypatch.setenv(f"TAO_{name}_PASSWORD", "secret")
    monkeypatch.setenv("TAO_DATABASE_CA", str(TestAuthority(tmp_path).file))
    assert [each.user for each in all_logins()] == ["tao_admin", "tao_replicator", "tao_admin", "tao_leader"]
    assert all(each.tls is not None for each in all_logins())


def test_a_development_cluster_with_certificates_encrypts_every_account(give: Give, tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write(ClusterRecord(shape=Shape(), passwords=new_passwords(), options=StartOptions(tls=True)))
    issue_certificates(folder, {OPERATOR: ""})
    give(state_dir=tmp_path)
    assert all(each.tls is not None for each in all_logins())


def test_a_missing_password_names_the_way_to_do_without(
    give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAO_ADMIN_PASSWORD", raising=False)
    give(file=tmp_path / "topology.json", state_dir=tmp_path / "s")
    with pytest.raises(OperatorError, match=r"TAO_ADMIN_PASSWORD is not set: .*--state-dir"):
        administrator_login()


def test_all_missing_passwords_are_named_at_once(give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADMIN", "REPLICATOR", "LEADER"):
        monkeypatch.delenv(f"TAO_{name}_PASSWORD", raising=False)
    give(file=tmp_path / "topology.json", state_dir=tmp_path / "s")
    with pytest.raises(OperatorError, match=r"^TAO_ADMIN_PASSWORD, TAO_REPLICATOR_\w+, TAO_LEADER_\w+ are not set"):
        mover_login()
    monkeypatch.setenv("TAO_REPLICATOR_PASSWORD", "secret")
    with pytest.raises(OperatorError, match=r"^TAO_ADMIN_PASSWORD, TAO_LEADER_PASSWORD are not set"):
        mover_login()
    assert passwords_of("TAO_REPLICATOR_PASSWORD") == ("secret",)
