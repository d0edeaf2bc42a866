"""The scenarios that break things, at toy size: a fault or a restart of each kind that takes little time. What is
judged has to be right, and no read may fail that nothing explains."""

from __future__ import annotations

import msgspec
import pytest

from tests.rigs.toy_runs import ToyRun

scenario = pytest.mark.scenario
pytestmark = [pytest.mark.e2e, pytest.mark.database, pytest.mark.timeout(420)]


@scenario("chaos", "--fault", "follower_kill", "--fault", "link_cut", "--logs", "{folder}/logs")
def test_while_things_fail_nothing_acknowledged_is_lost_and_no_read_is_wrong(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert set(found["faults"]) <= {"follower_kill", "link_cut"}
    assert sum(found["faults"].values()) == len(found["fault_log"]) > 0
    assert found["acked_writes"] > 0
    assert found["reads"] > 0
    assert found["compared"]["cached entries"] > 0
    zeros = ("acked_writes_lost", "stale_after_quiescence", "failed_reads_unexplained", "wrong_answers")
    violations = [key for key in found if key.endswith("_violations")]
    assert len(violations) == 5
    assert {key: found[key] for key in (*zeros, *violations) if found[key]} == {}
    assert (ran.folder / "logs" / "topology.json").exists()


@scenario("rolling", "--role", "follower", "--role", "leader")
def test_a_follower_and_a_leader_are_drained_and_restarted_and_no_request_fails(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert list(found["seconds"]) == ["east-follower-1a", "east-leader-1"]
    assert (found["failed_reads"], found["failed_writes"], found["acked_writes_lost"]) == (0, 0, 0)
    assert found["reads"] > found["acked_writes"] > 0


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
