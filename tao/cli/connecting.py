"""Which cluster a command talks to: the one named, else the development cluster of the current folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.frame import REGION
from tao.model.errors import OperatorError, RetryableError

if TYPE_CHECKING:
    from tao.client import ClientSettings, Graph
    from tao.model.topology import Topology
    from tao.wire.tls import TlsFiles

DEFAULT_STATE_DIR = Path(".tao-dev")
state_dir_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="Where data, logs and records of the cluster lie.",
)


def target_of(connect: str | None) -> str:
    """The address or topology file to connect to. Raises `OperatorError` when none is named and no cluster runs."""
    if connect:
        return connect
    from tao.devcluster.state_folder import StateFolder

    folder = StateFolder(DEFAULT_STATE_DIR)
    record = folder.read()
    if record is None or not folder.running(record):
        raise OperatorError(
            "no cluster runs in ./.tao-dev: start one with `tao dev up`, or name one with --connect or TAO_CONNECT"
        )
    return str(folder.topology)


def region_of_command(target: str) -> str | None:
    """The region of ``--region``, else the first of the topology file; None: that of the follower at the address.

    Raises `TaoError` for a file or an address that is none.
    """
    from tao.client.configuration import read_target
    from tao.model.topology import Topology

    context = click.get_current_context(silent=True)
    if context is not None and (region := context.meta.get(REGION)):
        return str(region)
    found = read_target(target)
    return found.regions[0].name if isinstance(found, Topology) else None


def load_topology(path: Path) -> Topology:
    """The topology document in a file. Raises `OperatorError` when it cannot be read or is wrong."""
    from tao.topology.document import parse_topology

    try:
        text = path.read_bytes()
    except OSError as error:
        raise OperatorError(f"cannot read the topology file {path}: {error.strerror}") from error
    return parse_topology(text, str(path))


def tls_of_command() -> TlsFiles | None:
    """What the running command was told by ``tao --ca`` and its companions; None: plain connections."""
    from tao.wire.tls import TlsFiles

    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context is not None else None
    return found.if_set if isinstance(found, TlsFiles) else None


@asynccontextmanager
async def graph_of(connect: str | None, settings: ClientSettings | None = None) -> AsyncIterator[Graph]:
    """A client of the cluster, closed at the end; it shows the secret in ``TAO_TOKEN``, if there is one. Raises as
    `target_of` and as connecting does."""
    from tao.client import ClientSettings, Credentials
    from tao.client import connect as open_graph

    credentials = Credentials("operator", "client", os.environ.get("TAO_TOKEN", ""))
    settings = replace(settings or ClientSettings(), tls=tls_of_command())
    target = target_of(connect)
    region = region_of_command(target)
    with pointing_to_stats():
        async with open_graph(target, region=region, settings=settings, credentials=credentials) as graph:
            yield graph


@contextmanager
def pointing_to_stats() -> Iterator[None]:
    """A request that another attempt may help says where to look meanwhile; `tao stats` itself does not."""
    try:
        yield
    except RetryableError as error:
        context = click.get_current_context(silent=True)
        if context is not None and context.info_name != "stats":
            error.add_note("`tao stats` shows which servers answer")
        raise
