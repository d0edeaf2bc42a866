"""Pictures of a run: latency distributions, and throughput and hit rate over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from loadtest.published.recording import Merged

if TYPE_CHECKING:
    from loadtest.published.outcome import Measured

_INCHES: Final = (11.0, 4.5)
_DPI: Final = 130


def draw_run(measured: Measured, merged: Merged, file: Path) -> None:
    """Hits and misses by operation on the left, answered requests and the hit rate by second on the right."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    latencies, throughput = figure.subplots(1, 2)
    for name in merged.names():
        if name.startswith(("hit ", "miss ")):
            curve = merged.curve(name)
            style = "-" if name.startswith("hit ") else "--"
            latencies.plot([value for value, _ in curve], [share for _, share in curve], style, label=name, linewidth=1)
    latencies.set_xscale("log")
    latencies.set_xlabel("milliseconds")
    latencies.set_ylabel("share of requests that took no longer")
    latencies.legend(fontsize=7)
    latencies.grid(visible=True, linewidth=0.3)
    throughput.plot(measured.throughput_by_second, linewidth=1)
    throughput.set_ylim(bottom=0)
    throughput.set_xlabel("second of the run")
    throughput.set_ylabel("requests answered")
    throughput.grid(visible=True, linewidth=0.3)
    hit_rate = throughput.twinx()
    known = [(second.at, 100 * second.hit_rate) for second in measured.by_second if second.hit_rate is not None]
    hit_rate.plot([at for at, _ in known], [rate for _, rate in known], "--", color="tab:green", linewidth=1)
    hit_rate.set_ylim(top=100)
    hit_rate.set_ylabel("hit rate of followers, % (dashed)")
    figure.suptitle(f"{measured.workload}: hit rate {measured.hit_rate:.1%}, {measured.throughput_qps:,.0f} queries/s")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=_DPI)
