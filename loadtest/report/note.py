"""`python -m loadtest report`: one Markdown note, and plots in a folder beside it, from the scenarios' JSON files.

The aims stand first, met or not, then ratios to what a user would pick instead, because a machine's absolute figures
are its own affair. What was not measured is named, as is what cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from loadtest.report import plots, sections
from loadtest.report.aims import aims
from loadtest.report.capacity_section import capacity
from loadtest.report.comparison import one_table, ratios
from loadtest.report.found import Found, read_folder
from loadtest.report.peers_plot import draw_peers

_TITLES: Final = {
    "run": "A published workload",
    "locality": "What the hit rate depends on",
    "geo": "Two regions",
    "herd": "Everybody misses one key",
    "storm": "A tier restarts cold under load",
    "capacity": "Capacity",
    "whale": "A very long list",
    "recovery": "After a crash",
}
_SECTIONS: Final[dict[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "run": sections.run,
    "locality": sections.locality,
    "geo": sections.geo,
    "herd": sections.herd,
    "storm": sections.storm,
    "capacity": capacity,
    "whale": sections.whale,
    "recovery": sections.recovery,
}
_PLOTS: Final[dict[str, Callable[[Mapping[str, Any], Path], None]]] = {
    "run": plots.draw_run,
    "peers": draw_peers,
    "locality": plots.draw_locality,
    "geo": plots.draw_geo,
    "herd": plots.draw_herd,
    "storm": plots.draw_storm,
    "capacity": plots.draw_capacity,
    "whale": plots.draw_whale,
    "recovery": plots.draw_recovery,
}
PROFILED: Final = ("run", "peers", "geo", "herd", "storm", "capacity", "recovery", "whale")
"""Scenarios whose largest costs the note tells, by hand-written notes named after them."""
_PROFILES: Final = Path(__file__).parent.parent / "profiles"
NOT_REPRODUCED: Final = (
    (
        "**Production traffic.** Requests are drawn from published distributions; their repetition and the "
        "length of the longest lists (one in a hundred of TAO's counts was above 512,000) were not published and are "
        "assumed."
    ),
    "**The failed share over 90 days** and the shares of failover of section 8: a run takes minutes.",
    (
        "**Latencies of a loaded production network and of a PHP client**: all processes are on one "
        "machine, over loopback, and "
        "share its cores; hits and misses are compared in form, not in hardware."
    ),
    "**Figure 7's absolute rates**, of servers with sixteen cores: one follower process here has one core at most.",
    "**Replication lag under production load**: the regions here are two, a delay line apart, with little load.",
)


def write_note(folder: Path, file: Path, remark: str = "") -> list[str]:
    """Read the JSON files in ``folder``, write the note and its plots; the scenarios that are missing. Raises
    `OperatorError` for files that no scenario wrote."""
    found = read_folder(folder)
    drawings = file.parent / file.stem
    for name, draw in _PLOTS.items():
        measured = found.get(name)
        if measured is not None:
            draw(measured, drawings / f"{name}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(note(found, remark)).replace("](benchmarks/", f"]({drawings.name}/")
    file.write_text(text.rstrip() + "\n", encoding="utf-8")
    return found.missing


def note(found: Found, remark: str = "") -> list[str]:
    """The lines of the note; ``remark`` on the machine or the occasion. Pure."""
    lines = [
        "# Benchmarks: results",
        "",
        (
            "Made by `python -m loadtest report` from the scenarios' JSON files; what each scenario does is told in "
            "[loadtest/README.md](../loadtest/README.md). Where a machine does other work as well, ratios and CPU per "
            f"query suffer least, and tails of latency most. {remark}"
        ).rstrip(),
        "",
        "## Aims",
        "",
        *aims(found),
        "## Beside what one would pick instead",
        "",
        *ratios(found),
        *profile("peers"),
        "## Published, here, and the peers",
        "",
        *one_table(found),
    ]
    for name, title in _TITLES.items():
        measured = found.get(name)
        lines += [f"## {title}", ""]
        lines += [f"Not measured: `{name}`.", ""] if measured is None else _SECTIONS[name](measured)
        lines += profile(name)
    for name in found.others:
        lines += [f"## `{name}`", "", *sections.other(found.measured[name])]
    lines += ["## What was not reproduced, and why", "", *(f"- {each}" for each in NOT_REPRODUCED)]
    lines += [f"- **`{name}`**: not measured; its JSON file was not there." for name in found.missing]
    lines += [f"- **`{name}`**: its largest costs; nobody has profiled it." for name in PROFILED if not profile(name)]
    return [*lines, "", *_conditions(found)]


def profile(scenario: str) -> list[str]:
    """The three largest costs of a scenario as profiling found them, and what was done about them; nothing where nobody
    has looked. Written by hand: what a profile means no program knows."""
    file = _PROFILES / f"{scenario}.md"
    return [*file.read_text(encoding="utf-8").rstrip().splitlines(), ""] if file.exists() else []


def _conditions(found: Found) -> list[str]:
    machines: dict[str, list[str]] = {}
    commands = []
    versions: dict[str, str] = {}
    for name, measured in found.measured.items():
        machine = measured["machine"]
        cores = f"{machine['cpus']} × {machine['cpu']}, {machine['memory_mb']:,} MB"
        described = f"{cores}, {machine['kernel']}, {machine['python']}"
        machines.setdefault(described, []).append(name)
        versions |= machine["versions"]
        if "command" in measured:
            commands.append(measured["command"])
    lines = ["## Machine, versions, commands", ""]
    lines += [f"- {', '.join(names)}: {machine}" for machine, names in machines.items()]
    lines += [f"- {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}", ""]
    return [*lines, *(f"    {command}" for command in commands)]
