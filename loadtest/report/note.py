"""`python -m loadtest report`: one Markdown note, and plots in a folder beside it, from the scenarios' JSON files.

The aims stand first, met or not, then ratios to the alternatives, because absolute figures depend on the machine. The
note names the scenarios that were not measured, and what cannot be reproduced. Sections that are written by hand can be
copied to a note that exists, without the JSON files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.published.workload import published_results
from loadtest.report.plots import draw, has_drawing
from tao.model.errors import OperatorError

Found = Mapping[str, Mapping[str, Any]]
"""The files by scenario. `Any`: each scenario has its own form, and files may be older than the code."""

_TITLES: Final = {
    "run": "A published workload",
    "locality": "What the hit rate depends on",
    "geo": "Two regions",
    "herd": "All clients miss one key",
    "storm": "A tier restarts cold under load",
    "capacity": "Capacity",
    "whale": "A very long list",
    "recovery": "After a crash",
}
_BESIDE: Final = "Beside what one would pick instead"
_OTHER_TITLES: Final = {"hostile": "Beside attacks", "rights": "What rights cost"}
EXPECTED: Final = ("run", "peers", "geo", "herd", "storm", "capacity", "locality", "whale", "recovery")
"""The scenarios that the note expects; others are added to it when their files exist."""
_AIMED: Final = ("run", "peers", "geo")
"""Scenarios that the table of aims names when they are missing."""
PROFILED: Final = ("run", "peers", "geo", "herd", "storm", "capacity", "recovery", "whale")
"""Scenarios whose largest costs are described by hand, in files named after them. They end the scenario's section."""
_BY_HAND: Final = {
    "Edges with states, and journals": "states_and_journal",
    "Counters": "counters",
    "Attacks, before and after": "attacks",
}
"""Sections that are written by hand as a whole, and their files."""
_PROFILES: Final = Path(__file__).parent.parent / "profiles"
_PROSE: Final = Path(__file__).parent / "prose"
_MAX_BYTES: Final = 64 << 20


