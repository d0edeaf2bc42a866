"""`tao promote` and `tao rejoin`: another server becomes the master of a database, and a former one follows it.

Both are what the watcher does, by hand and shown first; the lock of the database keeps the two from each other. Both
may be repeated after whatever interrupted them (DESIGN.md §9).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.connecting import DEFAULT_STATE_DIR, load_topology
from tao.cli.frame import INCOMPLETE_STATUS, ask, json_option, run
from tao.cli.output import print_json, print_table

if TYPE_CHECKING:
    from tao.watcher.promotion import Promoter, Step
    from tao.watcher.promotion_plan import Member
    from tao.watcher.replication_set import SetAccounts

_topology_option = click.option(
    "--topology",
    "file",
    envvar="TAO_TOPOLOGY",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The document.  [default: that of the development cluster in ./.tao-dev]",
)


def changing(command: Callable[..., Any]) -> Callable[..., Any]:
    """What all of these commands take: the document, ``--yes``, ``--json``."""
    yes = click.option("--yes", is_flag=True, help="Do it without asking.")
    for option in (json_option, yes, _topology_option):
        command = option(command)
    return command


@click.command()
@click.argument("database")
@click.option("--to", "region", metavar="REGION", help="Whose server.  [default: the one that has most]")
@click.option("--master-lost", is_flag=True, help="The master is gone: do it without its help. Not while it answers.")
@click.option("--without", multiple=True, metavar="SERVER", help="Needs no answer, as it certainly has nothing more.")
@changing
def promote(
    database: str,
    region: str | None,
    master_lost: bool,
    without: tuple[str, ...],
    file: Path | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Make another region's server the master of DATABASE.

    While the master answers, nothing is lost: it is closed, the other one gets all that it has. Writes wait or fail
    with MASTER_READ_ONLY meanwhile, for about two seconds; reads go on. With --to the present master region an
    interrupted promotion is finished or undone. Passwords: TAO_ADMIN_PASSWORD, TAO_REPLICATOR_PASSWORD.

    Exit status 4: it is done, and a server was left behind, or commits wait for no replica though they should.
    """
    import msgspec

    from tao.watcher.promotion_plan import Wish, check_before
    from tao.watcher.replication_set import find_database

    path, accounts = set_place(file)
    found = find_database(load_topology(path), database)
    others = sorted(set(found.servers) - {found.master_region})
    wish = Wish(region or (others[0] if len(others) == 1 else None), master_lost, frozenset(without))
    promoter = promoter_of(path, accounts, as_json)
    members = run(promoter.look(database))
    if not as_json:
        _show(members)
    if wish.region != found.master_region:
        check_before(members, wish)
    target = "the most advanced server" if wish.region is None else found.servers[wish.region].name
    ask(f"Make {target} the master of {database}?", yes)
    done = run(promoter.promote(database, wish))
    alone = found.semi_sync and not done.waits_for_replica
    if as_json:
        print_json(msgspec.to_builtins(done))
    else:
        version = f"version epoch {done.version_epoch}, topology {done.topology_version}"
        click.echo(f"{done.master} is the master of {database}: {version}")
        for name, why in done.left.items():
            click.echo(f"{name} does not follow it: {why}", err=True)
        for name, why in done.without_tables.items():
            click.echo(f"{name} has no tables, so no promotion of it was interrupted: {why}", err=True)
        if alone:
            click.echo("no replica acknowledges: commits wait for none until one is back (`tao rejoin`)", err=True)
    return INCOMPLETE_STATUS if done.left or alone else 0


@click.command()
@click.argument("server")
@changing
def rejoin(server: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Have SERVER, a former master that is back, follow the master of its database.

    It is compared first. A server that has transactions which the master never had is refused: tao reseed rebuilds it.
    """
    from tao.model.errors import TopologyError

    path, accounts = set_place(file)
    topology = load_topology(path)
    database = next((d for d in topology.databases if server in {each.name for each in d.servers.values()}), None)
    if database is None:
        raise TopologyError(f"there is no database server {server!r}")
    promoter = promoter_of(path, accounts, as_json)
    if not as_json:
        _show(run(promoter.look(database.name)))
    ask(f"Close {server} to writes and have it follow {database.servers[database.master_region].name}?", yes)
    run(promoter.rejoin(database.name, server))
    if as_json:
        print_json({"server": server, "follows": database.servers[database.master_region].name})
    else:
        click.echo(f"{server} follows, and has caught up")


def _show(members: list[Member]) -> None:
    print_table(
        ("server", "region", "part", "writes", "follows", "receives", "has", "error"),
        [
            (
                member.name,
                member.region,
                "master" if member.is_master else "replica",
                None if member.state is None else "closed" if member.state.read_only else "open",
                None if member.state is None or member.state.following is None else member.state.following.source,
                "yes" if member.receives else "no",
                None if member.state is None else str(member.state.received),
                member.error or None,
            )
            for member in members
        ],
    )


def set_place(file: Path | None) -> tuple[Path, SetAccounts]:
    """The topology file, and as whom to come in: of the development cluster, or from the environment."""
    from tao.devcluster.state_folder import StateFolder, service_accounts
    from tao.model.errors import OperatorError
    from tao.storage.accounts import Account
    from tao.watcher.replication_set import SetAccounts

    folder = StateFolder(DEFAULT_STATE_DIR)
    if file is None or file.absolute() == folder.topology:
        known = service_accounts(folder.require().passwords)
        return folder.topology, SetAccounts(known.administrator, known.replicator)
    passwords = [os.environ.get(f"TAO_{who}_PASSWORD", "") for who in ("ADMIN", "REPLICATOR")]
    if not all(passwords):
        raise OperatorError("set TAO_ADMIN_PASSWORD and TAO_REPLICATOR_PASSWORD: passwords come from the environment")
    return file, SetAccounts(Account("tao_admin", passwords[0]), Account("tao_replicator", passwords[1]))


def promoter_of(path: Path, accounts: SetAccounts, as_json: bool, *, catch_up_seconds: float | None = None) -> Promoter:
    """Tells its steps on standard error, unless for a program. ``catch_up_seconds``: None for the usual."""
    from tao.model.errors import TopologyError
    from tao.topology.file_store import TopologyFile
    from tao.watcher.locks import FileLocks
    from tao.watcher.promotion import Promoter
    from tao.watcher.settings import PromotionSettings

    async def on_step(step: Step) -> None:
        if not as_json:
            click.echo(f"… {step.value}", err=True)

    def fail(error: TopologyError) -> None:
        raise error

    store = TopologyFile(path, on_error=fail)
    settings = PromotionSettings()
    if catch_up_seconds is not None:
        settings = replace(settings, catch_up_seconds=catch_up_seconds)
    return Promoter(store, FileLocks(path), accounts, settings, on_step=on_step)
