"""`tao database`: move shards to other databases while they are read and written.

Everything is shown first. A move that was interrupted is repeated: it goes on where it can, and undoes the rest.
"""

from __future__ import annotations

import os
import sys
import time

import click

from tao.admin.documents import topology_file, topology_locks
from tao.admin.move_sequence import move_patiently, plan_balance_of, plan_split_of, run_moves
from tao.admin.shard_balance import MovePlan, PlannedMove
from tao.admin.shard_contents import ShardContents
from tao.admin.shard_mover import MoverAccounts, MoveResult, ShardMover
from tao.cli.frame import CommandGroup, ask, run, show
from tao.cli.logins import mover_login
from tao.cli.options import Decorator, FloatRange, IntRange, changing_options, combined, given
from tao.model.errors import RetryableError
from tao.observability.logs import configure_logs, logger
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.replication.shard_move_plan import MoveStep
from tao.terminal import LINE_SECONDS, counted, print_pairs, print_records

_MB = 1_000_000
_NICENESS = 10
"""Of a move with a pace: servers on its machine have a core before it. Without it the p99 of other requests was a tenth
higher."""
_shard_argument = click.argument("shard", type=IntRange(min=0))
_pace_option: Decorator = click.option(
    "--megabytes-per-second",
    type=FloatRange(0, 10_000),
    default=0.0,
    show_default=True,
    help="Copy at most so many megabytes of rows a second, compare an eighth of the time, and give way to other "
    "processes of this machine. 0: as fast as the servers can.",
)
_steady_option: Decorator = click.option(
    "--steady-seconds",
    type=FloatRange(0, 3_600),
    default=10.0,
    show_default=True,
    help="How long the copy must have been less than a second behind before writes are held up, in seconds.",
)
_moving_options = combined(_pace_option, _steady_option, changing_options)


@click.group(cls=CommandGroup)
def database() -> None:
    """Move shards to other databases while they are read and written."""


@database.command("move")
@_shard_argument
@click.option("--to", "target", required=True, metavar="DATABASE", help="The database that gets the shard.")
@click.option("--undo", is_flag=True, help="Give up a move that was interrupted, and drop the copy.")
@_moving_options
def move(shard: int, target: str, undo: bool, megabytes_per_second: float, steady_seconds: float) -> None:
    """Move SHARD to another database.

    The rows of the shard are copied, its changes are followed in the binlog, and the copy is compared. Then its writes
    wait, for about a second, until the other database has everything and the topology says so. Reads go on, and no
    request fails. After an interruption, run it again. Passwords: TAO_ADMIN_PASSWORD, TAO_LEADER_PASSWORD,
    TAO_REPLICATOR_PASSWORD.
    """
    moves, mover, _ = _tools(megabytes_per_second, steady_seconds)
    if undo:
        ask(f"Give up the move of shard {shard} to {target}, and drop the copy?")
        steps = [step.value for step in run(moves.undo(shard, target))]
        done = "; ".join(steps) or "there was nothing to undo"
        show({"shard": shard, "target": target, "steps": steps}, lambda: click.echo(done))
        return
    plan = run(mover.plan(shard, target))
    if not given("as_json"):
        print_pairs(
            {
                "shard": plan.shard,
                "from": plan.source,
                "to": plan.target,
                "begins with": plan.step,
                "megabytes, about": round(plan.about_bytes / _MB, 1),
                "megabytes free": "not known" if plan.free_bytes is None else round(plan.free_bytes / _MB, 1),
            }
        )
    ask(f"Move shard {shard} from {plan.source} to {target}?")
    result = run(
        move_patiently(mover, PlannedMove(shard, plan.source, target), _show_failure),
        if_interrupted="repeat the command, which goes on with what was begun, or give the move up with --undo",
    )
    show(result, lambda: click.echo(_done(result)))


@database.command("split")
@click.argument("source")
@click.option("--into", "target", required=True, metavar="DATABASE", help="The database that gets half of the shards.")
@_moving_options
def split(source: str, target: str, megabytes_per_second: float, steady_seconds: float) -> None:
    """Move half of the shards of the database SOURCE to another one, one after the other.

    The moves are shown first. After an interruption, run it again: it finishes what was begun, and moves what is left
    of the half. Shards count as moved as long as the database SOURCE keeps what they were (`tao database
    drop-moved`)."""
    _, mover, contents = _tools(megabytes_per_second, steady_seconds)
    _do_all(mover, run(plan_split_of(contents, source, target)), "bytes")


