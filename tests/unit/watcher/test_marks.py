"""Which marks a watcher sets: on whose word, and never the last one of a tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from tao.model.topology import CacheServer, Database, DatabaseServer, Region, TailerProcess, Tier, Topology
from tao.topology import edits
from tao.watcher.marks import (
    Mark,
    ServerVerdict,
    WatcherReport,
    lag_verdict,
    marks_by_database,
    steady_verdict,
    wanted_marks,
    with_marks,
)


def server(name: str, *, down: bool = False) -> CacheServer:
    return CacheServer(name=name, grpc="127.0.0.1:1", down=down)


def topology(down: Iterable[str] = ()) -> Topology:
    regions = tuple(
        Region(
            name=region,
            leaders=Tier(
                name="leaders", servers=tuple(server(f"{region}-l{n}", down=f"{region}-l{n}" in down) for n in (1, 2))
            ),
            followers=(
                Tier(
                    name="web", servers=tuple(server(f"{region}-f{n}", down=f"{region}-f{n}" in down) for n in (1, 2))
                ),
            ),
        )
        for region in ("east", "west")
    )
    servers = {region: DatabaseServer(name=f"{region}-db", down=f"{region}-db" in down) for region in ("east", "west")}
    database = Database(name="db", master_region="east", servers=servers, shards=((0, 3),))
    return Topology(version=1, shards=4, regions=regions, databases=(database,), marked_by_watcher=tuple(down))


def test_a_standby_is_marked_on_the_word_of_its_region_and_a_master_never() -> None:
    before = topology()
    (database,) = before.databases
    with_standby = msgspec.structs.replace(database, standbys={"east": DatabaseServer(name="east-db-2")})
    found = msgspec.structs.replace(before, databases=(with_standby,))
    own = WatcherReport("west", {"east-db-2": ServerVerdict.DOWN, "east-db": ServerVerdict.DOWN})
    assert wanted_marks(found, own, {}) == [Mark("east-db-2", down=True)]
    assert wanted_marks(found, own, {"east": WatcherReport("east", {})}) == []


def test_a_watcher_that_is_refused_everywhere_changes_no_mark() -> None:
    for before in (with_tailer(), with_tailer(down=True), topology(["east-l1", "west-f2", "west-db"])):
        refused = dict.fromkeys([*before.server_places, "east-db", "west-db"], ServerVerdict.REFUSED)
        for region in ("east", "west"):
            assert wanted_marks(before, WatcherReport(region, refused), {}) == []
            other = "west" if region == "east" else "east"
            for report in (None, WatcherReport(other, refused)):
                assert wanted_marks(before, WatcherReport(region, refused), {other: report}) == []


def with_tailer(*, down: bool = False) -> Topology:
    before = topology(["tailer"] if down else [])
    tailer = TailerProcess(name="tailer", database="db", admin="127.0.0.1:1", down=down)
    east, west = before.regions
    return msgspec.structs.replace(before, regions=(msgspec.structs.replace(east, tailers=(tailer,)), west))


def seen(**down: bool) -> WatcherReport:
    verdicts = {
        name.replace("_", "-"): ServerVerdict.DOWN if is_down else ServerVerdict.UP for name, is_down in down.items()
    }
    return WatcherReport("east", verdicts)


def marks_of(
    topology: Topology,
    own: WatcherReport,
    peers: Mapping[str, WatcherReport | None],
    databases_being_changed: Collection[str] = (),
) -> list[Mark]:
    marks = wanted_marks(topology, own, peers)
    by_database = marks_by_database(topology, marks)
    waiting = [mark for database in databases_being_changed for mark in by_database.get(database, ())]
    return [mark for mark in marks if mark not in waiting]


def test_a_server_that_is_gone_is_marked_and_one_that_is_back_is_not_marked_any_more() -> None:
    assert marks_of(topology(), seen(east_f1=True, east_f2=False), {}) == [Mark("east-f1", down=True)]
    assert marks_of(topology(["east-f1"]), seen(east_f1=False), {}) == [Mark("east-f1", down=False)]
    assert marks_of(topology(["east-f1"]), seen(east_f1=True), {}) == []


def test_a_mark_set_by_hand_stays_until_a_hand_takes_it_away() -> None:
    by_hand = edits.mark_server(topology(), "east-f1", down=True)
    assert marks_of(by_hand, seen(east_f1=False), {}) == []
    by_watcher = with_marks(topology(), [Mark("east-f1", down=True)])
    assert marks_of(by_watcher, seen(east_f1=False), {}) == [Mark("east-f1", down=False)]
    # Confirmed by hand, it is a mark set by hand.
    assert marks_of(edits.mark_server(by_watcher, "east-f1", down=True), seen(east_f1=False), {}) == []


def test_what_a_watcher_is_not_sure_of_stays_as_it_is() -> None:
    assert marks_of(topology(["east-f1"]), WatcherReport("east", {"east-f1": ServerVerdict.UNSURE}), {}) == []
    assert marks_of(topology(), WatcherReport("east", {}), {}) == []


def test_the_last_server_of_a_tier_is_never_marked() -> None:
    assert marks_of(topology(), seen(east_f1=True, east_f2=True), {}) == [Mark("east-f1", down=True)]
    assert marks_of(topology(["east-f1"]), seen(east_f1=True, east_f2=True), {}) == []


def test_the_last_server_with_a_weight_is_never_marked_and_others_are() -> None:
    new = edits.change_server(topology(), "east-f2", weight=0.0)
    assert marks_of(new, seen(east_f1=True), {}) == []
    assert marks_of(new, seen(east_f1=True, east_f2=True), {}) == [Mark("east-f2", down=True)]


def test_servers_of_a_region_with_a_watcher_of_its_own_are_marked_only_on_its_word() -> None:
    own = seen(west_f1=True, west_db=True)
    agreeing = WatcherReport("west", {"west-f1": ServerVerdict.DOWN})
    disagreeing = WatcherReport("west", {"west-f1": ServerVerdict.UP, "west-db": ServerVerdict.UP})
    assert marks_of(topology(), own, {}) == [Mark("west-f1", down=True), Mark("west-db", down=True)]
    assert marks_of(topology(), own, {"west": agreeing}) == [Mark("west-f1", down=True)]
    assert marks_of(topology(), own, {"west": disagreeing}) == []
    assert marks_of(topology(), own, {"west": None}) == []
    # It may see what cannot be seen from here.
    assert marks_of(topology(), seen(), {"west": agreeing}) == [Mark("west-f1", down=True)]


def test_a_master_is_replaced_and_not_marked() -> None:
    assert marks_of(topology(), seen(east_db=True), {}) == []
    assert marks_of(topology(["east-db"]), seen(east_db=False), {}) == [Mark("east-db", down=False)]


def test_several_marks_are_one_change_of_the_topology() -> None:
    changed = with_marks(topology(), [Mark("east-f1", down=True), Mark("west-db", down=True)])
    assert changed.version == 2
    assert changed.regions[0].followers[0].servers[0].down
    assert changed.databases[0].servers["west"].down


def test_a_replica_that_lags_is_marked_late_and_unmarked_later() -> None:
    def verdict(lag: float | None, *, marked: bool) -> ServerVerdict:
        return lag_verdict(lag, marked, down_seconds=30, up_seconds=5)

    assert [verdict(lag, marked=False) for lag in (0, 29, 30, None)] == [
        *(ServerVerdict.UP, ServerVerdict.UP, ServerVerdict.DOWN, ServerVerdict.DOWN),
    ]
    assert [verdict(lag, marked=True) for lag in (30, 29, 6, 5)] == [
        *(ServerVerdict.DOWN, ServerVerdict.UNSURE, ServerVerdict.UNSURE, ServerVerdict.UP),
    ]


def test_while_the_master_of_a_database_is_being_changed_its_servers_keep_their_marks() -> None:
    """The next master follows nobody for a while, and the region that has lost the old one asks it alone."""
    alone = seen(west_db=True, west_f1=True)
    assert marks_of(topology(), alone, {}, ["db"]) == [Mark("west-f1", down=True)]
    assert Mark("west-db", down=True) in marks_of(topology(), alone, {}, ["another"])
    assert marks_of(topology(["west-db"]), seen(west_db=False), {}, ["db"]) == []


def test_a_database_server_that_is_marked_is_up_after_several_good_looks_in_a_row() -> None:
    def verdict(given: ServerVerdict, good_probes: int, *, marked: bool = True) -> ServerVerdict:
        return steady_verdict(given, marked, good_probes, probes_until_up=3)

    assert [verdict(ServerVerdict.UP, looks) for looks in (1, 2, 3)] == [
        ServerVerdict.UNSURE,
        ServerVerdict.UNSURE,
        ServerVerdict.UP,
    ]
    assert verdict(ServerVerdict.UP, 1, marked=False) is ServerVerdict.UP
    assert verdict(ServerVerdict.DOWN, 0) is ServerVerdict.DOWN


def test_a_tailer_is_marked_although_it_is_the_only_one_and_unmarked_when_it_is_back() -> None:
    marked = marks_of(with_tailer(), seen(tailer=True), {})
    assert marked == [Mark("tailer", down=True)]
    stored = with_marks(with_tailer(), marked)
    assert stored.regions[0].tailers[0].down
    assert stored.marked_by_watcher == ("tailer",)
    assert marks_of(stored, seen(tailer=True), {}) == []
    back = with_marks(stored, marks_of(stored, seen(tailer=False), {}))
    assert not back.regions[0].tailers[0].down
    assert back.marked_by_watcher == ()
