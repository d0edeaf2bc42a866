"""Plays one trace of the published workload against every policy, at cache sizes from 0.5 % to 50 % of the data.

Hit rates are of the users' requests, after a first third that warms up, without and beside a scan. CPU of a hit is that
of the policy alone, in Python like the cache: what it adds to a look-up.
"""

from __future__ import annotations

from pathlib import Path
from time import process_time
from typing import Final

import click
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

from loadtest.published.graph_plan import GraphPlan
from loadtest.published.workload import tao_atc13
from loadtest.report.plots import save
from loadtest.research.locality import LocalityOptions, entry_sizes, trace
from loadtest.research.policies import POLICIES, hit_rate

PARTS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def hit_nanoseconds(name: str, keys: list[int]) -> float:
    """Measure the CPU of the policy's part in a hit, the least of three rounds."""
    policy = POLICIES[name](1 << 60)
    for key in keys:
        if key not in policy.held:
            policy.add(key, 1)
    best = float("inf")
    for _ in range(3):
        begun = process_time()
        for _key in keys:
            pass
        empty = process_time() - begun
        hit = policy.hit
        begun = process_time()
        for key in keys:
            hit(key)
        best = min(best, process_time() - begun - empty)
    return 1e9 * best / len(keys)


@click.command()
@click.option("--nodes", default=40_000, show_default=True)
@click.option("--requests", default=400_000, show_default=True)
@click.option("--zipf", type=float, help="Exponent of the skew; without it as TAO's followers saw it.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the hit rates here.")
def main(nodes: int, requests: int, zipf: float | None, plot: Path | None) -> None:
    """Print the hit rate of every policy by cache size, without and with a scan."""
    wanted = LocalityOptions(nodes=nodes, requests=requests)
    keys = trace(wanted, zipf, tao_atc13().assumed.again)
    sizes = entry_sizes(GraphPlan(tao_atc13(), nodes, wanted.seed))
    rates = {
        (scan, name): [
            hit_rate(make(int(sum(sizes) * part)), keys, sizes, requests // 3, scan=scan)[0] for part in PARTS
        ]
        for scan in (False, True)
        for name, make in POLICIES.items()
    }
    shares = [f"{100 * part:g} %" for part in PARTS]
    for scan in (False, True):
        columns = [Column(text, justify="right") for text in (*shares, "ns of a hit")]
        table = Table("policy", *columns, title="with a scan" if scan else "without a scan")
        for name in POLICIES:
            figures = [f"{100 * rate:.1f}" for rate in rates[scan, name]]
            table.add_row(name, *figures, f"{hit_nanoseconds(name, keys[:100_000]):.0f}")
        Console().print(table)
    if plot is not None:
        draw(rates, plot)


def draw(rates: dict[tuple[bool, str], list[float]], file: Path) -> None:
    """Draw the hit rate by cache size: users alone on the left, beside a scan on the right."""
    figure = Figure(figsize=(11.0, 4.5), layout="constrained")
    for scan, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for name in POLICIES:
            values = [100 * rate for rate in rates[bool(scan), name]]
            axes.plot([100 * part for part in PARTS], values, marker=".", linewidth=1, label=name)
        axes.set_xscale("log")
        axes.set_title("users, while one client walks through everything" if scan else "users alone")
        axes.set_xlabel("cache size, % of the data's bytes")
        axes.grid(visible=True, linewidth=0.3)
        axes.legend(fontsize=8)
    figure.supylabel("hit rate of users, %", fontsize=10)
    save(figure, file)


if __name__ == "__main__":
    main()
