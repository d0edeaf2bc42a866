"""`tao dev partition`, `heal` and `rtt`: what stands between the regions of a development cluster, changed as it runs.

They speak to the delay line alone, so they work on a cluster in another terminal's foreground too. Nothing is kept:
the next start begins with open lines and the round trip that `tao dev up` was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tao.cli.connecting import state_dir_option
from tao.cli.frame import json_option, run
from tao.cli.output import print_json, print_table

if TYPE_CHECKING:
    from tao.devcluster.line_control import Command, LineStatus


@click.command()
@click.argument("one", metavar="REGION")
@click.argument("other", metavar="REGION")
@click.option("--silent", is_flag=True, help="Lose every packet, instead of resetting and refusing connections.")
@state_dir_option
@json_option
def partition(one: str, other: str, silent: bool, state_dir: Path, as_json: bool) -> None:
    """Cut two regions off from each other: gRPC, frames and replication."""
    from tao.devcluster.line_control import Cut

    _tell(state_dir, Cut((one, other), silent), as_json)


@click.command()
@click.argument("regions", metavar="[REGION REGION]", nargs=-1)
@state_dir_option
@json_option
def heal(regions: tuple[str, ...], state_dir: Path, as_json: bool) -> None:
    """Join two regions again, or all."""
    from tao.devcluster.line_control import Heal

    match regions:
        case ():
            _tell(state_dir, Heal(), as_json)
        case (one, other):
            _tell(state_dir, Heal((one, other)), as_json)
        case _:
            raise click.UsageError("name two regions, or none for all")


@click.command()
@click.argument("milliseconds", type=float)
@state_dir_option
@json_option
def rtt(milliseconds: float, state_dir: Path, as_json: bool) -> None:
    """Set the round trip between regions, for what is sent from now on."""
    from tao.devcluster.line_control import SetRoundTrip

    _tell(state_dir, SetRoundTrip(milliseconds), as_json)


def _tell(state_dir: Path, command: Command, as_json: bool) -> None:
    import msgspec

    from tao.devcluster.layout import LINE
    from tao.devcluster.line_control import ask_line
    from tao.devcluster.state_folder import StateFolder
    from tao.model.errors import OperatorError

    folder = StateFolder(state_dir)
    record = folder.require()
    if not record.shape.is_distributed:
        raise OperatorError(f"the cluster in {state_dir} has one region: `tao dev up --regions 2` makes more")
    if LINE not in folder.running(record):
        raise OperatorError(f"no cluster runs in {state_dir}: `tao dev up` starts it")
    status = run(ask_line(folder.line_control, command))
    if as_json:
        print_json(msgspec.to_builtins(status))
    else:
        print_line(status)


def print_line(status: LineStatus) -> None:
    """The state of the line between each two regions."""
    rows = [
        (" and ".join(pair.regions), pair.state, status.rtt_ms, pair.connections, pair.carried_bytes / 1e6)
        for pair in status.pairs
    ]
    numbers = ("round trip ms", "connections", "carried MB")
    print_table(("between", "line", *numbers), rows, right=numbers)
