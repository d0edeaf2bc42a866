"""`tao reseed`: a database server that cannot follow its master, or has nothing, is rebuilt from it.

The way back for what `tao rejoin` refuses. It may be repeated after whatever interrupted it, and begins anew then;
until it has ended nobody reads from that server (DESIGN.md §9).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tao.cli.connecting import load_topology
from tao.cli.frame import ask, run
from tao.cli.output import counted, print_json, print_pairs
from tao.cli.promote import changing, promoter_of, set_place
from tao.cli.waiting import LINE_SECONDS

if TYPE_CHECKING:
    from tao.storage.database_tools import Copied
    from tao.watcher.reseeding import SeedPlan, SeedStep

_MB: Final = 1 << 20


@click.command()
@click.argument("server")
@click.option("--dry-run", is_flag=True, help="Show what it would do, and change nothing.")
@changing
def reseed(server: str, dry_run: bool, file: Path | None, yes: bool, as_json: bool) -> None:
    """Rebuild SERVER, a replica of its database, from the master.

    For a former master that has diverged, an empty server, and one whose seeding was interrupted. It is marked down and
    closed, EVERYTHING THAT IT HAS IS DROPPED, the master is copied with the database's own tools (mariadb-dump, or
    mysqldump) while writes go on, and it follows. Passwords: TAO_ADMIN_PASSWORD, TAO_REPLICATOR_PASSWORD.
    """
    import msgspec

    from tao.topology.file_store import TopologyFile
    from tao.watcher.locks import FileLocks
    from tao.watcher.reseeding import Reseeder, database_with
    from tao.watcher.settings import PromotionSettings

    path, accounts = set_place(file)
    database_with(load_topology(path), server)
    progress = _Progress(silent=as_json)
    reseeder = Reseeder(
        TopologyFile(path, on_error=progress.fail),
        FileLocks(path),
        accounts,
        PromotionSettings(),
        promoter_of(path, accounts, True),
        on_step=progress.step,
        on_copied=progress.copied,
    )
    plan = run(reseeder.plan(server))
    if dry_run and as_json:
        print_json(msgspec.to_builtins(plan))
    if not as_json:
        _show(plan)
    if dry_run:
        return
    ask(f"Drop all that {server} has, and copy {plan.master} to it?", yes)
    done = run(reseeder.seed(server))
    if as_json:
        print_json(msgspec.to_builtins(done))
    else:
        click.echo(f"{server} has {counted(done.shards, 'shard')}, follows {done.follows}, and has caught up")


def _show(plan: SeedPlan) -> None:
    print_pairs(
        {
            "server": f"{plan.server} ({plan.region}), of {plan.database}",
            "is": "half seeded, by a run that was interrupted" if plan.half_seeded else "what it was left as",
            "drops": counted(plan.drops, "shard"),
            "discards": plan.discards or "no transaction that its master lacks",
            "copies": f"{counted(plan.copies, 'shard')} of {plan.master}, some {plan.about_bytes / _MB:,.0f} MB",
        }
    )


class _Progress:
    """Steps, and in the long one how far it is, on standard error."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._due = 0.0

    async def step(self, step: SeedStep) -> None:
        if not self._silent:
            click.echo(f"… {step.value}", err=True)
        self._due = time.monotonic() + LINE_SECONDS

    def copied(self, copied: Copied, shards: int) -> None:
        if not self._silent and time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            text = f"  {copied.statement_bytes / _MB:,.0f} MB of statements, shard {copied.schemas:,} of {shards:,}"
            click.echo(text, err=True)
            sys.stderr.flush()

    @staticmethod
    def fail(error: Exception) -> None:
        raise error
