"""`tao topology`: look at the document that says who exists, and change it by compare-and-set (DESIGN.md §13).

A change is worked out, shown against what is there, and stored only if nobody changed the document meanwhile; servers
and clients follow within a second. It is made in a file, so it is made on every machine that has one, or copied there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.connecting import DEFAULT_STATE_DIR, load_topology
from tao.cli.frame import ask, json_option, run
from tao.cli.output import print_json, print_table

if TYPE_CHECKING:
    from tao.model.errors import TopologyError
    from tao.model.topology import CacheServer, Topology


@click.group()
def topology() -> None:
    """Show and change the topology document."""


file_option = click.option(
    "--topology",
    "file",
    envvar="TAO_TOPOLOGY",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The document.  [default: that of the development cluster in ./.tao-dev]",
)
tier_option = click.option(
    "--tier", required=True, metavar="TIER", help="Its name; REGION/TIER where several regions have one of that name."
)


def changing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of a command that changes the document."""
    yes = click.option("--yes", is_flag=True, help="Do it without asking.")
    for option in (json_option, yes, file_option):
        command = option(command)
    return command


@topology.command()
@file_option
@json_option
def show(file: Path | None, as_json: bool) -> None:
    """Show regions, tiers, servers and how many shards each has."""
    import json

    from tao.routing.routes import Routes
    from tao.topology.document import dump_topology

    found = load_topology(document_path(file))
    if as_json:
        print_json(json.loads(dump_topology(found)))
        return
    routes = Routes(found)
    click.echo(f"version {found.version}, {found.shards:,} shards")
    rows = []
    for region in found.regions:
        for tier in (region.leaders, *region.followers):
            by_server = Counter(
                host.name for shard in range(found.shards) for host in routes.tier(region.name, tier.name).hosts(shard)
            )
            for server in tier.servers:
                state = "down" if server.down else "up"
                by_hand = sum(server.name in hosts for hosts in tier.moved.values())
                where = f"{region.name}/{tier.name}"
                rows.append((where, server.name, _addresses(server), by_server[server.name], by_hand, state))
    print_table(("tier", "server", "addresses", "shards", "by hand", "marked"), rows, right=("shards", "by hand"))
    click.echo()
    print_table(
        ("database", "region", "server", "master", "shards", "marked"),
        [
            (
                database.name,
                region_name,
                db.name,
                "master" if region_name == database.master_region else None,
                ", ".join(f"{first}-{last}" for first, last in database.shards),
                "down" if db.down else "up",
            )
            for database in found.databases
            for region_name, db in database.servers.items()
        ],
    )


def _addresses(server: CacheServer) -> str:
    """All that it has, the host once where they share it."""
    given = {"grpc": server.grpc, "frames": server.frames, "admin": server.admin}
    places = [(kind, *address.rpartition(":")[::2]) for kind, address in given.items() if address]
    if len({host for _, host, _ in places}) == 1:
        return " ".join((places[0][1], *(f"{kind}:{port}" for kind, _, port in places)))
    return " ".join(f"{kind}:{host}:{port}" for kind, host, port in places)


