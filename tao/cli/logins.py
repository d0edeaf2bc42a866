"""The accounts with which commands log in to databases: from options, the environment or the development cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.documents import load_topology, read_schema
from tao.cli.connection import secret_of_command, state_folder, tls_of_command
from tao.cli.options import given
from tao.model.errors import OperatorError
from tao.replication.accounts import Account
from tao.replication.replication_set import SetAccounts


def reader_login() -> ReaderLogin:
    """Return the read-only account of the databases, from the options or from the development cluster's records.

    Raises `OperatorError` that names what is missing."""
    schema_file: Path | None = given("schema_file")
    if given("connect") is None:
        from tao.devcluster.state_folder import service_accounts

        folder = state_folder()
        reader = service_accounts(folder.require().passwords).reader
        topology_file, schema_file = folder.topology, schema_file or folder.schema
    else:
        topology_file = Path(given("connect").removeprefix("file:"))
        password = os.environ.get("TAO_READER_PASSWORD", "")
        if schema_file is None or not password:
            raise OperatorError(
                "reading the databases needs --schema FILE, and the reader's password in TAO_READER_PASSWORD"
            )
        reader = Account(given("reader_user"), password)
    return ReaderLogin(load_topology(topology_file), read_schema(schema_file)[0], reader.user, reader.password)


def mastership_login() -> tuple[Path, SetAccounts]:
    """Return the topology file and the accounts that change replication.

    Those of the development cluster when no file or its file is named, else the passwords in the environment. Raises
    `OperatorError` when they are not set."""
    file: Path | None = given("file")
    if file is None or file.absolute() == (given("state_dir") / "topology.json").absolute():
        from tao.devcluster.state_folder import service_accounts

        folder = state_folder()
        known = service_accounts(folder.require().passwords)
        return folder.topology, SetAccounts(known.administrator, known.replicator)
    accounts = (("tao_admin", "TAO_ADMIN_PASSWORD"), ("tao_replicator", "TAO_REPLICATOR_PASSWORD"))
    return file, SetAccounts(*(Account(user, password_of(variable)) for user, variable in accounts))


def leader_login() -> Account:
    """Return the account with which leaders write rows, from where `mastership_login` has the others."""
    file: Path | None = given("file")
    if file is None or file.absolute() == (given("state_dir") / "topology.json").absolute():
        from tao.devcluster.state_folder import service_accounts

        return service_accounts(state_folder().require().passwords).leader
    return Account("tao_leader", password_of("TAO_LEADER_PASSWORD"))


def password_of(variable: str) -> str:
    """Return the password in an environment variable. Raises `OperatorError` when it is not set."""
    found = os.environ.get(variable, "")
    if not found:
        raise OperatorError(f"{variable} is not set: this command takes passwords from the environment")
    return found


@asynccontextmanager
async def databases_of_command(login: ReaderLogin) -> AsyncIterator[Access]:
    """Give access to the databases and the cache servers of a cluster, and close it at the end."""
    async with access_of(login, secret_of_command(), tls_of_command()) as access:
        yield access
