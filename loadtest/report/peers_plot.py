"""The picture of `peers`: for each shape of load, latencies, throughput by round and hit rates of every contestant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report.plots import THIN, save

_WIDTH: Final = 11.0
_ROW_INCHES: Final = 2.7
_COLOURS: Final = {
    "tao": "tab:blue",
    "redis_lookaside": "tab:red",
    "memcached_lookaside": "tab:green",
    "mysql": "tab:orange",
}


def draw_peers(measured: Mapping[str, Any], file: Path) -> None:
    """A row for each shape; ``measured``: as the scenario's JSON has it."""
    by_shape: dict[str, list[Mapping[str, Any]]] = {}
    for each in measured["figures"]:
        by_shape.setdefault(each["shape"], []).append(each)
    figure = Figure(figsize=(_WIDTH, _ROW_INCHES * len(by_shape)), layout="constrained")
    rows = figure.subplots(len(by_shape), 3, squeeze=False)
    for (latencies, throughput, hits), (shape, of) in zip(rows, by_shape.items(), strict=True):
        _latencies(latencies, of)
        latencies.set_title(shape, fontsize=8, loc="left")
        _by_round(throughput, {each["contestant"]: each["rounds_per_second"] for each in of})
        throughput.set_ylabel("queries a second", fontsize=8)
        throughput.set_ylim(bottom=0)
        rates = {each["contestant"]: [100 * rate for rate in each["rounds_hit_rate"]] for each in of}
        _by_round(hits, rates)
        hits.set_ylabel("reads without the database, %", fontsize=8)
        # Of batches it is not counted.
        hits.set_visible(any(rates.values()))
        for axes in (latencies, throughput, hits):
            axes.tick_params(labelsize=7)
            axes.grid(visible=True, linewidth=THIN)
    rows[0][0].legend(fontsize=7)
    save(figure, file)


def _latencies(axes: Axes, of: Sequence[Mapping[str, Any]]) -> None:
    """The share of operations that took longer, down to one in a thousand: a tail is what nobody sees in a median."""
    for each in of:
        points = [(float(ms), 100 - float(percent)) for percent, ms in each["quantiles_ms"].items()]
        tail = [(ms, longer) for ms, longer in points if longer > 0]
        axes.plot([ms for ms, _ in tail], [longer for _, longer in tail], label=each["contestant"], linewidth=1,
                  color=_COLOURS.get(each["contestant"]))  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.set_ylabel("% that took longer", fontsize=8)


def _by_round(axes: Axes, values: Mapping[str, Sequence[float]]) -> None:
    for name, some in values.items():
        axes.plot(range(1, len(some) + 1), some, marker=".", linewidth=1, color=_COLOURS.get(name))
    axes.set_xticks(range(1, max(map(len, values.values()), default=0) + 1))
    axes.set_xlabel("round", fontsize=8)
