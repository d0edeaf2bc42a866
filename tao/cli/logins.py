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

_PASSWORDS: Final = {
    "tao_admin": "TAO_ADMIN_PASSWORD",
    "tao_leader": "TAO_LEADER_PASSWORD",
    "tao_replicator": "TAO_REPLICATOR_PASSWORD",
}
"""The environment variable of each service account's password."""
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
    place, found = _service_logins("tao_admin", "tao_replicator")
    return place, SetAccounts(*found)


def mover_login() -> tuple[Location, SetAccounts, Account]:
    """Return what `mastership_login` does, and the account with which leaders write rows."""
    place, (administrator, replicator, leader) = _service_logins("tao_admin", "tao_replicator", "tao_leader")
    return place, SetAccounts(administrator, replicator), leader


def schema_place(topology: Location, named: Location | None) -> Location:
    """Return the place of the schema: the one that is named, else the one beside the topology in etcd, else that of the
    development cluster. Raises `OperatorError` for a topology file without a schema."""
    if named is not None:
        return named
    if isinstance(topology, EtcdLocation):
        return topology
    if not is_development(topology):
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
    _, (administrator,) = _service_logins("tao_admin")
    return administrator


def _service_logins(*users: str) -> tuple[Location, tuple[Account, ...]]:
    """Return the place of the topology, and the accounts of these users: those of the development cluster when no file
    or its file is named, else with passwords from the environment. Raises `OperatorError` when some are not set."""
    file: Location | None = given("file")
    if file is None or is_development(file):
        from tao.devcluster.certificates import cluster_accounts

        folder = state_folder()
        known = cluster_accounts(folder, folder.require())
        accounts = {each.user: each for each in (known.administrator, known.replicator, known.leader)}
        return folder.place_of_topology(), tuple(accounts[user] for user in users)
    otherwise = " (those of a development cluster are known: leave --topology out, or name its --state-dir)"
    passwords, tls = passwords_of(*(_PASSWORDS[user] for user in users), otherwise=otherwise), database_tls()
    return file, tuple(Account(user, password, tls) for user, password in zip(users, passwords, strict=True))


def is_development(file: Location | None) -> bool:
    """Return whether the topology is that of the development cluster, whose passwords are known."""
    return file is None or (
        isinstance(file, Path) and file.absolute() == (given("state_dir") / "topology.json").absolute()
    )


def passwords_of(*variables: str, otherwise: str = "") -> tuple[str, ...]:
    """Return the passwords in environment variables. Raises `OperatorError` that names all that are not set, and ends
    with how the command is given ``otherwise``."""
    found = tuple(os.environ.get(variable, "") for variable in variables)
    missing = [variable for variable, password in zip(variables, found, strict=True) if not password]
    if missing:
        raise OperatorError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: this command takes passwords from "
            f"the environment{otherwise}"
        )
    return found


@asynccontextmanager
async def databases_of_command(login: ReaderLogin) -> AsyncIterator[Access]:
    """Give access to the databases and the cache servers of a cluster, and close it at the end."""
    async with access_of(login, secret_of_command(), tls_of_command()) as access:
        yield access
