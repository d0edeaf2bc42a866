"""The accounts with which commands log in to databases: from options, the environment or the development cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.documents import load_topology, read_schema
from tao.cli.connection import secret_of_command, state_folder, tls_of_command
from tao.cli.options import given
from tao.etcd.location import EtcdLocation, Location, location_of
from tao.model.errors import OperatorError
from tao.replication.accounts import Account
from tao.replication.replication_set import SetAccounts
from tao.storage.tls import DatabaseTls, DatabaseTlsFiles

_TLS_VARIABLES: Final = {
    "authorities": "TAO_DATABASE_CA",
    "certificate": "TAO_DATABASE_CERTIFICATE",
    "private_key": "TAO_DATABASE_PRIVATE_KEY",
}


def reader_login() -> ReaderLogin:
    """Return the read-only account of the databases, from the options or from the development cluster's records.

    Raises `OperatorError` that names what is missing."""
    schema_file: Location | None = given("schema_file")
    if given("connect") is None:
        from tao.devcluster.certificates import cluster_accounts

        folder = state_folder()
        reader = cluster_accounts(folder, folder.require()).reader
        topology_file, schema_file = folder.place_of_topology(), schema_file or folder.place_of_schema()
    else:
        topology_file = location_of(given("connect"))
        password = os.environ.get("TAO_READER_PASSWORD", "")
        if schema_file is None or not password:
            raise OperatorError(
                "reading the databases needs --schema FILE or URL, and the reader's password in TAO_READER_PASSWORD"
            )
        reader = Account(given("reader_user"), password, database_tls())
    topology, (schema, _) = load_topology(topology_file), read_schema(schema_file)
    return ReaderLogin(topology, schema, reader.user, reader.password, reader.tls)


def mastership_login() -> tuple[Location, SetAccounts]:
    """Return the place of the topology and the accounts that change replication.

    These are the ones of the development cluster when no file or its file is named; else the passwords come from the
    environment. Raises `OperatorError` when they are not set."""
    file: Location | None = given("file")
    if file is None or _is_development(file):
        from tao.devcluster.certificates import cluster_accounts

        folder = state_folder()
        known = cluster_accounts(folder, folder.require())
        return folder.place_of_topology(), SetAccounts(known.administrator, known.replicator)
    accounts = (("tao_admin", "TAO_ADMIN_PASSWORD"), ("tao_replicator", "TAO_REPLICATOR_PASSWORD"))
    tls = database_tls()
    return file, SetAccounts(*(Account(user, password_of(variable), tls) for user, variable in accounts))


def schema_place(topology: Location, named: Location | None) -> Location:
    """Return the place of the schema: the one that is named, else the one beside the topology in etcd, else that of the
    development cluster. Raises `OperatorError` for a topology file without a schema."""
    if named is not None:
        return named
    if isinstance(topology, EtcdLocation):
        return topology
    if not _is_development(topology):
        raise OperatorError("name the schema with --schema: no schema lies beside a topology file")
    return state_folder().schema


def database_tls() -> DatabaseTls | None:
    """Return how connections to databases are encrypted, by the files that the environment names. Raises
    `SettingsError` for files that cannot be used."""
    named = {field: os.environ.get(variable, "") for field, variable in _TLS_VARIABLES.items()}
    files = {field: Path(file) for field, file in named.items() if file}
    return DatabaseTlsFiles(**files, verify_host=os.environ.get("TAO_DATABASE_VERIFY_HOST") != "0").if_set


def administrator_login() -> Account:
    """Return the administrator's account of the databases that the topology names, as `mastership_login` does."""
    file: Location | None = given("file")
    if _is_development(file):
        from tao.devcluster.certificates import cluster_accounts

        folder = state_folder()
        return cluster_accounts(folder, folder.require()).administrator
    return Account("tao_admin", password_of("TAO_ADMIN_PASSWORD"), database_tls())


def _is_development(file: Location | None) -> bool:
    """Return whether the topology is that of the development cluster, whose passwords are known."""
    return file is None or (
        isinstance(file, Path) and file.absolute() == (given("state_dir") / "topology.json").absolute()
    )


def leader_login() -> Account:
    """Return the account with which leaders write rows, from where `mastership_login` has the others."""
    if _is_development(given("file")):
        from tao.devcluster.certificates import cluster_accounts

        folder = state_folder()
        return cluster_accounts(folder, folder.require()).leader
    return Account("tao_leader", password_of("TAO_LEADER_PASSWORD"), database_tls())


def password_of(variable: str) -> str:
    """Return the password in an environment variable. Raises `OperatorError` when it is not set."""
    found = os.environ.get(variable, "")
    if not found:
        known = " (those of a development cluster are known: leave --topology out, or name its --state-dir)"
        raise OperatorError(
            f"{variable} is not set: this command takes passwords from the environment"
            + (known if given("state_dir") is not None else "")
        )
    return found


@asynccontextmanager
async def databases_of_command(login: ReaderLogin) -> AsyncIterator[Access]:
    """Give access to the databases and the cache servers of a cluster, and close it at the end."""
    async with access_of(login, secret_of_command(), tls_of_command()) as access:
        yield access
