"""`tao replicate`: the replicas of the topology are made to follow their masters, at the first start and after repairs.

It reads the topology, asks every database server what it has and whom it follows, and shows what it would do before it
asks. What is right already is left alone, so that it may be repeated, by a start script too. Two things it never does,
because they lose writes: make a master of a server that follows another one, which is a promotion, and attach a server
that has transactions of its own, whose data are another history (DESIGN.md §9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tao.cli.connecting import load_topology
from tao.cli.databases import administrator_option, password_of, topology_option, yes_option
from tao.cli.frame import ask, json_option, run

if TYPE_CHECKING:
    from tao.devcluster.replication_sets import Replica
    from tao.model.topology import Database, Topology
    from tao.storage.accounts import Account
    from tao.storage.promotion import MemberState

RIGHT: Final = ""
OPEN: Final = "open to writes"
ATTACH: Final = "attach"


@dataclass(frozen=True, slots=True)
class Step:
    """A database server, what the topology wants of it, and what is to be done (`RIGHT`: nothing)."""

    database: str
    server: str
    follows: str
    """The master's name; empty for a master."""
    action: str


@click.command()
@topology_option
@administrator_option
@click.option("--anew", is_flag=True, help="Attach replicas that are right too: their password or address has changed.")
@click.option(
    "--wait-seconds",
    type=click.FloatRange(0, 86_400),
    default=60.0,
    show_default=True,
    help="For replicas to have what their masters have now.",
)
@yes_option
@json_option
def replicate(topology_file: Path, as_user: str, anew: bool, wait_seconds: float, yes: bool, as_json: bool) -> None:
    """Have every replica follow its master, as the topology says who that is.

    What is right already is left alone. It refuses, before it changes anything, where the topology's master follows
    another server, and where a replica has transactions that its master lacks. The password with which replicas log in
    is taken from TAO_REPLICATOR_PASSWORD.
    """
    from tao.cli.output import counted, print_json, print_table
    from tao.storage.accounts import Account

    topology = load_topology(topology_file)
    administrator = Account(as_user, password_of("TAO_ADMIN_PASSWORD"))
    replicator = Account("tao_replicator", password_of("TAO_REPLICATOR_PASSWORD"))
    steps = plan(topology, run(_members(topology, administrator)), anew=anew)
    if not as_json:
        print_table(
            ("database", "server", "part", "to do"),
            [
                (step.database, step.server, f"replica of {step.follows}" if step.follows else "master", step.action)
                for step in steps
            ],
        )
    todo = [step for step in steps if step.action != RIGHT]
    if todo:
        ask(f"Change replication on {', '.join(step.server for step in todo)}?", yes)
    run(_do(topology, {step.server for step in todo}, administrator, replicator, wait_seconds))
    if as_json:
        print_json({"servers": [{name: getattr(step, name) for name in Step.__slots__} for step in steps]})
    else:
        waiting = sum(bool(step.follows) for step in steps)
        click.echo(f"{counted(len(todo), 'server')} changed; {counted(waiting, 'replica')} up to date with the masters")


def plan(topology: Topology, members: Mapping[str, MemberState], *, anew: bool) -> list[Step]:
    """What is to be done at each server, the master of a set first. Raises `OperatorError` where that would lose
    writes."""
    from tao.devcluster.replication_sets import replicas

    found = replicas(topology)
    steps: list[Step] = []
    for database in topology.databases:
        steps.append(_at_master(database, members))
        servers = set(database.servers.values())
        steps += [_at_replica(database, each, members, anew) for each in found if each.server in servers]
    return steps


def _at_master(database: Database, members: Mapping[str, MemberState]) -> Step:
    from tao.model.errors import OperatorError

    name = database.servers[database.master_region].name
    member = members[name]
    if member.following is not None:
        raise OperatorError(
            f"the topology names {name} as master of {database.name}, but it follows {member.following.source}: making "
            "it the master is a promotion, not this command's; is it the right topology file?"
        )
    return Step(database.name, name, "", OPEN if member.read_only else RIGHT)


def _at_replica(database: Database, replica: Replica, members: Mapping[str, MemberState], anew: bool) -> Step:
    from tao.model.errors import OperatorError

    name, master = replica.server.name, replica.master.name
    member = members[name]
    if member.seeding:
        raise OperatorError(f"{name} is being seeded, or was when that ended halfway: tao reseed {name}")
    astray = members[master].executed.lacks(member.executed)
    if astray:
        raise OperatorError(
            f"{name} has transactions that its master {master} lacks ({astray}): it cannot follow; "
            f"tao reseed {name} rebuilds it from the master"
        )
    there = replica.master.seen_from(replica.region)
    follows = member.following
    right = (
        follows is not None
        and (follows.source, follows.receiving, follows.applying) == (f"{there.host}:{there.port}", True, True)
        and member.read_only
    )
    return Step(database.name, name, master, RIGHT if right and not anew else ATTACH)


async def _members(topology: Topology, administrator: Account) -> dict[str, MemberState]:
    """By server name. Masters are asked last, so that they have whatever their replicas were found to have."""
    from tao.devcluster.replication_sets import masters, member, replicas

    servers = [*(replica.server for replica in replicas(topology)), *masters(topology)]
    return {server.name: await member(server, administrator) for server in servers}


async def _do(
    topology: Topology, changed: set[str], administrator: Account, replicator: Account, wait_seconds: float
) -> None:
    from tao.cli.waiting import WaitDisplay
    from tao.devcluster.replication_sets import catch_up, follow, lead, masters, replicas

    for master in masters(topology):
        if master.name in changed:
            await lead(master, administrator)
    found: Sequence[Replica] = replicas(topology)
    for replica in found:
        if replica.server.name in changed:
            await follow(replica, administrator, replicator)
    with WaitDisplay() as display:
        for replica in found:
            display.show(f"waiting for {replica.server.name}")
            await catch_up(replica, administrator, wait_seconds)
