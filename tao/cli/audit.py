"""`tao audit`: check that audit logs are whole and as they were written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

import click

from tao.cli.frame import CommandGroup, show
from tao.cli.options import json_option
from tao.model.errors import OperatorError, unreadable
from tao.observability.audit_records import CHAIN_START, Fault, verify
from tao.terminal import counted

_MAX_RECORD_BYTES: Final = 1 << 20
_LAST: Final = 1 << 64


class HashValue(click.ParamType[str]):
    """A SHA-256 in hexadecimal digits."""

    name = "HASH"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the digits."""
        text = str(value).lower()
        if not re.fullmatch(r"[0-9a-f]{64}", text):
            self.fail(f"{value!r} is not a hash: give all its 64 hexadecimal digits", param, ctx)
        return text


@click.group(cls=CommandGroup)
def audit() -> None:
    """Check audit logs."""


@audit.command("verify")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--newest",
    type=HashValue(),
    help="A hash that the server has published in its log or as a metric: a record must have it. Without it, records "
    "that were cut off the end are not noticed.",
)
@click.option(
    "--after",
    type=HashValue(),
    help="The hash of the last record before these files, where older files were removed.  [default: they begin with "
    "record 1]",
)
@json_option
def verify_files(files: tuple[Path, ...], newest: str | None, after: str | None) -> int:
    """Check the FILES of one audit log, in any order: that no record was changed, removed, moved or added.

    It names the first line that does not fit. A line that a crash has cut off at the very end is reported, too; the
    server moves it aside when it starts again. Exit status 1 when a line does not fit, or no record has the newest
    hash.
    """
    ordered = sorted(files, key=_first_seq)
    places: list[tuple[Path, int]] = []
    verdict = verify(_lines(ordered, places), newest=newest or "", after=after or CHAIN_START.hash)
    seq, digest = verdict.end
    document = {
        "whole": verdict.fault is None,
        "records": verdict.records,
        "newest": {"seq": seq, "hash": digest},
        "fault": verdict.fault and verdict.fault.value,
        "file": None,
        "line": None,
        "detail": verdict.detail,
    }
    if verdict.fault not in (None, Fault.TRUNCATED):
        file, line = places[-1]
        document |= {"file": str(file), "line": line}

    def text() -> None:
        whole = counted(verdict.records, "record")
        if verdict.fault is None:
            end = "" if newest else "; give a published hash with --newest to notice records cut off the end"
            click.echo(f"whole: {whole}, the newest is {seq} with hash {digest}{end}")
            return
        where = f"{document['file']}:{document['line']}: " if document["file"] else ""
        click.echo(f"not whole after {whole}: {where}{verdict.fault.value}: {verdict.detail}")

    show(document, text)
    return int(verdict.fault is not None)


def _lines(files: list[Path], places: list[tuple[Path, int]]) -> Iterator[bytes]:
    """Yield the lines of all files; the last of ``places`` is the file and number of the line at hand."""
    places.append((files[0], 0))
    with ExitStack() as stack:
        for path in files:
            for number, line in enumerate(stack.enter_context(_opened(path)), 1):
                places[-1] = (path, number)
                yield line


def _first_seq(path: Path) -> int:
    """Return the number that a file's first record claims to have; a file without one comes last."""
    with _opened(path) as file:
        line = file.readline(_MAX_RECORD_BYTES)
    try:
        return int(json.loads(line)["seq"])
    except (ValueError, TypeError, LookupError):
        return _LAST


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise OperatorError(unreadable(path, error)) from error
