"""`tao accounts`, `tao migrate` and `tao replicate`: what database servers need before the first leader starts.

All three read the topology, so that they reach exactly the servers that the cluster will use, and all three may be
repeated: accounts get their passwords again, shards and replicas that are up to date are left alone. Passwords come
from the environment only, because an option would show them to everybody who can list processes.
"""

from __future__ import annotations

import os
from typing import Final

import click

from tao.admin import documents
from tao.admin.documents import load_topology, read_schema
from tao.admin.replication import (
    NOTHING_TO_DO,
    ReplicationAccounts,
    ReplicationStep,
    apply_replication,
    catch_up_all,
    member_states,
    plan_replication,
)
from tao.admin.shard_tables import migrate_all
from tao.cli.frame import ask, run, show
from tao.cli.logins import database_tls, passwords_of
from tao.cli.options import PLACE_METAVAR, FloatRange, Place, given, json_option, yes_option
from tao.etcd.location import Location
from tao.model.topology import Database, DatabaseServer
from tao.replication.accounts import LOOPBACK_HOSTS, Account, ServiceAccounts, TlsDemand, ensure_accounts
from tao.storage.session import ServerAccount
from tao.terminal import Counting, WaitDisplay, counted, print_records

_ADMINISTRATOR: Final = "tao_admin"
_topology_option = click.option(
    "--topology",
    "topology_file",
    required=True,
    type=Place(),
    metavar=PLACE_METAVAR,
    help="The topology, which names the database servers: a file, or etcd://HOST:PORT,…/PREFIX.",
)
_administrator_option = click.option(
    "--as-user",
    default=_ADMINISTRATOR,
    show_default=True,
    help="The administrator's account; its password is taken from TAO_ADMIN_PASSWORD.",
)


@click.command()
@_topology_option
@click.option(
    "--as-user",
    default="root",
    show_default=True,
    help="The account that creates them; its password, if it has one, is taken from TAO_ROOT_PASSWORD.",
)
@click.option(
    "--from",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="A host that the accounts may connect from, as the database writes it: 10.0.%. May be repeated.  "
    "[default: loopback]",
)
@click.option(
    "--require",
    "demand",
    type=click.Choice([each.value for each in TlsDemand]),
    help="What servers demand of connections with these accounts: TLS, or TLS and a certificate of theirs (x509).  "
    "[default: what they demanded before; nothing of new accounts]",
)
@yes_option
@json_option
def accounts(topology_file: Location, as_user: str, hosts: tuple[str, ...], demand: str | None) -> None:
    """Create the accounts on every database server, or set their passwords.

    tao_admin (migrations), tao_leader (reads and writes), tao_reader (reads), tao_replicator (reads the binlog),
    tao_watcher (leases and promotions). Their passwords are taken from TAO_ADMIN_PASSWORD, TAO_LEADER_PASSWORD,
    TAO_READER_PASSWORD, TAO_REPLICATOR_PASSWORD and TAO_WATCHER_PASSWORD; without the last there is no tao_watcher.
    """
    admin, leader, reader, replicator = passwords_of(
        "TAO_ADMIN_PASSWORD", "TAO_LEADER_PASSWORD", "TAO_READER_PASSWORD", "TAO_REPLICATOR_PASSWORD"
    )
    watcher_password = os.environ.get("TAO_WATCHER_PASSWORD", "")
    wanted = ServiceAccounts(
        administrator=Account(_ADMINISTRATOR, admin),
        leader=Account("tao_leader", leader),
        reader=Account("tao_reader", reader),
        replicator=Account("tao_replicator", replicator),
        watcher=Account("tao_watcher", watcher_password) if watcher_password else None,
    )
    tls = database_tls()
    password = os.environ.get("TAO_ROOT_PASSWORD", "")  # through a socket root often needs none
    hosts = hosts or LOOPBACK_HOSTS
    servers = [each.server for each in load_topology(topology_file).database_servers]
    names = [server.name for server in servers]
    ask(f"Create the accounts, for connections from {', '.join(hosts)}, on {', '.join(names)}?")

    async def work() -> None:
        for server in servers:
            login = ServerAccount(server.host, server.port, as_user, password, server.socket, tls)
            await ensure_accounts(login, server.name, wanted, hosts, None if demand is None else TlsDemand(demand))

    run(work())
    show({"servers": names, "hosts": hosts}, lambda: click.echo(f"accounts are ready on {', '.join(names)}"))


