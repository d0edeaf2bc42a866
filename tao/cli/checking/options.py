"""What the commands that read databases and caches have alike: their options, and names of types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.frame import document_option, json_option

if TYPE_CHECKING:
    from tao.schema.registry import Schema


def database_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where schema and databases are, and as whom to come in."""
    options = (
        click.option("--schema", "schema_file", type=click.Path(path_type=Path), help="Schema file of the cluster."),
        click.option("--reader-user", default="tao_reader", show_default=True, help="Read-only database account."),
        click.option(
            "--reader-password", envvar="TAO_READER_PASSWORD", help="Its password; better in the environment."
        ),
        click.option("--token", envvar="TAO_TOKEN", default="", help="The cluster's shared secret, if it has one."),
        document_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def name_of(schema: Schema, atype: int) -> str:
    """Its number, when the given schema is older than the type; empty for 0, which is none."""
    found = next((each.name for each in schema.assocs if each.number == atype), "")
    return found or (str(atype) if atype else "")
