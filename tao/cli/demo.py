"""`tao demo`: demonstrate the system on a cluster of its own, which is removed at the end."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tao.cli.dev import at_first_signal
from tao.cli.frame import INTERRUPTED_STATUS, fail, run, show
from tao.cli.options import InputFile, IntRange, given, json_option

if TYPE_CHECKING:
    from tao.demonstration.graph_files import GraphFiles
    from tao.demonstration.narration import Figures
    from tao.demonstration.social_graph import Generated

CHECK_FAILED_STATUS = 1
_file = InputFile()


@click.command()
@click.option("--edges", type=_file, help="A CSV file of mutual likes of pages, with the columns id_1, id_2.")
@click.option(
    "--objects", type=_file, help="A CSV file of the pages, with the columns id, facebook_id, page_name, page_type."
)
@click.option(
    "--nodes",
    type=IntRange(4),
    default=20_000,
    show_default=True,
    help="The number of pages to generate, without files.",
)
@click.option(
    "--edges-count",
    type=IntRange(2),
    default=150_000,
    show_default=True,
    help="The number of likes to generate, without files.",
)
@json_option
def demo(edges: Path | None, objects: Path | None, nodes: int, edges_count: int) -> int:
    """Show a whole cluster at work: a page for two viewers, a social graph cold and warm, writes, a check, two regions.

    It takes a minute or two. The last line is "demo: ok" when every check succeeded; exit status 1 when one failed.
    With --json the text goes to standard error, and the measured figures to standard output.
    """
    from tao.demonstration.graph_files import GraphFiles
    from tao.demonstration.narration import DemonstrationFailed
    from tao.demonstration.social_graph import Generated

    if (edges is None) != (objects is None):
        raise click.UsageError("--edges and --objects belong together: give both, or neither")
    source = Generated(nodes, edges_count) if edges is None or objects is None else GraphFiles(edges, objects)
    with redirect_stdout(sys.stderr) if given("as_json") else nullcontext():
        try:
            figures = run(_demo(source))
        except DemonstrationFailed as error:
            fail(f"{error.reason}: {error.message}", CHECK_FAILED_STATUS)
        if figures is None:
            click.echo("tao: interrupted; nothing is left running", err=True)
            return INTERRUPTED_STATUS
        click.echo(f"Every check succeeded, in {figures['seconds']:.0f} s; the cluster is stopped and removed.")
        click.echo("demo: ok")
    show(figures, lambda: None)
    return 0


async def _demo(source: GraphFiles | Generated) -> Figures | None:
    """Run the demonstration; return its figures, or None when it was interrupted."""
    from tao.demonstration.chapters import demonstrate

    demonstration = asyncio.ensure_future(demonstrate(source))
    at_first_signal(demonstration.cancel)
    try:
        return await demonstration
    except asyncio.CancelledError:
        return None
