"""`tao invalidate`: have caches drop what they hold, by shard, range, server or type, at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tao.cli.frame import ask, connect_option, json_option, run
from tao.cli.output import counted, print_json, print_table

if TYPE_CHECKING:
    from tao.cli.invalidating import Plan, ServerResult, Types

_NAMED_SHARDS = 10


class ShardRange(click.ParamType[tuple[int, int]]):
    """``A-B``, both ends included."""

    name = "A-B"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """See click."""
        first, dash, last = str(value).partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            self.fail(f"{value!r} is no range of shards like 16-31", param, ctx)
        return int(first), int(last)


@click.command()
@click.option("--shard", "shards", type=click.IntRange(min=0), multiple=True, metavar="N", help="One shard.")
@click.option("--range", "ranges", type=ShardRange(), multiple=True, help="Shards A to B, both included.")
@click.option("--server", "servers", multiple=True, metavar="NAME", help="Only at this cache server.")
@click.option("--type", "types", multiple=True, metavar="NAME", help="Only objects or associations of this type.")
@click.option("--token", envvar="TAO_TOKEN", default="", help="The cluster's shared secret, if it has one.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
@connect_option
@json_option
def invalidate(
    shards: tuple[int, ...],
    ranges: tuple[tuple[int, int], ...],
    servers: tuple[str, ...],
    types: tuple[str, ...],
    token: str,
    yes: bool,
    connect: str | None,
    as_json: bool,
) -> int:
    """Have caches drop what they hold and read it again from the databases.

    Name shards, servers, types, or several of these: what is dropped is in the shards AND at the servers AND of the
    types named. Each may be given more than once. It takes effect at once, however much is cached, and costs misses:
    the databases must be able to serve them. Object types share tables with the others of their arena, which go, too. A
    name of an object type and an association type means both.

    Leaders are told first, then followers, who also follow their leaders. At a follower alone (--server) what its
    leader holds comes back. Exit status 1 when a server could not be told.
    """
    import dataclasses

    from tao.cli.invalidating import Types, plan_invalidation, types_named
    from tao.cli.reaching import schema_of, topology_of
    from tao.routing.routes import Routes

    if not (shards or ranges or servers or types):
        raise click.UsageError("say what: --shard, --range, --server or --type")
    wanted = {*shards, *(shard for first, last in ranges for shard in range(first, last + 1))}
    plan = plan_invalidation(Routes(run(topology_of(connect))), sorted(wanted), servers)
    numbers = types_named(run(schema_of(connect)), types) if types else Types()
    what = f"what is of type {', '.join(types)}" if types else "everything"
    if not as_json:
        click.echo(f"{what} in {_shards_text(plan)}:")
        print_table(
            ("server", "role", "region", "shards"),
            [(each.server, each.role, each.region, each.has) for each in plan.results.values()],
            right=("shards",),
        )
    ask(f"Drop {what} at {counted(len(plan.results), 'server')}?", yes)
    results = run(_invalidate(plan, token, numbers))
    failed = [each for each in results if each.error]
    if as_json:
        print_json(
            {
                "shards": len(plan.shards),
                "types": dataclasses.asdict(numbers),
                "servers": [dataclasses.asdict(each) for each in results],
                "unreachable": [each.server for each in failed],
            }
        )
    else:
        print_table(
            ("server", "role", "region", "voided shards", "error"),
            [(each.server, each.role, each.region, each.voided, each.error or None) for each in results],
            right=("voided shards",),
        )
        if failed:
            click.echo(f"{counted(len(failed), 'server')} may still serve it: repeat when they are reachable", err=True)
    return int(bool(failed))


def _shards_text(plan: Plan) -> str:
    if len(plan.shards) <= _NAMED_SHARDS:
        return f"shard{'s' if len(plan.shards) > 1 else ''} {', '.join(map(str, plan.shards))}"
    return counted(len(plan.shards), "shard")


async def _invalidate(plan: Plan, token: str, types: Types) -> list[ServerResult]:
    from tao.cli.invalidating import invalidate as invalidate_all
    from tao.cli.reaching import operator_links
    from tao.cli.waiting import Counting

    with Counting("shards voided") as counting:
        async with operator_links(token) as links:
            return await invalidate_all(plan, links, types, counting.show)
