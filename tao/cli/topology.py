"""`tao topology`: show the topology document, and change it by compare-and-set.

A change is shown first, and stored only if nobody else changed the document meanwhile; servers and clients use it
within a second. The document is a file: change it on every machine that has a copy, or copy it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tao.cli.connection import topology_path
from tao.cli.frame import ask, run
from tao.cli.options import changing_options, json_option, tier_option, topology_option
from tao.terminal import print_json, print_table

if TYPE_CHECKING:
    from tao.model.topology import CacheServer, Topology


@click.group()
def topology() -> None:
    """Show and change the topology document."""


@topology.command()
@topology_option
@json_option
def show(file: Path | None, as_json: bool) -> None:
    """Show regions, tiers, servers and the number of shards that each has."""
    import json

    from tao.admin.documents import load_topology
    from tao.routing.routes import Routes
    from tao.topology.document import dump_topology

    found = load_topology(topology_path(file))
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
    """Return all addresses of a server, with the host once where they share it."""
    given = {"grpc": server.grpc, "frames": server.frames, "admin": server.admin}
    places = [(kind, *address.rpartition(":")[::2]) for kind, address in given.items() if address]
    if len({host for _, host, _ in places}) == 1:
        return " ".join((places[0][1], *(f"{kind}:{port}" for kind, _, port in places)))
    return " ".join(f"{kind}:{host}:{port}" for kind, host, port in places)


@topology.command("mark-down")
@click.argument("name")
@changing_options
def mark_down(name: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Mark a cache or database server down: nobody uses it until it is marked up.

    A follower keeps its shards; other leaders take over those of a leader meanwhile."""
    from tao.admin.documents import with_mark

    _change(file, lambda found: with_mark(found, name, down=True), yes, as_json)


@topology.command("mark-up")
@click.argument("name")
@changing_options
def mark_up(name: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Mark a server up again, so that it is used."""
    from tao.admin.documents import with_mark

    _change(file, lambda found: with_mark(found, name, down=False), yes, as_json)


@topology.command("move-shard")
@click.argument("shard", type=click.IntRange(min=0))
@click.argument("servers", nargs=-1, required=True)
@tier_option
@changing_options
def move_shard(shard: int, servers: tuple[str, ...], tier: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Map SHARD of one tier to SERVERS by hand: the first is its home, others serve its reads too.

    In a tier of leaders only one leads a shard: the first that is not marked down."""
    from tao.admin.documents import find_tier
    from tao.topology import edits

    _change(file, lambda found: edits.move_shard(found, *find_tier(found, tier), shard, *servers), yes, as_json)


@topology.command("unmove-shard")
@click.argument("shard", type=click.IntRange(min=0))
@tier_option
@changing_options
def unmove_shard(shard: int, tier: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Let the ring place SHARD of one tier again."""
    from tao.admin.documents import find_tier
    from tao.topology import edits

    _change(file, lambda found: edits.unmove_shard(found, *find_tier(found, tier), shard), yes, as_json)


@topology.command("add-server")
@click.argument("name")
@tier_option
@click.option("--grpc", required=True, metavar="HOST:PORT", help="The address where it serves gRPC.")
@click.option(
    "--frames", default="", metavar="HOST:PORT", help="The address where it serves the frames transport, if it does."
)
@click.option(
    "--admin", default="", metavar="HOST:PORT", help="The address of its admin port: metrics, health, readiness."
)
@click.option(
    "--weight", default=1.0, show_default=True, help="Its part of the ring, relative to the tier's other servers."
)
@changing_options
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
    """Add a cache server to a tier; start it afterwards. The ring gives it its part of the shards."""
    from tao.admin.documents import find_tier
    from tao.model.topology import CacheServer
    from tao.topology import edits

    server = CacheServer(name=name, grpc=grpc, frames=frames, admin=admin, weight=weight)
    _change(file, lambda found: edits.add_server(found, *find_tier(found, tier), server), yes, as_json)


@topology.command("remove-server")
@click.argument("name")
@changing_options
def remove_server(name: str, file: Path | None, yes: bool, as_json: bool) -> None:
    """Remove a cache server for good; stop it afterwards. The tier's other servers get its shards at once."""
    from tao.topology import edits

    _change(file, lambda found: edits.remove_server(found, name), yes, as_json)


def _change(file: Path | None, edit: Callable[[Topology], Topology], yes: bool, as_json: bool) -> None:
    """Apply the edit, show the changes, ask, and store them.

    Raises `TopologyConflict` when somebody else changed the document meanwhile."""
    from tao.admin.documents import load_topology, topology_changes, topology_file

    path = topology_path(file)
    before = load_topology(path)
    after = edit(before)
    changes = topology_changes(before, after)
    if not as_json:
        print_table(("what", "before", "after"), changes)
    if changes:
        ask(f"Store this as version {after.version} of {path}?", yes)
        run(topology_file(path).change(before.version, after))
    if as_json:
        stored = after.version if changes else before.version
        shown = [{"what": what, "before": was, "after": now} for what, was, now in changes]
        print_json({"version": stored, "changes": shown})
    else:
        click.echo(f"version {after.version} is stored" if changes else "nothing to change")
