"""`tao invalidate`: have caches drop what they hold, by shard, range, server or type, at once."""

from __future__ import annotations

import click

from tao.admin.connection import current_schema, current_topology
from tao.admin.invalidation import Plan, ServerResult, Types, plan_invalidation, types_named
from tao.admin.invalidation import invalidate as invalidate_all
from tao.cli.connection import links_of_command, target_of
from tao.cli.frame import ask, run, show
from tao.cli.options import IntRange, given, global_options, yes_option
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.terminal import Counting, counted, fields_of, print_records, print_records_with_errors

_NAMED_SHARDS = 10


class ShardRange(click.ParamType[tuple[int, int]]):
    """``A-B``, both ends included."""

    name = "A-B"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Parse ``A-B`` into two numbers."""
        first, dash, last = str(value).partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            self.fail(f"{value!r} is not a range of shards: write 16-31", param, ctx)
        return int(first), int(last)


@click.command()
@click.option(
    "--shard",
    "shards",
    type=IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Drop this shard. May be repeated.",
)
@click.option(
    "--range",
    "ranges",
    type=ShardRange(),
    multiple=True,
    help="Drop the shards from A to B, both included. May be repeated.",
)
@click.option(
    "--server", "servers", multiple=True, metavar="NAME", help="Drop only at this cache server. May be repeated."
)
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="NAME",
    help="Drop only objects or associations of this type. May be repeated.",
)
@yes_option
@global_options
def invalidate(
    shards: tuple[int, ...], ranges: tuple[tuple[int, int], ...], servers: tuple[str, ...], types: tuple[str, ...]
) -> int:
    """Have caches drop what they hold and read it again from the databases.

    Name shards, servers, types, or several of these: entries are dropped that are in the shards AND at the servers AND
    of the types named. It takes effect at once, however much is cached, and causes misses: the databases must be able
    to serve them. Object types share tables with the others of their arena, which are dropped, too. A name that an
    object type and an association type share means both.

    Leaders come first, then followers. At a follower alone (--server) it fills again with what its leader holds. Exit
    status 1 when a server could not be reached.
    """
    if not (shards or ranges or servers or types):
        raise click.UsageError("name what to drop: --shard, --range, --server or --type")
    wanted = {*shards, *(shard for first, last in ranges for shard in range(first, last + 1))}
    target = target_of()
    topology = run(current_topology(target))
    plan = plan_invalidation(Routes(topology), sorted(wanted), servers)
    numbers = types_named(run(current_schema(target)), types) if types else Types()
    what = f"everything of type {', '.join(types)}" if types else "everything"
    if not given("as_json"):
        click.echo(f"{what} in {_shards_text(plan)}:")
        print_records(plan.results.values(), "server", "role", "region", "has")
    ask(f"Drop {what} at {counted(len(plan.results), 'server')}?")
    results = run(_invalidate(topology, plan, numbers))
    failed = [each.server for each in results if each.error]

    def text() -> None:
        print_records_with_errors(results, "server", "role", "region", "invalidated")
        if failed:
            click.echo(f"{counted(len(failed), 'server')} may still serve it: repeat when they are reachable", err=True)

    document = {
        "shards": len(plan.shards),
        "types": numbers,
        # "voided" is the former name of "invalidated".
        "servers": [{**fields_of(each), "voided": each.invalidated} for each in results],
        "unreachable": failed,
    }
    show(document, text)
    return int(bool(failed))


def _shards_text(plan: Plan) -> str:
    if len(plan.shards) <= _NAMED_SHARDS:
        return f"shard{'s' if len(plan.shards) > 1 else ''} {', '.join(map(str, plan.shards))}"
    return counted(len(plan.shards), "shard")


async def _invalidate(topology: Topology, plan: Plan, types: Types) -> list[ServerResult]:
    with Counting("shards invalidated") as counting:
        async with links_of_command(topology) as links:
            return await invalidate_all(plan, links, types, counting.show)
