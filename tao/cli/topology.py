"""`tao topology`: show the topology document, and change it by compare-and-set.

A change is shown first, and stored only if nobody else changed the document meanwhile; servers and clients use it
within a second. Where the document is a file, change it on every machine that has a copy, or copy it there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tao.admin.documents import (
    ClusterTexts,
    export_documents,
    find_tier,
    import_documents,
    load_topology,
    read_schema,
    topology_changes,
    topology_file,
    topology_locks,
)
from tao.admin.shard_tables import added_shards, create_shards
from tao.cli.connection import topology_path
from tao.cli.frame import CommandGroup, ask, run, show
from tao.cli.logins import mastership_login, schema_place
from tao.cli.options import PLACE_METAVAR, IntRange, Place, changing_options, given, tier_option, topology_options
from tao.etcd.location import Location
from tao.model.errors import OperatorError, unreadable, unwritable
from tao.model.ids import MAX_SHARDS
from tao.model.topology import CacheServer, Topology, ranges_text
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.routing.routes import Routes
from tao.terminal import counted, fields_of, print_records
from tao.topology import edits
from tao.topology.document import dump_topology

_shard_argument = click.argument("shard", type=IntRange(min=0))
_name_argument = click.argument("name")


@click.group(cls=CommandGroup)
def topology() -> None:
    """Show and change the topology document."""


@topology.command("show")
@topology_options
def show_topology() -> None:
    """Show regions, tiers, servers and the number of shards that each has."""
    found = load_topology(topology_path())
    show(json.loads(dump_topology(found)), lambda: _print(found))


def _print(found: Topology) -> None:
    routes = Routes(found)
    click.echo(f"version {found.version}, {found.shards:,} shards")
    rows = []
    for place in found.tiers:
        routes_of_tier = routes.tier(place.region.name, place.tier.name)
        by_server = Counter(host.name for shard in range(found.shards) for host in routes_of_tier.hosts(shard))
        rows += [
            {
                "tier": place.path,
                "server": server.name,
                "addresses": _addresses(server),
                "shards": by_server[server.name],
                "by hand": sum(server.name in hosts for hosts in place.tier.moved.values()),
                "marked": "down" if server.down else "up",
            }
            for server in place.tier.servers
        ]
    print_records(rows)
    click.echo()
    print_records(
        {
            "database": each.database.name,
            "region": each.region,
            "server": each.server.name,
            "master": "master" if each.is_master else None,
            "shards": ranges_text(each.database.shards),
            "marked": "down" if each.server.down else "up",
        }
        for each in found.database_servers
    )


def _addresses(server: CacheServer) -> str:
    """Return all addresses of a server, with the host once where they share it."""
    given = {"grpc": server.grpc, "frames": server.frames, "admin": server.admin}
    places = [(kind, *address.rpartition(":")[::2]) for kind, address in given.items() if address]
    if len({host for _, host, _ in places}) == 1:
        return " ".join((places[0][1], *(f"{kind}:{port}" for kind, _, port in places)))
    return " ".join(f"{kind}:{host}:{port}" for kind, host, port in places)


@topology.command("mark-down")
@_name_argument
@changing_options
def mark_down(name: str) -> None:
    """Mark a cache or database server down: nobody uses it until it is marked up.

    A follower keeps its shards; other leaders take over those of a leader meanwhile."""
    _change(lambda found: edits.mark_any(found, name, down=True))


@topology.command("mark-up")
@_name_argument
@changing_options
def mark_up(name: str) -> None:
    """Mark a server up again, so that it is used."""
    _change(lambda found: edits.mark_any(found, name, down=False))


@topology.command("move-shard")
@_shard_argument
@click.argument("servers", nargs=-1, required=True)
@tier_option
@changing_options
def move_shard(shard: int, servers: tuple[str, ...], tier: str) -> None:
    """Map SHARD of one tier to SERVERS by hand: the first is its home, others serve its reads too.

    In a tier of leaders only one leads a shard: the first that is not marked down."""
    _change(lambda found: edits.move_shard(found, *find_tier(found, tier), shard, *servers))


@topology.command("unmove-shard")
@_shard_argument
@tier_option
@changing_options
def unmove_shard(shard: int, tier: str) -> None:
    """Let the ring place SHARD of one tier again."""
    _change(lambda found: edits.unmove_shard(found, *find_tier(found, tier), shard))


@topology.command("add-server")
@_name_argument
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
def add_server(tier: str, **server: Any) -> None:  # Any: the fields of `CacheServer`, which are named like the options
    """Add a cache server to a tier; start it afterwards. The ring gives it its part of the shards."""
    _change(lambda found: edits.add_server(found, *find_tier(found, tier), CacheServer(**server)))


@topology.command("remove-server")
@_name_argument
@changing_options
def remove_server(name: str) -> None:
    """Remove a cache server for good; stop it afterwards. The tier's other servers get its shards at once."""
    _change(lambda found: edits.remove_server(found, name))


