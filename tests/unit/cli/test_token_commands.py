"""`tao token`: a token is shown once, listed by its id, and revoked; and no command takes a secret as an option."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.runtime.token_file import load_tokens
from tao.wire.identity import digest_of


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(tao, ["token", *arguments, "--file", "tokens.yaml"], input=typed, catch_exceptions=False)


def test_a_new_token_is_printed_once_and_kept_as_its_digest() -> None:
    made = call("new", "web", "--days", "90")
    secret = made.stdout.strip()
    (entry,) = load_tokens(Path("tokens.yaml"))
    assert (entry.id, entry.caller, entry.role, entry.sha256) == ("web-1", "web", "client", digest_of(secret).hex())
    assert entry.expires is not None
    assert secret not in Path("tokens.yaml").read_text()
    second = json.loads(call("new", "web", "--json").stdout)
    assert (second["id"], second["expires"], second["state"]) == ("web-2", None, "valid")
    assert digest_of(second["token"]).hex() == load_tokens(Path("tokens.yaml"))[1].sha256
    shown = json.loads(call("list", "--json").stdout)["tokens"]
    assert [each["id"] for each in shown] == ["web-1", "web-2"]
    assert all("token" not in each for each in shown)
    assert "web-2" in call("list").stdout


def test_a_list_says_which_file_it_is_of_and_without_one_what_names_it() -> None:
    call("new", "web")
    call("revoke", "web-1", "--yes")
    listed = call("list")
    assert (listed.stdout, listed.stderr) == ("", "tokens.yaml accepts 0 tokens\n")
    call("new", "web")
    assert call("list").stderr == "tokens.yaml accepts 1 token\n"
    assert call("list", "--json").stderr == ""
    unnamed = CliRunner().invoke(tao, ["token", "list"], env={"TAO_ACCEPTED_TOKENS": ""})
    assert unnamed.exit_code == 2
    assert "'--file' (env var: 'TAO_ACCEPTED_TOKENS')" in unnamed.stderr


def test_a_token_is_written_to_a_file_of_one_account_instead() -> None:
    made = call("new", "--role", "leader", "--out", "leader.token")
    assert made.stdout == ""
    assert stat.S_IMODE(Path("leader.token").stat().st_mode) == 0o600
    (entry,) = load_tokens(Path("tokens.yaml"))
    assert (entry.id, entry.role, entry.caller) == ("leader-1", "leader", "")
    assert entry.sha256 == digest_of(Path("leader.token").read_text().strip()).hex()
    again = call("new", "--role", "leader", "--out", "leader.token")
    assert (again.exit_code, len(load_tokens(Path("tokens.yaml")))) == (2, 1)
    refused = call("new", "--role", "operator", "--out", "operator.token")
    assert (refused.exit_code, Path("operator.token").exists()) == (2, False)
    assert refused.stderr == "tao: a token of the role operator needs a CALLER: tao token new NAME --role operator\n"


def test_a_token_in_use_is_accepted_for_another_role_too() -> None:
    for role in ("leader", "tailer"):
        made = call("new", "--role", role, "--existing", typed="the shared secret\n")
        assert (made.exit_code, made.stdout) == (0, "")
    assert {each.sha256 for each in load_tokens(Path("tokens.yaml"))} == {digest_of("the shared secret").hex()}
    assert call("new", "web", "--existing").exit_code == 2


def test_a_revoked_token_is_gone_and_an_unknown_one_is_named() -> None:
    call("new", "web")
    assert call("revoke", "web-1", typed="n\n").exit_code == 1
    assert len(load_tokens(Path("tokens.yaml"))) == 1
    assert call("revoke", "web-1", "--yes").exit_code == 0
    assert load_tokens(Path("tokens.yaml")) == ()
    unknown = call("revoke", "web-1", "--yes")
    assert (unknown.exit_code, "web-1" in unknown.stderr) == (2, True)
    assert call("list").exit_code == 0


def test_no_option_takes_a_secret() -> None:
    def options(group: click.Group) -> Iterator[str]:
        yield from (name for option in group.params for name in option.opts)
        for command in group.commands.values():
            if isinstance(command, click.Group):
                yield from options(command)
            else:
                yield from (name for option in command.params for name in option.opts)

    for name in list(tao.commands):
        tao.commands.get(name)
    assert [name for name in options(tao) if name in ("--token", "--secret") or "password" in name] == []
