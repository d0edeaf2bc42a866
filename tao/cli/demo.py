"""`tao demo`: the system shown at work on a cluster of its own; ends by itself, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tao.cli.frame import INTERRUPTED_STATUS, fail, run
from tao.model.errors import OperatorError

if TYPE_CHECKING:
    from tao.cli.demonstration.figures import Figures
    from tao.cli.demonstration.generated_graph import GraphFiles
    from tao.cli.demonstration.story import Generated

NOT_AS_IT_SHOULD_BE_STATUS = 1
_file = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.option("--edges", type=_file, help="Mutual likes of pages: a CSV file with the columns id_1, id_2.")
@click.option("--objects", type=_file, help="The pages: columns id, facebook_id, page_name, page_type.")
@click.option(
    "--nodes", type=click.IntRange(4), default=20_000, show_default=True, help="Without files: pages to generate."
)
@click.option(
    "--edges-count",
    type=click.IntRange(2),
    default=150_000,
    show_default=True,
    help="Without files: likes to generate.",
)
@click.option(
    "--json", "figures_file", type=click.Path(path_type=Path, dir_okay=False), help="Write what was measured there."
)
def demo(edges: Path | None, objects: Path | None, nodes: int, edges_count: int, figures_file: Path | None) -> int:
    """Show a whole cluster at work: a page for two viewers, a social graph cold and warm, writes, a check, two regions.

    Takes a minute or two. The last line is "demo: ok" when everything shown was as it should be; exit status 1 when
    something was not.
    """
    import msgspec

    from tao.cli.demonstration.figures import DemonstrationFailed
    from tao.cli.demonstration.generated_graph import GraphFiles
    from tao.cli.demonstration.story import Generated

    if (edges is None) != (objects is None):
        raise click.UsageError("--edges and --objects belong together: give both, or neither")
    if figures_file is not None and not figures_file.absolute().parent.is_dir():
        raise click.UsageError(f"--json {figures_file}: there is no folder {figures_file.absolute().parent}")
    source = Generated(nodes, edges_count) if edges is None or objects is None else GraphFiles(edges, objects)
    try:
        figures = run(_demo(source))
    except DemonstrationFailed as error:
        fail(f"{error.reason}: {error.message}", NOT_AS_IT_SHOULD_BE_STATUS)
    if figures is None:
        click.echo("tao: interrupted; nothing is left running", err=True)
        return INTERRUPTED_STATUS
    if figures_file is not None:
        try:
            figures_file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
        except OSError as error:
            raise OperatorError(f"cannot write {figures_file}: {error.strerror}") from error
    click.echo(f"Everything was as it should be, in {figures.seconds:.0f} s; the cluster is stopped and removed.")
    click.echo("demo: ok")
    return 0


async def _demo(source: GraphFiles | Generated) -> Figures | None:
    """None: interrupted."""
    from tao.cli.demonstration.story import tell

    loop = asyncio.get_running_loop()
    telling = asyncio.ensure_future(tell(source))

    def on_signal() -> None:
        # The next one ends the program at once; the kernel then ends what it started.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        telling.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await telling
    except asyncio.CancelledError:
        return None
