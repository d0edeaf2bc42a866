"""The note's pictures, each from one scenario's figures as its JSON file has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.published.workload import published_results
from loadtest.report.found import NOT_FIGURES
from loadtest.research.locality import skew_name

_INCHES: Final = (11.0, 4.2)
_DPI: Final = 110
THIN: Final = 0.3


def draw_run(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the median latency of hits and misses beside the published one, and the throughput over time."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    latencies, throughput = figure.subplots(1, 2)
    paper = published_results()
    names = [name for name in paper["hit_ms"] if name in measured["operations"]]
    offset = 0.0
    for how in ("hit_ms", "miss_ms"):
        ours = [((measured["operations"][name].get(how) or {}).get("p50") or 0.0) for name in names]
        theirs = [paper[how][name]["p50"] for name in names]
        for label, values in ((f"here, {how[:-3]}", ours), (f"TAO, {how[:-3]}", theirs)):
            latencies.bar([index + offset for index in range(len(names))], values, 0.2, label=label)
            offset += 0.2
    latencies.set_xticks([index + 0.3 for index in range(len(names))], names, fontsize=8)
    latencies.set_ylabel("p50, milliseconds")
    latencies.legend(fontsize=8)
    throughput.plot(measured["throughput_by_second"], linewidth=1)
    throughput.set_ylim(bottom=0)
    throughput.set_xlabel("second of the run")
    throughput.set_ylabel("requests answered")
    known = [(each["at"], each["hits"] / (each["hits"] + each["misses"])) for each in measured["by_second"]
             if each["hits"] + each["misses"]]  # fmt: skip
    hit_rate = throughput.twinx()
    hit_rate.plot([at for at, _ in known], [100 * rate for _, rate in known], "--", color="tab:green", linewidth=1)
    hit_rate.set_ylim(top=100)
    hit_rate.set_ylabel("hit rate of followers, % (dashed)")
    save(figure, file)


def draw_geo(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the median and 99th percentile of everything that was timed, with the round trip."""
    timed = {f"{name}, {where.replace('_', ' ')}": each for name in ("write", "read")
             for where, each in measured[f"{name}_ms"].items()}  # fmt: skip
    figure, axes = _bars({**timed, "visible in the other region": measured["visible_ms"]})
    axes.axvline(measured["rtt_ms"], color="black", linestyle=":", linewidth=1)
    save(figure, file)


