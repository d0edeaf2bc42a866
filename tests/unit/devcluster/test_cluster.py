"""A database server that was started again takes up its part by the present topology, while nobody changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.devcluster import cluster as module
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.state_folder import ClusterRecord, new_passwords
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.replication.accounts import ServiceAccounts
from tao.replication.locks import FileLocks, LockTaken, mastership_lock
from tao.topology.document import dump_topology


def topology() -> Topology:
    def tier(name: str) -> Tier:
        return Tier(name=name, servers=(CacheServer(name=f"{name}-1", grpc="127.0.0.1:1"),))

    region = Region(name="east", leaders=tier("leaders"), followers=(tier("web"),))
    servers = {"east": DatabaseServer(name="east-db", port=1)}
    databases = (Database(name="db", master_region="east", servers=servers, shards=((0, 1),)),)
    return Topology(version=7, shards=2, regions=(region,), databases=databases)


async def test_a_database_server_resumes_under_the_lock_of_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = DevCluster(ClusterSettings(state_dir=tmp_path))
    cluster._record = ClusterRecord(shape=Shape(), passwords=new_passwords())
    monkeypatch.setattr(module, "etcd_location", lambda _: None)
    cluster.topology_path.write_text(dump_topology(topology()))
    seen: list[tuple[int, str]] = []

    async def resume(found: Topology, name: str, accounts: ServiceAccounts, *, watched: bool) -> None:
        with pytest.raises(LockTaken):
            async with FileLocks(cluster.topology_path).held(mastership_lock("db"), exclusive=False):
                seen.append((0, "without the lock"))
        seen.append((found.version, name))

    monkeypatch.setattr(module, "resume", resume)
    await cluster._resume("east-db")
    assert seen == [(7, "east-db")]