@click.command()
@_topology_option
@click.option(
    "--schema",
    "schema_file",
    required=True,
    type=Place(),
    metavar=PLACE_METAVAR,
    help="The schema, which names custom tables: a file, or etcd://HOST:PORT,…/PREFIX.",
)
@_administrator_option
@yes_option
@json_option
def migrate(topology_file: Location, schema_file: Location, as_user: str) -> None:
    """Create the tables of every shard, or bring them up to date.

    It works on each database's master; replicas follow by replication. Run it before the first start, after an upgrade,
    and when the schema names a new custom table. One run at a time: another one ends with `LOCK_TAKEN`.
    """
    topology = load_topology(topology_file)
    tables = read_schema(schema_file)[0].custom_tables()
    (password,) = passwords_of("TAO_ADMIN_PASSWORD")
    administrator = Account(as_user, password, database_tls())
    names = ", ".join(_master(database).name for database in topology.databases)
    shards = counted(topology.shards, "shard")
    ask(f"Bring {shards} on {names} up to date?")
    store, locks = documents.topology_file(topology_file), documents.topology_locks(topology_file)
    with Counting("shards up to date") as counting:
        changed = run(migrate_all(store, locks, topology, tables, administrator, counting.show))
    show(
        {"shards": topology.shards, "changed": changed},
        lambda: click.echo(f"{sum(changed.values()):,} of {shards} were changed; all are up to date"),
    )


def _master(database: Database) -> DatabaseServer:
    return database.servers[database.master_region]


@click.command()
@_topology_option
@_administrator_option
@click.option(
    "--anew", is_flag=True, help="Attach replicas that follow already, too: their password or address has changed."
)
@click.option(
    "--wait-seconds",
    type=FloatRange(0, 86_400),
    default=60.0,
    show_default=True,
    help="How long each replica may take to have what its master has now, in seconds.",
)
@yes_option
@json_option
def replicate(topology_file: Location, as_user: str, anew: bool, wait_seconds: float) -> None:
    """Have every replica follow its master, as the topology names it.

    Replicas that follow already are left alone. It refuses, before it changes anything, where the topology's master
    follows another server, and where a replica has transactions that its master lacks. A promotion that is under way
    is waited for, and one that has happened since the question ends the command. The password with which
    replicas log in is taken from TAO_REPLICATOR_PASSWORD.
    """
    topology = load_topology(topology_file)
    tls = database_tls()
    administrator, replicator = passwords_of("TAO_ADMIN_PASSWORD", "TAO_REPLICATOR_PASSWORD")
    accounts = ReplicationAccounts(Account(as_user, administrator, tls), Account("tao_replicator", replicator, tls))
    steps = plan_replication(topology, run(member_states(topology, accounts.administrator)), anew=anew)
    if not given("as_json"):
        print_records(steps)
    changed = [step.server for step in steps if step.action != NOTHING_TO_DO]
    if changed:
        ask(f"Change replication on {', '.join(changed)}?")
    run(_replicate(topology_file, steps, accounts, wait_seconds, anew=anew))
    replicas = counted(sum(bool(step.follows) for step in steps), "replica")
    done = f"{counted(len(changed), 'server')} changed; {replicas} up to date with the masters"
    show({"servers": steps}, lambda: click.echo(done))


async def _replicate(
    place: Location, steps: list[ReplicationStep], accounts: ReplicationAccounts, wait_seconds: float, *, anew: bool
) -> None:
    store = documents.topology_file(place)
    if any(step.action != NOTHING_TO_DO for step in steps):
        await apply_replication(store, documents.topology_locks(place), steps, accounts, anew=anew)
    with WaitDisplay() as display:
        await catch_up_all(await store.load(), accounts.administrator, wait_seconds, display.show)
