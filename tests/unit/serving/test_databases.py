"""Which database server is asked, and as whom, by the topology as it is."""

from __future__ import annotations

import msgspec
import pytest

from tao.model.errors import TopologyError
from tao.model.topology import Database, DatabaseAddress, DatabaseServer
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.serving.databases import Databases
from tao.storage.session import ServerAccount
from tests.rigs.leader_rig import SCHEMA, SHARDS, make_topology


@pytest.fixture
def configuration() -> Configuration:
    servers = {
        "east": DatabaseServer(name="db-east", port=3307),
        "west": DatabaseServer(name="db-west", reached_from={"east": DatabaseAddress(host="gateway", port=3400)}),
    }
    database = Database(name="db", master_region="west", servers=servers, shards=((0, SHARDS - 1),))
    return Configuration(msgspec.structs.replace(make_topology(), databases=(database,)), SCHEMA, logger("test"))


def test_a_region_reads_its_own_server_and_writes_the_masters(configuration: Configuration) -> None:
    east = Databases("east", configuration)
    assert (east.database_of(0), east.local(0), east.master(0)) == ("db", "db-east", "db-west")
    assert not east.is_mastered_here(0)
    assert Databases("west", configuration).is_mastered_here(0)


def test_a_mark_is_seen_in_the_region_whose_server_it_is(configuration: Configuration) -> None:
    east, west = Databases("east", configuration), Databases("west", configuration)
    assert not east.local_is_down(0)
    topology = configuration.routes.topology
    (database,) = topology.databases
    servers = database.servers | {"east": msgspec.structs.replace(database.servers["east"], down=True)}
    database = msgspec.structs.replace(database, servers=servers)
    configuration.use_topology(msgspec.structs.replace(topology, version=2, databases=(database,)))
    assert east.local_is_down(0)
    assert not west.local_is_down(0)


def test_a_replica_that_is_marked_down_is_asked_before_nobody_is(configuration: Configuration) -> None:
    west = Databases("west", configuration)
    assert Databases("east", configuration).other_region(0) == "west", "the master's"
    topology = configuration.routes.topology
    (database,) = topology.databases
    alone = {"west": database.servers["west"]}
    marked = database.servers | {"east": msgspec.structs.replace(database.servers["east"], down=True)}
    choices = ((alone, None), (marked, "east"), (marked | {"north": DatabaseServer(name="db-north")}, "north"))
    for version, (servers, other) in enumerate(choices, 2):
        changed = msgspec.structs.replace(database, servers=servers)
        configuration.use_topology(msgspec.structs.replace(topology, version=version, databases=(changed,)))
        assert west.other_region(0) == other


def test_servers_are_reached_at_the_address_that_is_good_in_the_region(configuration: Configuration) -> None:
    login = Databases("east", configuration).login("tao_reader", "secret")
    assert login("db-east") == ServerAccount("127.0.0.1", 3307, "tao_reader", "secret")
    assert login("db-west") == ServerAccount("gateway", 3400, "tao_reader", "secret")
    with pytest.raises(TopologyError, match="nowhere"):
        login("nowhere")
