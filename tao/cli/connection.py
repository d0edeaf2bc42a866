"""Finds the cluster that a command talks to: the one that its options name, else the one in ``--state-dir``.

The development cluster is imported when it is used, because an installation of servers does not have it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from tao.admin.connection import ClusterTarget, open_graph, operator_links
from tao.cli.frame import run
from tao.cli.options import given
from tao.client import Graph
from tao.etcd.location import Location
from tao.model.errors import OperatorError, RetryableError
from tao.model.topology import Topology
from tao.wire.identity import read_secret
from tao.wire.links import Links
from tao.wire.tls import TlsFiles

if TYPE_CHECKING:
    from tao.devcluster.state_folder import StateFolder

_Result = TypeVar("_Result")


def target_of() -> ClusterTarget:
    """Return the cluster that ``--connect`` names, else the running development cluster.

    Raises `OperatorError` when no cluster is named and none runs."""
    return ClusterTarget(
        address=given("connect") or _development_topology(),
        region=given("region"),
        tls=tls_of_command(),
        secret=secret_of_command(),
    )


def state_folder() -> StateFolder:
    """Return the folder of the development cluster."""
    from tao.devcluster.state_folder import StateFolder

    return StateFolder(given("state_dir"))


def _development_topology() -> str:
    folder = state_folder()
    record = folder.read()
    if record is None or not folder.running(record):
        raise OperatorError(
            f"no cluster runs in {given('state_dir')}: start one with {folder.command('up')}, or name one with "
            "--connect or TAO_CONNECT"
        )
    return str(folder.place_of_topology())


def tls_of_command() -> TlsFiles | None:
    """Return the certificates that ``tao --ca`` and its companions name, else those of the development cluster's
    operator, if the command asks that one and it has any; None: connect without TLS."""
    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context is not None else None
    if isinstance(found, TlsFiles):
        return found.if_set
    asks_development_cluster = given("state_dir") is not None and given("connect") is None and given("file") is None
    return _development_tls() if asks_development_cluster else None


def _development_tls() -> TlsFiles | None:
    folder = state_folder()
    record = folder.read()
    if record is None or not record.options.tls:
        return None
    from tao.devcluster.certificates import OPERATOR, tls_files

    return tls_files(folder, OPERATOR)


def secret_of_command() -> str:
    """Return the token to show to servers, from ``--token-file`` or TAO_TOKEN; empty when there is none. Raises
    `SettingsError` for a file that cannot be read."""
    file: Path | None = given("token_file")
    return os.environ.get("TAO_TOKEN", "") if file is None else read_secret(file)


def on_graph(work: Callable[[Graph], Awaitable[_Result]]) -> _Result:
    """Do work with a client of the cluster. Raises as `target_of`, and as connecting and the work do."""

    async def connected() -> _Result:
        async with open_graph(target_of()) as graph:
            try:
                return await work(graph)
            except RetryableError as error:
                error.add_note("`tao status` names the servers that do not answer")
                raise

    return run(connected())


@asynccontextmanager
async def links_of_command(topology: Topology) -> AsyncIterator[Links]:
    """Give links to the cache servers of a topology with an operator's rights, and close them at the end."""
    async with operator_links(topology, secret_of_command(), tls_of_command()) as links:
        yield links


def topology_path() -> Location:
    """Return the place of the topology that ``--topology`` names, else the development cluster's.

    Raises `OperatorError` when there is none."""
    file: Location | None = given("file")
    if file is None:
        file = state_folder().place_of_topology()
        if isinstance(file, Path) and not file.exists():
            raise OperatorError(
                f"there is no cluster in {given('state_dir')}: name a document with --topology or TAO_TOPOLOGY"
            )
    return file
