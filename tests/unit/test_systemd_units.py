"""config/systemd/: a template unit for every role, whose commands and files exist and which ends a server in time."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tao.cli.commands import tao
from tao.follower.settings import FollowerSettings
from tao.leader.settings import LeaderSettings
from tao.runtime.process import EXIT_OPERATOR, ProcessSettings
from tao.runtime.settings import load_settings
from tao.tailer.settings import TailerSettings
from tao.watcher.settings import WatcherSettings
from tao.worker.settings import WorkerSettings
from tests.rigs.pacing import PATIENT_SECONDS

CONFIG = Path(__file__).resolve().parents[2] / "config"
UNITS = CONFIG / "systemd"
MODELS: dict[str, type[Any]] = {
    "follower": FollowerSettings,
    "leader": LeaderSettings,
    "tailer": TailerSettings,
    "watcher": WatcherSettings,
    "worker": WorkerSettings,
}


def service(role: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as the documentation of configparser has it
    parser.read(UNITS / f"tao-{role}@.service")
    return dict(parser["Service"])


def test_there_is_a_unit_for_every_role_that_has_a_command() -> None:
    assert {path.name for path in UNITS.iterdir()} == {f"tao-{role}@.service" for role in MODELS}


@pytest.mark.parametrize("role", MODELS)
def test_a_unit_starts_its_role_with_settings_that_load(role: str) -> None:
    program, command, *arguments = shlex.split(service(role)["ExecStart"])
    assert Path(program).name == "tao"
    assert command == role
    # An instance is named after its server; the examples are named after the role.
    given = [argument.replace("/etc/tao/%i.yaml", str(CONFIG / f"{role}.yaml")) for argument in arguments]
    context = tao.commands[command].make_context(command, given)
    load_settings(context.params["settings_file"], MODELS[role])


@pytest.mark.parametrize("role", MODELS)
def test_a_server_has_the_time_to_end_by_itself_and_is_not_restarted_after_an_operator_s_mistake(role: str) -> None:
    bounds, unit = ProcessSettings(), service(role)
    assert int(unit["TimeoutStopSec"]) > bounds.drain_seconds + bounds.close_seconds
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("always", str(EXIT_OPERATOR))
    assert unit["KillSignal"] == "SIGTERM"


@pytest.mark.parametrize("role", MODELS)
def test_each_role_has_an_account_of_its_own_and_reads_what_all_read_by_a_group(role: str) -> None:
    unit = service(role)
    assert (unit["User"], unit["Group"], unit["SupplementaryGroups"]) == (f"tao-{role}", f"tao-{role}", "tao")


def test_each_role_that_keeps_an_audit_log_has_a_folder_of_its_own_for_it() -> None:
    # systemd gives a folder to the account of the unit that started last, so no two roles may share one.
    folders = {role: service(role).get("LogsDirectory") for role in MODELS}
    assert folders == {role: f"tao/{role}" if hasattr(MODELS[role], "audit") else None for role in MODELS}


def test_a_follower_may_write_where_its_example_keeps_the_journal() -> None:
    folder = load_settings(CONFIG / "follower.yaml", FollowerSettings).journal.folder
    assert folder is not None
    assert folder.is_relative_to(Path("/var/lib") / service("follower")["StateDirectory"])


def test_a_leader_may_write_where_its_example_keeps_the_spool() -> None:
    folder = load_settings(CONFIG / "leader.yaml", LeaderSettings).spool.folder
    assert folder is not None
    assert folder.is_relative_to(Path("/var/lib") / service("leader")["StateDirectory"])


def test_a_watcher_may_write_where_its_example_has_the_topology() -> None:
    place = load_settings(CONFIG / "watcher.yaml", WatcherSettings).topology_file
    assert isinstance(place, Path)
    assert place.parent == Path(service("watcher")["ReadWritePaths"])


def test_a_tailer_may_write_where_its_example_keeps_the_position() -> None:
    folder = load_settings(CONFIG / "tailer.yaml", TailerSettings).state_folder
    assert folder.is_relative_to(Path("/var/lib") / service("tailer")["StateDirectory"])


@pytest.mark.parametrize("role", MODELS)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd on this machine")
def test_systemd_finds_no_fault_in_a_unit(role: str, tmp_path: Path) -> None:
    # The program is not installed where the unit has it, which is all that may differ.
    unit = tmp_path / f"tao-{role}@.service"
    unit.write_text((UNITS / unit.name).read_text().replace("/opt/tao/bin/tao", sys.executable))
    instance = unit.with_name(f"tao-{role}@x.service")
    instance.symlink_to(unit)
    answer = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(instance)],
        capture_output=True,
        text=True,
        timeout=PATIENT_SECONDS,
        check=False,
    )
    mine = [line for line in answer.stderr.splitlines() if f"tao-{role}@" in line]
    assert (answer.returncode, mine) == (0, [])
