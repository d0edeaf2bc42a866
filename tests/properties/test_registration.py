"""Whatever servers, watchers and operators do in whatever order, a registered server's weight moves by one step at a
time between 0 and its share, nobody else's entry changes, and every document holds the rules."""

from __future__ import annotations

from typing import Final

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Registration, Tier, Topology
from tao.routing.routes import Routes
from tao.topology import edits
from tao.topology.document import check_topology
from tao.topology.registration import STEPS, Registrant, follow_absences, leave, placed, register, step

NAMES: Final = ("f-1", "f-2", "f-3", "l-1")
REMOVE_SECONDS: Final = 60.0
ACTIONS: Final = (
    "register",
    "elsewhere",
    "step",
    "step",
    "step",
    "unready step",
    "leave",
    "stay",
    "gone",
    "back",
    "watch",
)


def make() -> Topology:
    def tier(name: str, *names: str) -> Tier:
        return Tier(name=name, servers=tuple(CacheServer(name=each, grpc=f"{each}:1") for each in names))

    region = Region(name="east", leaders=tier("leaders", "l-0"), followers=(tier("web", "f-0"),))
    database = Database(
        name="db", master_region="east", servers={"east": DatabaseServer(name="db-east")}, shards=((0, 31),)
    )
    return Topology(version=1, shards=32, regions=(region,), databases=(database,), changes=())


def registrant(name: str, share: float, host: str) -> Registrant:
    entry = CacheServer(name=name, grpc=f"{host}:1", weight=0.0, registration=Registration(share=share))
    return (
        Registrant("leader", "east", "leaders", entry)
        if name[0] == "l"
        else Registrant("follower", "east", "web", entry)
    )


def act(topology: Topology, action: str, name: str, share: float, now_ms: int) -> Topology:
    match action:
        case "register" | "elsewhere":
            return register(topology, registrant(name, share, name if action == "register" else f"{name}-b"))
        case "step" | "unready step":
            return step(topology, name, is_ready=action == "step")
        case "leave" | "stay":
            return leave(topology, name, leaving=action == "leave")
        case "gone" | "back":
            return edits.mark_by_watcher(topology, name, down=action == "gone")
        case _:
            return follow_absences(topology, now_ms, REMOVE_SECONDS)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTIONS), st.sampled_from(NAMES), st.sampled_from((0.5, 1.0, 3.0)), st.integers(0, 40_000)
        ),
        max_size=60,
    )
)
def test_any_history(history: list[tuple[str, str, float, int]]) -> None:
    topology, now_ms = make(), 1
    for action, name, share, passed_ms in history:
        now_ms += passed_ms
        try:
            after = act(topology, action, name, share, now_ms)
        except TopologyError:
            continue  # refused: the document stays as it was
        if after is topology:
            continue
        assert after.version == topology.version + 1
        check_topology(after)
        assert_added_by_hand_are_untouched(after)
        if action == "watch":
            assert_only_overdue_were_removed(topology, after, now_ms)
            assert follow_absences(after, now_ms, REMOVE_SECONDS) is after, "it is idempotent"
        else:
            assert_others_unchanged(topology, after, name)
        assert_one_step(topology, after, name, action)
        topology = after
    assert_everyone_arrives(topology)


def assert_added_by_hand_are_untouched(topology: Topology) -> None:
    for name in ("f-0", "l-0"):
        found = placed(topology, name)
        assert found is not None
        assert found.server == CacheServer(name=name, grpc=f"{name}:1")


def assert_only_overdue_were_removed(before: Topology, after: Topology, now_ms: int) -> None:
    for name in before.server_places.keys() - after.server_places.keys():
        registration = Routes(before).server(name).registration
        assert registration
        assert 0 < registration.gone_unix_ms <= now_ms - 1000 * REMOVE_SECONDS


def assert_others_unchanged(before: Topology, after: Topology, name: str) -> None:
    former = {server.name: server for _, server in before.cache_servers if server.name != name}
    assert former == {server.name: server for _, server in after.cache_servers if server.name != name}


def assert_one_step(before: Topology, after: Topology, name: str, action: str) -> None:
    was, now = placed(before, name), placed(after, name)
    if was is None or now is None:
        return
    moved = now.server.weight - was.server.weight
    if action not in ("step", "unready step"):
        assert moved == 0 or now.server.weight == 0, "only steps move the weight, but a new server begins at 0"
        return
    registration = now.server.registration
    assert registration
    assert moved
    assert not (action == "unready step" and moved > 0 and not registration.leaving)
    # Half a step more where another share left it between two steps.
    assert now.place.role == "leader" or abs(moved) <= 1.5 * registration.share / STEPS


def assert_everyone_arrives(topology: Topology) -> None:
    """Each server that goes on taking steps ends at its share, or at 0 when it leaves."""
    for name in NAMES:
        found = placed(topology, name)
        if found is None or not found.server.registration:
            continue
        registration = found.server.registration
        while (after := step(topology, name, is_ready=True)) is not topology:
            topology = after
        expected = 0.0 if registration.leaving else registration.share
        assert msgspec.structs.replace(found.server, weight=expected) == Routes(topology).server(name)
