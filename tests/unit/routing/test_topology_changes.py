"""Recorded changes: for a server that skips versions, the affected shards are those of all changes, and no more."""

from __future__ import annotations

import msgspec

from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.routing.routes import Routes
from tao.routing.topology_changes import (
    MAX_CHANGES,
    MAX_CHANGES_BYTES,
    AffectedShards,
    affected_shards,
    is_range_text,
    record_change,
)

SHARDS = 64
HALF = SHARDS // 2
EVERYTHING = frozenset(range(SHARDS))
NOTHING = AffectedShards(frozenset(), frozenset())


def region(name: str) -> Region:
    def servers(kind: str) -> tuple[CacheServer, ...]:
        return tuple(CacheServer(name=f"{name}-{kind}-{number}", grpc=f"h:{number}") for number in (1, 2, 3))

    return Region(
        name=name,
        leaders=Tier(name="leaders", servers=servers("leader")),
        followers=(Tier(name="web", servers=servers("follower")),),
    )


def database(name: str, first: int, last: int, **fields: object) -> Database:
    servers = {each: DatabaseServer(name=f"{name}-{each}") for each in ("east", "west")}
    made = Database(name=name, master_region="east", servers=servers, shards=((first, last),))
    return msgspec.structs.replace(made, **fields)


def first_version(**fields: object) -> Topology:
    regions = (region("east"), region("west"))
    databases = (database("db1", 0, HALF - 1), database("db2", HALF, SHARDS - 1))
    made = Topology(version=1, shards=SHARDS, regions=regions, databases=databases, changes=())
    return msgspec.structs.replace(made, **fields)


def next_version(topology: Topology, **fields: object) -> Topology:
    """Return what a store makes of the document with these fields."""
    changed = msgspec.structs.replace(topology, version=topology.version + 1, **fields)
    return record_change(topology, changed)


def led_by(topology: Topology, homes: dict[int, str], *, down: str = "") -> Topology:
    """Return the next version, in which shards of east are led by these leaders, and one leader is marked down."""
    east, west = topology.regions
    servers = tuple(msgspec.structs.replace(each, down=each.name == down) for each in east.leaders.servers)
    leaders = msgspec.structs.replace(
        east.leaders, moved={shard: (home,) for shard, home in homes.items()}, servers=servers
    )
    return next_version(topology, regions=(msgspec.structs.replace(east, leaders=leaders), west))


def with_database(topology: Topology, place: int, **fields: object) -> Topology:
    databases = list(topology.databases)
    databases[place] = msgspec.structs.replace(databases[place], **fields)
    return next_version(topology, databases=tuple(databases))


def affected(former: Topology, now: Topology, at: str = "east") -> AffectedShards:
    return affected_shards(Routes(former), Routes(now), at)


def other_leader(topology: Topology, shard: int) -> str:
    home = Routes(topology).leaders("east").home(shard).name
    return next(each.name for each in topology.regions[0].leaders.servers if each.name != home)


def test_a_change_affects_the_shards_that_get_another_leader_and_no_others() -> None:
    first = first_version()
    second = led_by(first, {7: other_leader(first, 7), 9: other_leader(first, 9)})
    assert affected(first, second) == AffectedShards(frozenset({7, 9}), frozenset())
    assert affected(first, second, "west") == NOTHING
    assert affected(first, second, "north").led == EVERYTHING, "a region that was not there"


def test_a_change_and_its_reverse_within_one_poll_affect_their_shards() -> None:
    """The two documents that the server sees are equal; another leader had the shard in between."""
    first = first_version()
    third = led_by(led_by(first, {7: other_leader(first, 7)}), {})
    assert msgspec.structs.replace(third, version=1, changes=()) == first
    assert affected(first, third) == AffectedShards(frozenset({7}), frozenset())
    assert affected(first, third, "west") == NOTHING


def test_a_leader_marked_down_and_up_within_one_poll_affects_the_shards_that_others_led() -> None:
    first = first_version()
    down = first.regions[0].leaders.servers[0].name
    third = led_by(led_by(first, {}, down=down), {})
    assert affected(first, third).led == set(Routes(first).shards_of(down))


def test_changes_of_followers_marks_of_databases_and_other_regions_affect_nothing() -> None:
    first = first_version()
    east, west = first.regions
    tier = msgspec.structs.replace(
        west.followers[0], servers=tuple(msgspec.structs.replace(each, down=True) for each in west.followers[0].servers)
    )
    second = next_version(first, regions=(east, msgspec.structs.replace(west, followers=(tier,))))
    marked = {at: msgspec.structs.replace(server, down=True) for at, server in first.databases[0].servers.items()}
    third = with_database(second, 0, servers=marked)
    assert [(each.version, each.leaders, each.databases) for each in third.changes or ()] == [(2, {}, ()), (3, {}, ())]
    assert affected(first, third) == NOTHING


