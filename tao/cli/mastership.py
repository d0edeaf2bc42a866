"""`tao promote`, `tao rejoin` and `tao reseed`: change the master of a database, and repair its replicas, by hand.

They show what they will do and ask; the work is the watcher's, and the lock of the database keeps the two from each
other. All three may be repeated after whatever interrupted them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final

import click

from tao.admin.documents import database_of_server, load_topology, topology_file, topology_locks
from tao.cli.connection import state_folder
from tao.cli.frame import INCOMPLETE_STATUS, ask, run, show
from tao.cli.logins import is_development, mastership_login
from tao.cli.options import changing_options, given
from tao.etcd.location import Location
from tao.model.errors import OperatorError
from tao.replication.database_copy import CopyProgress
from tao.replication.promotion import Promoter, PromotionSettings, PromotionStep
from tao.replication.promotion_plan import PromotionRequest, SetMember, check_before
from tao.replication.replica_seed import Reseeder, SeedPlan, SeedStep
from tao.replication.replication_set import SetAccounts, find_database
from tao.terminal import LINE_SECONDS, counted, print_pairs, print_records

_MB: Final = 1 << 20


@click.command()
@click.argument("database")
@click.option(
    "--to",
    "region",
    metavar="REGION",
    help="The region of the new master, or REGION/standby.  [default: the most advanced server]",
)
@click.option("--master-lost", is_flag=True, help="Promote without the help of the master, which must not answer.")
@click.option(
    "--without",
    multiple=True,
    metavar="SERVER",
    help="Promote without an answer from this server: it certainly has no transactions that the others lack, or they "
    "may be lost. May be repeated.",
)
@changing_options
def promote(database: str, region: str | None, master_lost: bool, without: tuple[str, ...]) -> int:
    """Make another region's server the master of DATABASE.

    While the master answers, nothing is lost: it is closed to writes, and the new one gets all that it has. Writes wait
    or fail with MASTER_READ_ONLY meanwhile, for about two seconds; reads go on. With --to the present master region an
    interrupted promotion is finished or undone. Passwords: TAO_ADMIN_PASSWORD, TAO_REPLICATOR_PASSWORD.

    Exit status 4: it is done, but a server does not follow the new master, or commits wait for no replica though the
    topology says so.
    """
    path, accounts = mastership_login()
    found = find_database(load_topology(path), database)
    others = sorted(set(found.places) - {found.master_region})
    target_region = region or (others[0] if len(others) == 1 else None)
    master = found.places[found.master_region].name
    request = PromotionRequest(target_region, master_lost, frozenset(without), master=master)
    promoter = shown_promoter(path, accounts)
    members = _observe(promoter, database)
    if request.region != found.master_region:
        check_before(members, request)
    target = "the most advanced server" if request.region is None else found.places[request.region].name
    ask(f"Make {target} the master of {database}?")
    done = run(
        promoter.promote(database, request),
        if_interrupted="a watcher finishes or undoes what was begun, and so does the same command: repeat it",
    )
    alone = found.semi_sync and not done.waits_for_replica

    def text() -> None:
        version = f"version epoch {done.version_epoch}, topology {done.topology_version}"
        click.echo(f"{done.master} is the master of {database}: {version}")
        for name, why in done.left.items():
            click.echo(f"{name} does not follow it: {why}", err=True)
        for name, why in done.without_tables.items():
            click.echo(f"{name} has no tables, so no promotion of it was interrupted: {why}", err=True)
        if alone:
            click.echo("no replica acknowledges: commits wait for none until one is back (`tao rejoin`)", err=True)

    show(done, text)
    return INCOMPLETE_STATUS if done.left or alone else 0


@click.command()
@click.argument("server")
@changing_options
def rejoin(server: str) -> None:
    """Have SERVER, a former master that is back, follow the master of its database.

    Both have to run. The server is compared with the master first. One with transactions that the master never had is
    refused: `tao reseed` rebuilds it.
    """
    path, accounts = mastership_login()
    database = database_of_server(load_topology(path), server)
    master = database.servers[database.master_region].name
    if server == master:
        raise OperatorError(
            f"{server} is the master of {database.name} by the topology and follows nobody; `tao promote "
            f"{database.name}` makes another server the master"
        )
    promoter = shown_promoter(path, accounts)
    check_answers(_observe(promoter, database.name), server, database.name)
    ask(f"Close {server} to writes and have it follow {master}?")
    run(promoter.rejoin(database.name, server), if_interrupted="repeat the command")
    show({"server": server, "follows": master}, lambda: click.echo(f"{server} follows, and has caught up"))


@click.command()
@click.argument("server")
@click.option("--dry-run", is_flag=True, help="Show what it would do, and change nothing.")
@changing_options
def reseed(server: str, dry_run: bool) -> None:
    """Rebuild SERVER, a replica of its database, from the master.

    For a former master that has diverged, an empty server, and one whose seeding was interrupted. The server is marked
    down and closed, EVERYTHING THAT IT HAS IS DROPPED, the master is copied with the database's own tools (mariadb-dump
    or mysqldump) while writes go on, and the server follows it. Nobody reads from it until it has caught up.
    Passwords: TAO_ADMIN_PASSWORD, TAO_REPLICATOR_PASSWORD.
    """
    path, accounts = mastership_login()
    database_of_server(load_topology(path), server)
    progress = _SeedProgress()
    store, locks, settings = topology_file(path), topology_locks(path), PromotionSettings()
    promoter = Promoter(store, locks, accounts, settings)
    reseeder = Reseeder(store, locks, accounts, settings, promoter, on_step=progress.step, on_copied=progress.copied)
    plan = run(reseeder.plan(server))
    if dry_run:
        show(plan, lambda: _print_plan(plan))
        return
    if not given("as_json"):
        _print_plan(plan)
    ask(f"Drop all that {server} has, and copy {plan.master} to it?")
    done = run(
        reseeder.seed(server),
        if_interrupted=f"{server} has only a part of the data: repeat the command, which begins anew",
    )
    seeded = f"{server} has {counted(done.shards, 'shard')}, follows {done.follows}, and has caught up"
    show(done, lambda: click.echo(seeded))


def check_answers(members: Sequence[SetMember], server: str, database: str) -> None:
    """Raise `OperatorError` with what to start when the server that is to follow does not answer, or its master. One
    that answers and refuses the login says itself what is wrong."""
    silent = [each for each in members if each.state is None and not each.refuses]
    for each in silent:
        if each.name == server:
            state = "does not run: nothing listens at its address" if each.is_refused else "does not answer"
            how = "closed to writes"
            if is_development(given("file")):
                how = f"with {state_folder().command(f'restart {server}')}"
            raise OperatorError(f"{server} {state}. Start it first, {how}, and repeat this. ({each.error})")
        if each.is_master:
            raise OperatorError(
                f"{each.name}, the master of {database}, does not answer, so nothing can follow it. Start it, or "
                f"replace it with `tao promote {database} --master-lost`. ({each.error})"
            )


def shown_promoter(path: Location, accounts: SetAccounts, settings: PromotionSettings | None = None) -> Promoter:
    """Return a promoter of the databases in a topology file, which prints its steps unless the output is JSON."""

    async def on_step(step: PromotionStep) -> None:
        _print_step(step.value)

    return Promoter(
        topology_file(path), topology_locks(path), accounts, settings or PromotionSettings(), on_step=on_step
    )


def _print_step(text: str) -> None:
    if not given("as_json"):
        click.echo(f"… {text}", err=True)
        sys.stderr.flush()


def _observe(promoter: Promoter, database: str) -> list[SetMember]:
    """Return the servers of a database, and print them unless the output is JSON."""
    members = run(promoter.observe(database))
    if not given("as_json"):
        print_records(_member_row(member) for member in members)
    return members


def _member_row(member: SetMember) -> dict[str, object]:
    state = member.state
    return {
        "server": member.name,
        "region": member.region,
        "part": "master" if member.is_master else "replica",
        "writes": None if state is None else "closed" if state.read_only else "open",
        "follows": None if state is None or state.following is None else state.following.source,
        "receives": member.receives,
        "has": None if state is None else str(state.received),
        "error": member.error,
    }


def _print_plan(plan: SeedPlan) -> None:
    print_pairs(
        {
            "server": f"{plan.server} ({plan.region}), of {plan.database}",
            "is": "half seeded, by a run that was interrupted" if plan.half_seeded else "what it was left as",
            "drops": counted(plan.drops, "shard"),
            "discards": plan.discards or "no transaction that its master lacks",
            "copies": f"{counted(plan.copies, 'shard')} of {plan.master}, some {plan.about_bytes / _MB:,.0f} MB",
        }
    )


class _SeedProgress:
    """Prints the steps of a seeding to standard error, and the progress of the copy every few seconds."""

    def __init__(self) -> None:
        self._next_line_at = 0.0

    async def step(self, step: SeedStep) -> None:
        _print_step(step.value)
        self._next_line_at = time.monotonic() + LINE_SECONDS

    def copied(self, copied: CopyProgress, shards: int) -> None:
        if time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + LINE_SECONDS
            size = f"{copied.statement_bytes / _MB:,.0f} MB of statements"
            _print_step(f"{size}, shard {copied.schemas:,} of {shards:,}")
