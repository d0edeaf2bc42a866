"""The function of the jobs of fault runs, and the package by which workers find it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tao.client import Graph
from tao.worker.leaders import ScannedEdge

MARK: Final = "loadtest_mark"
"""The name of the function in jobs."""
_SOURCES: Final = Path(__file__).resolve().parents[2]


async def mark(graph: Graph, edges: Sequence[ScannedEdge]) -> None:
    """Add the edge ``(id1, blocks, id2)`` for each edge. Doing it twice changes nothing."""
    await graph.assoc_add_many([(edge.id1, "blocks", edge.id2, edge.time) for edge in edges])


@contextmanager
def functions_installed(folder: Path) -> Iterator[None]:
    """Install the package for the servers that this process starts while the block runs: the variable PYTHONPATH has
    ``folder``, in which this makes the package."""
    installed = folder / "loadtest_jobs-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: loadtest_jobs\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[tao.jobs]\n{MARK} = {__name__}:{mark.__name__}\n")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(_SOURCES), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
