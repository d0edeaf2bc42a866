"""The audit log's records of what a command changes directly: the topology document, databases, servers.

A command that changes something writes one record before it does, once it has the confirmation where it asks for one,
and one with the outcome when it ends. The caller is the account of the machine that runs the command.
"""

from __future__ import annotations

import os
import pwd
import socket
import time
from pathlib import Path
from typing import Final

import click
import msgspec

from tao.cli.options import given
from tao.model.errors import InvalidField, OperatorError, TaoError
from tao.observability.audit_log import AuditFile
from tao.observability.audit_records import AuditEvent, Outcome

_LOCK_SECONDS: Final = 5.0
"""Longest wait for another command that writes its records."""
_KEY: Final = "tao.action"
_UNRECORDED: Final = ("token", "password", "secret", "assignments")
"""Arguments that are secret, or values of fields: those whose names contain one of these."""


def begin_action(question: str = "") -> None:
    """Record that the running command begins, if there is an audit log of commands. ``question``: what was confirmed.

    Raises `OperatorError` when that cannot be recorded: then nothing must be changed."""
    path: Path | None = given("audit_log")
    context = click.get_current_context(silent=True)
    if path is None or context is None or _KEY in context.meta:
        return
    event = AuditEvent(
        time_ms=_now_ms(),
        server=socket.gethostname(),
        caller=f"operator/{_account()}",
        role="operator",
        action=context.command_path.partition(" ")[2],
        outcome=Outcome.UNKNOWN,
        details={"phase": "begun", **({"question": question} if question else {}), **_arguments(context)},
    )
    try:
        _append(path, event)
    except (OSError, OperatorError) as error:
        raise OperatorError(f"nothing was changed, because the audit log cannot record it: {error}") from error
    context.meta[_KEY] = event


def note_result(**details: object) -> None:
    """Have the record of the end say this, too, if there is one."""
    context = click.get_current_context(silent=True)
    if context is not None and _KEY in context.meta:
        event: AuditEvent = context.meta[_KEY]
        context.meta[_KEY] = msgspec.structs.replace(event, details={**event.details, **details})


def end_action(context: click.Context, result: object) -> None:
    """Record how the command has ended: ``result`` is its exit status, None for 0, or what it raised."""
    event: AuditEvent | None = context.meta.pop(_KEY, None)
    if event is None:
        return
    outcome, reason, message = _outcome(result)
    details = {**event.details, "phase": "ended"}
    ended = msgspec.structs.replace(
        event, time_ms=_now_ms(), outcome=outcome, reason=reason, message=message, details=details
    )
    try:
        _append(given("audit_log"), ended)
    except (OSError, OperatorError) as error:
        click.echo(f"tao: the outcome is not in the audit log: {error}", err=True)


def _outcome(result: object) -> tuple[Outcome, str, str]:
    if isinstance(result, SystemExit):
        result = result.code
    match result:
        case None | 0:
            return Outcome.SUCCESS, "", ""
        case int():
            return Outcome.FAILURE, f"EXIT_{result}", f"exit status {result}"
        case InvalidField():
            # Its message may quote the value.
            return Outcome.FAILURE, result.reason, ""
        case TaoError():
            return Outcome.FAILURE, result.reason, result.message
        case _:
            return Outcome.UNKNOWN, type(result).__name__, str(result)


def _append(path: Path, event: AuditEvent) -> None:
    file = AuditFile(path)
    try:
        file.open(_LOCK_SECONDS)
        file.append([event])
    finally:
        file.close()


def _arguments(context: click.Context) -> dict[str, object]:
    """Return the command's arguments and options as text, without those that are secret or were not given."""
    named = {**context.params, "topology": given("file"), "connect": given("connect")}
    return {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in named.items()
        if value not in (None, False, (), "") and not any(each in name for each in _UNRECORDED)
    }


def _account() -> str:
    """Return the account that runs the command, and behind it the one that has become root by sudo."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    before = os.environ.get("SUDO_USER", "")
    return f"{before} as {name}" if before else name


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
