"""Changes to the topology: each raises the version by one and leaves a document that holds the rules."""

from __future__ import annotations

import msgspec
import pytest

from tao.model.errors import TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Topology
from tao.topology import edits


def test_marking_a_server_changes_that_server_alone(topology: Topology) -> None:
    for name in ("w-1", "l-2"):
        changed = edits.mark_server(topology, name, down=True)
        assert changed.version == 2
        (region,) = changed.regions
        servers = [*region.leaders.servers, *region.followers[0].servers]
        assert [server.name for server in servers if server.down] == [name]
        assert edits.mark_server(changed, name, down=False).regions == topology.regions


def test_marking_a_database_server_changes_that_server_alone(topology: Topology) -> None:
    changed = edits.mark_database_server(topology, "db-here", down=True)
    assert changed.databases[0].servers["here"].down


def test_a_standby_that_is_promoted_changes_places_with_the_former_master(topology: Topology) -> None:
    (database,) = topology.databases
    with_standby = msgspec.structs.replace(database, standbys={"here": DatabaseServer(name="db-2")})
    before = msgspec.structs.replace(topology, databases=(with_standby,))
    assert [each.is_master for each in before.database_servers] == [True, False]
    changed = edits.promote(before, "db", "here/standby", 2, lost="db-here")
    (after,) = changed.databases
    assert (after.master_region, after.version_epoch) == ("here", 2)
    assert after.servers == {"here": DatabaseServer(name="db-2")}
    assert after.standbys == {"here": DatabaseServer(name="db-here", down=True)}
    assert changed.marked_by_watcher == ("db-here",)
    assert not edits.mark_database_server(changed, "db-here", down=False).databases[0].standbys["here"].down


def test_a_shard_is_moved_cloned_and_given_back(topology: Topology) -> None:
    changed = edits.move_shard(topology, "here", "web", 3, "w-2", "w-1")
    assert changed.regions[0].followers[0].moved[3] == ("w-2", "w-1")
    assert edits.unmove_shard(changed, "here", "web", 3).regions == topology.regions
    leaders = edits.move_shard(topology, "here", "leaders", 3, "l-2").regions[0].leaders
    assert leaders.moved == {3: ("l-2",)}


def test_a_server_joins_and_leaves_with_what_was_mapped_to_it(topology: Topology) -> None:
    changed = edits.add_server(topology, "here", "web", CacheServer(name="w-3", grpc="127.0.0.1:9"))
    assert [server.name for server in changed.regions[0].followers[0].servers] == ["w-1", "w-2", "w-3"]
    tier = edits.remove_server(changed, "w-1").regions[0].followers[0]
    assert [server.name for server in tier.servers] == ["w-2", "w-3"]
    assert tier.moved == {2: ("w-2",)}


def test_what_is_not_there_or_would_break_a_rule_is_refused(topology: Topology) -> None:
    with pytest.raises(TopologyError, match="'nobody'"):
        edits.mark_server(topology, "nobody", down=True)
    with pytest.raises(TopologyError, match="'nobody'"):
        edits.mark_database_server(topology, "nobody", down=True)
    with pytest.raises(TopologyError, match="'there'"):
        edits.move_shard(topology, "there", "web", 1, "w-1")
    with pytest.raises(TopologyError, match="no tier 'wob'"):
        edits.move_shard(topology, "here", "wob", 1, "w-1")
    with pytest.raises(TopologyError, match="'l-1' is not a server of this tier"):
        edits.move_shard(topology, "here", "web", 1, "l-1")
    with pytest.raises(TopologyError, match="not mapped by hand"):
        edits.unmove_shard(topology, "here", "web", 1)
    with pytest.raises(TopologyError, match="there is a server 'l-1' already"):
        edits.add_server(topology, "here", "web", CacheServer(name="l-1", grpc="127.0.0.1:9"))
    with pytest.raises(TopologyError, match="no servers"):
        edits.remove_server(edits.remove_server(topology, "l-1"), "l-2")


def two_databases(topology: Topology) -> Topology:
    (database,) = topology.databases
    other = Database(name="db-2", master_region="here", servers={"here": DatabaseServer(name="db-2-here")}, shards=())
    return msgspec.structs.replace(topology, databases=(database, other))


def test_a_shard_changes_its_database_and_ranges_stay_short(topology: Topology) -> None:
    changed = edits.move_to_database(two_databases(topology), 7, "db-2")
    assert (changed.version, [each.shards for each in changed.databases]) == (2, [((0, 6), (8, 15)), ((7, 7),)])
    again = edits.move_to_database(changed, 8, "db-2")
    assert [each.shards for each in again.databases] == [((0, 6), (9, 15)), ((7, 8),)]
    back = edits.move_to_database(edits.move_to_database(again, 7, "db"), 8, "db")
    assert [each.shards for each in back.databases] == [((0, 15),), ()]
    for shard, name in ((16, "db-2"), (7, "db-3"), (7, "db")):
        with pytest.raises(TopologyError):
            edits.move_to_database(two_databases(topology), shard, name)


def test_shards_are_added_behind_the_present_ones_and_spread_over_the_databases(topology: Topology) -> None:
    changed = edits.add_shards(two_databases(topology), 5)
    assert (changed.shards, [each.shards for each in changed.databases]) == (21, [((0, 17),), ((18, 20),)])
    with pytest.raises(TopologyError, match="there can be 1 to 65536"):
        edits.add_shards(topology, 1 << 16)
