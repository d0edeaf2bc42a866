"""`tao migrate` and `tao replicate` on two bare servers make them a replication set, and keep it one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.admin.documents import example_schema_file
from tao.admin.replication import replication_states
from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.replication.accounts import ServiceAccounts
from tao.topology.document import dump_topology
from tests.e2e.test_real_deployment import Operator
from tests.rigs.certificates import TestAuthority

pytestmark = [pytest.mark.database, pytest.mark.e2e]

REGIONS = ("east", "west")


def region(name: str) -> Region:
    tiers = [Tier(name=tier, servers=(CacheServer(name=f"{name}-{tier}", grpc="h:1"),)) for tier in ("leaders", "near")]
    return Region(name=name, leaders=tiers[0], followers=(tiers[1],))


@pytest.fixture
async def set_of_two(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[Operator]:
    binary = find_server_binary(os.environ)
    instances = {
        name: DatabaseInstance(
            binary,
            InstanceSettings(
                folder=tmp_path / name,
                accounts=database_accounts,
                cache_folder=default_cache_folder(os.environ),
                options=ServerOptions(
                    server_id=number, gtid_domain=1, replicated=True, read_only=name == "west",
                    durability=Durability.RELAXED,
                ),
            ),
        )
        for number, name in enumerate(REGIONS, 1)
    }  # fmt: skip
    await asyncio.gather(*(instance.start() for instance in instances.values()))
    servers = {name: DatabaseServer(name=f"{name}-db", port=each.port) for name, each in instances.items()}
    topology = Topology(
        version=1,
        shards=2,
        regions=tuple(map(region, REGIONS)),
        databases=(Database(name="db", master_region="east", servers=servers, shards=((0, 1),)),),
    )
    person = Operator(tmp_path, topology, TestAuthority(tmp_path / "certificates"))
    person.topology_file.write_text(dump_topology(topology))
    person.environment |= {
        "TAO_ADMIN_PASSWORD": database_accounts.administrator.password,
        "TAO_REPLICATOR_PASSWORD": database_accounts.replicator.password,
    }
    try:
        yield person
    finally:
        await asyncio.gather(*(instance.stop() for instance in instances.values()))


async def test_a_set_is_attached_once_and_a_server_of_another_history_is_rejected(
    set_of_two: Operator, database_accounts: ServiceAccounts
) -> None:
    where = ("--topology", str(set_of_two.topology_file))
    await set_of_two.must("migrate", *where, "--schema", str(example_schema_file()), "--yes")
    status, _, err = await set_of_two.run("replicate", *where)
    assert (status, "there is no input to ask" in err) == (2, True)
    found = [json.loads(await set_of_two.must("replicate", *where, "--yes", "--json"))["servers"] for _ in range(2)]
    assert [[step["action"] for step in steps] for steps in found] == [["", "attach"], ["", ""]]
    states = await replication_states(set_of_two.topology, database_accounts.administrator)
    assert (states["east-db"].part, states["west-db"].part) == ("master", "replica")
    # The tables of the shards came by replication.
    assert states["west-db"].position == states["east-db"].position

    # Both servers change roles in the document: the command must not do a promotion as a side effect.
    (database,) = set_of_two.topology.databases
    swapped = dump_topology(set_of_two.topology).replace('"master_region": "east"', '"master_region": "west"')
    assert database.master_region == "east"
    set_of_two.topology_file.write_text(swapped)
    status, out, err = await set_of_two.run("replicate", *where, "--yes")
    assert (status, out) == (2, "")
    assert "promotion" in err
