"""A server registers, takes its share in steps, leaves, and is removed when it has been gone for long."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from tao.model.errors import NameTaken, TopologyError
from tao.model.topology import CacheServer, Registration, Topology
from tao.routing.routes import Routes
from tao.topology import edits
from tao.topology.document import dump_topology, parse_topology
from tao.topology.registration import Registrant, eighths, follow_absences, leave, placed, register, step
from tao.topology.sections import sections_of, topology_of

HOUR_MS = 3_600_000


def registrant(name: str = "w-3", grpc: str = "127.0.0.1:9", *, tier: str = "web", share: float = 1.0) -> Registrant:
    server = CacheServer(name=name, grpc=grpc, weight=0.0, registration=Registration(share=share))
    return Registrant("leader" if tier == "leaders" else "follower", "here", tier, server)


def server(topology: Topology, name: str = "w-3") -> CacheServer:
    found = placed(topology, name)
    assert found is not None
    return found.server


def weights(topology: Topology, name: str = "w-3") -> list[float]:
    """The weights of a server until it takes no more steps."""
    found = [server(topology, name).weight]
    while (after := step(topology, name, is_ready=True)) is not topology:
        assert after.version == topology.version + 1
        topology = after
        found.append(server(topology, name).weight)
    return found


def gone(topology: Topology, name: str = "w-3", since_ms: int = 1) -> Topology:
    return follow_absences(edits.mark_by_watcher(topology, name, down=True), since_ms, 3600)


def test_a_new_follower_gets_its_share_in_eighths(topology: Topology) -> None:
    joined = register(topology, registrant(share=2.0))
    assert joined.version == topology.version + 1
    assert weights(joined) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


def test_a_new_leader_gets_its_share_at_once(topology: Topology) -> None:
    assert weights(register(topology, registrant("l-3", tier="leaders")), "l-3") == [0.0, 1.0]


def test_no_step_up_is_taken_before_the_server_is_ready_and_every_step_down_is(topology: Topology) -> None:
    joined = register(topology, registrant())
    assert step(joined, "w-3", is_ready=False) is joined
    leaving = leave(step(joined, "w-3", is_ready=True), "w-3")
    assert server(step(leaving, "w-3", is_ready=False)).weight == 0.0


def test_a_server_that_leaves_goes_down_in_eighths_and_may_stay_after_all(topology: Topology) -> None:
    joined = register(topology, registrant())
    leaving = leave(edits.change_server(joined, "w-3", weight=0.25), "w-3")
    assert weights(leaving) == [0.25, 0.125, 0.0]
    staying = leave(step(leaving, "w-3", is_ready=True), "w-3", leaving=False)
    assert weights(staying)[:3] == [0.125, 0.25, 0.375]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_server_that_has_left_the_ring_has_no_shards_mapped_by_hand_either(topology: Topology, at_once: bool) -> None:
    mapped = edits.move_shard(register(topology, registrant()), "here", "web", 5, "w-3", "w-1")
    leaving = leave(edits.change_server(mapped, "w-3", weight=0.125), "w-3", at_once=at_once)
    after = leaving if at_once else step(leaving, "w-3", is_ready=True)
    assert after.version == (leaving.version if at_once else leaving.version + 1)
    assert Routes(after).shards_of("w-3") == ()
    assert after.regions[0].followers[0].moved == {**topology.regions[0].followers[0].moved, 5: ("w-1",)}


def test_a_server_with_another_share_takes_steps_to_it_from_either_side(topology: Topology) -> None:
    joined = edits.change_server(register(topology, registrant()), "w-3", weight=1.0)
    less = register(joined, registrant(share=0.5))
    assert weights(less)[-1] == 0.5
    assert eighths(server(less)) == 16
    assert weights(register(joined, registrant(share=2.0)))[-1] == 2.0


def test_a_server_whose_share_is_much_lower_gets_there_in_few_steps_of_an_eighth_of_what_it_has(
    topology: Topology,
) -> None:
    joined = edits.change_server(register(topology, registrant(share=80.0)), "w-3", weight=80.0)
    found = weights(register(joined, registrant(share=1.0)))
    assert found[:3] == [80.0, 70.0, 61.25]
    assert found[-1] == 1.0
    assert len(found) == 38
    assert all(before * 7 / 8 <= after < before for before, after in pairwise(found))


def test_a_share_for_which_the_ring_has_no_room_is_refused(topology: Topology) -> None:
    with pytest.raises(TopologyError, match=r"w-3 cannot join here/web with a share of 1e\+06: .*use lower weights"):
        register(topology, registrant(share=1e6))


def test_a_server_that_an_operator_has_added_is_left_alone(topology: Topology) -> None:
    same = Registrant("follower", "here", "web", msgspec.structs.replace(server(topology, "w-1"), weight=0.0))
    assert register(topology, same) is topology
    assert step(topology, "w-1", is_ready=True) is topology
    marked = edits.mark_by_watcher(topology, "w-1", down=True)
    assert follow_absences(marked, HOUR_MS * 9, 1.0) is marked
    with pytest.raises(TopologyError, match="has not joined by itself"):
        leave(topology, "w-1")


def test_a_server_that_starts_again_keeps_its_weight_and_gets_its_new_addresses(topology: Topology) -> None:
    half = edits.change_server(register(topology, registrant()), "w-3", weight=0.5)
    assert register(half, registrant()) is half
    moved = registrant()
    moved = Registrant("follower", "here", "web", msgspec.structs.replace(moved.server, admin="127.0.0.1:10"))
    again = register(leave(half, "w-3"), moved)
    assert server(again) == msgspec.structs.replace(server(half), admin="127.0.0.1:10")


def test_a_name_that_another_server_has_is_refused_with_what_to_do(topology: Topology) -> None:
    joined = register(topology, registrant())
    with pytest.raises(NameTaken, match=r"w-3 is registered in here/web at 127\.0\.0\.1:9, not at 127.*tao drain"):
        register(joined, registrant(grpc="127.0.0.1:99"))
    with pytest.raises(NameTaken, match=r"an operator has added w-1 .*remove-server w-1"):
        register(topology, registrant("w-1", "127.0.0.1:99"))


@pytest.mark.parametrize("how", ["gone", "left"])
def test_a_name_whose_server_is_gone_or_has_left_is_taken_over_at_weight_0(topology: Topology, how: str) -> None:
    joined = edits.change_server(register(topology, registrant()), "w-3", weight=1.0)
    before = gone(joined) if how == "gone" else leave(joined, "w-3", at_once=True)
    after = register(before, registrant(grpc="127.0.0.1:99"))
    assert server(after) == registrant(grpc="127.0.0.1:99").server
    assert after.version == before.version + 1
    assert "w-3" not in after.marked_by_watcher


def test_a_tier_that_is_not_there_or_of_another_role_is_refused(topology: Topology) -> None:
    with pytest.raises(TopologyError, match=r"w-3 cannot join here/wob.*there are here/leaders, here/web"):
        register(topology, registrant(tier="wob"))
    with pytest.raises(TopologyError, match="w-3 is a follower and cannot join here/leaders, a tier of leaders"):
        register(topology, Registrant("follower", "here", "leaders", registrant().server))


def test_a_server_that_moves_to_another_tier_begins_there_with_nothing(topology: Topology) -> None:
    joined = edits.change_server(register(topology, registrant("x-3")), "x-3", weight=1.0)
    moved = register(joined, registrant("x-3", tier="leaders"))
    found = placed(moved, "x-3")
    assert found is not None
    assert (found.place.tier.name, found.server.weight) == ("leaders", 0.0)


def test_a_server_is_gone_while_a_watchers_mark_says_so(topology: Topology) -> None:
    joined = register(topology, registrant())
    by_hand = edits.mark_server(joined, "w-3", down=True)
    assert follow_absences(by_hand, 5, 1.0) is by_hand, "an operator has reasons"
    absent = gone(joined, since_ms=5)
    assert server(absent).registration == Registration(gone_unix_ms=5)
    assert follow_absences(absent, 6, 3600) is absent
    back = follow_absences(edits.mark_by_watcher(absent, "w-3", down=False), 7, 3600)
    assert server(back).registration == Registration()


def test_a_server_that_has_been_gone_for_long_is_removed(topology: Topology) -> None:
    absent = gone(register(topology, registrant()), since_ms=5)
    assert follow_absences(absent, 4 + HOUR_MS, 3600) is absent
    removed = follow_absences(absent, 5 + HOUR_MS, 3600)
    assert placed(removed, "w-3") is None
    assert removed.version == absent.version + 1
    assert follow_absences(absent, 5 + 9 * HOUR_MS, 0) is absent, "never"


def test_the_last_server_of_a_tier_in_use_stays(topology: Topology) -> None:
    absent = gone(edits.change_server(register(topology, registrant()), "w-3", weight=1.0))
    for name in ("w-1", "w-2"):
        absent = edits.mark_server(absent, name, down=True)
    assert follow_absences(absent, 9 * HOUR_MS, 3600) is absent
    alone = leave(edits.remove_server(edits.remove_server(register(topology, registrant()), "l-1"), "w-1"), "w-3")
    alone = edits.change_server(edits.change_server(alone, "w-3", weight=0.125), "w-2", weight=0.0)
    with pytest.raises(TopologyError, match="weight is above 0"):
        step(alone, "w-3", is_ready=True)


def test_only_a_document_with_registered_servers_has_the_field(topology: Topology) -> None:
    """Programs of earlier versions refuse fields that they do not know."""
    assert "registration" not in dump_topology(topology)
    assert not any(b"registration" in section for section in sections_of(topology).values())
    joined = register(topology, registrant())
    assert parse_topology(dump_topology(joined), "file") == joined
    assert topology_of(sections_of(joined), "etcd") == joined
    with pytest.raises(TopologyError, match=r"w-3\.registration\.share: is 0"):
        register(topology, registrant(share=0.0))
