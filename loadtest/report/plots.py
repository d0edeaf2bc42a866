"""The note's pictures, each from one scenario's figures as its JSON file has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.published.workload import published_results
from loadtest.research.locality import skew_name

_INCHES: Final = (11.0, 4.2)
_DPI: Final = 110
_SMALL: Final = 8
_THIN: Final = 0.3
_ROW_INCHES: Final = 2.7
_NOT_FIGURES: Final = ("machine", "command", "aims", "tables", "notes")
"""Keys of every scenario's file that hold no figures of its own."""
_COLOURS: Final = {
    "tao": "tab:blue",
    "redis_lookaside": "tab:red",
    "valkey_lookaside": "tab:pink",
    "memcached_lookaside": "tab:green",
    "memcached_memcachio": "tab:olive",
    "mysql": "tab:orange",
    "mysql_asyncmy": "tab:brown",
    "postgres": "tab:purple",
}

Measured = Mapping[str, Any]
"""A scenario's JSON; `Any`: each has its own form."""
Points = Iterable[tuple[Any, float | None]]
"""Places and values; those without a value are left out."""


def _figure(columns: int, inches: tuple[float, float] = _INCHES, rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=inches, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _lines(axes: Axes, lines: Mapping[str, Points], style: str = "-", **axis: Any) -> None:
    """Draw a line for each name, and set properties of the axes. `Any`: what `Axes.set` takes."""
    for name, points in lines.items():
        known = [(at, value) for at, value in points if value is not None]
        if known:
            colour = _COLOURS.get(name)
            axes.plot([at for at, _ in known], [value for _, value in known], style, label=name, lw=1, color=colour)
    axes.set(**axis)
    axes.tick_params(labelsize=_SMALL)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(_SMALL)
    axes.grid(visible=True, linewidth=_THIN)
    if len(axes.lines) > 1:
        axes.legend(fontsize=_SMALL)


def _bars(
    timed: Mapping[str, Mapping[str, Any]], keys: tuple[str, str] = ("p50", "p99"), unit: str = "milliseconds"
) -> tuple[Figure, Axes]:
    """Draw a pair of bars for each name, of those of its ``keys`` that exist."""
    figure, (axes,) = _figure(1)
    places = range(len(timed))
    for offset, key in zip((0.0, 0.35), keys, strict=True):
        if any(key in each for each in timed.values()):
            values = [each.get(key, 0.0) for each in timed.values()]
            axes.barh([place + offset for place in places], values, 0.35, label=key)
    axes.set_yticks([place + 0.17 for place in places], list(timed), fontsize=_SMALL)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=unit)
    axes.legend(fontsize=_SMALL)
    axes.grid(visible=True, axis="x", linewidth=_THIN)
    return figure, axes


def _run(measured: Measured) -> Figure:
    """Draw the median latency of hits and misses beside the published one, and the throughput over time."""
    figure, (latencies, throughput) = _figure(2)
    paper = published_results()
    names = [name for name in paper["hit_ms"] if name in measured["operations"]]
    series = {
        f"{who}, {how[:-3]}": [((source[name] or {}).get("p50") or 0.0) for name in names]
        for how in ("hit_ms", "miss_ms")
        for who, source in (
            ("here", {name: measured["operations"][name].get(how) for name in names}),
            ("TAO", paper[how]),
        )
    }
    for number, (label, values) in enumerate(series.items()):
        latencies.bar([index + 0.2 * number for index in range(len(names))], values, 0.2, label=label)
    latencies.set_xticks([index + 0.3 for index in range(len(names))], names, fontsize=_SMALL)
    latencies.set_ylabel("p50, milliseconds")
    latencies.legend(fontsize=_SMALL)
    answered = {"answered": enumerate(measured["throughput_by_second"])}
    _lines(throughput, answered, xlabel="second of the run", ylabel="requests answered")
    throughput.set_ylim(bottom=0)
    rates = [
        (each["at"], 100 * each["hits"] / (each["hits"] + each["misses"]))
        for each in measured["by_second"]
        if each["hits"] + each["misses"]
    ]
    hit_rate = throughput.twinx()
    hit_rate.plot([at for at, _ in rates], [rate for _, rate in rates], "--", color="tab:green", linewidth=1)
    hit_rate.set_ylim(top=100)
    hit_rate.set_ylabel("hit rate of followers, % (dashed)")
    return figure


def _geo(measured: Measured) -> Figure:
    """Draw the median and 99th percentile of everything that was timed, with the round trip."""
    timed = {
        f"{name}, {where.replace('_', ' ')}": each
        for name in ("write", "read")
        for where, each in measured[f"{name}_ms"].items()
    }
    figure, axes = _bars({**timed, "visible in the other region": measured["visible_ms"]})
    axes.axvline(measured["rtt_ms"], color="black", linestyle=":", linewidth=1)
    return figure


def _herd(measured: Measured) -> Figure:
    """Draw the latencies of each round, from the common start."""
    rounds = {f"{number}: one {each['what']}": each["latency_ms"] for number, each in enumerate(measured["herds"], 1)}
    return _bars({name: each for name, each in rounds.items() if each})[0]


def _whale(measured: Measured) -> Figure:
    """Draw the medians of all that was asked of the list."""
    timed = {name: value for name, value in measured.items() if name.endswith(":ms")}
    return _bars({name[: -len(":ms")].replace("_", " "): {"p50": value} for name, value in timed.items()})[0]


def _recovery(measured: Measured) -> Figure:
    """Draw the median and longest time after each kind of crash."""
    timed = {
        f"{role}: {what}": each
        for role, found in measured.items()
        if role not in _NOT_FIGURES
        for what, each in found.items()
    }
    return _bars(timed, ("p50", "max"), "seconds")[0]


