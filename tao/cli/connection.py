"""Finds the cluster that a command talks to: the one that its options name, else the one in ./.tao-dev."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tao.cli.options import DEFAULT_STATE_DIR, REGION_KEY
from tao.model.errors import OperatorError, RetryableError

if TYPE_CHECKING:
    from tao.admin.access import ReaderLogin
    from tao.admin.connection import ClusterTarget
    from tao.client import Graph
    from tao.replication.replication_set import SetAccounts
    from tao.wire.tls import TlsFiles


def target_of(connect: str | None, token: str | None = None) -> ClusterTarget:
    """Return the cluster that ``--connect`` names, else the running development cluster.

    ``token``: the shared secret; None takes it from ``TAO_TOKEN``. Raises `OperatorError` when no cluster is named and
    none runs."""
    from tao.admin.connection import ClusterTarget

    context = click.get_current_context(silent=True)
    return ClusterTarget(
        address=connect or _development_topology(),
        region=context.meta.get(REGION_KEY) if context is not None else None,
        tls=tls_of_command(),
        secret=os.environ.get("TAO_TOKEN", "") if token is None else token,
    )


def _development_topology() -> str:
    from tao.devcluster.state_folder import StateFolder

    folder = StateFolder(DEFAULT_STATE_DIR)
    record = folder.read()
    if record is None or not folder.running(record):
        raise OperatorError(
            "no cluster runs in ./.tao-dev: start one with `tao dev up`, or name one with --connect or TAO_CONNECT"
        )
    return str(folder.topology)


def tls_of_command() -> TlsFiles | None:
    """Return the certificates that ``tao --ca`` and its companions name; None: connect without TLS."""
    from tao.wire.tls import TlsFiles

    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context is not None else None
    return found.if_set if isinstance(found, TlsFiles) else None


@asynccontextmanager
async def graph_of(connect: str | None) -> AsyncIterator[Graph]:
    """Open a client of the cluster and close it at the end. Raises as `target_of` and as connecting does."""
    from tao.admin.connection import open_graph

    try:
        async with open_graph(target_of(connect)) as graph:
            yield graph
    except RetryableError as error:
        error.add_note("`tao stats` shows which servers answer")
        raise


def topology_path(file: Path | None) -> Path:
    """Return the topology file that is named, else the development cluster's. Raises `OperatorError`."""
    if file is not None:
        return file
    from tao.devcluster.state_folder import StateFolder

    found = StateFolder(DEFAULT_STATE_DIR).topology
    if not found.exists():
        raise OperatorError("there is no cluster in ./.tao-dev: name a document with --topology or TAO_TOPOLOGY")
    return found


def reader_login(
    connect: str | None, schema_file: Path | None, reader_user: str, reader_password: str | None
) -> ReaderLogin:
    """Return the read-only account of the databases, from the options or from the development cluster's records.

    Raises `OperatorError` that names what is missing."""
    from tao.admin.access import ReaderLogin
    from tao.admin.documents import load_topology, read_schema

    if connect is None:
        from tao.devcluster.state_folder import StateFolder, service_accounts

        folder = StateFolder(DEFAULT_STATE_DIR)
        reader = service_accounts(folder.require().passwords).reader
        topology_file, schema_file = folder.topology, schema_file or folder.schema
        user, password = reader.user, reader.password
    else:
        topology_file = Path(connect.removeprefix("file:"))
        user, password = reader_user, reader_password or ""
        if schema_file is None or not password:
            raise OperatorError(
                "reading the databases needs --schema FILE, and the reader's password in TAO_READER_PASSWORD"
            )
    return ReaderLogin(load_topology(topology_file), read_schema(schema_file)[0], user, password)


def mastership_login(file: Path | None) -> tuple[Path, SetAccounts]:
    """Return the topology file and the accounts that change replication.

    Those of the development cluster when ``file`` is None or its file, else the passwords in the environment. Raises
    `OperatorError` when they are not set."""
    from tao.replication.accounts import Account
    from tao.replication.replication_set import SetAccounts

    if file is None or file.absolute() == (DEFAULT_STATE_DIR / "topology.json").absolute():
        from tao.devcluster.state_folder import StateFolder, service_accounts

        folder = StateFolder(DEFAULT_STATE_DIR)
        known = service_accounts(folder.require().passwords)
        return folder.topology, SetAccounts(known.administrator, known.replicator)
    passwords = [os.environ.get(f"TAO_{who}_PASSWORD", "") for who in ("ADMIN", "REPLICATOR")]
    if not all(passwords):
        raise OperatorError("set TAO_ADMIN_PASSWORD and TAO_REPLICATOR_PASSWORD: passwords come from the environment")
    return file, SetAccounts(Account("tao_admin", passwords[0]), Account("tao_replicator", passwords[1]))


def password_of(variable: str) -> str:
    """Return the password in an environment variable. Raises `OperatorError` when it is not set."""
    found = os.environ.get(variable, "")
    if not found:
        raise OperatorError(f"{variable} is not set: this command takes passwords from the environment")
    return found
