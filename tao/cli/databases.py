"""`tao accounts` and `tao migrate`: what a database server needs before the first leader starts, and after an upgrade.

Both read the topology, so that they reach exactly the servers that the cluster will use, and both may be repeated:
accounts get their passwords anew, shards that are up to date are left alone. Passwords come from the environment only,
because an option would show them to everyone who can list processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tao.cli.connecting import load_topology
from tao.cli.frame import ask, json_option, run

if TYPE_CHECKING:
    from tao.model.topology import Database, DatabaseServer
    from tao.storage.accounts import ServiceAccounts
    from tao.storage.session import ServerAccount

_ADMINISTRATOR: Final = "tao_admin"
topology_option = click.option(
    "--topology",
    "topology_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The topology document, which names the database servers.",
)
administrator_option = click.option(
    "--as-user", default=_ADMINISTRATOR, show_default=True, help="Administrator; its password: TAO_ADMIN_PASSWORD."
)
yes_option = click.option("--yes", is_flag=True, help="Do it without asking.")


@click.command()
@topology_option
@click.option(
    "--as-user", default="root", show_default=True, help="Who makes them; its password, if any: TAO_ROOT_PASSWORD."
)
@click.option(
    "--from",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Whence they may come in, as the database writes it: 10.0.%. Several times for several.  [default: loopback]",
)
@yes_option
@json_option
def accounts(topology_file: Path, as_user: str, hosts: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Make the four accounts on every database server, or set their passwords.

    tao_admin (migrations), tao_leader (reads and writes), tao_reader (reads), tao_replicator (reads the binlog). Their
    passwords are taken from TAO_ADMIN_PASSWORD, TAO_LEADER_PASSWORD, TAO_READER_PASSWORD and TAO_REPLICATOR_PASSWORD.
    """
    from tao.cli.output import print_json
    from tao.storage.accounts import LOOPBACK_HOSTS, Account, ServiceAccounts

    wanted = ServiceAccounts(
        administrator=Account(_ADMINISTRATOR, password_of("TAO_ADMIN_PASSWORD")),
        leader=Account("tao_leader", password_of("TAO_LEADER_PASSWORD")),
        reader=Account("tao_reader", password_of("TAO_READER_PASSWORD")),
        replicator=Account("tao_replicator", password_of("TAO_REPLICATOR_PASSWORD")),
    )
    password = os.environ.get("TAO_ROOT_PASSWORD", "")  # through a socket root often needs none
    hosts = hosts or LOOPBACK_HOSTS
    databases = load_topology(topology_file).databases
    servers = [server for database in databases for server in database.servers.values()]
    names = ", ".join(server.name for server in servers)
    ask(f"Make the four accounts, from {', '.join(hosts)}, on {names}?", yes)
    run(_make_accounts([(each.name, _login(each, as_user, password)) for each in servers], wanted, hosts))
    if as_json:
        print_json({"servers": [server.name for server in servers], "hosts": list(hosts)})
    else:
        click.echo(f"accounts are ready on {names}")


async def _make_accounts(
    logins: list[tuple[str, ServerAccount]], wanted: ServiceAccounts, hosts: tuple[str, ...]
) -> None:
    from tao.storage.accounts import ensure_accounts

    for name, login in logins:
        await ensure_accounts(login, name, wanted, hosts)


@click.command()
@topology_option
@click.option("--schema", "schema_file", required=True, type=click.Path(path_type=Path), help="For its custom tables.")
@administrator_option
@yes_option
@json_option
def migrate(topology_file: Path, schema_file: Path, as_user: str, yes: bool, as_json: bool) -> None:
    """Make the tables of every shard, or bring them up to date.

    On each database's master; replicas follow by replication. Run it before the first start, after an upgrade, and
    when the schema names a new custom table.
    """
    from tao.cli.output import counted, print_json
    from tao.devcluster.schema_copy import read_schema

    topology = load_topology(topology_file)
    tables = read_schema(schema_file)[0].custom_tables()
    password = password_of("TAO_ADMIN_PASSWORD")
    names = ", ".join(_master(database).name for database in topology.databases)
    ask(f"Bring {counted(topology.shards, 'shard')} on {names} up to date?", yes)
    changed = {
        database.name: run(_migrate(database, tables, _login(_master(database), as_user, password)))
        for database in topology.databases
    }
    if as_json:
        print_json({"shards": topology.shards, "changed": changed})
    else:
        click.echo(f"{sum(changed.values()):,} of {counted(topology.shards, 'shard')} needed it; all are up to date")


async def _migrate(database: Database, tables: dict[str, int], login: ServerAccount) -> int:
    from tao.cli.waiting import Counting
    from tao.storage.migrations import migrate as migrate_shards

    shards = [shard for first, last in database.shards for shard in range(first, last + 1)]
    with Counting("shards up to date") as counting:
        return await migrate_shards(
            login,
            shards,
            tables,
            _master(database).name,
            version_epoch=database.version_epoch,
            progress=lambda done, _: counting.show(database.name, done),
        )


def _master(database: Database) -> DatabaseServer:
    return database.servers[database.master_region]


def _login(server: DatabaseServer, user: str, password: str) -> ServerAccount:
    from tao.storage.session import ServerAccount

    return ServerAccount(server.host, server.port, user, password, server.socket)


def password_of(variable: str) -> str:
    """What the environment holds. Raises `OperatorError` when it is not set."""
    from tao.model.errors import OperatorError

    found = os.environ.get(variable, "")
    if not found:
        raise OperatorError(f"{variable} is not set: this command takes passwords from the environment")
    return found