@topology.command("add-shards")
@click.argument("count", type=IntRange(min=1, max=MAX_SHARDS))
@click.option(
    "--schema",
    "schema_file",
    type=Place(),
    metavar=PLACE_METAVAR,
    help="The schema, which names custom tables: a file, or etcd://HOST:PORT,…/PREFIX.  [default: the one beside the "
    "topology in etcd, or that of the development cluster in --state-dir]",
)
@changing_options
def add_shards(count: int, schema_file: Location | None) -> None:
    """Add COUNT shards, spread over the databases. New objects go there, too; what exists stays where it is.

    Their tables are created first, as `tao migrate` does. There can be 65,536 shards, and never fewer than before.
    Password: TAO_ADMIN_PASSWORD."""
    path, accounts = mastership_login()
    before = load_topology(path)
    after = edits.add_shards(before, count)
    tables = read_schema(schema_place(path, schema_file))[0].custom_tables()
    added = added_shards(before, after)
    if not given("as_json"):
        print_records(
            {"database": name, "new shards": ranges_text([(shards[0], shards[-1])])}
            for name, shards in added.items()
            if shards
        )
    ask(f"Create {counted(count, 'shard')}, and store {after.shards:,} shards as version {after.version} of {path}?")

    moves = ShardMoves(topology_file(path), topology_locks(path), accounts, MoveSettings())
    run(create_shards(moves, before, after, tables, accounts.administrator))
    show(
        {"version": after.version, "shards": after.shards, "added": added},
        lambda: click.echo(f"version {after.version} is stored: {after.shards:,} shards"),
    )


@topology.command("record-changes")
@changing_options
def record_changes() -> None:
    """Record the last 64 changes in the document, so that servers that skip a version lose no cache.

    Run it once, when every server, every tao command, and every application that connects to the file uses this
    version: earlier versions refuse the document."""
    _change(edits.begin_record)


@topology.command("export")
@click.argument("document", type=click.Path(path_type=Path))
@click.option("--schema", type=click.Path(path_type=Path), help="Write the schema that lies beside it to this file.")
@click.option("--access", type=click.Path(path_type=Path), help="Write the access document to this file.")
@topology_options
def export(document: Path, schema: Path | None, access: Path | None) -> None:
    """Write the topology, and what lies beside it in etcd, to files.

    `tao topology import` stores them where they came from, or in another place."""
    place = topology_path()
    found = run(export_documents(place))
    written = {}
    for what, text, path in (
        ("topology", found.topology, document),
        ("schema", found.schema, schema),
        ("access document", found.access, access),
    ):
        if path is not None:
            if text is None:
                raise OperatorError(f"there is no {what} in {place}: leave out the option for it")
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise OperatorError(unwritable(path, error)) from error
            written[what] = str(path)
    show(written, lambda: click.echo("\n".join(f"{what}: {path}" for what, path in written.items())))


@topology.command("import")
@click.argument("document", type=click.Path(path_type=Path))
@click.option("--schema", type=click.Path(path_type=Path), help="Store this schema file beside it, in etcd.")
@click.option("--access", type=click.Path(path_type=Path), help="Store this access document beside it, in etcd.")
@click.option(
    "--above",
    type=IntRange(min=0),
    default=0,
    metavar="VERSION",
    help="Store it under a version above this one: the highest that a server has, after etcd was restored.",
)
@changing_options
def import_(document: Path, schema: Path | None, access: Path | None, above: int) -> None:
    """Store a whole topology document from a file, in place of the one that is there.

    To move a cluster's documents into etcd, or back to a file, and after etcd was restored from a snapshot. It gets a
    version above the one that is there."""
    place = topology_path()
    schema_text, access_text = (None if path is None else _text_of(path) for path in (schema, access))
    sources = str(document), str(schema), str(access)
    texts = ClusterTexts(_text_of(document), schema_text, access_text, sources)
    parts = [name for name, text in zip(("topology", "schema", "access document"), texts, strict=False) if text]
    ask(f"Store the {' and the '.join(parts)} in {place}?")
    stored = run(import_documents(place, texts, above))
    show({"version": stored.version}, lambda: click.echo(f"version {stored.version} is stored in {place}"))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(unreadable(path, error)) from error


def _change(edit: Callable[[Topology], Topology]) -> None:
    """Apply the edit, show the changes, ask, and store them.

    Raises `TopologyConflict` when somebody else changed the document meanwhile."""
    path = topology_path()
    before = load_topology(path)
    after = edit(before)
    changes = topology_changes(before, after)
    if not given("as_json"):
        print_records(changes)
    if changes:
        ask(f"Store this as version {after.version} of {path}?")
        run(topology_file(path).change(before.version, after))
    show(
        {"version": after.version if changes else before.version, "changes": [fields_of(each) for each in changes]},
        lambda: click.echo(f"version {after.version} is stored" if changes else "nothing to change"),
    )
