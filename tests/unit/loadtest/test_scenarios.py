"""Scenarios are found by name, settings are checked, and the report's JSON keeps its form."""

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from loadtest.__main__ import main
from loadtest.catalogue import bench_scenarios
from loadtest.results import Figure, Goal, GoalVerdict, Measure, Quantity, Report, ScenarioResult, this_machine
from loadtest.scenario import BenchSettings, PartOfProgress, Progress, Scenario
from loadtest.table import print_report
from tao.model.errors import OperatorError


def figure(contestant: str) -> Figure:
    return Figure(
        shape="obj_get, 64 awaiters",
        contestant=contestant,
        queries_per_operation=1,
        operations=1000,
        per_second=123_456.7,
        rounds_per_second=[123_456.7],
        p50_us=500.0,
        p99_us=900.0,
        server_cpu_us=5.5,
        client_cpu_us=6.5,
        yardstick="redis",
        rate_ratio=3.1,
        p50_ratio=0.4,
        verdicts=[GoalVerdict(aim=Goal(measure=Measure.RATE, bound=80_000), value=123_456.7, met=True)],
    )


def report() -> Report:
    result = ScenarioResult(
        summary="summary",
        conditions={"objects": 10},
        figures=[figure("frames"), figure("redis")],
        quantities=[Quantity(name="memory", value=80.0, unit="resident_mb")],
        notes=["a note"],
    )
    return Report(machine=this_machine({"redis-server": "7.0"}), scenarios={"cached_reads": result})


def test_an_unknown_scenario_is_reported_with_the_known_ones() -> None:
    outcome = CliRunner().invoke(main, ["bench", "--only", "nonsense"])
    assert outcome.exit_code == 2
    assert outcome.stderr == f"loadtest: there is no scenario nonsense; there are {', '.join(bench_scenarios())}\n"


def test_arguments_of_a_scenario_that_cannot_be_are_refused_before_anything_starts() -> None:
    for arguments in (["geo", "--rtt-ms", "0"], ["converge", "--writes", "-1"]):
        outcome = CliRunner().invoke(main, arguments)
        assert outcome.exit_code == 2
        assert "give a number" in outcome.stderr


def test_list_names_every_scenario() -> None:
    outcome = CliRunner().invoke(main, ["list"])
    assert [line.split()[0] for line in outcome.stdout.splitlines()] == list(bench_scenarios())


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_a_measured_time_out_of_bounds_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(OperatorError, match="--seconds"):
        BenchSettings(tmp_path, seconds=seconds)


def test_edges_without_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="belong together"):
        BenchSettings(tmp_path, edges_file=tmp_path / "edges.csv")


def test_a_report_survives_its_json() -> None:
    encoded = msgspec.json.encode(report())
    assert msgspec.json.decode(encoded, type=Report) == report()
    assert set(msgspec.json.decode(encoded)) == {"format", "machine", "scenarios", "failures", "interrupted"}
    assert set(msgspec.json.decode(encoded)["machine"]) == {"cpu", "cpus", "memory_mb", "kernel", "python", "versions"}


def test_the_table_lines_up_and_says_which_aims_were_met() -> None:
    written = StringIO()
    print_report(report(), Console(width=200, file=written))
    lines = written.getvalue().splitlines()
    heading = next(line for line in lines if "queries/s" in line)
    rows = [line for line in lines if "123,457" in line]
    assert len(rows) == 2
    assert {row.index("123,457") + len("123,457") for row in rows} == {heading.index("queries/s") + len("queries/s")}
    assert all("≥ 80,000/s: met" in row for row in rows)


def test_a_part_of_the_progress_moves_within_its_share() -> None:
    steps: list[tuple[str, float]] = []

    class Recorder:
        def step(self, text: str, done: float = 0.0) -> None:
            steps.append((text, done))

    PartOfProgress(Recorder(), 0.5, 0.25).step("half", 0.5)
    assert steps == [("half", 0.625)]


def test_a_scenario_that_fails_is_reported_and_the_others_keep_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(settings: BenchSettings, progress: Progress, options: object) -> ScenarioResult:
        raise OperatorError("no redis-server on the PATH")

    async def succeed(settings: BenchSettings, progress: Progress, options: object) -> ScenarioResult:
        progress.step("working", 0.5)
        return report().scenarios["cached_reads"]

    both = [Scenario(name="first", summary="", run=fail), Scenario(name="second", summary="", run=succeed)]
    monkeypatch.setattr("loadtest.__main__.bench_scenarios", lambda: {each.name: each for each in both})
    json_file = tmp_path / "deep" / "bench.json"
    outcome = CliRunner().invoke(main, ["bench", "--json", str(json_file)])
    assert outcome.exit_code == 1
    assert "first failed: no redis-server on the PATH" in outcome.stdout
    written = msgspec.json.decode(json_file.read_bytes(), type=Report)
    assert written.failures == {"first": "no redis-server on the PATH"}
    assert list(written.scenarios) == ["second"]


def test_scenarios_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def succeed(settings: BenchSettings, progress: Progress, options: object) -> ScenarioResult:
        return report().scenarios["cached_reads"]

    some = [Scenario(name=name, summary="", run=succeed) for name in ("first", "second", "third")]
    monkeypatch.setattr("loadtest.__main__.bench_scenarios", lambda: {each.name: each for each in some})
    for chosen, expected in ((["third", "first"], ["first", "third"]), ([], ["first", "second", "third"])):
        only = [part for name in chosen for part in ("--only", name)]
        CliRunner().invoke(main, ["bench", "--json", str(tmp_path / "bench.json"), *only])
        written = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report)
        assert list(written.scenarios) == expected