def draw_herd(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the latencies of each round, from the common start."""
    rounds = {f"{number}: one {each['what']}": each["latency_ms"] for number, each in enumerate(measured["herds"], 1)}
    figure, _ = _bars({name: each for name, each in rounds.items() if each})
    save(figure, file)


def draw_whale(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the medians of all that was asked of the list."""
    timed = {name.removesuffix(":ms").replace("_", " "): {"p50": value} for name, value in measured.items()
             if name.endswith(":ms")}  # fmt: skip
    figure, _ = _bars(timed)
    save(figure, file)


def draw_recovery(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the median and longest time after each kind of crash."""
    timed = {f"{role}: {what}": each for role, found in measured.items() if role not in NOT_FIGURES
             for what, each in found.items()}  # fmt: skip
    figure, _ = _bars(timed, ("p50", "max"), "seconds")
    save(figure, file)


def _bars(
    timed: Mapping[str, Mapping[str, Any]], keys: tuple[str, str] = ("p50", "p99"), unit: str = "milliseconds"
) -> tuple[Figure, Axes]:
    """Draw a pair of bars for each name, of those of its ``keys`` that exist."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    places = range(len(timed))
    for offset, key in zip((0.0, 0.35), keys, strict=True):
        if any(key in each for each in timed.values()):
            axes.barh([place + offset for place in places], [each.get(key, 0.0) for each in timed.values()], 0.35,
                      label=key)  # fmt: skip
    axes.set_yticks([place + 0.17 for place in places], list(timed), fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.legend(fontsize=8)
    axes.grid(visible=True, axis="x", linewidth=THIN)
    return figure, axes


def draw_storm(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the hit rate on the left, reads of leader and database on the right, by second since the restart."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    rates, loads = figure.subplots(1, 2)
    timeline = measured["timeline"]
    known = [each for each in timeline if each["hit_rate"] is not None]
    rates.plot([each["at"] for each in known], [100 * each["hit_rate"] for each in known], linewidth=1)
    rates.axhline(100 * measured["old_hit_rate"], linestyle=":", linewidth=1)
    rates.set_ylabel("hit rate of followers, %")
    lines = {
        "leader_reads": "leader: reads",
        "leader_fetches": "leader: fetches",
        "database_selects": "database: SELECTs",
    }
    for key, label in lines.items():
        counted = [(each["at"], each[key]) for each in timeline if each[key] is not None]
        if counted:
            loads.plot([at for at, _ in counted], [value for _, value in counted], linewidth=1, label=label)
    loads.set_ylim(bottom=0)
    loads.set_ylabel("a second")
    loads.legend(fontsize=8)
    for axes in (rates, loads):
        axes.axvline(0, color="black", linewidth=THIN)
        axes.set_xlabel("seconds since the restart began")
        axes.grid(visible=True, linewidth=THIN)
    save(figure, file)


def draw_capacity(measured: Mapping[str, Any], file: Path) -> None:
    """Draw rates by hit rate on the left (the paper's figure 7), CPU per query by size of the data on the right."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    rates, growth = figure.subplots(1, 2)
    for batch in sorted({each["batch"] for each in measured["by_hit_rate"]}):
        points = sorted(
            (each for each in measured["by_hit_rate"] if each["batch"] == batch),
            key=lambda each: float(each["hit_rate"]),
        )
        at = [100 * each["hit_rate"] for each in points]
        rates.plot(at, [each["follower_limit_qps"] for each in points], marker=".", label=f"alone, batches of {batch}")
        rates.plot(at, [each["throughput_qps"] for each in points], ":", marker=".", label=f"measured, {batch}")
    rates.set_yscale("log")
    rates.set_xlabel("hit rate of the follower, %")
    rates.set_ylabel("queries a second of one follower")
    rates.legend(fontsize=8)
    for grows, label in ((True, "cache grows with it"), (False, "cache stays")):
        # The smallest belongs to both.
        some = [each for each in measured["by_growth"] if each["cache_grows"] is grows or each["growth"] == 1]
        total = [sum(each["cost"][f"{role}_us"] for role in ("follower", "leader", "database")) for each in some]
        growth.plot([each["growth"] for each in some], total, marker=".", label=label)
    growth.set_xscale("log")
    growth.set_ylim(bottom=0)
    growth.set_xlabel("data, × the smallest")
    growth.set_ylabel("CPU of all servers, µs per query")
    growth.legend(fontsize=8)
    for axes in (rates, growth):
        axes.grid(visible=True, linewidth=THIN)
    save(figure, file)


def draw_locality(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the hit rate by exponent, a line for each share of repetitions; one picture for each cache size."""
    surface = measured["surface"]
    shares = sorted({each["cache_share"] for each in surface})
    figure = Figure(figsize=_INCHES, layout="constrained")
    for axes, share in zip(figure.subplots(1, len(shares), sharey=True, squeeze=False)[0], shares, strict=True):
        for again in sorted({each["again"] for each in surface}):
            points = [each for each in surface if each["cache_share"] == share and each["again"] == again]
            axes.plot(
                [skew_name(each["skew"]) for each in points],
                [100 * each["hit_rate"] for each in points],
                marker=".",
                label=f"{again:.0%} repeated",
            )
        axes.axhline(96.4, color="black", linestyle=":", linewidth=1)
        axes.set_title(f"cache {share:.0%} of the data", fontsize=9)
        axes.set_xlabel("skew: measured, or Zipf exponent")
        axes.grid(visible=True, linewidth=THIN)
        axes.legend(fontsize=7)
    figure.supylabel("hit rate, %", fontsize=10)
    save(figure, file)


def save(figure: Figure, file: Path) -> None:
    """Write a PNG."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # No date inside: the same figures give the same file.
    figure.savefig(file, dpi=_DPI, metadata={"Software": None})


_WIDTH: Final = 11.0
_ROW_INCHES: Final = 2.7
_COLOURS: Final = {
    "tao": "tab:blue",
    "redis_lookaside": "tab:red",
    "memcached_lookaside": "tab:green",
    "mysql": "tab:orange",
}


def draw_peers(measured: Mapping[str, Any], file: Path) -> None:
    """Draw a row for each shape of load; ``measured`` is the scenario's JSON."""
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


_DRAWINGS: Final[dict[str, Callable[[Mapping[str, Any], Path], None]]] = {
    "run": draw_run,
    "peers": draw_peers,
    "locality": draw_locality,
    "geo": draw_geo,
    "herd": draw_herd,
    "storm": draw_storm,
    "capacity": draw_capacity,
    "whale": draw_whale,
    "recovery": draw_recovery,
}


def has_drawing(scenario: str) -> bool:
    """Tell whether there is a drawing of a scenario's figures."""
    return scenario in _DRAWINGS


def draw(scenario: str, measured: Mapping[str, Any], file: Path) -> None:
    """Draw a scenario's figures into a PNG, if there is a drawing of that scenario."""
    if scenario in _DRAWINGS:
        _DRAWINGS[scenario](measured, file)
