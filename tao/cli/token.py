"""`tao token`: make, list and revoke the tokens that servers accept, in the file that their settings name.

The file holds digests, so a token is shown once, when it is made. Servers follow the file within a second: copy it to
every machine, as the schema.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast, get_args

import click

from tao.cli.action_record import note_result
from tao.cli.frame import CommandGroup, ask, begin, show
from tao.cli.options import FloatRange, combined, given, json_option, yes_option
from tao.model.errors import OperatorError, unwritable
from tao.runtime.token_file import TokenEntry, TokenRole, change_tokens, entry_for, load_tokens, new_secret
from tao.terminal import counted, print_records
from tao.wire.identity import CLIENT

_file_options = combined(
    click.option(
        "--file",
        type=click.Path(path_type=Path),
        envvar="TAO_ACCEPTED_TOKENS",
        show_envvar=True,
        required=True,
        metavar="FILE",
        help="The file of the accepted tokens: accepted_tokens_file in the servers' settings.",
    ),
    json_option,
)


@click.group(cls=CommandGroup)
def token() -> None:
    """Make, list and revoke the tokens that servers accept.

    Several tokens of a caller may be valid at a time. To replace one: make a new one, have every process show it, then
    revoke the old one."""


@token.command()
@click.argument("caller", default="")
@click.option(
    "--role",
    type=click.Choice(get_args(TokenRole)),
    default="client",
    show_default=True,
    help="The role that the token vouches for.",
)
@click.option("--days", type=FloatRange(min=0, min_open=True), help="Days until it runs out.  [default: never]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the token to this new file, which only your account can read, and do not print it.",
)
@click.option("--existing", is_flag=True, help="Accept a token that is in use already: read it from standard input.")
@_file_options
def new(caller: str, role: str, days: float | None, out: Path | None, existing: bool, file: Path) -> None:
    """Make a token, and accept it.

    CALLER is the application's name, by which rights and audit know it, or the operator's. For the role of a server it
    is the only server that may show the token; without it, every server of that role may."""
    if not caller and role in (CLIENT, "operator"):
        raise OperatorError(f"a token of the role {role} needs a CALLER: tao token new NAME --role {role}")
    secret = sys.stdin.readline().strip() if existing else new_secret()
    if not secret:
        raise OperatorError("--existing reads the token from standard input, which is empty")
    expires = None if days is None else (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
    made: list[TokenEntry] = []

    def add(tokens: tuple[TokenEntry, ...]) -> tuple[TokenEntry, ...]:
        made.append(entry_for(secret, caller, cast("TokenRole", role), expires, [each.id for each in tokens]))
        return (*tokens, *made)

    begin()
    if out is not None:
        _write_secret(out, secret)
    try:
        change_tokens(file, add)
    except BaseException:
        if out is not None:
            out.unlink()
        raise
    (entry,) = made
    note_result(id=entry.id)
    printed = None if out is not None or existing else secret
    show({**_fields(entry), "token": printed}, lambda: _say(entry, file, out, printed))


def _say(entry: TokenEntry, file: Path, out: Path | None, printed: str | None) -> None:
    click.echo(f"token {entry.id} is accepted by the servers that read {file}", err=True)
    if out is not None:
        click.echo(f"it is in {out}: set token_file to it, or TAO_TOKEN_FILE", err=True)
    if printed is not None:
        click.echo("it is shown this once:", err=True)
        click.echo(printed)


def _write_secret(path: Path, secret: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OperatorError(unwritable(path, error)) from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{secret}\n")


@token.command("list")
@_file_options
def list_tokens(file: Path) -> None:
    """List the accepted tokens: their ids, callers, roles and ends."""
    rows = [_fields(each) for each in load_tokens(file)]
    if not given("as_json"):
        click.echo(f"{file} accepts {counted(len(rows), 'token')}", err=True)
    show({"tokens": rows}, lambda: print_records(rows))


@token.command()
@click.argument("id")
@_file_options
@yes_option
def revoke(id: str, file: Path) -> None:  # noqa: A002 - the argument's name in the help
    """Accept the token ID no longer. Connections that were opened with it end within seconds."""
    found = next((each for each in load_tokens(file) if each.id == id), None)
    if found is None:
        raise OperatorError(f"{file}: there is no token {id!r}; `tao token list` shows all")
    ask(f"Accept token {id} of {found.caller or f'every {found.role}'} no longer?")
    change_tokens(file, lambda tokens: tuple(each for each in tokens if each.id != id))
    show({"revoked": id}, lambda: click.echo(f"token {id} is revoked"))


def _fields(entry: TokenEntry) -> dict[str, str | None]:
    expired = entry.expires is not None and entry.expires <= datetime.now(UTC)
    return {
        "id": entry.id,
        "caller": entry.caller or None,
        "role": entry.role,
        "expires": None if entry.expires is None else entry.expires.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "state": "expired" if expired else "valid",
    }
