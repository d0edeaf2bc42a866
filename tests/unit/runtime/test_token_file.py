"""The file of accepted tokens: what it may say, how it is changed, and how a server follows it."""

from __future__ import annotations

import hashlib
import math
import stat
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tao.follower.settings import FollowerSettings
from tao.model.errors import SettingsError, Unauthorized
from tao.observability.logs import logger
from tao.runtime.credentials import AcceptedCredentialFiles, CredentialChange, CredentialSources
from tao.runtime.settings import parse_settings
from tao.runtime.token_file import (
    TokenEntry,
    change_tokens,
    dump_tokens,
    entry_for,
    load_tokens,
    new_secret,
    parse_tokens,
)
from tao.wire.identity import AcceptedToken, Credentials, ShownCredentials, digest_of

DIGEST = digest_of("secret").hex()
LOG = logger("test")


def shown(token: str, role: str = "client", name: str = "x") -> ShownCredentials:
    return ShownCredentials(Credentials(name, role, token))


def entry_text(**fields: str) -> str:
    given = {"id": "web-1", "caller": "web", "sha256": DIGEST} | fields
    lines = [f"  {name}: {value}" for name, value in given.items() if value]
    return "tokens:\n-" + "\n".join(lines)[1:] + "\n"


def test_an_entry_becomes_an_accepted_token() -> None:
    (entry,) = parse_tokens(entry_text(expires="2027-01-31T00:00:00Z"), "tokens.yaml")
    expires = datetime(2027, 1, 31, tzinfo=UTC)
    assert entry == TokenEntry(id="web-1", caller="web", role="client", sha256=DIGEST, expires=expires)
    assert entry.accepted() == AcceptedToken("web-1", "client", digest_of("secret"), "web", expires.timestamp())
    (endless,) = parse_tokens(entry_text(role="leader", caller=""), "tokens.yaml")
    assert (endless.role, endless.caller, endless.expires_at) == ("leader", "", math.inf)
    assert parse_tokens("tokens: []", "tokens.yaml") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (entry_text(id=""), "id"),
        (entry_text(caller=""), "a token of a client needs an id and a caller"),
        (entry_text(caller="", role="operator"), "a token of a operator needs an id and a caller"),
        (entry_text(caller="leader/east-leader-1"), "'leader/east-leader-1' is a server's name"),
        (entry_text(caller="operator"), "'operator' is a server's name"),
        (entry_text(caller="a b"), "the caller 'a b' is not a name"),
        (entry_text(caller="a" * 101), "at most 100"),
        (entry_text(sha256="secret"), "sha256"),
        (entry_text(role="king"), "king"),
        (entry_text(expires="2027-01-31T00:00:00"), "no time zone"),
        (entry_text(expires="2027-01-31"), "datetime"),
        (entry_text(expirse="2027-01-31T00:00:00Z"), "expirse"),
        (entry_text() + entry_text().removeprefix("tokens:\n"), "two tokens have the id 'web-1'"),
        ("", "is empty"),
        ("\n", "is empty"),
        ("{}", "tokens"),
        ("# nothing", "object"),
        ("tokens: 3", "tokens"),
        ("a: b: c", "not valid YAML: mapping values are not allowed here$"),
        ("- 1", "object"),
    ],
)
def test_a_wrong_file_is_rejected_with_its_name_and_the_fault(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=rf"^tokens\.yaml(:1)?: .*{says}"):
        parse_tokens(text, "tokens.yaml")


def test_tokens_are_random_and_ids_count_up() -> None:
    secret = new_secret()
    assert secret != new_secret()
    assert len(secret) > 40
    first = entry_for(secret, "team/web", "client", None, [])
    assert first.id == "team-web-1"
    assert entry_for(secret, "team/web", "client", None, ["team-web-1"]).id == "team-web-2"
    assert entry_for(secret, "", "leader", None, []).id == "leader-1"
    assert secret not in dump_tokens((first,))