def _storm(measured: Measured) -> Figure:
    """Draw the hit rate on the left, reads of leader and database on the right, by second since the restart."""
    figure, (rates, loads) = _figure(2)
    timeline, since = measured["timeline"], "seconds since the restart began"
    known = [(each["at"], 100 * each["hit_rate"]) for each in timeline if each["hit_rate"] is not None]
    _lines(rates, {"hit rate": known}, xlabel=since, ylabel="hit rate of followers, %")
    rates.axhline(100 * measured["old_hit_rate"], linestyle=":", linewidth=1)
    labels = {
        "leader_reads": "leader: reads",
        "leader_fetches": "leader: fetches",
        "database_selects": "database: SELECTs",
    }
    lines = {label: [(each["at"], each[key]) for each in timeline] for key, label in labels.items()}
    _lines(loads, lines, xlabel=since, ylabel="a second")
    loads.set_ylim(bottom=0)
    for axes in (rates, loads):
        axes.axvline(0, color="black", linewidth=_THIN)
    return figure


def _capacity(measured: Measured) -> Figure:
    """Draw rates by hit rate on the left (the paper's figure 7), CPU per query by size of the data on the right."""
    figure, (rates, growth) = _figure(2)
    points = sorted(measured["by_hit_rate"], key=lambda each: float(each["hit_rate"]))
    for key, label, style in (("follower_limit_qps", "alone", ".-"), ("throughput_qps", "measured", ".:")):
        lines = {
            f"{label}, batches of {batch}": [
                (100 * each["hit_rate"], each[key]) for each in points if each["batch"] == batch
            ]
            for batch in sorted({each["batch"] for each in points})
        }
        _lines(rates, lines, style, yscale="log")
    rates.legend(fontsize=_SMALL)
    rates.set(xlabel="hit rate of the follower, %", ylabel="queries a second of one follower")
    lines = {
        label: [
            (each["growth"], sum(each["cost"][f"{role}_us"] for role in ("follower", "leader", "database")))
            # The smallest belongs to both.
            for each in measured["by_growth"]
            if each["cache_grows"] is grows or each["growth"] == 1
        ]
        for grows, label in ((True, "cache grows with it"), (False, "cache stays"))
    }
    _lines(growth, lines, ".-", xscale="log", xlabel="data, × the smallest", ylabel="CPU of all servers, µs per query")
    growth.set_ylim(bottom=0)
    return figure


def _locality(measured: Measured) -> Figure:
    """Draw the hit rate by exponent, a line for each share of repetitions; one picture for each cache size."""
    surface = measured["surface"]
    shares = sorted({each["cache_share"] for each in surface})
    figure, pictures = _figure(len(shares))
    for axes, share in zip(pictures, shares, strict=True):
        lines = {
            f"{again:.0%} repeated": [
                (skew_name(each["skew"]), 100 * each["hit_rate"])
                for each in surface
                if each["cache_share"] == share and each["again"] == again
            ]
            for again in sorted({each["again"] for each in surface})
        }
        _lines(axes, lines, ".-", title=f"cache {share:.0%} of the data", xlabel="skew: measured, or Zipf exponent")
        axes.axhline(96.4, color="black", linestyle=":", linewidth=1)
        if axes is not pictures[0]:
            axes.sharey(pictures[0])
    figure.supylabel("hit rate, %", fontsize=10)
    return figure


def _peers(measured: Measured) -> Figure:
    """Draw a row for each shape of load: the tail of the latencies down to one in a thousand, because nobody sees it in
    a median; throughput and hit rate by round."""
    shapes: dict[str, dict[str, Any]] = {}
    for each in measured["figures"]:
        shapes.setdefault(each["shape"], {})[each["contestant"]] = each
    figure, pictures = _figure(3, (_INCHES[0], _ROW_INCHES * len(shapes)), len(shapes))
    for row, (shape, of) in enumerate(shapes.items()):
        latencies, throughput, hits = (pictures[3 * row + column] for column in range(3))
        tails = {
            name: [(ms, 100 - float(percent)) for percent, ms in each["quantiles_ms"].items() if float(percent) < 100]
            for name, each in of.items()
        }
        _lines(latencies, tails, xscale="log", yscale="log", xlabel="milliseconds", ylabel="% that took longer")
        latencies.set_title(shape, fontsize=_SMALL, loc="left")
        rates = {name: enumerate(each["rounds_per_second"], 1) for name, each in of.items()}
        _lines(throughput, rates, ".-", xlabel="round", ylabel="queries a second")
        throughput.set_ylim(bottom=0)
        shares = {name: [100 * rate for rate in each["rounds_hit_rate"]] for name, each in of.items()}
        by_round = {name: enumerate(some, 1) for name, some in shares.items()}
        _lines(hits, by_round, ".-", xlabel="round", ylabel="reads without the database, %")
        # The hit rate of batches is not counted.
        hits.set_visible(any(shares.values()))
    return figure


_FIGURES: Final[dict[str, Callable[[Measured], Figure]]] = {
    "run": _run,
    "peers": _peers,
    "locality": _locality,
    "geo": _geo,
    "herd": _herd,
    "storm": _storm,
    "capacity": _capacity,
    "whale": _whale,
    "recovery": _recovery,
}


def has_drawing(scenario: str) -> bool:
    """Return whether there is a drawing of a scenario's figures."""
    return scenario in _FIGURES


def draw(scenario: str, measured: Measured, file: Path) -> None:
    """Draw a scenario's figures into a PNG, if there is a drawing of that scenario."""
    if scenario in _FIGURES:
        save(_FIGURES[scenario](measured), file)


def save(figure: Figure, file: Path) -> None:
    """Write a figure into a PNG."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # No date inside: the same figures give the same file.
    figure.savefig(file, dpi=_DPI, metadata={"Software": None})