@database.command("balance")
@click.option(
    "--by",
    type=click.Choice(("bytes", "writes")),
    default="bytes",
    show_default=True,
    help="Make databases equal in bytes, or in row changes a second.",
)
@click.option(
    "--sample-seconds",
    type=FloatRange(1, 3_600),
    default=10.0,
    show_default=True,
    help="How long row changes are counted with --by writes, in seconds.",
)
@_moving_options
def balance(by: str, sample_seconds: float, megabytes_per_second: float, steady_seconds: float) -> None:
    """Move shards until all databases hold about as much, or are written about as much.

    The moves are shown first. A shard does not move back to a database where its former copy still stands (`tao
    database drop-moved`). After an interruption, run it again: it finishes what was begun."""
    _, mover, contents = _tools(megabytes_per_second, steady_seconds)
    plan = run(plan_balance_of(contents, 0.0 if by == "bytes" else sample_seconds))
    _do_all(mover, plan, "bytes" if by == "bytes" else "row changes a second")


@database.command("drop-moved")
@click.argument("shards", nargs=-1, type=IntRange(min=0))
@click.option(
    "--keep-hours",
    type=FloatRange(0, 8_760),
    default=24.0,
    show_default=True,
    help="Keep what has moved away less than so many hours ago.",
)
@changing_options
def drop_moved(shards: tuple[int, ...], keep_hours: float) -> None:
    """Drop what shards have left behind at the databases that they have moved away from: all, or SHARDS alone.

    Nothing reads it any more. It is kept for a day, to look something up if need be."""
    *_, contents = _tools()
    found, kept = run(contents.find_moved(shards, keep_hours * 3_600))
    if not given("as_json"):
        print_records(found)
    if found:
        ask(f"Drop {counted(len(found), 'schema')}?")
        run(contents.drop(found))
    named = ", ".join(str(each.shard) for each in kept)
    more = f"; kept, because less than {keep_hours:g} hours old (--keep-hours): shards {named}" if kept else ""
    show({"dropped": found, "kept": kept}, lambda: click.echo(f"{counted(len(found), 'schema')} dropped{more}"))


def _tools(
    megabytes_per_second: float = 0.0, steady_seconds: float = 0.0
) -> tuple[ShardMoves, ShardMover, ShardContents]:
    settings = MoveSettings(megabytes_per_second=megabytes_per_second, steady_seconds=steady_seconds)
    if settings.is_paced:
        os.nice(_NICENESS)
    path, accounts, leader = mover_login()
    configure_logs("operator", "tao", "error", "console", sys.stderr)
    log, progress = logger("move"), _MoveProgress()
    moves = ShardMoves(topology_file(path), topology_locks(path), accounts, settings)
    mover_accounts = MoverAccounts(leader, accounts.replicator)
    mover = ShardMover(moves, settings, mover_accounts, log, on_step=progress.step, on_copied=progress.copied)
    return moves, mover, ShardContents(moves, settings, accounts.replicator, log)


def _do_all(mover: ShardMover, plan: MovePlan, unit: str) -> None:
    """Show a sequence of moves, ask, and do them; or say why there is none."""
    planned = plan.moves
    if not given("as_json"):
        print_records({**move._asdict(), "load": f"{move.load:,.0f} {unit}"} for move in planned)
    if planned:
        ask(f"Move {counted(len(planned), 'shard')}?")
    results: list[MoveResult] = []

    async def work() -> None:
        async for result in run_moves(mover, planned, _show_failure):
            results.append(result)
            if not given("as_json"):
                click.echo(f"{len(results)}/{len(planned)}: {_done(result)}", err=True)

    run(work(), if_interrupted="repeat the command, which goes on with what was begun")
    moved = {result.shard for result in results}
    others = ", ".join(str(move.shard) for move in planned if move.shard not in moved)
    more = f"; left out, because another process has moved them: shards {others}" if others else ""
    more = more or (f": {plan.why_none}" if plan.why_none else "")
    show({"moves": results}, lambda: click.echo(f"{counted(len(results), 'shard')} moved{more}"))


def _show_failure(error: RetryableError, pause_seconds: float) -> None:
    """Show why an attempt has failed, unless the output is JSON."""
    if not given("as_json"):
        click.echo(f"… {error.reason}: {error.message}; trying again in {pause_seconds:g} s", err=True)
        sys.stderr.flush()


def _done(result: MoveResult) -> str:
    stood = "" if result.writes_stood_seconds is None else f"; its writes stood {result.writes_stood_seconds:.2f} s"
    return f"{result.target} holds shard {result.shard}, topology {result.topology_version}{stood}"


class _MoveProgress:
    """Prints the steps of a move and the progress of its copy, unless the output is JSON."""

    def __init__(self) -> None:
        self._printed_at = 0.0

    async def step(self, step: MoveStep) -> None:
        if not given("as_json"):
            click.echo(f"… {step.value}", err=True)
            sys.stderr.flush()

    def copied(self, copied_bytes: int) -> None:
        now = time.monotonic()
        if not given("as_json") and now - self._printed_at >= LINE_SECONDS:
            self._printed_at = now
            click.echo(f"  {copied_bytes / _MB:,.0f} MB of rows", err=True)
