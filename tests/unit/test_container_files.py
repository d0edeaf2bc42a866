"""docker/: what no engine is needed for. Commands exist, copied files exist, settings load, names and ports agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tao.cli.commands import tao
from tao.follower.settings import FollowerSettings
from tao.leader.settings import LeaderSettings
from tao.model.errors import SettingsError
from tao.model.topology import CacheServer, TailerProcess, Topology
from tao.routing.routes import Routes
from tao.runtime.process import ProcessSettings
from tao.runtime.settings import parse_settings
from tao.serving.requests import check_exposure
from tao.tailer.settings import TailerSettings
from tao.topology.document import parse_topology
from tao.watcher.settings import WatcherSettings
from tao.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "tao-graph"}
WATCHERS = ("east-watcher-1", "west-watcher-1")
DOCUMENT = Path("/var/lib/tao/topology/topology.json")
DATABASES = {name: service for name, service in SERVICES.items() if name not in OURS}


def secrets() -> dict[str, str]:
    lines = (ROOT / "docker" / "example.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled_in(text: str) -> str:
    return re.sub(r"\$\{(\w+)(?:[:?-][^}]*)?\}", lambda found: secrets()[found[1]], text)


def example_topology() -> Topology:
    return parse_topology((ROOT / "config" / "topology.example.json").read_bytes(), "topology.example.json")


def servers_of(topology: Topology) -> list[CacheServer]:
    return [
        server for region in topology.regions for tier in (region.leaders, *region.followers) for server in tier.servers
    ]


def instructions(word: str) -> list[str]:
    text = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(word).strip() for line in text.splitlines() if line.startswith(f"{word} ")]


def assert_command(command: list[str]) -> None:
    """click itself parses the arguments; nothing is run."""
    found = tao.commands[command[0]]
    found.make_context(command[0], command[1:], resilient_parsing=False)


def test_every_file_that_the_image_copies_exists_and_is_sent_to_the_builder() -> None:
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    copied = [word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert [name for name in copied if f"!{name}" not in ignored] == []


def test_the_base_image_is_an_argument_and_the_image_runs_without_root() -> None:
    assert instructions("ARG")[0].startswith("BASE_IMAGE=")
    assert [line for line in instructions("FROM") if "${BASE_IMAGE}" not in line] == []
    assert instructions("USER") == ["tao"]


def test_what_the_image_installs_is_locked_with_hashes_and_of_the_versions_that_are_tested() -> None:
    installs = [line for line in DOCKERFILE.replace("\\\n", " ").splitlines() if "pip install" in line]
    assert [line for line in installs if "--require-hashes" not in line and "--no-deps" not in line] == []
    entry = re.compile(r"^([a-z0-9-]+==\S+)(?: ; [^\\]+)? \\\n((?:    --hash=\S+(?: \\)?\n?)+)", re.MULTILINE)
    everything = dict(entry.findall((ROOT / "requirements.lock").read_text()))
    servers = dict(entry.findall((ROOT / "docker" / "requirements.lock").read_text()))
    assert {"aiomysql", "click", "cryptography", "grpcio", "structlog"} <= {name.split("==")[0] for name in servers}
    assert {name: hashes.split() for name, hashes in servers.items()}.items() <= {
        name: hashes.split() for name, hashes in everything.items()
    }.items()


def test_the_health_check_and_every_service_name_commands_that_exist() -> None:
    assert re.search(r'HEALTHCHECK .* CMD \["tao", "ready"\]', DOCKERFILE)
    assert isinstance(tao.commands["ready"], click.Command)
    for service in OURS.values():
        if "command" in service:
            assert_command(service["command"])


def tailers_of(topology: Topology) -> dict[str, TailerProcess]:
    return {tailer.name: tailer for region in topology.regions for tailer in region.tailers}


def test_the_services_are_the_servers_of_the_example_topology() -> None:
    topology = example_topology()
    roles = ("leader", "follower", "tailer")
    ours = {name for name, service in OURS.items() if service.get("command", [""])[0] in roles}
    listed = {watcher.name: watcher.admin for region in topology.regions for watcher in region.watchers}
    assert listed == {name: f"{name}:7002" for name in WATCHERS}
    assert ours == {server.name for server in servers_of(topology)} | set(tailers_of(topology))
    found = {server.name: server for database in topology.databases for server in database.servers.values()}
    assert {server.host for server in found.values()} == set(DATABASES) == set(found)
    assert {server.port for server in found.values()} == {3306}
    ports = {
        address.rsplit(":")[1] for each in servers_of(topology) for address in (each.grpc, each.frames, each.admin)
    }
    assert ports == set(instructions("EXPOSE")[0].split())


def test_there_are_two_regions_each_with_leaders_two_tiers_and_a_tailer_for_each_database() -> None:
    topology = example_topology()
    assert len(topology.regions) == 2
    for region in topology.regions:
        assert len(region.leaders.servers) >= 2
        assert len(region.followers) >= 2
        assert {tailer.database for tailer in region.tailers} == {database.name for database in topology.databases}


def test_database_servers_have_ids_of_their_own_sets_have_domains_and_all_start_closed_to_writes() -> None:
    options = {name: dict(word[2:].split("=") for word in each["command"]) for name, each in DATABASES.items()}
    assert len({each["server-id"] for each in options.values()}) == len(DATABASES)
    topology = example_topology()
    domains = [{options[each.name]["gtid-domain-id"] for each in db.servers.values()} for db in topology.databases]
    assert [len(each) for each in domains] == [1] * len(domains)
    assert len(set.union(*domains)) == len(domains)
    assert {each.get("read-only") for each in options.values()} == {"1"}
    for name, each in DATABASES.items():
        assert each["volumes"] == ["../config/mariadb.cnf:/etc/mysql/conf.d/tao.cnf:ro", f"{name}:/var/lib/mysql"]


def test_accounts_come_before_tables_before_replication_before_servers() -> None:
    def waits_for(name: str) -> dict[str, str]:
        return {each: how["condition"] for each, how in SERVICES[name]["depends_on"].items()}

    assert waits_for("accounts") == {
        **dict.fromkeys(DATABASES, "service_healthy"),
        "document": "service_completed_successfully",
    }
    assert waits_for("migrate") == {"accounts": "service_completed_successfully"}
    assert waits_for("replicate") == dict.fromkeys(("migrate", "tokens"), "service_completed_successfully")
    topology = example_topology()
    for region in topology.regions:
        leaders = [server.name for server in region.leaders.servers]
        for name in (
            *leaders,
            *(tailer.name for tailer in region.tailers),
            f"{region.name}-watcher-1",
            f"{region.name}-worker-1",
        ):
            assert waits_for(name) == {"replicate": "service_completed_successfully"}
        for server in (server for tier in region.followers for server in tier.servers):
            assert waits_for(server.name) == dict.fromkeys(leaders, "service_healthy")


def test_a_container_has_more_time_to_stop_than_its_server_takes() -> None:
    bounds = ProcessSettings()
    for name in [*(server.name for server in servers_of(example_topology())), *tailers_of(example_topology())]:
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > bounds.drain_seconds + bounds.close_seconds


def settings_of(name: str, model: type[Any]) -> Any:
    """The settings that a service gets, as its process would read them."""
    service = SERVICES[name]
    assert service["configs"] == [{"source": name, "target": service["command"][-1]}]
    parsed = parse_settings(yaml.safe_load(filled_in(COMPOSE["configs"][name]["content"])), model, name)
    assert parsed.name == name
    mode = "" if name in WATCHERS else ":ro"
    assert {"../config:/etc/tao:ro", f"topology:{DOCUMENT.parent}{mode}"} <= set(service["volumes"])
    assert parsed.topology_file == DOCUMENT
    return parsed


def mounts_of(service: dict[str, Any]) -> dict[str, str]:
    """The volumes by the folder where each is mounted, with ``:ro`` behind those that cannot be written."""
    parts = (volume.split(":") for volume in service.get("volumes", ()))
    return {folder: ":".join((source, *mode)) for source, folder, *mode in parts}


def test_a_server_shows_the_token_of_its_role_and_sees_no_other_nor_may_it_change_what_is_accepted() -> None:
    roles = {
        "leader": LeaderSettings,
        "follower": FollowerSettings,
        "tailer": TailerSettings,
        "watcher": WatcherSettings,
        "worker": WorkerSettings,
    }
    seen = set()
    for name, service in OURS.items():
        role = service.get("command", [""])[0]
        if role not in roles:
            continue
        seen.add(role)
        parsed, mounts = settings_of(name, roles[role]), mounts_of(service)
        assert (parsed.token, mounts[str(parsed.token_file.parent)]) == ("", f"{role}-token:ro")
        assert [each for each in mounts.values() if each.split(":")[0].endswith("-token")] == [f"{role}-token:ro"]
        if role not in ("tailer", "worker"):
            assert mounts[str(parsed.accepted_tokens_file.parent)] == "accepted-tokens:ro"
            with pytest.raises(SettingsError, match=r"without TLS \(`tls`\)\. Set"):
                check_exposure(CacheServer(name=name, grpc=f"{name}:7000"), parsed.tls, has_credentials=True)
            assert parsed.insecure, "plain connections, which the settings have to say"
    assert seen == set(roles)


def test_tokens_are_made_once_for_each_role_and_an_operator_who_may_make_those_of_applications() -> None:
    task, tools = SERVICES["tokens"], SERVICES["tools"]
    group = tao.commands["token"]
    assert isinstance(group, click.Group)
    new = group.commands["new"]
    shell, option, script = task["entrypoint"]
    assert (shell, option) == ("sh", "-ec")
    roles = re.search(r"for role in ([\w ]+);", script)
    assert roles is not None
    commands = [command.split() for command in re.findall(r"\|\| tao (.+)", script)]
    accepted = task["environment"]["TAO_ACCEPTED_TOKENS"]
    made = set()
    for role in (*roles[1].split(), "operator"):
        (command,) = (each for each in commands if ("operator" in each) is (role == "operator"))
        words = [word.replace("$$role", role) for word in command]
        new.make_context("new", [*words[2:], "--file", accepted])
        made.add(Path(words[words.index("--out") + 1]))
    owned = {source: folder for folder, source in mounts_of(task).items()}
    assert made == {Path(folder) / "token" for source, folder in owned.items() if source.endswith("-token")}
    assert owned["accepted-tokens"] == str(Path(accepted).parent)
    assert mounts_of(tools)[str(Path(tools["environment"]["TAO_TOKEN_FILE"]).parent)] == "operator-token:ro"
    assert tools["environment"]["TAO_ACCEPTED_TOKENS"] == accepted
    assert mounts_of(tools)[str(Path(accepted).parent)] == "accepted-tokens"
    # A new volume takes its owner from the image: the account without which no token could be written there.
    (folders,) = (line.split() for line in instructions("RUN") if "/var/lib/tao/accepted" in line)
    assert "--owner=tao" in folders
    assert {*owned.values(), "/var/lib/tao/tokens"} <= {*folders}


def test_the_document_is_writable_only_for_those_who_change_it_or_take_locks_beside_it() -> None:
    changing = {name for name, service in OURS.items() if mounts_of(service).get(str(DOCUMENT.parent)) == "topology"}
    assert changing == {"document", "migrate", "replicate", "tools", *WATCHERS}


def assert_schema(parsed: LeaderSettings | FollowerSettings | TailerSettings) -> None:
    assert isinstance(parsed.schema_file, Path)
    assert (ROOT / "config" / parsed.schema_file.relative_to("/etc/tao")).is_file()


def test_the_document_is_copied_once_to_where_it_may_be_changed() -> None:
    program, option, source, target = SERVICES["document"]["entrypoint"]
    assert (program, option, Path(target)) == ("cp", "--no-clobber", DOCUMENT)
    assert (ROOT / "config" / Path(source).relative_to("/etc/tao")).is_file()
    (made,) = (line for line in instructions("RUN") if str(DOCUMENT.parent) in line)
    assert "--owner=tao" in made


@pytest.mark.parametrize("name", WATCHERS)
def test_a_watcher_stands_in_its_region_where_the_topology_lists_it(name: str) -> None:
    parsed = settings_of(name, WatcherSettings)
    assert name == f"{parsed.region}-watcher-1"
    listed = [watcher for region in example_topology().regions for watcher in region.watchers if watcher.name == name]
    assert [(watcher.frames, watcher.admin) for watcher in listed] == [(f"{name}:7001", parsed.admin)]
    assert parsed.admin == SERVICES[name]["environment"]["TAO_ADMIN"]


@pytest.mark.parametrize("name", [server.name for server in servers_of(example_topology())])
def test_a_server_gets_its_settings_and_its_own_admin_port_to_be_asked_at(name: str) -> None:
    role = SERVICES[name]["command"][0]
    assert_schema(settings_of(name, LeaderSettings if role == "leader" else FollowerSettings))
    routes = Routes(example_topology())
    assert routes.locate(name).role == role
    assert SERVICES[name]["environment"]["TAO_ADMIN"] == routes.server(name).admin


@pytest.mark.parametrize("name", tailers_of(example_topology()))
def test_a_tailer_reads_its_region_s_server_and_keeps_its_position_on_a_volume_of_its_own(name: str) -> None:
    topology = example_topology()
    parsed = settings_of(name, TailerSettings)
    assert_schema(parsed)
    listed = tailers_of(topology)[name]
    assert parsed.admin == listed.admin == SERVICES[name]["environment"]["TAO_ADMIN"]
    (database,) = (database for database in topology.databases if database.name == listed.database)
    assert database.servers[parsed.region].name == parsed.database_server
    volumes = dict(volume.split(":")[:2] for volume in SERVICES[name]["volumes"])
    assert parsed.state_folder.is_relative_to(volumes[name])
    # A new volume takes its owner from the image: the account without which the tailer could not write there.
    (made,) = (line for line in instructions("RUN") if volumes[name] in line)
    assert "--owner=tao" in made


@pytest.mark.parametrize(
    "name", [each.name for region in example_topology().regions for each in region.leaders.servers]
)
def test_a_leader_keeps_its_spool_on_a_volume_of_its_own(name: str) -> None:
    volumes = dict(reversed(volume.split(":")[:2]) for volume in SERVICES[name]["volumes"])
    folder = settings_of(name, LeaderSettings).spool.folder
    assert volumes[str(folder)] == name
    (made,) = (line for line in instructions("RUN") if str(folder) in line)
    assert "--owner=tao" in made


def test_every_volume_is_declared_and_used() -> None:
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    assert {name for name in used if not name.startswith("..")} == set(COMPOSE["volumes"])


def test_images_are_named_by_arguments() -> None:
    assert COMPOSE["x-tao"]["build"]["args"]["BASE_IMAGE"].startswith("${TAO_BASE_IMAGE:-")
    assert {service["image"].split(":-")[0] for service in DATABASES.values()} == {"${TAO_DATABASE_IMAGE"}


def test_every_secret_has_an_example_and_none_stands_in_a_file() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+):\?", text)) == set(secrets())
    given = re.findall(r"(?im)^ *\S*(?:password|token): *(\S.*)$", text)
    assert given
    assert [value for value in given if not re.fullmatch(r'"?\$\{\w+:\?see docker/example.env\}"?', value)] == []