def test_two_promotions_within_one_poll_affect_their_databases_and_no_leaders() -> None:
    """At the loss of a region: the leaders of the others keep their caches."""
    first = first_version()
    second = with_database(first, 0, master_region="west", version_epoch=2)
    third = with_database(second, 1, master_region="west", version_epoch=2)
    back = with_database(with_database(third, 0, master_region="east", version_epoch=3), 0, version_epoch=4)
    for at in ("east", "west"):
        assert affected(first, third, at) == AffectedShards(frozenset(), EVERYTHING)
        assert affected(third, back, at) == AffectedShards(frozenset(), frozenset(range(HALF)))


def test_a_shard_that_another_database_holds_is_affected_in_every_region() -> None:
    first = first_version()
    databases = (database("db1", 0, HALF), database("db2", HALF + 1, SHARDS - 1))
    second = next_version(first, databases=databases)
    for at in ("east", "west"):
        assert affected(first, second, at) == AffectedShards(frozenset({HALF}), EVERYTHING)
        assert affected(first, next_version(second, databases=first.databases), at).led == {HALF}


def test_for_a_server_that_misses_a_change_every_shard_is_affected() -> None:
    first = first_version()
    later = first
    for _ in range(MAX_CHANGES):
        later = next_version(later)
    assert affected(first, later) == NOTHING
    assert affected(first, next_version(later)).led == EVERYTHING, "the record has lost version 2"
    by_hand = msgspec.structs.replace(later, version=later.version + 1)
    assert affected(later, by_hand) == NOTHING, "nothing was skipped: the two documents show everything"
    assert affected(first, next_version(by_hand)).led == EVERYTHING
    assert affected(later, next_version(by_hand)).led == EVERYTHING


def test_without_a_record_a_skipped_version_affects_every_shard_and_a_single_change_does_not() -> None:
    first = first_version(changes=None)
    second = led_by(first, {7: other_leader(first, 7)})
    third = led_by(second, {})
    assert second.changes is None
    assert affected(first, second).led == {7}
    assert affected(first, third) == AffectedShards(EVERYTHING, EVERYTHING)


def test_added_shards_affect_no_others_and_fewer_shards_affect_every_one() -> None:
    first = first_version()
    db1, _ = first.databases
    second = next_version(first, shards=SHARDS + 2, databases=(db1, database("db2", HALF, SHARDS + 1)))
    assert affected(first, second).led == {SHARDS, SHARDS + 1}
    assert affected(first, next_version(second)).led == {SHARDS, SHARDS + 1}, "also when a version is skipped"
    fewer = next_version(first, shards=SHARDS - 1, databases=(db1, database("db2", HALF, SHARDS - 2)))
    assert affected(first, fewer).led == frozenset(range(SHARDS - 1))


def test_the_record_is_bounded_in_changes_and_bytes_and_drops_the_oldest() -> None:
    topology = first_version()
    for _ in range(MAX_CHANGES + 5):
        topology = next_version(topology)
    assert [each.version for each in topology.changes or ()] == list(range(7, MAX_CHANGES + 7))
    wide = first_version(shards=65_536, databases=(database("db1", 0, 65_535),))
    down = wide.regions[0].leaders.servers[0].name
    for turn in range(8):
        wide = led_by(wide, {}, down=down if turn % 2 == 0 else "")
    kept = wide.changes or ()
    assert len(msgspec.json.encode(kept)) <= MAX_CHANGES_BYTES + 2 * MAX_CHANGES
    assert len(kept) < 8
    assert [each.version for each in kept] == list(range(10 - len(kept), 10))


def test_shards_are_written_as_ranges() -> None:
    first = first_version()
    moved = {shard: other_leader(first, shard) for shard in (3, 17, 18, 19)}
    (change,) = led_by(first, moved).changes or ()
    assert change.leaders == {"east": "3,17-19"}
    assert all(is_range_text(text, SHARDS) for text in ("3", "3,17-19", "0-63"))
    assert not any(is_range_text(text, SHARDS) for text in ("", "3,", "a", "3-", "-3", "3 4"))
    assert not any(is_range_text(text, SHARDS) for text in ("64", "0-64", "5-3", "0-99999999999", "9" * 5000))
