"""One note is made of whatever JSON files there are, and says what was not measured."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from loadtest.__main__ import main
from loadtest.report.note import note, read_folder, write_note
from loadtest.results import this_machine
from tao.model.errors import OperatorError

_REPOSITORY = Path(__file__).parents[3]
LATENCY = {"avg": 1.5, "p50": 1.0, "p99": 9.0, "count": 1000, "p90": 2.0, "p999": 9.5, "max": 10.0}
COST = {
    "batch": 1, "hit_rate": 0.9, "throughput_qps": 5000.0, "follower_us": 20.0, "leader_us": 5.0, "database_us": 2.0,
    "client_us": 30.0, "follower_limit_qps": 50_000.0,
}  # fmt: skip


def peer(throughput: float, *ratios: float, hit_rate: float | None = 0.9) -> dict[str, Any]:
    compared = ("throughput", "p50", "p99", "server_cpu", "client_cpu", "total_cpu")
    return {
        "throughput_qps": throughput, "p50_ms": 1.0, "p99_ms": 5.0, "server_cpu_us_per_query": 50.0,
        "client_cpu_us_per_query": 60.0, "total_cpu_us_per_query": 110.0, "hit_rate": hit_rate, "joined_share": 0.01,
        "first_read_share": 0.6,
        "stale_reads": 0, "stale": [{"reads": 100, "stale": 0, "within": "one tier"}],
        "memory": [{"budget": 5_000_000, "cached": 19_000_000, "resident": 40_000_000}],
        "ratio": dict(zip(compared, ratios or (1.0,) * 6, strict=True)),
    }  # fmt: skip


TOY: dict[str, dict[str, Any]] = {
    "run": {
        "workload": "tao_atc13", "throughput_qps": 9000.0, "hit_rate": 0.87, "failed_fraction": 0.0, "cache_bytes": 19,
        "data_bytes": 100, "server_cpu_us_per_query": 20.0, "client_cpu_us_per_query": 20.0,
        "database_cpu_us_per_query": 5.0, "throughput_by_second": [1, 2, 3], "hit_rate_with_joined": 0.88,
        "misses": {"joined": 0.01, "first_time": 0.02, "incomplete": 0.03, "came_back": 0.04,
                   "too_large": 0.0, "not_kept": 0.0, "dropped": 0.01, "left_long_ago": 0.02},
        "failed": {}, "warm_requests_per_node": 12.3,
        "by_second": [{"at": 1.0, "hits": 9, "misses": 1, "joined": 0}, {"at": 2.0, "hits": 0, "misses": 0}],
        "generated": [{"name": "share of obj_get", "asked": 0.288, "generated": 0.29}],
        "operations": {"obj_get": {"all_ms": LATENCY, "hit_ms": LATENCY, "miss_ms": None}},
        "aims": [
            {"aim": "hit rate at least 96.4 %", "shape": "cache of 19 %", "value": 0.87, "bound": 0.964, "met": False},
            {"aim": "no failed request", "shape": "tao_atc13", "value": 0, "bound": 0, "met": True},
        ],
    },
    "peers": {
        "tao": peer(6000.0),
        "redis_lookaside": peer(2400.0, 2.5, 1.2, 0.8, 1.0, 2.0, 1.5),
        "memcached_lookaside": peer(2000.0, 3.0, 1.2, 1.1, 0.5, 2.0, 1.0),
        "mysql": peer(1000.0, 6.0, 5.0, 4.0, 2.0, 3.0, 2.5, hit_rate=None),
        "aims": [
            {"aim": "throughput at least 3 × redis_lookaside", "shape": "many awaiters", "value": 2.5, "bound": 3.0,
             "met": False},
            {"aim": "no failed request of tao", "shape": "", "value": 0, "bound": 0, "met": True},
        ],
        "warming": {"requests": 500_000, "requests_per_node": 5.0, "steady": True},
        "peers_win": ["many awaiters: redis_lookaside is better in p99 (0.80 ×)"],
        "figures": [
            {"shape": shape, "contestant": name, "per_second": 100.0, "p50_us": 10_000.0, "p99_us": 20_000.0,
             "server_cpu_us": 5.0, "client_cpu_us": 7.0, "total_cpu_us": 12.0, "hit_ms": LATENCY, "miss_ms": None,
             "quantiles_ms": {"50": 10.0, "99": 20.0, "100": 30.0}, "rounds_per_second": [90.0, 110.0],
             "rounds_hit_rate": [] if name == "mysql" else [0.9, 0.91]}
            for shape in ("many awaiters", "one awaiter")
            for name in ("tao", "redis_lookaside", "memcached_lookaside", "mysql")
        ],
    },
    "geo": {
        "rtt_ms": 58.1, "failed": {},
        "aims": [
            {"aim": "`visible_ms.p50` 44.0 ms at most", "shape": "", "figure": "visible_ms.p50", "bound": 44.05,
             "value": 51.0, "met": False},
        ],
        "visible_ms": LATENCY, "read_ms": {"remote_region": LATENCY},
        "write_ms": {"same_region": LATENCY, "remote_region": LATENCY},
    },
    "herd": {
        "clients": 10_000, "processes": 4, "sessions": 16, "followers": 4,
        "database_queries": {"object": 1, "list": None}, "leader_fetches": {"object": 1, "list": 2},
        "latency_ms": {"object": LATENCY, "list": LATENCY},
        "herds": [{"what": "object", "latency_ms": LATENCY}, {"what": "list", "latency_ms": None}],
    },
    "storm": {
        "rate": 1000.0, "answered": 60_000, "failed": {}, "tier_away_seconds": 3.0, "old_hit_rate": 0.9,
        "lowest_hit_rate": 0.3, "recovery_seconds": 12.0, "database_selects_before": 10.0,
        "database_selects_most": 50.0, "leader_reads_before": 100.0, "leader_reads_most": 900.0,
        "leader_fetches_before": 5.0, "leader_fetches_most": 45.0,
        "timeline": [
            {"at": float(at), "reads": 1.0, "hit_rate": None if at == 0 else 0.9, "leader_reads": 1.0,
             "leader_fetches": 1.0, "database_selects": None if at > 1 else 1.0} for at in range(-2, 3)
        ],
    },
    "capacity": {
        "cpus": 2,
        "object_bytes": 673,
        "by_mix": [COST],
        "by_hit_rate": [COST, {**COST, "batch": 20}],
        "by_followers": [{"followers": 1, "cost": COST}],
        "by_growth": [
            {"growth": growth, "objects": 10, "cache_mb": 1, "cache_grows": growth == 1, "cost": COST}
            for growth in (1, 10)
        ],
        "costs": {
            "the published mix": {
                "hit_us": 10.0, "miss_us": 50.0, "leader_hit_us": 9.0, "leader_miss_us": 19.0, "database_us": 9.0,
                "hit_bytes": 900.0, "miss_bytes": 2900.0, "database_bytes": 700.0,
            }
        },
        "assumptions": {
            "hit_rate": 0.964, "leader_hit_rate": 0.5, "write_share": 0.002, "utilisation": 0.5, "cores": 16,
        },
        "billion_reads": {
            "the published mix": {
                "follower": {"for_cpu": 1500, "for_network": 1400, "network_gbit": 7000.0},
                "leader": {"for_cpu": 60, "for_network": 70, "network_gbit": 350.0},
                "database": {"for_cpu": 7, "for_network": 7, "network_gbit": 30.0},
                "reads_per_follower_server": 666_666.0,
            }
        },
    },
    "locality": {
        "requests": 1000, "nodes": 100, "assumed_again": 0.6,
        "surface": [
            {"skew": skew, "again": again, "cache_share": 0.2, "hit_rate": 0.97, "first_time_share": 0.01}
            for skew in (None, 1.0) for again in (0.3, 0.6)
        ],
    },
    "whale": {
        "edges": 2_000_000, "wrong_answers": 0, "count:ms": 0.14, "first_page:ms": 0.15, "add:ms": 7.2,
        "before_without_database:ratio": 0.0, "after_without_database:ratio": 0.9983, "after_not_there:ms": 21.0,
        "walk:edges_per_second": 60_000.0,
    },
    "rolling": {"adds": {"per_second": 1234.5}},
    "recovery": {"follower": {"reads": {"p50": 1.5, "max": 2.25, "count": 3}}},
}  # fmt: skip


TABLE = {"title": "a table", "columns": ["", "p50 ms"], "rows": [["its count", "0.14"]]}
AIMS_TABLE = {"title": "", "columns": ["aim", "measured", "verdict"], "rows": [["an aim", "1", "met"]]}


def write(folder: Path, *names: str) -> None:
    machine = msgspec.to_builtins(this_machine({"mariadb": "10.11"}))
    for name in names:
        shared = {"aims": [], "tables": [TABLE, AIMS_TABLE], "notes": [f"a note on {name}"]}
        value = {**shared, **TOY[name], "machine": machine, "command": f"python -m loadtest {name}"}
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(value))


def test_every_scenario_has_its_place_and_its_plot(tmp_path: Path) -> None:
    write(tmp_path, *TOY)
    file = tmp_path / "docs" / "results.md"
    outcome = CliRunner().invoke(main, ["report", "--from", str(tmp_path), "--out", str(file), "--remark", "Shared."])
    assert outcome.exit_code == 0, outcome.output
    text = file.read_text()
    # No line mixes runs.
    assert "| hit rate of reads, by itself | 96.4 % | 87.0 % | – |" in text
    assert "| hit rate of reads, in turns | – | 90.0 % | 90.0 % | 90.0 % | – |" in text
    assert "| queries/s, of this machine | – | 6,000 | 2,400 | 2,000 | 1,000 |" in text
    assert "most. Shared." in text
    assert "\n2 of 5 met.\n" in text
    assert "| hit rate at least 96.4 % | `run`, cache of 19 % | 0.870 | not met |" in text
    assert "| no failed request | `run`, tao_atc13 | 0 | met |" in text
    assert "| throughput at least 3 × redis_lookaside | `peers`, many awaiters | 2.50 | not met |" in text
    assert "| no failed request of tao | `peers` | 0 | met |" in text
    assert "| `visible_ms.p50` 44.0 ms at most | `geo` | 51.00 | not met |" in text
    assert text.index("## Aims") < text.index("## Beside what one would pick instead")
    assert "a factor above 1 is in favour of tao" in text
    assert text.count("**a table**") == len(TOY)
    assert "| its count | 0.14 |" in text
    assert "| an aim |" not in text
    assert "- a note on storm" in text
    assert "## `rolling`" in text
    assert "Not measured" not in text
    assert "mariadb 10.11" in text
    assert "    python -m loadtest storm" in text
    pictures = re.findall(r"\]\((results/\w+\.png)\)", text)
    assert len(pictures) == 9
    assert all((file.parent / each).read_bytes().startswith(b"\x89PNG") for each in pictures)


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    write(tmp_path, "herd")
    missing = write_note(tmp_path, tmp_path / "note.md")
    assert missing == ["run", "peers", "geo", "storm", "capacity", "locality", "whale", "recovery"]
    text = (tmp_path / "note.md").read_text()
    assert all(f"- **`{name}`**: not measured" in text for name in missing)
    assert note(read_folder(tmp_path)) == note(read_folder(tmp_path))


def test_a_file_that_no_scenario_wrote_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no JSON file"):
        read_folder(tmp_path)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(OperatorError, match="was not written by a scenario"):
        read_folder(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(OperatorError, match="is not JSON"):
        read_folder(tmp_path)


def test_a_scenario_without_a_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "herd")
    monkeypatch.setattr("loadtest.report.note._PROFILES", tmp_path)
    (tmp_path / "herd.md").write_text("**Largest costs.** Sending.\n")
    lines = note(read_folder(tmp_path))
    assert lines.index("**Largest costs.** Sending.") > lines.index("## All clients miss one key")
    unknown = [line for line in lines if "nobody has profiled it" in line]
    assert [line.split("`")[1] for line in unknown] == ["run", "peers", "geo", "storm", "capacity", "recovery", "whale"]


_BY_HAND = (
    *(_REPOSITORY / f"loadtest/report/prose/{name}.md" for name in ("states_and_journal", "counters", "attacks")),
    *sorted((_REPOSITORY / "loadtest/profiles").glob("*.md")),
)


@pytest.mark.parametrize("file", _BY_HAND, ids=lambda file: file.stem)
def test_the_page_of_results_has_the_sections_that_are_written_by_hand(file: Path) -> None:
    page = (_REPOSITORY / "docs/explanation/benchmarks.md").read_text(encoding="utf-8")
    command = "python -m loadtest report --out docs/explanation/benchmarks.md"
    assert file.read_text(encoding="utf-8").strip() in page, f"copy {file.name} to the page: {command}"


def test_what_is_written_by_hand_is_copied_to_a_note_and_nothing_else_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *TOY)
    file = tmp_path / "note.md"
    write_note(tmp_path, file)
    before = file.read_text()
    command = ["report", "--out", str(file)]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert file.read_text() == before
    monkeypatch.setattr("loadtest.report.note._PROFILES", tmp_path)
    (tmp_path / "herd.md").write_text("**Largest costs.** Sending.\n")
    assert CliRunner().invoke(main, command).exit_code == 0
    changed = file.read_text()
    begin = before.index("**Largest costs.**", before.index("## All clients miss one key"))
    end = before.index("\n## A tier restarts cold under load")
    assert changed == f"{before[:begin]}**Largest costs.** Sending.\n{before[end:]}"
    (tmp_path / "herd.md").write_text("**Other costs.** None.\n")
    outcome = CliRunner().invoke(main, command)
    assert outcome.exit_code == 1
    assert "has no '**Other costs.**' under 'All clients miss one key'" in outcome.output
