"""Commands without a cluster: help, one-line errors, exit statuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tao.admin.documents import example_schema_file
from tao.cli.commands import COMMANDS, tao
from tao.cli.extras import missing_module_text
from tao.devcluster.ports import LOOPBACK, reserve_port


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAO_CONNECT", raising=False)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(tao, list(arguments), catch_exceptions=False)


def assert_operator_error(result: Result, named: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert named in result.stderr


def test_every_command_has_help() -> None:
    assert call("--help").exit_code == 0
    for name in tao.commands:
        result = call(name, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


def groups(group: click.Group, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name in group.commands:
        command = group.commands[name]
        if isinstance(command, click.Group):
            yield from groups(command, *words, name)


@pytest.mark.parametrize("words", list(groups(tao)))
def test_the_help_of_a_group_shows_the_first_sentence_of_each_command_uncut(words: tuple[str, ...]) -> None:
    lines = call(*words, "--help").stdout.partition("Commands:\n")[2].splitlines()
    assert lines
    assert [line for line in lines if line.endswith("...") or len(line) > 80] == []


def test_the_list_of_commands_shows_the_first_sentence_of_their_help() -> None:
    shown = {name: command.get_short_help_str(1_000) for name, command in tao.commands.items() if not command.hidden}
    assert shown == {name: entry.summary for name, entry in COMMANDS.items() if entry.summary}


@pytest.mark.parametrize("before", [True, False])
def test_connect_state_dir_and_json_are_accepted_before_and_after_the_command(before: bool, tmp_path: Path) -> None:
    def called(options: tuple[str, ...], *command: str) -> Result:
        return call(*options, *command) if before else call(*command, *options)

    assert_operator_error(called(("--state-dir", "mine"), "get", "1"), "no cluster runs in mine")
    assert_operator_error(
        called(("--state-dir", "mine"), "dev", "status"), "mine: start one with `tao dev up --state-dir mine`"
    )
    assert called(("--connect", "127.0.0.1:1"), "get", "1").exit_code == 3
    file = str(example_schema_file())
    assert json.loads(called(("--json",), "schema", "check", file, file).stdout)["compatible"]


def test_an_option_after_the_command_wins() -> None:
    assert_operator_error(call("--state-dir", "one", "get", "1", "--state-dir", "other"), "no cluster runs in other")


def test_help_imports_no_server_no_driver_and_no_transport() -> None:
    script = "import sys; from tao.cli.commands import tao; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"grpc", "aiomysql", "rich", "google.protobuf", "prometheus_client"} & set(loaded) == set()


@pytest.mark.parametrize(
    "command",
    [
        ("get", "1"),
        ("list", "1", "friend"),
        ("count", "1", "friend"),
        ("counter", "1", "views"),
        ("sets", "1.friend & 2.friend"),
        ("add", "object", "user"),
        ("delete", "object", "1", "--yes"),
        ("stats",),
        ("schema", "show"),
    ],
)
def test_without_a_cluster_a_command_says_how_to_start_or_name_one(command: tuple[str, ...]) -> None:
    assert_operator_error(call(*command), "tao dev up")


def test_a_connect_option_of_no_known_form_names_the_forms() -> None:
    result = call("get", "1", "--connect", "bogus")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    for form in ("'bogus'", "host:port", "topology file", "etcd://"):
        assert form in result.stderr


def test_a_cluster_that_does_not_answer_is_reported_in_one_line_with_a_hint() -> None:
    get, stats = (call(*command, "--connect", "127.0.0.1:1") for command in (("get", "1"), ("stats",)))
    for result in (get, stats):
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
        assert result.stderr.count("UNAVAILABLE") == 1
        assert result.stderr.endswith("; start the cluster, or name another follower with --connect or TAO_CONNECT\n")


def test_a_command_that_there_is_not_names_those_that_there_are() -> None:
    result = call("load", "people.csv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No such command 'people.csv'. The commands here are objects, edges, nodes." in result.stderr
    assert "The commands here" not in call("load", "object").stderr
    assert "The commands here" not in call("people.csv").stderr


def test_an_option_before_its_command_is_rejected_with_its_right_place() -> None:
    result = call("load", "--connect", "127.0.0.1:1", "objects", "people.csv")
    assert result.exit_code == 2
    assert (
        "No such option '--connect'. Options stand after the command: `tao load COMMAND … --connect`." in result.stderr
    )


def test_an_option_of_the_program_behind_a_command_is_rejected_with_its_right_place() -> None:
    result = call("get", "1", "--token-file", "mine")
    assert result.exit_code == 2
    assert "No such option '--token-file'. It stands before the command: `tao --token-file … get`." in result.stderr
    assert "before the command" not in call("dev", "up", "--connect", "127.0.0.1:1").stderr


@pytest.mark.parametrize("command", [("history", "alice"), ("shard", "hot", "--limit", "x"), ("get", "alice")])
def test_text_in_place_of_a_number_is_no_valid_integer(command: tuple[str, ...]) -> None:
    result = call(*command)
    assert result.exit_code == 2
    assert f"{command[-1]!r} is not a valid integer." in result.stderr


CHANGING = (
    "accounts", "backup restore", "database balance", "database drop-moved", "database move", "database split",
    "delete edge", "delete object", "dev reset", "drain", "invalidate", "journal discard", "journal drain",
    "journal inject", "migrate", "promote", "rejoin", "repair", "replicate", "reseed", "shard clone", "shard unclone",
    "topology add-server", "topology add-shards", "topology import", "topology mark-down", "topology mark-up",
    "topology move-shard", "topology record-changes", "topology remove-server", "token revoke",
    "topology unmove-shard", "undrain",
)  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
def test_every_command_that_changes_something_takes_yes_and_json(name: str) -> None:
    shown = call(*name.split(), "--help").stdout
    assert "--yes" in shown
    assert "--json" in shown


def test_no_other_command_takes_yes() -> None:
    def asking(group: click.Group, *words: str) -> Iterator[str]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from asking(command, *words, name)
            elif any("--yes" in option.opts for option in command.params):
                yield " ".join((*words, name))

    assert sorted(asking(tao)) == sorted(CHANGING)


@pytest.mark.parametrize(("pace", "niceness"), [((), []), (("--megabytes-per-second", "9"), [10])])
def test_a_move_with_a_pace_gives_way_to_other_processes(
    monkeypatch: pytest.MonkeyPatch, pace: tuple[str, ...], niceness: list[int]
) -> None:
    found: list[int] = []
    monkeypatch.setattr(os, "nice", found.append)
    assert call("database", "move", "1", "--to", "db-2", "--topology", "missing.json", *pace).exit_code == 2
    assert found == niceness


@pytest.mark.parametrize("command", ["drain", "undrain"])
@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(("typed", "status", "said"), [("n\n", 1, "nothing was changed"), ("", 2, "--yes")])
def test_a_server_is_neither_drained_nor_put_back_without_a_yes(
    command: str, options: tuple[str, ...], typed: str, status: int, said: str
) -> None:
    file = Path("topology.json")
    file.write_bytes((Path(__file__).parents[3] / "config" / "topology.example.json").read_bytes())
    before = file.read_bytes()
    argv = [command, "east-leader-1", "--topology", str(file), *options]
    result = CliRunner().invoke(tao, argv, input=typed, catch_exceptions=False)
    assert (result.exit_code, result.stdout, said in result.stderr) == (status, "", True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", ["status", "down", "logs"])
def test_a_folder_without_a_cluster_is_reported_in_one_line(command: str) -> None:
    assert_operator_error(call("dev", command), "there is no cluster in")


def test_without_a_database_server_the_error_says_what_to_install_or_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAO_MYSQLD", "/nowhere/mariadbd")
    assert_operator_error(call("dev", "up"), "TAO_MYSQLD")


@pytest.mark.database
def test_without_an_etcd_program_the_error_names_it_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAO_ETCD", "/nowhere/etcd")
    assert_operator_error(call("dev", "up", "--etcd"), "TAO_ETCD")
    assert list(Path().iterdir()) == []


@pytest.mark.database
def test_an_impossible_shape_is_reported_in_one_line_and_leaves_nothing() -> None:
    assert_operator_error(call("dev", "up", "--databases", "3", "--shards", "2"), "--databases 3")
    assert_operator_error(call("dev", "up", "--state-dir", "a/b/c", "--leaders", "0"), "--leaders 0")
    assert list(Path().iterdir()) == []


@pytest.mark.database
def test_a_schema_file_that_is_not_there_starts_nothing_and_leaves_nothing() -> None:
    assert_operator_error(call("dev", "up", "--schema", "missing.yaml"), "missing.yaml")
    assert list(Path().iterdir()) == []


@pytest.mark.database
def test_a_port_that_is_taken_leaves_a_folder_as_it_was() -> None:
    mine = Path("mine")
    mine.mkdir(mode=0o755)
    (mine / "notes.txt").write_text("kept")
    with reserve_port() as taken, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, taken.port))
        listener.listen()
        result = call("dev", "up", "--state-dir", str(mine), "--client-port", str(taken.port))
    assert_operator_error(result, str(taken.port))
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
    assert mine.stat().st_mode & 0o777 == 0o755


def test_an_input_file_that_is_not_there_is_named() -> None:
    result = call("load", "objects", "missing.csv", "--otype", "page", "--key", "id")
    assert_operator_error(result, "missing.csv")


@pytest.mark.parametrize(
    "command",
    [
        ("load", "objects", "missing", "--otype", "page", "--key", "id"),
        ("follower", "--settings", "missing"),
        ("topology", "show", "--topology", "missing"),
        ("topology", "import", "missing", "--topology", "other.json"),
        ("schema", "show", "missing"),
        ("access", "check", "missing", "--schema", "missing"),
        ("audit", "verify", "missing"),
        ("token", "list", "--file", "missing"),
        ("demo", "--edges", "missing", "--objects", "missing"),
        ("get", "1", "--connect", "./missing"),
        ("--token-file", "missing", "get", "1", "--connect", "127.0.0.1:1"),
        ("--ca", "missing", "get", "1", "--connect", "127.0.0.1:1"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_in_the_same_words_by_every_command(command: tuple[str, ...]) -> None:
    result = call(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "tao: missing: cannot be read: No such file or directory\n"
    Path("missing").mkdir()
    assert call(*command).stderr == "tao: missing: cannot be read: Is a directory\n"


def test_standard_input_needs_a_name() -> None:
    assert_operator_error(call("load", "objects", "-", "--otype", "page", "--key", "id"), "--name")


def test_a_server_s_settings_file_that_is_not_there_is_named() -> None:
    assert_operator_error(call("follower", "--settings", "missing.yaml"), "missing.yaml")


def test_a_schema_is_compatible_with_itself() -> None:
    file = str(example_schema_file())
    result = call("schema", "check", file, file, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"compatible": True, "changes": []}


def test_a_schema_that_breaks_data_ends_with_status_1(tmp_path: Path) -> None:
    changed = tmp_path / "new.yaml"
    changed.write_text(example_schema_file().read_text().replace("lat: {number: 2, type: float}", ""))
    result = call("schema", "check", str(example_schema_file()), str(changed))
    assert result.exit_code == 1
    assert "lat" in result.stdout
    assert "not compatible" in result.stdout


def test_a_schema_file_can_be_shown() -> None:
    result = call("schema", "show", str(example_schema_file()), "--json")
    assert json.loads(result.stdout)["objects"]["page"]["number"] == 5
    assert "page_likes" in call("schema", "show", str(example_schema_file())).stdout


@pytest.mark.parametrize("command", [("dev", "status"), ("demo",), ("status",)])
def test_without_the_tools_a_command_that_needs_them_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("tao.devcluster", "tao.demonstration"))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "tao.devcluster", None)
    monkeypatch.setitem(sys.modules, "tao.demonstration", None)
    result = CliRunner().invoke(tao, list(command))
    assert (result.exit_code, "pip install 'tao-graph[dev]'" in result.stderr) == (2, True), result.stderr


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    missing = ModuleNotFoundError("no", name="aiomysql.cursors")
    assert "tao-graph[server]" in missing_module_text(missing, ["status"])
    assert "tao-graph[dev]" in missing_module_text(missing, ["dev", "up"])
    assert missing_module_text(ModuleNotFoundError("no", name="tao.cache.gone"), ["status"]) == ""


def test_commands_that_name_their_cluster_work_without_the_development_cluster(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith(('tao.devcluster', 'tao.demonstration')):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from tao.cli import main\n"
        "sys.argv = ['tao', *sys.argv[1:]]\n"
        "main()\n"
    )
    topology = str(tmp_path / "none.json")
    passwords = {f"TAO_{who}_PASSWORD": "secret" for who in ("ADMIN", "REPLICATOR", "READER")}
    commands = [
        *(["topology", "show", "--topology", topology], ["drain", "leader-1", "--topology", topology, "--yes"]),
        *(["promote", "db-1", "--to", "east", "--topology", topology, "--yes"],),
        *(["verify", "--connect", topology, "--schema", str(example_schema_file())],),
    ]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", program, *command],
            env={**os.environ, **passwords},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert "none.json" in done.stderr, (command, done.stderr)
        assert "not part of this installation" not in done.stderr