@topology.command("mark-down")
@click.argument("name")
@changing
def mark_down(name: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Have a cache or database server passed over until it is marked up.

    A follower keeps its shards; those of a leader are led by others meanwhile."""
    _change(file, lambda found: _marked(found, name, down=True), yes, as_json)


@topology.command("mark-up")
@click.argument("name")
@changing
def mark_up(name: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Have a server that was marked down used again."""
    _change(file, lambda found: _marked(found, name, down=False), yes, as_json)


@topology.command("move-shard")
@click.argument("shard", type=click.IntRange(min=0))
@click.argument("servers", nargs=-1, required=True)
@tier_option
@changing
def move_shard(shard: int, servers: tuple[str, ...], tier: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Map SHARD of one tier to SERVERS by hand: the first is its home, others serve its reads too.

    In a tier of leaders only one leads a shard: the first that is not marked down."""
    from tao.topology import edits

    _change(file, lambda found: edits.move_shard(found, *place_of(found, tier), shard, *servers), yes, as_json)


@topology.command("unmove-shard")
@click.argument("shard", type=click.IntRange(min=0))
@tier_option
@changing
def unmove_shard(shard: int, tier: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Give SHARD of one tier back to the ring."""
    from tao.topology import edits

    _change(file, lambda found: edits.unmove_shard(found, *place_of(found, tier), shard), yes, as_json)


@topology.command("add-server")
@click.argument("name")
@tier_option
@click.option("--grpc", required=True, metavar="HOST:PORT")
@click.option("--frames", default="", metavar="HOST:PORT", help="The faster transport, where it listens for it.")
@click.option("--admin", default="", metavar="HOST:PORT", help="Metrics, health, readiness.")
@click.option("--weight", default=1.0, show_default=True, help="Its part of the ring, beside the tier's others.")
@changing
def add_server(
    name: str,
    tier: str,
    grpc: str,
    frames: str,
    admin: str,
    weight: float,
    file: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Let a cache server join a tier: start it afterwards. The ring gives it its part of the shards."""
    from tao.model.topology import CacheServer
    from tao.topology import edits

    server = CacheServer(name=name, grpc=grpc, frames=frames, admin=admin, weight=weight)
    _change(file, lambda found: edits.add_server(found, *place_of(found, tier), server), yes, as_json)


@topology.command("remove-server")
@click.argument("name")
@changing
def remove_server(name: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Take a cache server out for good: its shards go to the tier's others at once. Stop it afterwards."""
    from tao.topology import edits

    _change(file, lambda found: edits.remove_server(found, name), yes, as_json)


def _change(file: Path | None, edit: Callable[[Topology], Topology], yes: bool, as_json: bool) -> None:
    """Work out, show, ask, store. Raises `TopologyConflict` when somebody else was faster."""
    from tao.cli.topology_changes import differences
    from tao.topology.file_store import TopologyFile

    path = document_path(file)
    before = load_topology(path)
    after = edit(before)
    changes = differences(before, after)
    if not as_json:
        print_table(("what", "before", "after"), changes)
    if changes:
        ask(f"Store this as version {after.version} of {path}?", yes)
        run(TopologyFile(path, on_error=_raise).change(before.version, after))
    if as_json:
        stored = after.version if changes else before.version
        shown = [{"what": what, "before": was, "after": now} for what, was, now in changes]
        print_json({"version": stored, "changes": shown})
    else:
        click.echo(f"version {after.version} is stored" if changes else "nothing to change")


def _marked(found: Topology, name: str, down: bool) -> Topology:
    from tao.topology import edits

    databases = {server.name for database in found.databases for server in database.servers.values()}
    mark = edits.mark_database_server if name in databases else edits.mark_server
    return mark(found, name, down)


def place_of(found: Topology, tier: str) -> tuple[str, str]:
    """Region and tier of what was given as TIER or REGION/TIER."""
    from tao.model.errors import TopologyError

    places = [(region.name, each.name) for region in found.regions for each in (region.leaders, *region.followers)]
    fitting = [place for place in places if tier in (place[1], "/".join(place))]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join("/".join(place) for place in fitting or places)
    raise TopologyError(f"{tier!r} names {'no tier' if not fitting else 'several tiers'}; name one of {known}")


def document_path(file: Path | None) -> Path:
    """The file named, or that of the development cluster. Raises `OperatorError`."""
    from tao.devcluster.state_folder import StateFolder
    from tao.model.errors import OperatorError

    if file is not None:
        return file
    found = StateFolder(DEFAULT_STATE_DIR).topology
    if not found.exists():
        raise OperatorError("there is no cluster in ./.tao-dev: name a document with --topology or TAO_TOPOLOGY")
    return found


def _raise(error: TopologyError) -> None:
    raise error
