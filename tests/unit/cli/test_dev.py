"""The commands of the development cluster that need no running process: logs, and the end of a foreground."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Role, Shape, StartOptions
from tao.devcluster.state_folder import ClusterRecord, StateFolder
from tao.model.errors import OperatorError


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    found = StateFolder(tmp_path / "s")
    found.create()
    found.write(ClusterRecord(shape=Shape(tiers=1, followers=1, leaders=1)))
    return found


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[StartOptions]:
    """The options of each cluster that is started. None gets further."""
    found: list[StartOptions] = []

    async def start(cluster: DevCluster) -> None:
        found.append(msgspec.convert(cluster._settings, StartOptions, from_attributes=True))
        raise OperatorError("the rest is not of interest")

    monkeypatch.setattr(DevCluster, "start", start)
    return found


def call(folder: StateFolder, *arguments: str) -> Result:
    return CliRunner().invoke(tao, ["dev", *arguments, "--state-dir", str(folder.path)], catch_exceptions=False)


def write_log(folder: StateFolder, name: str, role: Role, text: str) -> Path:
    path = folder.log(name, role)
    path.write_text(text)
    return path


def test_logs_end_with_the_last_whole_lines_and_those_of_all_processes_name_theirs(folder: StateFolder) -> None:
    write_log(folder, "leader-1", Role.LEADER, "".join(f"line {number}\n" for number in range(30)) + "half a li")
    write_log(folder, "follower-1a", Role.FOLLOWER, "ready\n")
    assert call(folder, "logs", "leader-1").stdout.splitlines() == [f"line {number}" for number in range(10, 30)]
    both = call(folder, "logs").stdout.splitlines()
    assert (both[0], both[-1]) == ("leader-1 | line 10", "follower-1a | ready")


def test_followed_logs_show_each_line_once_also_those_of_a_log_that_was_begun_anew(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_log(folder, "leader-1", Role.LEADER, "one\ntwo, and a half")
    later = [" line\nthree\n", "", None]

    def look_again(_seconds: float) -> None:
        added = later.pop(0) if later else None
        if added is not None:
            path.write_text(path.read_text() + added)
        elif not later and path.read_text() == "new\n":
            raise KeyboardInterrupt
        else:
            path.write_text("new\n")

    monkeypatch.setattr("time.sleep", look_again)
    result = call(folder, "logs", "leader-1", "--follow")
    assert result.exit_code == 130
    assert result.stdout.splitlines() == ["one", "two, and a half line", "three", "new"]


@pytest.mark.parametrize(("when", "status", "said"), [("start", 130, "nothing is left running"), ("run", 0, "stopped")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_foreground_that_starts_or_runs(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, when: str, status: int, said: str, number: signal.Signals
) -> None:
    stops: list[str] = []

    async def start(cluster: DevCluster) -> None:
        cluster._record = folder.require()
        if when == "start":
            signal.raise_signal(number)
            await asyncio.Event().wait()

    async def stop(_cluster: DevCluster) -> list[str]:
        stops.append("stopped")
        return []

    def running(_folder: StateFolder, _record: ClusterRecord) -> dict[str, object]:
        if when == "run":
            asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        return {}

    monkeypatch.setattr(DevCluster, "start", start)
    monkeypatch.setattr(DevCluster, "stop", stop)
    monkeypatch.setattr(StateFolder, "running", running)
    result = call(folder, "up")
    assert result.exit_code == status
    assert said in result.stderr
    assert len(stops) == (when == "run")


def test_options_that_differ_from_the_cluster_that_runs_are_refused(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = msgspec.structs.replace(folder.require(), ready=True)
    folder.write(record)

    def attached(state_dir: Path, on_progress: Callable[[str], None]) -> DevCluster:
        cluster = DevCluster(ClusterSettings(state_dir=state_dir, shape=record.shape), on_progress)
        cluster._record = record
        return cluster

    monkeypatch.setattr(DevCluster, "attached", attached)
    monkeypatch.setattr(StateFolder, "running", lambda *_: {"leader-1": "runs"})
    options = ("--tls", "--followers", "3", "--cache-mb", "256")
    result = CliRunner().invoke(tao, ["dev", "up", *options, "--state-dir", str(folder.path)])
    assert result.exit_code == 2
    assert result.stderr == (
        f"tao: a cluster with other options runs in {folder.path}: --followers 3 (it runs with 1), --tls (it runs "
        f"without); leave these out to start what does not run, or `tao dev down --state-dir {folder.path}` first\n"
    )


SEMI_SYNC: dict[str, Any] = {"durability": Durability.FULL, "semi_sync": True}  # by field
CHANGED = StartOptions(durability=Durability.RELAXED, cache_mb=32, buffer_pool_mb=16, log_level="debug", tls=True)


@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        (CHANGED, [], CHANGED),
        (CHANGED, ["--no-tls"], msgspec.structs.replace(CHANGED, tls=False)),
        (CHANGED, ["--cache-mb", "256"], msgspec.structs.replace(CHANGED, cache_mb=256)),
        (CHANGED, ["--durability", "semi_sync"], msgspec.structs.replace(CHANGED, **SEMI_SYNC)),
        (StartOptions(**SEMI_SYNC), [], StartOptions(**SEMI_SYNC)),
        (StartOptions(**SEMI_SYNC), ["--durability", "full"], StartOptions()),
        (StartOptions(), [], StartOptions()),
        (StartOptions(), ["--log-level", "error"], StartOptions(log_level="error")),
    ],
)
def test_a_cluster_that_was_stopped_keeps_the_options_that_are_not_given_anew(
    folder: StateFolder, starts: list[StartOptions], before: StartOptions, options: list[str], after: StartOptions
) -> None:
    folder.write(msgspec.structs.replace(folder.require(), options=before))
    result = CliRunner().invoke(tao, ["dev", "up", *options, "--state-dir", str(folder.path)])
    assert (result.exit_code, starts) == (2, [after])


@pytest.mark.parametrize(("options", "durability"), [([], "full"), (["--standby"], "semi_sync")])
def test_a_new_cluster_has_the_defaults(
    tmp_path: Path, starts: list[StartOptions], options: list[str], durability: str
) -> None:
    CliRunner().invoke(tao, ["dev", "up", *options, "--state-dir", str(tmp_path / "new")])
    assert starts == [StartOptions(semi_sync=durability == "semi_sync")]


def test_the_options_that_a_stopped_cluster_keeps_are_named(folder: StateFolder, starts: list[StartOptions]) -> None:
    folder.write(msgspec.structs.replace(folder.require(), options=CHANGED, rtt_ms=10.0))
    result = CliRunner().invoke(tao, ["dev", "up", "--log-level", "info", "--state-dir", str(folder.path)])
    kept = "--tls, --durability relaxed, --rtt-ms 10, --buffer-pool-mb 16, --cache-mb 32"
    assert result.stdout == f"as at the last start: {kept}\n"
    folder.write(msgspec.structs.replace(folder.require(), options=StartOptions(), rtt_ms=DEFAULT_RTT_MS))
    result = CliRunner().invoke(tao, ["dev", "up", "--state-dir", str(folder.path)])
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shards", "8"], "data of 16 shards"),
        (["--databases", "2"], "on 1 database"),
        (["--regions", "2"], "data of 1 region"),
        (["--etcd"], "its topology in a file"),
        (["--standby"], "without standbys"),
    ],
)
def test_an_option_that_is_fixed_once_there_are_data_is_refused(
    folder: StateFolder, options: list[str], said: str
) -> None:
    before = folder.require()
    result = CliRunner().invoke(tao, ["dev", "up", *options, "--state-dir", str(folder.path)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "cannot be changed" in result.stderr
    assert folder.require() == before


@pytest.mark.parametrize(
    "command", [("restart", "leader-1"), ("kill", "leader-1"), ("add-follower",), ("remove-follower",)]
)
def test_a_process_of_a_cluster_that_does_not_run_is_not_touched(folder: StateFolder, command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(tao, ["dev", *command, "--state-dir", str(folder.path)])
    assert result.exit_code == 2
    assert f"start it with `tao dev up --state-dir {folder.path}`" in result.stderr


def test_a_reset_of_a_stopped_cluster_asks_and_removes_the_data(folder: StateFolder) -> None:
    data = folder.database("db-1")
    data.mkdir()
    declined = CliRunner().invoke(tao, ["dev", "reset", "--state-dir", str(folder.path)], input="n\n")
    assert (declined.exit_code, data.exists()) == (1, True)
    done = call(folder, "reset", "--yes")
    assert "starts the cluster without any" in done.stdout
    assert not data.exists()
