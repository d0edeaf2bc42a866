"""The options that several commands share, each defined once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Adds options to a command. (`Any`: a command's parameters are its own.)"""

DEFAULT_STATE_DIR: Final = Path(".tao-dev")
REGION_KEY: Final = "tao.region"
"""The key under which the running command's context keeps the value of ``--region``."""
_FILE: Final = click.Path(path_type=Path)


def _keep_region(context: click.Context, _: click.Parameter, region: str | None) -> None:
    context.meta[REGION_KEY] = region


json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
yes_option: Decorator = click.option("--yes", is_flag=True, help="Do it without asking for confirmation.")
token_option: Decorator = click.option(
    "--token", envvar="TAO_TOKEN", default="", help="The cluster's shared secret, if it has one."
)
connect_option: Decorator = click.option(
    "--connect",
    envvar="TAO_CONNECT",
    metavar="ADDRESS|FILE",
    help="A follower's host:port, or a topology file.  [default: the development cluster in ./.tao-dev]",
)
document_option: Decorator = click.option(
    "--connect",
    envvar="TAO_CONNECT",
    metavar="FILE",
    help="The topology file, which names the databases.  [default: the development cluster in ./.tao-dev]",
)
region_option: Decorator = click.option(
    "--region",
    envvar="TAO_REGION",
    expose_value=False,
    callback=_keep_region,
    help="The region whose followers are asked.  [default: the region of the named follower, else the first one]",
)
topology_option: Decorator = click.option(
    "--topology",
    "file",
    envvar="TAO_TOPOLOGY",
    type=_FILE,
    metavar="FILE",
    help="The topology document.  [default: that of the development cluster in ./.tao-dev]",
)
tier_option: Decorator = click.option(
    "--tier",
    required=True,
    metavar="TIER",
    help="The tier's name, or REGION/TIER where several regions have a tier of that name.",
)
state_dir_option: Decorator = click.option(
    "--state-dir",
    type=_FILE,
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="The folder that holds the cluster's data, logs and records.",
)


def combined(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options, listed in the help in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


reader_options: Decorator = combined(
    click.option("--schema", "schema_file", type=_FILE, help="The schema file of the cluster."),
    click.option("--reader-user", default="tao_reader", show_default=True, help="The read-only database account."),
    click.option(
        "--reader-password",
        envvar="TAO_READER_PASSWORD",
        help="Password of that account; better set TAO_READER_PASSWORD, which other users of the machine cannot see.",
    ),
)
database_options: Decorator = combined(reader_options, token_option, document_option, json_option)
"""Options of commands that read databases and caches."""
changing_options: Decorator = combined(topology_option, yes_option, json_option)
"""Options of commands that change the topology document."""