def test_a_change_keeps_the_other_entries_and_the_mode_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    expires = datetime(2027, 1, 31, tzinfo=UTC)
    entries = (entry_for("a", "web", "client", expires, []), entry_for("b", "", "leader", None, []))
    change_tokens(path, lambda before: (*before, entries[0]))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o600)
    change_tokens(path, lambda before: (*before, entries[1]))
    assert load_tokens(path) == entries
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["tokens.yaml"]


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens: [")
    with pytest.raises(SettingsError, match=r"tokens\.yaml:1: not valid YAML"):
        change_tokens(path, lambda before: before)
    assert path.read_text() == "tokens: ["
    with pytest.raises(SettingsError, match="cannot be written"):
        change_tokens(tmp_path / "missing" / "tokens.yaml", lambda before: before)


async def test_a_server_follows_the_file_and_keeps_what_it_accepts_when_the_file_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    old, new = (entry_for(secret, "web", "client", None, []) for secret in ("old", "new"))
    path.write_text(dump_tokens((old,)))
    files = AcceptedCredentialFiles(CredentialSources(accepted_tokens_file=path), LOG)
    await files.load(lambda *_: False)
    admission = files.authenticator.admit(shown("old"))
    assert admission.peer.caller == "web"

    async def changed(text: str) -> None:
        path.write_text(text)
        await files.look()

    for wrong in ("tokens: [", ""):
        await changed(wrong)
        assert admission.refusal() is None
    await changed(dump_tokens((old, TokenEntry(id="web-2", caller="web", sha256=new.sha256))))
    assert admission.refusal() is None
    assert files.authenticator.identify(shown("new")).caller == "web"
    await changed(dump_tokens((new,)))
    refusal = admission.refusal()
    assert isinstance(refusal, Unauthorized)
    await changed(dump_tokens(()))
    with pytest.raises(Unauthorized):  # not: open to everyone
        files.authenticator.identify(shown("new"))


async def test_a_server_says_which_tokens_a_changed_file_has_added_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    web, ann = entry_for("old", "web", "client", None, []), entry_for("ann's", "ann", "operator", None, [])
    path.write_text(dump_tokens((web,)))
    files = AcceptedCredentialFiles(CredentialSources(accepted_tokens_file=path), LOG)
    changes: list[CredentialChange] = []
    files.on_changed = changes.append
    await files.load(lambda *_: False)
    first = hashlib.sha256(path.read_bytes()).hexdigest()
    assert files.digests == {"accepted_tokens": first}
    shorter = msgspec.structs.replace(ann, expires=datetime(2030, 1, 1, tzinfo=UTC))
    for text in (dump_tokens((web, ann)), "tokens: [", dump_tokens((ann,)), dump_tokens((shorter,))):
        path.write_text(text)
        await files.look()
    assert [(each.added, each.removed) for each in changes] == [
        (("ann-1 operator ann",), ()),
        ((), ("web-1 client web",)),
        (("ann-1 operator ann",), ("ann-1 operator ann",)),
    ]
    assert changes[0].former_sha256 == first
    assert [each.former_sha256 for each in changes[1:]] == [each.sha256 for each in changes[:-1]]
    assert files.digests == {"accepted_tokens": hashlib.sha256(path.read_bytes()).hexdigest()}


async def test_a_file_that_is_missing_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens.yaml"
    files = AcceptedCredentialFiles(CredentialSources(accepted_tokens_file=path), LOG)
    text = dump_tokens((entry_for("secret", "web", "client", None, []),))
    path.write_text(text)
    await files.load(lambda *_: False)
    for times in (1, 2):
        path.unlink()
        for _ in range(3):
            await files.look()
        assert files.authenticator.identify(shown("secret")).caller == "web"
        assert sum("what it said before stays in use" in each for each in caplog.messages) == times
        path.write_text(text)
        await files.look()


@pytest.mark.parametrize(
    "sources", [CredentialSources(token="shared"), CredentialSources(token_file=Path("/etc/tao/token"))]
)
async def test_a_token_to_show_is_accepted_from_nobody_and_needs_a_file_of_accepted_ones(
    sources: CredentialSources,
) -> None:
    with pytest.raises(SettingsError, match=r"not accepted any more.* --existing.* set accepted_tokens_file"):
        await AcceptedCredentialFiles(sources, LOG).load(lambda *_: True)


def test_a_secret_of_all_applications_is_no_setting_any_more() -> None:
    found = {"name": "f-1", "topology_file": "t.json", "schema_file": "s.yaml", "client_token": "secret"}
    with pytest.raises(SettingsError, match="client_token: there is no such setting"):
        parse_settings(found, FollowerSettings, "follower.yaml")


async def test_without_settings_of_credentials_every_peer_is_believed() -> None:
    nothing = AcceptedCredentialFiles(CredentialSources(), LOG)
    await nothing.load(lambda *_: False)
    assert nothing.authenticator.identify(shown("", "leader", "l-1")).caller == ""


def test_a_token_is_read_from_its_file_for_each_connection(tmp_path: Path) -> None:
    path = tmp_path / "token"
    credentials = Credentials("web", "client", token_file=path)
    with pytest.raises(SettingsError, match="cannot be read"):
        credentials.with_token()
    path.write_text("\n")
    with pytest.raises(SettingsError, match="no secret in this file"):
        credentials.with_token()
    for secret in ("first", "second"):
        path.write_text(f"{secret}\n")
        assert credentials.with_token() == Credentials("web", "client", secret)
