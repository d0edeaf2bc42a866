"""A social graph as CSV files, when none is given: pages that like each other, few of them much liked.

Each page in turn likes some earlier ones, chosen among the ends of the edges so far (preferential attachment), which
gives the few long and many short lists of real graphs. The columns are those of the public page graph that `load`
accepts as well.
"""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random

KINDS = ("company", "government", "politician", "tvshow")


def write_graph(objects_file: Path, edges_file: Path, objects: int, edges_per_object: int, seed: int = 1) -> int:
    """Write ``objects`` lines of pages and their undirected edges, each once. Returns how many edges. Raises
    `OSError`."""
    chance = Random(seed)
    with objects_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "facebook_id", "page_name", "page_type"))
        for number in range(objects):
            writer.writerow((number, 10**12 + number, f"page {number}", chance.choice(KINDS)))
    ends = [0]
    edges = 0
    with edges_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id_1", "id_2"))
        for page in range(1, objects):
            liked = {chance.choice(ends) for _ in range(min(page, edges_per_object))}
            for other in sorted(liked):
                writer.writerow((other, page))
            ends += [*liked, *[page] * len(liked)]
            edges += len(liked)
    return edges
