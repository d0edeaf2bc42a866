"""The scripts behind `make` that need neither a network nor root: what they refuse, and what they ask before."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rigs.pacing import PATIENT_SECONDS

SCRIPTS = Path(__file__).resolve().parents[2] / ".ci"


def program(folder: Path, name: str, body: str) -> Path:
    """Make a program of a few lines of shell."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


# ---- install-packages ------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of programs that stand for apt-get and sudo, and note how they are called."""
    program(tmp_path, "apt-get", f'echo "apt-get $*" >>{tmp_path}/calls')
    program(tmp_path, "sudo", f'echo "sudo $*" >>{tmp_path}/calls')
    # Bash sets EUID itself; a script that reads it with another name sees an ordinary user.
    text = (SCRIPTS / "install-packages").read_text()
    assert text.count("EUID") == 1
    program(tmp_path, "install-packages", text.replace("EUID", "1000"))
    shutil.copy(SCRIPTS / "ask-for-root", tmp_path)
    return tmp_path


def install(machine: Path, typed: str | None = None, **environment: str) -> tuple[int, str]:
    """Call install-packages as an ordinary user, at a terminal where ``typed`` is typed, or without one."""
    arguments = ("a database", "elsewhere", "mariadb-server-core")
    path = f"{machine}:{os.environ['PATH']}"
    return call_at_terminal(machine / "install-packages", *arguments, typed=typed, PATH=path, **environment)


def call_at_terminal(*command: str | Path, typed: str | None, **environment: str) -> tuple[int, str]:
    reader, writer = pty.openpty() if typed is not None else os.pipe()
    if typed is not None:
        os.write(reader, typed.encode())
    done = subprocess.run(
        command,
        stdin=writer if typed is not None else reader,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENT_SECONDS,
        check=False,
    )
    os.close(reader)
    os.close(writer)
    return done.returncode, done.stderr


def calls(machine: Path) -> list[str]:
    file = machine / "calls"
    return file.read_text().splitlines() if file.exists() else []


BY_HAND = "sudo apt-get install --no-install-recommends mariadb-server-core"


def test_without_a_terminal_an_ordinary_user_sees_what_to_run_and_nothing_is_installed(machine: Path) -> None:
    status, said = install(machine)
    assert (status, calls(machine)) == (1, [])
    assert f"a database is missing, and there is no terminal to ask at. Run: {BY_HAND}" in said


@pytest.mark.parametrize("typed", ["n\n", "\n", "\x04"])
def test_at_a_terminal_anything_but_yes_installs_nothing(machine: Path, typed: str) -> None:
    status, _ = install(machine, typed)
    assert (status, calls(machine)) == (1, [])


@pytest.mark.parametrize(("typed", "environment"), [("y\n", {}), ("Yes\n", {}), (None, {"CI": "true"})])
def test_after_a_yes_or_under_ci_packages_are_installed_by_sudo(
    machine: Path, typed: str | None, environment: dict[str, str]
) -> None:
    status, _ = install(machine, typed, **environment)
    assert status == 0
    assert [call.split(" ")[:2] for call in calls(machine)] == [["sudo", "apt-get"], ["sudo", "env"]]
    assert calls(machine)[1].endswith("--no-install-recommends mariadb-server-core")


# ---- ensure-etcd -----------------------------------------------------------------------------------------------------


@pytest.fixture
def old_lists(tmp_path: Path) -> Path:
    """A machine without etcd, whose apt finds the package only when its lists were updated."""
    for name in ("bash", "env", "mktemp", "mkdir", "mv", "rm", "dirname", "touch"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    calls, updated = tmp_path / "calls", tmp_path / "updated"
    program(tmp_path, "sudo", f'echo "sudo $*" >>{calls}; "$@"')
    program(
        tmp_path,
        "apt-get",
        f"if [[ $1 == update ]]; then touch {updated}; else [[ -e {updated} ]] && touch etcd-server_3.deb; fi",
    )
    program(tmp_path, "dpkg", f'mkdir -p "$3/usr/bin" && mv {tmp_path}/etcd-program "$3/usr/bin/etcd"')
    program(tmp_path, "etcd-program", "true")
    text = (SCRIPTS / "ensure-etcd").read_text()
    assert text.count("EUID") == 1
    program(tmp_path, "ensure-etcd", text.replace("EUID", "1000"))
    shutil.copy(SCRIPTS / "ask-for-root", tmp_path)
    return tmp_path


def ensure_etcd(machine: Path, typed: str | None = None, **environment: str) -> tuple[int, str]:
    command = (machine / "ensure-etcd", machine / "found")
    return call_at_terminal(*command, typed=typed, PATH=str(machine), **environment)


@pytest.mark.parametrize("typed", [None, "n\n", "\n"])
def test_the_lists_of_packages_are_not_updated_through_sudo_without_a_yes(old_lists: Path, typed: str | None) -> None:
    status, said = ensure_etcd(old_lists, typed)
    assert (status, calls(old_lists)) == (1, [])
    assert not (old_lists / "found" / "etcd").exists()
    assert typed is not None or "there is no terminal to ask at. Run: sudo apt-get update" in said


@pytest.mark.parametrize(("typed", "environment"), [("y\n", {}), (None, {"CI": "true"})])
def test_after_a_yes_or_under_ci_the_lists_are_updated_and_etcd_is_unpacked(
    old_lists: Path, typed: str | None, environment: dict[str, str]
) -> None:
    status, said = ensure_etcd(old_lists, typed, **environment)
    assert (status, calls(old_lists)) == (0, ["sudo apt-get update -qq"]), said
    assert (old_lists / "found" / "etcd").exists()


# ---- supply-chain ----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the script alone, and tools that note how they are called."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPTS / "supply-chain", tmp_path / ".ci")
    tools = tmp_path / "build" / "supply-chain-venv" / "bin"
    for name in ("pip-audit", "cyclonedx-py"):
        program(tools, name, f'echo "{name} $*" >>{tmp_path}/calls')
    return tmp_path


def supply_chain(checkout: Path, *arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [checkout / ".ci" / "supply-chain", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENT_SECONDS,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [(), ("audit",), ("everything", "python3")])
def test_a_wrong_call_of_supply_chain_shows_its_usage_and_makes_nothing(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPTS / "supply-chain", tmp_path / ".ci")
    assert supply_chain(tmp_path, *arguments) == (2, "usage: supply-chain sbom|audit PYTHON\n")
    assert not (tmp_path / "build").exists()


def test_an_audit_without_an_advisory_database_says_that_nothing_was_audited(checkout: Path) -> None:
    unreachable = program(checkout, "python", "exit 1")
    status, said = supply_chain(checkout, "audit", unreachable)
    assert (status, calls(checkout)) == (3, [])
    assert "NOTHING WAS AUDITED" in said


def test_an_audit_fails_for_a_dependency_that_the_database_does_not_know(checkout: Path) -> None:
    assert supply_chain(checkout, "audit", program(checkout, "python", "exit 0"))[0] == 0
    (call,) = calls(checkout)
    assert "--strict" in call.split()
    assert call.endswith("--requirement requirements.lock")


# ---- test-newest -----------------------------------------------------------------------------------------------------

OF_PROCESSES = {"e2e", "loads"}
"""Folders whose tests all start processes."""


def test_the_newest_interpreter_runs_every_folder_of_tests_that_start_no_process() -> None:
    tests = SCRIPTS.parent / "tests"
    folders = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")} - OF_PROCESSES
    script = (SCRIPTS / "test-newest").read_text()
    assert {folder for folder in folders if f"tests/{folder} " not in f"{script} ".replace("\n", " ")} == set()
