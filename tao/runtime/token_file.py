"""The file of the accepted tokens: YAML outside, accepted tokens inside. It holds digests and no secret.

    tokens:
    - id: web-1
      caller: web
      role: client
      sha256: 5e8f…
      expires: 2027-01-31T00:00:00Z

An entry of a client names the caller. One of a server may name the only server that it vouches for; without a name,
every server of that role in the topology may show it. An operator's names the operator.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import yaml

from tao.model.errors import SettingsError, unreadable, unwritable
from tao.schema.plain_data import yaml_fault
from tao.wire.identity import CLIENT, SERVER_ROLES, AcceptedToken, digest_of

TokenRole = Literal["client", "follower", "leader", "tailer", "watcher", "worker", "operator"]

_SECRET_BYTES: Final = 32
_PREFIX: Final = "tao_"
"""Begins every token, so that a scanner of repositories and logs can find one that leaked."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_MAX_NAME_LENGTH: Final = 100


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One token. ``id`` names it for people."""

    id: str
    caller: str = ""
    role: TokenRole = "client"
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", description="64 hexadecimal digits")]
    expires: datetime | None = None

    @property
    def expires_at(self) -> float:
        """The time at which the token expires, in seconds since 1970; infinity for never."""
        return math.inf if self.expires is None else self.expires.timestamp()

    def accepted(self) -> AcceptedToken:
        """Return the token as a server accepts it."""
        return AcceptedToken(self.id, self.role, bytes.fromhex(self.sha256), self.caller, self.expires_at)


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[TokenEntry, ...]


def parse_tokens(text: str, source: str) -> tuple[TokenEntry, ...]:
    """Return the entries of a file. Raises `SettingsError`, which names the entry and what is wrong with it. An empty
    text is wrong, because a file is empty for a moment while it is copied; a file without tokens says so."""
    if not text.strip():
        raise SettingsError(f"{source}: is empty; a file that accepts no token has `tokens: []`")
    try:
        tokens = msgspec.convert(yaml.safe_load(text), _Document).tokens
    except yaml.YAMLError as error:
        raise SettingsError(yaml_fault(error, source)) from error
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {error}") from error
    ids: set[str] = set()
    for token in tokens:
        if token.id in ids:
            raise SettingsError(f"{source}: two tokens have the id {token.id!r}; give each its own")
        ids.add(token.id)
        _check(token, source)
    return tokens


def _check(token: TokenEntry, source: str) -> None:
    for what, name in (("id", token.id), ("caller", token.caller)):
        if name and not (_NAME.fullmatch(name) and len(name) <= _MAX_NAME_LENGTH):
            raise SettingsError(
                f"{source}: token {token.id!r}: the {what} {name!r} is not a name of at most {_MAX_NAME_LENGTH} "
                "letters, digits, '.', '_', '-', and '/' between them"
            )
    if not token.id or (not token.caller and token.role in (CLIENT, "operator")):
        raise SettingsError(f"{source}: token {token.id!r}: a token of a {token.role} needs an id and a caller")
    if token.role == CLIENT and token.caller.partition("/")[0] in SERVER_ROLES:
        raise SettingsError(f"{source}: token {token.id!r}: the caller {token.caller!r} is a server's name")
    if token.expires is not None and token.expires.tzinfo is None:
        raise SettingsError(f"{source}: token {token.id!r}: expires has no time zone: {token.expires.isoformat()}Z?")


def new_secret() -> str:
    """Return a new token."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def entry_for(
    secret: str,
    caller: str,
    role: TokenRole,
    expires: datetime | None,
    taken: Iterable[str],
) -> TokenEntry:
    """Return an entry for a token, with an id made of caller or role that is not ``taken``. Raises `SettingsError`."""
    ids, stem, number = set(taken), (caller or role).replace("/", "-"), 1
    while f"{stem}-{number}" in ids:
        number += 1
    entry = TokenEntry(id=f"{stem}-{number}", caller=caller, role=role, sha256=digest_of(secret).hex(), expires=expires)
    _check(entry, "tao token new")
    return entry


def load_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Return the entries of a file. Raises `SettingsError`."""
    try:
        return parse_tokens(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(unreadable(path, error)) from error


def change_tokens(path: Path, change: Callable[[tuple[TokenEntry, ...]], tuple[TokenEntry, ...]]) -> None:
    """Replace the entries of a file, which need not exist yet, in one step that no other change comes between. Raises
    `SettingsError`, and what ``change`` raises."""
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise SettingsError(unwritable(path, error)) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _replace(path, dump_tokens(change(load_tokens(path) if path.exists() else ())))
    except OSError as error:
        raise SettingsError(unwritable(path, error)) from error
    finally:
        os.close(folder)


def dump_tokens(tokens: tuple[TokenEntry, ...]) -> str:
    """Return the text of a file with these entries."""
    shown = [
        {**msgspec.structs.asdict(token), "expires": token.expires and token.expires.astimezone(UTC)}
        for token in tokens
    ]
    kept = [{name: value for name, value in each.items() if value not in ("", None)} for each in shown]
    return yaml.safe_dump({"tokens": kept}, sort_keys=False)


def _replace(path: Path, text: str) -> None:
    """Write the file under another name and rename it, so that a reader finds the old entries or the new ones."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                before = path.stat()
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
                with suppress(PermissionError):  # only the administrator may give a file away
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            else:
                os.fchmod(descriptor, 0o640)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
