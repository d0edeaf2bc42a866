"""A social graph to load when no files are given: seeded, heavy-tailed, in the form of the Facebook page graph.

Preferential attachment (Barabási and Albert): whoever comes new is joined to ends of existing edges, drawn evenly. A
page is so drawn in proportion to the edges that it has, and few pages come to have very many of them, as in the graphs
that people make. That tail is what makes caching lists interesting.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tao.model.errors import OperatorError

KINDS: Final = ("company", "government", "politician", "tvshow")
_FIRST_EXTERNAL_ID: Final = 100_000_000_000


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """An edge list (``id_1,id_2``, undirected) and its pages (``id,facebook_id,page_name,page_type``)."""

    edges: Path
    objects: Path


def generate_edges(nodes: int, edges: int, seed: int) -> list[tuple[int, int]]:
    """Exactly ``edges`` different undirected edges ``(smaller, larger)`` between nodes 0 … ``nodes - 1``; every node
    has one. The same for the same arguments.

    Raises `OperatorError` when there is no such graph, or none that is sparse enough to be drawn at random."""
    if nodes < 2:
        raise OperatorError(f"a graph of {nodes} nodes has no edges: at least 2 are needed")
    if not nodes - 1 <= edges <= nodes * (nodes - 1) // 4:
        raise OperatorError(
            f"{nodes:,} nodes can have {nodes - 1:,} (one for each new node) to {nodes * (nodes - 1) // 4:,} (half of "
            f"all pairs) edges, not {edges:,}"
        )
    chance = random.Random(seed)
    found = {(0, 1): None}
    ends = [0, 1]

    def join(one: int, other: int) -> None:
        pair = (min(one, other), max(one, other))
        if one != other and pair not in found:
            found[pair] = None
            ends.extend(pair)

    for node in range(2, nodes):
        # What is due by now in even growth; never more than there are others to be joined to.
        due = max(1, min(edges * node // (nodes - 1) - len(found), node // 2))
        before = len(found)
        while len(found) < before + min(due, edges - before):
            join(node, chance.choice(ends))
    while len(found) < edges:
        join(chance.choice(ends), chance.randrange(nodes))
    return list(found)


def write_graph(folder: Path, nodes: int, edges: int, seed: int) -> GraphFiles:
    """Generate a graph into two files of ``folder``. Raises as `generate_edges`."""
    files = GraphFiles(folder / "edges.csv", folder / "pages.csv")
    drawn = generate_edges(nodes, edges, seed)
    with files.edges.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id_1", "id_2"))
        writer.writerows(drawn)
    chance = random.Random(seed)
    with files.objects.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "facebook_id", "page_name", "page_type"))
        for node in range(nodes):
            writer.writerow((node, _FIRST_EXTERNAL_ID + node, f"Page {node}", chance.choice(KINDS)))
    return files
