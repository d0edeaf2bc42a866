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
from tao.model.topology import CacheServer, Topology
from tao.routing.routes import Routes
from tao.runtime.settings import parse_settings
from tao.topology.document import parse_topology

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "tao-graph"}


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


def test_the_services_are_the_servers_of_the_example_topology() -> None:
    topology = example_topology()
    roles = ("leader", "follower")
    ours = {name for name, service in OURS.items() if service.get("command", [""])[0] in roles}
    assert ours == {server.name for server in servers_of(topology)}
    databases = {server.host for database in topology.databases for server in database.servers.values()}
    assert databases <= set(SERVICES)
    ports = {
        address.rsplit(":")[1] for each in servers_of(topology) for address in (each.grpc, each.frames, each.admin)
    }
    assert ports == set(instructions("EXPOSE")[0].split())


@pytest.mark.parametrize("name", [server.name for server in servers_of(example_topology())])
def test_a_server_gets_its_settings_and_its_own_admin_port_to_be_asked_at(name: str) -> None:
    service = SERVICES[name]
    role = service["command"][0]
    settings = yaml.safe_load(filled_in(COMPOSE["configs"][name]["content"]))
    model: type[LeaderSettings | FollowerSettings] = LeaderSettings if role == "leader" else FollowerSettings
    parsed = parse_settings(settings, model, name)
    routes = Routes(example_topology())
    assert parsed.name == name
    assert routes.locate(name).role == role
    assert service["environment"]["TAO_ADMIN"] == routes.server(name).admin
    assert service["configs"] == [{"source": name, "target": service["command"][-1]}]
    mounted = dict(volume.split(":")[:2] for volume in service["volumes"])
    for path in (parsed.topology_file, parsed.schema_file):
        assert (ROOT / "config" / path.relative_to("/etc/tao")).is_file()
    assert mounted == {"../config": "/etc/tao"}


def test_every_secret_has_an_example() -> None:
    asked = set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker" / "compose.yaml").read_text()))
    assert asked == set(secrets())
