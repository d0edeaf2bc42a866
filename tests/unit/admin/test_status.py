"""`tao status` describes every problem of the cluster, and has a row for every server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tao.admin.status import Answer, membership_text, view_of
from tao.model.topology import (
    CacheServer,
    Database,
    DatabaseServer,
    Region,
    Registration,
    TailerProcess,
    Tier,
    Topology,
    WatcherProcess,
)

SECONDS = 5.0


def region(name: str, *, tailers: bool = True, down: str = "") -> Region:
    def server(kind: str) -> CacheServer:
        return CacheServer(name=f"{name}-{kind}", grpc="host:1", admin="host:2", down=down == f"{name}-{kind}")

    return Region(
        name=name,
        leaders=Tier(name="leaders", servers=(server("leader"),)),
        followers=(Tier(name="web", servers=(server("web"),)),),
        tailers=(TailerProcess(name=f"{name}-tailer", database="db-1", admin="host:3"),) if tailers else (),
    )


def topology_of(*regions: Region, database_down: str = "", semi_sync: bool = False) -> Topology:
    servers = {
        each.name: DatabaseServer(name=f"{each.name}-db-1", down=database_down == f"{each.name}-db-1")
        for each in regions
    }
    database = Database(name="db-1", master_region="east", servers=servers, shards=((0, 3),), semi_sync=semi_sync)
    return Topology(version=7, shards=4, regions=regions, databases=(database,))


TWO = topology_of(region("east"), region("west"))


def healthy(topology: Topology, **changes: Answer) -> dict[str, Answer]:
    """Answers of all servers, with ``changes`` by name, hyphens as underscores."""
    answers: dict[str, Answer] = {}
    for each in topology.regions:
        beats = {"db-1": {"age_seconds": 0.4, "trouble": ""}} if each.name == "east" else {}
        age = {"staleness_seconds": {"db-1": 1.2}, "topology_version": topology.version}
        answers[f"{each.name}-leader"] = leader(beats, **age)
        answers[f"{each.name}-web"] = Answer({**age, "hit_rate": 0.5, "unsubscribed_shards": 0})
        for process in each.tailers:
            answers[process.name] = Answer({"connected": True, "lag_seconds": 0.3, "position": "0-1-9"})
    return answers | {name.replace("_", "-"): answer for name, answer in changes.items()}


def leader(beats: dict[str, Any], **stats: Any) -> Answer:
    shards = {"owned_shards": 4, "hosted_shards": 0, "delivery": {"subscribers": 1}}
    return Answer({"topology_version": 7, "heartbeats": beats, **shards, **stats})


def problems(topology: Topology = TWO, **changes: Answer) -> list[str]:
    return view_of(topology, healthy(topology, **changes), SECONDS).problems


def test_a_healthy_cluster_has_no_problems_and_a_row_for_each_server() -> None:
    view = view_of(TWO, healthy(TWO), SECONDS)
    assert view.problems == []
    assert view.topology_version == 7
    assert [(row.name, row.state, row.owned_shards, row.subscribers) for row in view.leaders] == [
        ("east-leader", "ready", 4, 1),
        ("west-leader", "ready", 4, 1),
    ]
    assert [(row.name, row.tier, row.hit_rate, row.staleness_seconds) for row in view.followers] == [
        ("east-web", "web", 0.5, 1.2),
        ("west-web", "web", 0.5, 1.2),
    ]
    assert [(row.name, row.database, row.lag_seconds, row.position) for row in view.tailers] == [
        ("east-tailer", "db-1", 0.3, "0-1-9"),
        ("west-tailer", "db-1", 0.3, "0-1-9"),
    ]
    assert view.databases[0].servers == {"east-db-1": "up", "west-db-1": "up"}


def test_a_full_disk_of_a_master_is_named_even_if_no_leader_owns_a_shard_there() -> None:
    said = "the disk of database server east-db-1 is full: make room there"

    def with_write_pool(full: str) -> Answer:
        pool = {"write": {"east-db-1": {"full": full}}}
        return leader({} if full else {"db-1": {"age_seconds": 0.4, "trouble": ""}}, databases=pool)

    assert f"east: writes of db-1 fail: {said}" in problems(east_leader=with_write_pool(said))
    view = view_of(TWO, healthy(TWO, east_leader=with_write_pool(said)), SECONDS)
    assert view.databases[0].servers["east-db-1"] == said
    assert not any("disk" in problem for problem in problems(east_leader=with_write_pool("")))


def test_an_audit_log_that_cannot_be_written_is_a_problem_of_its_server() -> None:
    def auditing(trouble: str) -> Answer:
        return leader({}, staleness_seconds={"db-1": 1.0}, audit={"trouble": trouble, "lost": 3})

    said = "/var/log/tao/west-leader.jsonl: No space left on device"
    assert problems(west_leader=auditing(said)) == [f"west: leader west-leader cannot write its audit log: {said}"]
    assert problems(west_leader=auditing("")) == []


def test_parked_writes_of_a_journal_are_a_problem_and_those_that_wait_are_none() -> None:
    def journaling(parked: dict[str, int]) -> Answer:
        journal = {"waiting": {"high": 0, "normal": 5, "low": 0}, "parked": parked}
        return Answer({"topology_version": 7, "staleness_seconds": {"db-1": 1.0}, "journal": journal})

    (problem,) = problems(west_web=journaling({"high": 1, "normal": 2, "low": 0}))
    assert "west-web has given up accepted writes, which are parked (3): see tao journal parked" in problem
    assert problems(west_web=journaling({"high": 0, "normal": 0, "low": 0})) == []


def test_an_inconsistency_is_a_problem_for_an_hour_and_stays_in_the_figures() -> None:
    def found(seconds: float | None) -> Answer:
        figures = {"looks": 500, "inconsistencies": 2, "seconds_since_inconsistency": seconds}
        return leader({}, staleness_seconds={"db-1": 1.0}, consistency=figures)

    (problem,) = problems(west_leader=found(60.0))
    assert "west-leader found 2 inconsistencies in followers' caches" in problem
    assert problems(west_leader=found(4_000.0)) == problems(west_leader=found(None)) == []
    view = view_of(TWO, healthy(TWO, west_leader=found(4_000.0)), SECONDS)
    assert [(row.consistency_looks, row.inconsistencies) for row in view.leaders] == [(None, None), (500, 2)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"west_web": Answer({}, "host:2/stats does not answer: refused")},
            (
                "west: follower west-web does not answer: host:2/stats does not answer: refused. If it is down, reads "
                "and writes of 4 of its shards fail, because no other follower of the region serves them. Start it, or "
                "give the region another tier"
            ),
        ),
        (
            {"west_leader": Answer({"topology_version": 7, "staleness_seconds": {"db-1": 1.0}}, "not every shard")},
            "west: leader west-leader is not ready: not every shard",
        ),
        (
            {"west_web": Answer({"topology_version": 6, "staleness_seconds": {"db-1": 1.0}})},
            "west: follower west-web uses topology 6, not 7",
        ),
        (
            {"west_tailer": Answer({}, "refused")},
            "west: tailer west-tailer of db-1 does not answer: refused",
        ),
        (
            {"west_tailer": Answer({"connected": False}, "the binlog is not connected")},
            "west: tailer west-tailer of db-1 does not follow the binlog: the binlog is not connected",
        ),
        (
            {"west_web": Answer({"topology_version": 7, "staleness_seconds": {"db-1": 12.34}})},
            "west: the data served of db-1 may be up to 12.3 s behind its master (west-web)",
        ),
        (
            {"west_web": Answer({"topology_version": 7, "staleness_seconds": {"db-1": None}})},
            "west: the data served of db-1 may be behind its master, by an unknown time (west-web)",
        ),
        (
            {"east_leader": leader({"db-1": {"age_seconds": 9.0, "trouble": "the server is read-only"}})},
            "east: the master of db-1 takes no writes: the server is read-only",
        ),
        (
            {"east_leader": leader({"db-1": {"age_seconds": 9.0, "trouble": ""}})},
            "east: the master of db-1 takes no writes: no heartbeat has been written recently",
        ),
        (
            {"east_leader": leader({})},
            "east: the master of db-1 takes no writes: no leader has written a heartbeat",
        ),
    ],
)
def test_each_fault_is_described(changes: dict[str, Answer], problem: str) -> None:
    assert problems(TWO, **changes) == [problem]


def test_problems_that_stop_writes_come_first() -> None:
    found = problems(east_web=Answer({}, "refused"), east_leader=leader({}), west_tailer=Answer({}, "refused"))
    assert [problem.split(":")[1].split()[0] for problem in found] == ["the", "follower", "tailer"]


def test_commits_that_wait_for_no_replica_are_a_problem_with_semi_sync() -> None:
    def saying(waits: bool | None, *, age: float = 0.4) -> Answer:
        ages = {"staleness_seconds": {"db-1": 1.2}}
        return leader({"db-1": {"age_seconds": age, "trouble": "", "waits_for_replica": waits}}, **ages)

    semi_sync = topology_of(region("east"), region("west"), semi_sync=True)
    (problem,) = problems(semi_sync, east_leader=saying(False))
    assert problem.startswith("east: commits of db-1 wait for no replica, though the topology says semi_sync")
    assert "lost with east-db-1" in problem
    assert "tao undrain" in problem
    assert problems(semi_sync, east_leader=saying(True)) == problems(TWO, east_leader=saying(False)) == []
    assert problems(semi_sync) == [], "a leader of an older release says nothing of it"
    (stopped,) = problems(semi_sync, east_leader=saying(False, age=60.0))
    assert "takes no writes" in stopped
    (row,) = view_of(semi_sync, healthy(semi_sync, east_leader=saying(False)), SECONDS).databases
    assert (row.semi_sync, row.waits_for_replica) == (True, False)


def test_a_mark_down_is_reported_whether_the_server_answers_or_not() -> None:
    topology = topology_of(region("east"), region("west", down="west-web"), database_down="west-db-1")
    stopped = "Reads and writes of 4 of its shards fail, because no other follower of the region serves them."
    assert problems(topology) == [
        (
            f"west: follower west-web is ready, but marked down in the topology. {stopped} Run tao undrain west-web, "
            "or give the region another tier"
        ),
        "west: the database server west-db-1 is marked down in the topology",
    ]
    (gone, _) = problems(topology, west_web=Answer({}, "refused"))
    gone_text = "west: follower west-web does not answer, and is marked down in the topology: refused"
    assert gone == f"{gone_text}. {stopped} Start it, or give the region another tier"
    view = view_of(topology, healthy(topology), SECONDS)
    assert view.databases[0].servers["west-db-1"] == "marked down"
    assert view.followers[1].state == "ready, marked down"


def test_a_lost_follower_stops_its_shards_only_when_no_other_tier_has_them() -> None:
    def with_two_tiers(*, down: bool) -> Topology:
        east = region("east", down="east-web")
        behind = CacheServer(name="east-behind", grpc="host:1", admin="host:2", down=down)
        return topology_of(
            msgspec.structs.replace(east, followers=(*east.followers, Tier(name="all", servers=(behind,))))
        )

    answer = Answer({"topology_version": 7, "staleness_seconds": {"db-1": 1.2}, "hit_rate": 0.5})
    gone = "east: follower east-web does not answer, and is marked down in the topology: refused"
    refused = Answer({}, "refused")
    assert problems(with_two_tiers(down=False), east_web=refused, east_behind=answer) == [gone]
    first, second = problems(with_two_tiers(down=True), east_web=refused, east_behind=answer)
    assert first.startswith(f"{gone}. Reads and writes of 4 of its shards fail")
    assert "Run tao undrain east-behind" in second


def test_one_region_without_tailers_measures_nothing_and_that_is_no_fault() -> None:
    topology = topology_of(region("east", tailers=False))
    unknown = {"staleness_seconds": {"db-1": None}, "topology_version": 7}
    assert problems(topology, east_web=Answer({**unknown, "hit_rate": None})) == []


def test_with_several_regions_each_needs_a_tailer_for_each_database() -> None:
    topology = topology_of(region("east"), region("west", tailers=False))
    assert problems(topology) == ["west: the topology names no tailer that reads db-1: its staleness is unknown"]
    view = view_of(topology, healthy(topology), SECONDS)
    assert view.databases[0].servers == {"east-db-1": "up", "west-db-1": "not known"}


def test_a_cluster_that_does_not_answer_at_all_is_a_list_of_problems_and_rows() -> None:
    view = view_of(TWO, {name: Answer({}, "refused") for name in healthy(TWO)}, SECONDS)
    assert len(view.problems) == 7
    states = [[row.state for row in view.leaders], [row.state for row in view.followers]]
    assert [*states, [row.state for row in view.tailers]] == [["does not answer"] * 2] * 3
    assert view.databases[0].servers == {
        "east-db-1": "no leader of its region answers",
        "west-db-1": "not known",
    }


def watched(*regions: Region) -> Topology:
    """A topology that lists a watcher in each region."""
    listed = (WatcherProcess(name=f"{each.name}-watcher", admin="host:4") for each in regions)
    return topology_of(
        *(msgspec.structs.replace(each, watchers=(watcher,)) for each, watcher in zip(regions, listed, strict=True))
    )


def test_that_no_watcher_acts_is_a_problem_and_that_one_is_in_reserve_is_none() -> None:
    topology = watched(region("east"), region("west"))
    acts, waits = Answer({"active": True}), Answer({"active": False})
    assert problems(topology, east_watcher=acts, west_watcher=waits) == []
    view = view_of(topology, healthy(topology, east_watcher=acts, west_watcher=waits), SECONDS)
    assert [(row.name, row.state, row.acts) for row in view.watchers] == [
        ("east-watcher", "ready", True),
        ("west-watcher", "ready", False),
    ]
    gone = Answer({}, "refused")
    (reserve,) = problems(topology, east_watcher=acts, west_watcher=gone)
    assert reserve == "west: watcher west-watcher does not answer: refused"
    nobody, *each = problems(topology, east_watcher=gone, west_watcher=gone)
    assert nobody.startswith("no watcher acts: nobody marks down or replaces what fails, and the masters of db-1")
    assert each == [f"{name}: watcher {name}-watcher does not answer: refused" for name in ("east", "west")]


def test_watchers_that_run_and_do_not_act_are_not_to_be_started_but_lack_their_lock() -> None:
    topology = watched(region("east"), region("west"))
    waits = Answer({"active": False})
    (nobody,) = problems(topology, east_watcher=waits, west_watcher=waits)
    assert nobody.startswith("no watcher acts: nobody marks down or replaces what fails, and the masters of db-1")
    assert nobody.endswith("east-watcher runs, so it cannot take its lock: look whether etcd answers, and at its log")
    kept = tuple(msgspec.structs.replace(each, semi_sync=True) for each in topology.databases)
    (nobody,) = problems(msgspec.structs.replace(topology, databases=kept), east_watcher=waits, west_watcher=waits)
    assert "masters" not in nobody, "their leases are renewed without the lock"


def test_a_watcher_says_whom_it_cannot_judge() -> None:
    topology = watched(region("east"))
    refused = Answer({"active": True, "refusals": {"east-web": "the token w-1 has expired"}})
    assert problems(topology, east_watcher=refused) == [
        "east: watcher east-watcher cannot judge east-web: one of them refuses the other: the token w-1 has expired"
    ]


def test_without_a_second_region_a_dead_watcher_stops_nothing_but_replacement() -> None:
    topology = watched(region("east"))
    nobody, _ = problems(topology, east_watcher=Answer({}, "refused"))
    assert nobody == "no watcher acts: nobody marks down or replaces what fails. Start a watcher: east-watcher"


def test_the_loss_of_a_database_s_only_server_is_said() -> None:
    topology = watched(region("east"))
    lost = Answer({"active": True, "lost_databases": ["db-1"]})
    trouble = leader({"db-1": {"age_seconds": 9.0, "trouble": "refused"}}, staleness_seconds={"db-1": 1.0})
    (problem,) = problems(topology, east_watcher=lost, east_leader=trouble)
    assert problem == (
        "east: the master of db-1 takes no writes: refused. It has no second server that could be promoted"
    )


@pytest.mark.parametrize(
    ("weight", "registration", "text"),
    [
        (1.0, msgspec.UNSET, ""),
        (0.0, Registration(share=2.0), "joining 0/8"),
        (0.75, Registration(share=2.0), "joining 3/8"),
        (2.0, Registration(share=2.0), "joined"),
        (0.75, Registration(share=2.0, leaving=True), "leaving 3/8"),
        (2.0, Registration(share=2.0, gone_unix_ms=1_780_000_000_000), "gone since 2026-05-28 20:26:40 UTC"),
    ],
)
def test_a_row_says_how_far_a_server_that_registers_itself_has_come(
    weight: float, registration: Registration | msgspec.UnsetType, text: str
) -> None:
    server = CacheServer(name="east-web", grpc="host:1", weight=weight, registration=registration)
    assert membership_text(server) == text
    tier = Tier(name="web", servers=(server,))
    view = view_of(topology_of(msgspec.structs.replace(region("east"), followers=(tier,))), healthy(TWO), SECONDS)
    assert [row.membership for row in view.followers] == [text]
    assert [row.membership for row in view.leaders] == [""]


def test_workers_are_those_that_have_asked_a_leader_for_jobs_lately() -> None:
    topology = topology_of(region("east"), region("west"))
    east, west = Answer({"jobs": {"workers": {"b": 3.0, "a": 40.0}}}), Answer({"jobs": {"workers": {"a": 0.5}}})
    view = view_of(topology, healthy(topology, east_leader=east, west_leader=west), SECONDS)
    assert [(row.name, row.asked_seconds_ago) for row in view.workers] == [("a", 0.5), ("b", 3.0)]


def test_a_standby_has_a_state_of_its_own_as_the_watchers_of_its_region_see_it() -> None:
    watched = [
        msgspec.structs.replace(each, watchers=(WatcherProcess(name=f"{each.name}-watcher", admin="host:4"),))
        for each in (region("west"), region("east"))
    ]
    topology = topology_of(*watched)
    (database,) = topology.databases

    def state(east: dict[str, str], west: dict[str, str], *, down: bool = False) -> str:
        standbys = {"east": DatabaseServer(name="east-db-1b", down=down)}
        with_standby = msgspec.structs.replace(
            topology, databases=(msgspec.structs.replace(database, standbys=standbys),)
        )
        watchers = {
            "east_watcher": Answer({"active": True, "verdicts": east} if east else {}),
            "west_watcher": Answer({"active": True, "verdicts": west}),
        }
        view = view_of(with_standby, healthy(with_standby, **watchers), SECONDS)
        assert list(view.databases[0].servers) == ["west-db-1", "east-db-1", "east-db-1b"]
        return view.databases[0].servers["east-db-1b"]

    assert state({"east-db-1b": "up"}, {"east-db-1b": "unsure"}) == "standby, up"
    assert state({}, {"east-db-1b": "down"}) == "standby, down"
    assert state({}, {}) == "standby, not known"
    assert state({"east-db-1b": "up"}, {}, down=True) == "standby, marked down"
