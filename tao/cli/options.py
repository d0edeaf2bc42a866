"""The options that several commands share, each defined once, and what they were given.

A shared option is accepted after a command and before it (``tao --json get 7``); the one after the command wins. A
command that has a parameter of the option's name receives the value; all others leave it to the functions that use it,
which ask `given`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from tao.etcd.location import EtcdLocation, Location, location_of
from tao.model.errors import InvalidArgument, OperatorError, SettingsError, unreadable

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Adds options to a command. (`Any`: a command's parameters are its own.)"""

DEFAULT_STATE_DIR: Final = Path(".tao-dev")
_FILE: Final = click.Path(path_type=Path)
PLACE_METAVAR: Final = "FILE|URL"


def given(name: str) -> Any:  # Any: each option has its own type
    """Return the value of a shared option of the running command; None when the command does not have it."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(f"tao.{name}")


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> object:
    name = str(parameter.name)
    if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        context.meta[f"tao.{name}"] = value
    return context.meta.setdefault(f"tao.{name}", value)


def shared(*names: str, **attributes: Any) -> Decorator:  # Any: as in click
    """Return the decorator of a shared option."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        option = click.option(*names, callback=_keep, expose_value=False, show_envvar=True, **attributes)(command)
        added: click.Parameter = option.__click_params__[-1]  # type: ignore[attr-defined]  # click keeps them there
        added.expose_value = added.name in inspect.signature(command).parameters
        return option

    return add


def combined(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options, listed in the help in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class IntRange(click.IntRange):
    """A whole number within bounds, called like one without: click says "integer range" in errors and help texts."""

    name = "integer"


class FloatRange(click.FloatRange):
    """A number within bounds, called like one without."""

    name = "float"


class InputFile(click.ParamType[Path]):
    """A file that is there and can be read: a wrong path is reported before a command does anything."""

    name = "file"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path. Raises `OperatorError`, in the words that every file that cannot be read has."""
        path = Path(str(value))
        try:
            path.open("rb").close()
        except OSError as error:
            raise OperatorError(unreadable(path, error)) from error
        return path


class Place(click.ParamType[Location]):
    """The path of a file, or the URL of a prefix in etcd."""

    name = "file|url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        """Return the place. Fails for a wrong URL."""
        if isinstance(value, Path | EtcdLocation):
            return value
        try:
            return location_of(str(value))
        except SettingsError as error:
            self.fail(error.message, param, ctx)


class AdminAddress(click.ParamType[str]):
    """The ``HOST:PORT`` of an admin port."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the address. Fails for another form."""
        from tao.wire.address import TcpAddress, parse_address

        text = str(value)
        try:
            is_one = isinstance(parse_address(text), TcpAddress)
        except InvalidArgument:
            is_one = False
        if not is_one:
            self.fail(f"{text!r} is not HOST:PORT", param, ctx)
        return text


json_option: Decorator = shared("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
yes_option: Decorator = shared("--yes", is_flag=True, help="Do it without asking for confirmation.")
token_file_option: Decorator = shared(
    "--token-file",
    envvar="TAO_TOKEN_FILE",
    type=_FILE,
    help="The file of the token to show to servers.  [default: the token itself is in TAO_TOKEN]",
)
state_dir_option: Decorator = shared(
    "--state-dir",
    type=_FILE,
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="The folder that holds the development cluster's data, logs and records.",
)
_connect_option: Decorator = shared(
    "--connect",
    envvar="TAO_CONNECT",
    metavar="ADDRESS|FILE|URL",
    help="A follower's host:port, or the topology: a file, or etcd://HOST:PORT,…/PREFIX.  [default: the development "
    "cluster in --state-dir]",
)
_document_option: Decorator = shared(
    "--connect",
    envvar="TAO_CONNECT",
    metavar=PLACE_METAVAR,
    help="The topology, which names the databases: a file, or etcd://HOST:PORT,…/PREFIX.  [default: the development "
    "cluster in --state-dir]",
)
_region_option: Decorator = shared(
    "--region",
    envvar="TAO_REGION",
    help="The region whose followers are asked.  [default: the region of the named follower, else the first one]",
)
_topology_option: Decorator = shared(
    "--topology",
    "file",
    envvar="TAO_TOPOLOGY",
    type=Place(),
    metavar=PLACE_METAVAR,
    help="The topology document: a file, or etcd://HOST:PORT,…/PREFIX (etcds:// with TLS).  [default: that of the "
    "development cluster in --state-dir]",
)
audit_log_option: Decorator = shared(
    "--audit-log",
    type=_FILE,
    envvar="TAO_AUDIT_LOG",
    metavar="FILE",
    help="Record what the command changes in this audit log, before and after. Commands on one machine may share it; a "
    "server has one of its own.",
)
tier_option: Decorator = click.option(
    "--tier",
    required=True,
    metavar="TIER",
    help="The tier's name, or REGION/TIER where several regions have a tier of that name.",
)
global_options: Decorator = combined(_connect_option, state_dir_option, json_option)
"""Options that `tao` itself takes for the command that follows, and most commands take."""
region_options: Decorator = combined(_connect_option, _region_option, state_dir_option, json_option)
"""Options of commands that ask the followers of one region."""
reader_options: Decorator = combined(
    shared(
        "--schema",
        "schema_file",
        type=Place(),
        metavar=PLACE_METAVAR,
        help="The schema of the cluster: a file, or etcd://HOST:PORT,…/PREFIX.",
    ),
    shared(
        "--reader-user",
        default="tao_reader",
        show_default=True,
        help="The read-only database account; its password is taken from TAO_READER_PASSWORD.",
    ),
    _document_option,
    state_dir_option,
)
"""Options of commands that read the databases."""
topology_options: Decorator = combined(_topology_option, state_dir_option, json_option)
"""Options of commands that read the topology document."""
changing_options: Decorator = combined(topology_options, yes_option)
"""Options of commands that change the topology document, or a server that it names."""