def read_folder(folder: Path) -> Found:
    """Read every ``NAME.json``. Raises `OperatorError` for a file that is not what a scenario writes."""
    measured: dict[str, Mapping[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        if file.stat().st_size > _MAX_BYTES:
            raise OperatorError(f"{file} is larger than any scenario's figures")
        try:
            value = msgspec.json.decode(file.read_bytes())
        except msgspec.DecodeError as error:
            raise OperatorError(f"{file} is not JSON: {error}") from error
        if not isinstance(value, dict) or not {"machine", "tables"} <= value.keys():
            raise OperatorError(f"{file} was not written by a scenario's own command (--json)")
        measured[file.stem] = value
    if not measured:
        raise OperatorError(f"{folder} has no JSON file: run some scenarios with --json {folder}/NAME.json")
    return measured


def missing_of(found: Found) -> list[str]:
    """Return the expected scenarios that were not measured."""
    return [name for name in EXPECTED if name not in found]


def write_note(folder: Path, file: Path, remark: str = "") -> list[str]:
    """Read the JSON files in ``folder``, and write the note and its plots; returns the scenarios that are missing.

    Raises `OperatorError` for files that no scenario wrote."""
    found = read_folder(folder)
    drawings = file.parent / file.stem
    for name, measured in found.items():
        draw(name, measured, drawings / f"{name}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(note(found, remark)).replace("](benchmarks/", f"]({drawings.name}/")
    file.write_text(text.rstrip() + "\n", encoding="utf-8")
    return missing_of(found)


def refresh_note(file: Path) -> None:
    """Copy what is written by hand to a note that exists: whole sections, and the largest costs of scenarios, which end
    their sections. Raises `OperatorError` when the note has no place for one of them."""
    sections = file.read_text(encoding="utf-8").split("\n## ")
    number_of = {section.partition("\n")[0]: number for number, section in enumerate(sections)}
    written = {title: _file_lines(_PROSE / f"{name}.md") for title, name in _BY_HAND.items()}
    profiles = {_TITLES.get(name, _BESIDE): _profile(name) for name in PROFILED}
    for title, lines in {**written, **profiles}.items():
        if not lines:
            continue
        section = sections[number_of[title]] if title in number_of else ""
        # A profile begins with its first words in bold type.
        begin = f"{title}\n" if title in written else f"\n{lines[0].partition('.**')[0]}.**"
        before, found, _ = section.partition(begin)
        if not found:
            raise OperatorError(f"{file} has no {begin.strip()!r} under {title!r}: make it anew, with --from")
        kept = f"{title}\n" if title in written else before
        sections[number_of[title]] = "\n".join([kept, *lines])
    file.write_text("\n## ".join(sections).rstrip() + "\n", encoding="utf-8")


def note(found: Found, remark: str = "") -> list[str]:
    """Return the lines of the note; ``remark`` is about the machine or the occasion."""
    lines = [
        "# Benchmarks: results",
        "",
        (
            "`python -m loadtest report` makes this page from the JSON files of the scenarios, which "
            "`loadtest/README.md` describes. On a machine that does other work as well, ratios and CPU per query "
            f"suffer least, and tails of latency most. {remark}"
        ).rstrip(),
        "",
        "## Aims",
        "",
        *_aims(found),
        f"## {_BESIDE}",
        "",
        *_section("peers", found),
        "## Published, here, and the peers",
        "",
        *_published(found),
    ]
    others = {name: _OTHER_TITLES.get(name, f"`{name}`") for name in found if name not in EXPECTED}
    for name, title in (_TITLES | others).items():
        lines += [f"## {title}", "", *_section(name, found)]
    for title, name in _BY_HAND.items():
        lines += [f"## {title}", "", *_file_lines(_PROSE / f"{name}.md")]
    lines += ["## What was not reproduced, and why", "", *_file_lines(_PROSE / "not_reproduced.md")[:-1]]
    lines += [f"- **`{name}`**: not measured; its JSON file was not there." for name in missing_of(found)]
    lines += [f"- **`{name}`**: its largest costs; nobody has profiled it." for name in PROFILED if not _profile(name)]
    return [*lines, "", *_conditions(found)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table with the numbers to the right."""
    line = "|".join(("---", *("---:" for _ in columns[1:])))
    return [f"| {' | '.join(columns)} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _number(value: Any, digits: int = 1) -> str:
    """Return the text of a number; a dash when there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else "–"


def _aims(found: Found) -> list[str]:
    """Return the table of all aims; the expected scenarios that are missing are named in it."""
    rows = [(f"all of `{name}`", "–", "–", "not measured") for name in missing_of(found) if name in _AIMED]
    for name, measured in found.items():
        for each in measured["aims"]:
            where, value = ", ".join(filter(None, (f"`{name}`", each["shape"]))), each["value"]
            # Below 1 it is a share, of which two digits would say too little.
            shown = _number(value, 3 if abs(value) < 1 else 2)
            rows.append((each["aim"], where, shown, "met" if each["met"] else "not met"))
    met = sum(row[-1] == "met" for row in rows)
    return [f"{met} of {len(rows)} met.", "", *_table(("aim", "in", "measured", "verdict"), rows)]


def _section(name: str, found: Found) -> list[str]:
    """Return the section of a scenario: what it is, its tables, its picture, its notes, and its largest costs."""
    if name not in found:
        return [f"Not measured: `{name}`.", "", *_profile(name)]
    lines, measured = _file_lines(_PROSE / f"{name}.md"), found[name]
    for each in measured["tables"]:
        if "verdict" in each["columns"]:
            continue  # the aims stand at the head of the note
        lines += [f"**{each['title']}**", ""] if each["title"] else []
        lines += _table(each["columns"], each["rows"])
    if has_drawing(name):
        lines += [f"![{name}](benchmarks/{name}.png)", ""]
    notes = [f"- {note}" for note in measured["notes"]]
    return [*lines, *notes, *([""] if notes else []), *_profile(name)]


def _profile(scenario: str) -> list[str]:
    """Return the largest costs of a scenario as a profiler showed them, written by hand; empty where nobody looked."""
    return _file_lines(_PROFILES / f"{scenario}.md")


def _file_lines(file: Path) -> list[str]:
    return [*file.read_text(encoding="utf-8").rstrip().splitlines(), ""] if file.exists() else []


def _conditions(found: Found) -> list[str]:
    machines: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    for name, measured in found.items():
        machine = measured["machine"]
        cores = f"{machine['cpus']} × {machine['cpu']}, {machine['memory_mb']:,} MB"
        machines.setdefault(f"{cores}, {machine['kernel']}, {machine['python']}", []).append(name)
        versions |= machine["versions"]
    lines = ["## Machine, versions, commands", ""]
    lines += [f"- {', '.join(names)}: {machine}" for machine, names in machines.items()]
    lines += [f"- {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}", ""]
    return [*lines, *(f"    {measured['command']}" for measured in found.values())]


_PEERS: Final = {
    "tao": "here",
    "redis_lookaside": "Redis look-aside",
    "memcached_lookaside": "memcached look-aside",
    "mysql": "MySQL alone",
    "postgres": "PostgreSQL alone",
}
_IN_TURNS: Final[tuple[tuple[str, str, Callable[[Any], str]], ...]] = (
    ("hit rate of reads, in turns", "hit_rate", _percent),
    ("queries/s, of this machine", "throughput_qps", lambda value: _number(value, 0)),
    ("all queries, p50 ms", "p50_ms", lambda value: _number(value, 2)),
    ("all queries, p99 ms", "p99_ms", lambda value: _number(value, 2)),
)
"""What is compared with the peers: of their run, which has another load, and another graph."""


def _published(found: Found) -> list[str]:
    """Return the table of all figures that were published or compared; a dash stands where there is none."""
    paper: Mapping[str, Any] = published_results()
    run, geo, peers = (found.get(name, {}) for name in ("run", "geo", "peers"))
    failed = run.get("failed_fraction")
    share = "–" if failed is None else f"{failed:.1e}" if failed else "0"
    lag = geo.get("visible_ms", {})

    def timed(ours: Mapping[str, Any] | None, digits: int) -> str:
        return " / ".join(_number((ours or {}).get(key), digits) for key in ("p50", "avg", "p99"))

    rows: list[tuple[str, ...]] = [
        ("hit rate of reads, by itself", _percent(paper["overall_read_hit_rate"]), _percent(run.get("hit_rate"))),
        ("failed share", f"{paper['failed_query_fraction_90_days']:.1e}", share),
        *(
            (text, "–", *(show(peers.get(name, {}).get(key)) for name in _PEERS)) for text, key, show in _IN_TURNS
        ),
        *(
            (
                f"`{kind}` {how.removesuffix('_ms')}, p50 / avg / p99 ms",
                timed(published, 1),
                timed(run.get("operations", {}).get(kind, {}).get(how), 2),
            )
            for how in ("hit_ms", "miss_ms")
            for kind, published in paper[how].items()
        ),
        *(
            (
                f"write, {where.replace('_', ' ')}, avg ms",
                _number(paper["write_ms"][f"{where}_avg"]),
                _number(geo.get("write_ms", {}).get(where, {}).get("avg")),
            )
            for where in ("same_region", "remote_region")
        ),
        (
            "visible in the other region, p50 / p99 ms",
            "85 % < 1 s, 99 % < 3 s",
            f"{_number(lag.get('p50'))} / {_number(lag.get('p99'))}",
        ),
    ]  # fmt: skip
    columns = ("figure", "TAO, published", *_PEERS.values())
    return _table(columns, [(*row, *("–",) * (len(columns) - len(row))) for row in rows])
