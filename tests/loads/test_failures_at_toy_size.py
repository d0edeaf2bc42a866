"""The scenarios that break things, at toy size: a fault or a restart of each kind that takes little time. What is
judged has to be right, and no read may fail that nothing explains."""

from __future__ import annotations

import msgspec
import pytest

from tests.rigs.effort import EFFORT_PERCENT
from tests.rigs.toy_runs import ToyRun

scenario = pytest.mark.scenario
takes_minutes = pytest.mark.skipif(EFFORT_PERCENT < 100, reason="takes minutes of a machine: `make thorough` runs it")
pytestmark = [pytest.mark.e2e, pytest.mark.database, pytest.mark.timeout(1200)]


LOGS = ("--logs", "{folder}/logs")


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(
            {"worker_kill", "link_cut"},
            marks=scenario("chaos", "--fault", "worker_kill", "--fault", "link_cut", *LOGS),
            id="two regions",
        ),
        pytest.param(
            {"leader_kill"},
            marks=scenario("chaos", "--regions", "1", "--fault", "leader_kill", *LOGS),
            id="one region",
        ),
    ],
)
def test_while_things_fail_nothing_acknowledged_is_lost_and_no_read_is_wrong(ran: ToyRun, kinds: set[str]) -> None:
    found = msgspec.json.decode(ran.json)
    assert set(found["faults"]) <= kinds
    assert sum(found["faults"].values()) == len(found["fault_log"]) > 0
    assert found["acked_writes"] > 0
    assert found["reads"] > 0
    assert found["compared"]["cached entries"] > 0
    zeros = ("acked_writes_lost", "stale_after_quiescence", "failed_reads_unexplained", "wrong_answers")
    violations = [key for key in found if key.endswith("_violations")]
    assert len(violations) == 7
    assert {key: found[key] for key in (*zeros, *violations) if found[key]} == {}
    assert found["far_end_reads"] >= found["far_end_reads_while_pending"]
    assert found["existence_answers"] > 0
    assert found["set_answers"] > 0
    assert found["operations"]["edge"] > 0
    assert found["operations"]["edge, journaled"] > 0
    assert (ran.folder / "logs" / "topology.json").exists()
    # Whatever the machine: another leader, or the one that is back, takes the writes of every shard.
    assert len(found["writes_again_seconds"]) == found["faults"].get("leader_kill", 0)
    aims = [aim["aim"] for aim in found["aims"] if "killed" in aim["aim"]]
    assert len(aims) == (2 if "leader_kill" in kinds else 0)


@scenario("cut_journals")
def test_after_journaled_operations_on_both_sides_of_a_cut_both_regions_have_the_join(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert (found["not_accepted"], found["not_applied"], found["not_the_join"]) == (0, 0, 0)
    assert (found["differences"], found["not_well"]) == ({}, "")
    assert found["most_waiting"] > 0
    assert all(number > 0 for number in found["accepted"].values())


@scenario("replay")
def test_the_same_operations_in_order_shuffled_and_doubled_end_in_the_same_rows(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert found["differing"] == {"in order": 0, "shuffled": 0, "doubled": 0}
    assert found["edges"] > 0


@scenario("etcd_faults", *LOGS)
def test_while_etcd_fails_no_read_fails_and_no_database_has_two_masters(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert sorted(found["faults"]) == ["etcd_cut", "etcd_kill", "etcd_restored"]
    assert found["acked_writes"] > 0
    assert found["reads"] > 0
    aims = {aim["aim"]: aim for aim in found["aims"]}
    for aim in (
        "no plain read fails while nothing but etcd fails",
        "no read fails that another server could have answered",
        "no database has two masters",
        "masters stay open while etcd does not answer all",
        "no server goes back to an older document",
        "no acked writes lost",
        "no wrong answers",
    ):
        assert aims[aim]["met"], aims[aim]
    assert aims["databases are looked at"]["value"] > 0
    assert found["etcd_alone"]["reads"] > 0


@scenario("rolling", "--role", "follower", "--role", "leader")
def test_a_follower_and_a_leader_are_drained_and_restarted_and_no_request_fails(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert list(found["seconds"]) == ["east-follower-1a", "east-leader-1"]
    assert (found["failed_reads"], found["failed_writes"], found["acked_writes_lost"]) == (0, 0, 0)
    assert found["reads"] > found["acked_writes"] > 0


@takes_minutes
@scenario("grow")
def test_a_tier_grows_and_shrinks_under_load_and_no_request_fails(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert [aim["aim"] for aim in found["aims"] if not aim["met"]] == []
    assert list(found["stages"]) == [
        "2 followers, before",
        "3 followers, + follower-1c",
        "2 followers, − follower-1c",
    ]
    assert (found["failed_reads"], found["failed_writes"]) == (0, 0)
    assert found["reads"] > found["writes"] > 0


@takes_minutes
@scenario("rotation")
def test_authority_certificates_tokens_and_rights_are_replaced_and_no_request_fails(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert [aim["aim"] for aim in found["aims"] if not aim["met"]] == []
    assert len(found["aims"]) == 8
    assert found["requests"] > found["acked_writes"] > found["denials"] > 0
    assert found["new_connections"] > 0


@scenario("recovery")
def test_the_report_says_how_long_clients_go_without_each_server_that_was_killed(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert {role: set(found[role]) for role in ("follower", "leader", "replica", "tailer", "master")} == {
        "follower": {"reads", "writes", "start"},
        "leader": {"misses", "writes", "critical reads"},
        "replica": {"misses", "writes, since its start", "start"},
        "tailer": {"fresh again", "start"},
        "master": {"misses", "writes", "detection", "promotion"},
    }
    assert 0 < found["master"]["detection"]["p50"] < found["master"]["writes"]["p50"]


@takes_minutes
@scenario("move")
def test_shards_move_under_load_and_while_the_mover_is_killed_and_nothing_is_lost(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert (found["failed_requests"], found["acked_writes_lost"], found["stale_after_quiescence"]) == (0, 0, 0)
    assert found["requests_while_moving"] > 0
    assert found["moved_shards"] == sum(found["movers_killed"].values()) == 1
    assert found["faults"]["follower_kill"] > 0
    assert found["writes_stood_seconds"] is not None
    assert len(found["aims"]) > 5
