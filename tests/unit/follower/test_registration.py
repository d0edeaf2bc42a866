"""A follower that nobody has added to the topology registers itself, and takes no more shards than leaders confirm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from tao.admin.drain import drain_cache_server
from tao.admin.server_stats import server_stats, unreadiness
from tao.follower.server import FollowerServer
from tao.follower.settings import FollowerSettings
from tao.model.errors import NameTaken, SettingsError, TopologyError
from tao.model.topology import CacheServer, Registration, Topology
from tao.observability.logs import logger
from tao.serving.registration import RegistrationSettings
from tao.topology import edits
from tao.topology.document import dump_topology
from tao.topology.file_store import TopologyFile
from tao.topology.registration import placed
from tests.rigs.leader_rig import make_topology
from tests.rigs.ports import free_ports

SHARE: Final = 80.0
"""A share so large that an eighth of it is most of the ring."""
SCHEMA_FILE: Final = Path(__file__).parents[3] / "config/schema.yaml"


def fail(error: TopologyError) -> None:
    raise error


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A topology whose other servers do not run."""
    topology = make_topology(1)
    for _, server in topology.cache_servers:
        gone = {"grpc": "127.0.0.1:1", "frames": "127.0.0.1:1", "admin": "127.0.0.1:1"}
        topology = edits.change_server(topology, server.name, **gone)
    for shard in range(topology.shards):
        topology = edits.unmove_shard(topology, "east", "near", shard)
    path = tmp_path / "topology.json"
    path.write_text(dump_topology(topology))
    return path


def settings_of(path: Path, tier: str = "near") -> FollowerSettings:
    grpc, frames, admin = (f"127.0.0.1:{port}" for port in free_ports(3))
    registration = RegistrationSettings(
        join=True, tier=tier, grpc=grpc, frames=frames, admin=admin, share=SHARE, step_seconds=0.01
    )
    return FollowerSettings(name="near-3", topology_file=path, schema_file=SCHEMA_FILE, registration=registration)


@asynccontextmanager
async def running(settings: FollowerSettings) -> AsyncIterator[FollowerServer]:
    server = await FollowerServer(settings, logger("test")).start()
    try:
        yield server
    finally:
        await server.close()


async def entry_once(path: Path, holds: Callable[[CacheServer], bool]) -> CacheServer:
    """The follower's entry, as soon as the condition holds."""
    store = TopologyFile(path, on_error=fail)
    while True:
        found = placed(await store.load(), "near-3")
        if found is not None and holds(found.server):
            return found.server
        await asyncio.sleep(0.02)


async def until_unready(admin: str, reason: str) -> None:
    """Wait until the follower has read the entry that it wrote: before, it is ready, since it has no shards."""
    while True:
        if reason in await unreadiness(admin):
            return
        await asyncio.sleep(0.02)


async def change(path: Path, edit: Callable[[Topology], Topology]) -> None:
    store = TopologyFile(path, on_error=fail)
    before = await store.load()
    await store.change(before.version, edit(before))


async def test_it_is_ready_without_shards_and_waits_at_the_first_eighth_for_a_leader(path: Path) -> None:
    settings = settings_of(path)
    async with running(settings):
        entry = await entry_once(path, lambda server: server.weight > 0)
        assert (entry.weight, entry.registration) == (SHARE / 8, Registration(share=SHARE))
        assert (entry.grpc, entry.admin) == (settings.registration.grpc, settings.registration.admin)
        await until_unready(entry.admin, "shards are not subscribed yet")
        assert (await server_stats(entry.admin))["registration"] == {"leaving": False, "trouble": ""}


async def test_it_is_drained_out_of_the_ring_and_the_topology_and_registers_when_it_starts_again(path: Path) -> None:
    settings = settings_of(path)
    async with running(settings):
        await entry_once(path, lambda server: server.weight > 0)
        drained = await drain_cache_server(path, "near-3", 30.0, lambda _: None)
        assert (drained.safe_to_stop, drained.marked) == (True, False)
        assert placed(await TopologyFile(path, on_error=fail).load(), "near-3") is None
    async with running(settings):
        assert (await entry_once(path, lambda _: True)).registration == Registration(share=SHARE)


async def test_it_registers_again_when_it_was_removed_while_it_runs(path: Path) -> None:
    async with running(settings_of(path)):
        await entry_once(path, lambda server: server.weight > 0)
        await change(path, lambda found: edits.remove_server(found, "near-3"))
        await entry_once(path, lambda server: server.weight > 0)


async def test_it_does_not_start_under_a_name_that_is_taken_or_in_a_tier_of_leaders(path: Path) -> None:
    with pytest.raises(TopologyError, match="near-3 is a follower and cannot join east/leaders"):
        await FollowerServer(settings_of(path, "leaders"), logger("test")).start()
    taken = CacheServer(name="near-3", grpc="127.0.0.1:1")
    await change(path, lambda found: edits.add_server(found, "east", "near", taken))
    with pytest.raises(NameTaken, match="remove-server near-3"):
        await FollowerServer(settings_of(path), logger("test")).start()


async def test_nothing_is_registered_where_others_could_reach_it_unprotected(path: Path) -> None:
    settings = settings_of(path)
    open_port = RegistrationSettings(join=True, tier="near", grpc="0.0.0.0:1")
    exposed = FollowerSettings(
        name="near-3", topology_file=path, schema_file=settings.schema_file, registration=open_port
    )
    with pytest.raises(SettingsError, match="TLS"):
        await FollowerServer(exposed, logger("test")).start()
    assert placed(await TopologyFile(path, on_error=fail).load(), "near-3") is None
