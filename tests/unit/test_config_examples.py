"""The example files in config/: each loads, shows every setting there is, and states its true default."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tao.access.decisions import oddities
from tao.access.document import load_access
from tao.follower.settings import FollowerSettings
from tao.leader.settings import LeaderSettings
from tao.model.topology import Topology, WatcherProcess
from tao.routing.routes import Routes
from tao.runtime.settings import load_settings, parse_settings
from tao.schema.registry import load_schema
from tao.tailer.settings import TailerSettings
from tao.topology.document import dump_topology, parse_topology
from tao.watcher.settings import WatcherSettings
from tao.worker.settings import WorkerSettings

CONFIG = Path(__file__).resolve().parents[2] / "config"
ROLES = [("follower", FollowerSettings), ("leader", LeaderSettings)]


def example_topology() -> Topology:
    return parse_topology((CONFIG / "topology.example.json").read_bytes(), "topology.example.json")


def commented_out(text: str) -> Iterator[str]:
    """The file with every setting switched on: a setting stands right behind its #, a comment after a blank."""
    return (re.sub(r"^#(?=\S|  +\w+:)", "", line) for line in text.splitlines())


def test_the_schema_the_access_document_and_the_topology_load() -> None:
    schema = load_schema((CONFIG / "schema.yaml").read_text(), "schema.yaml")
    assert oddities(load_access((CONFIG / "access.example.yaml").read_text(), "access.example.yaml"), schema) == []
    text = (CONFIG / "topology.example.json").read_text()
    topology = parse_topology(text, "topology.example.json")
    assert dump_topology(topology) == text


@pytest.mark.parametrize(("role", "model"), ROLES)
def test_the_settings_load_and_name_a_server_of_the_example_topology(role: str, model: type[Any]) -> None:
    settings = load_settings(CONFIG / f"{role}.yaml", model)
    assert Routes(example_topology()).locate(settings.name).role == role


def test_the_tailer_s_settings_are_those_of_a_tailer_of_the_example_topology() -> None:
    settings = load_settings(CONFIG / "tailer.yaml", TailerSettings)
    topology = example_topology()
    (region,) = (region for region in topology.regions if region.name == settings.region)
    (listed,) = (tailer for tailer in region.tailers if tailer.name == settings.name)
    (database,) = (database for database in topology.databases if database.name == listed.database)
    assert database.servers[region.name].name == settings.database_server
    assert settings.admin == listed.admin


def test_the_watcher_s_settings_are_those_of_a_watcher_of_the_example_topology() -> None:
    settings = load_settings(CONFIG / "watcher.yaml", WatcherSettings)
    (region,) = (region for region in example_topology().regions if region.name == settings.region)
    frames = f"{settings.name}:7001"
    assert WatcherProcess(name=settings.name, admin=settings.admin, frames=frames) in region.watchers


@pytest.mark.parametrize(("role", "model"), [*ROLES, ("watcher", WatcherSettings), ("worker", WorkerSettings)])
def test_the_settings_that_stand_behind_a_hash_are_all_others_with_their_defaults(role: str, model: type[Any]) -> None:
    text = (CONFIG / f"{role}.yaml").read_text()
    shown = yaml.safe_load("\n".join(commented_out(text)))
    assert_all_shown(model, shown, role)
    assert parse_settings(shown, model, role) == load_settings(CONFIG / f"{role}.yaml", model)


def assert_all_shown(model: type[Any], shown: Mapping[str, object], where: str) -> None:
    assert set(shown) == {field.name for field in dataclasses.fields(model)}, where
    for field in dataclasses.fields(model):
        inner = shown[field.name]
        if dataclasses.is_dataclass(field.default):
            assert isinstance(inner, Mapping)
            assert_all_shown(type(field.default), inner, f"{where}.{field.name}")
