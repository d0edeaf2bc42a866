"""An etcd of three members: one is killed or hangs, and the documents and locks are there all the same."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.etcd.location import EtcdSettings
from tao.model.errors import TopologyConflict, TopologyError
from tao.replication.etcd_locks import open_locks
from tao.replication.locks import ACTIVITY, LocksAway
from tao.topology.edits import mark_server
from tao.topology.stores import EtcdConnections
from tests.conformance.store_rig import Ear, StoreRig
from tests.conformance.test_locks import taken_over
from tests.conformance.test_topology_stores import topology
from tests.rigs.etcd_rig import EtcdMembers
from tests.rigs.pacing import PATIENT_SECONDS


@pytest.fixture
async def members(tmp_path: Path) -> AsyncIterator[EtcdMembers]:
    members = EtcdMembers(tmp_path)
    await members.start()
    yield members
    await members.kill()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_the_leading_member_changes_and_locks_go_on_and_none_is_lost(
    members: EtcdMembers, fault: signal.Signals
) -> None:
    leader, ear = await members.leader(), Ear()
    rig = StoreRig(members.location(leader))
    store, watched, locks, others = rig.store(), rig.store(ear), rig.locks(), rig.locks()
    stored = await store.change(0, topology())
    await watched.load()
    stop = watched.watch(ear.changed)
    async with locks.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        leader.signal(fault)
        # An election takes a second or two. What was begun before may have been stored, which the next attempt finds.
        async with asyncio.timeout(PATIENT_SECONDS):
            while stored.version < 4:
                try:
                    changed = mark_server(stored, "w-1", stored.version % 2 == 0)
                    stored = await store.change(stored.version, changed)
                except TopologyConflict:
                    stored = await store.load()
                except TopologyError:
                    continue
        # The one who holds the lock sees that it is lost before somebody else can take it.
        taken = await taken_over(others, "watcher")
        assert not hold.is_held()
        await taken.__aexit__(None, None, None)
    await ear.until(lambda: 4 in ear.versions)
    assert ear.versions == sorted(set(ear.versions)), "no change is seen twice, or after a later one"
    stop()
    await rig.close()


async def test_a_process_that_takes_locks_for_a_moment_only_turns_away_from_a_member_that_hangs(
    members: EtcdMembers,
) -> None:
    """Each of its calls ends before it is repeated at another member."""
    hanging = await members.follower()
    connections = EtcdConnections(EtcdSettings(timeout_seconds=2.0))
    locks = open_locks(members.location(hanging), connections)
    async with locks.held("master-of-db", exclusive=False) as hold:
        hold.check()
    hanging.signal(signal.SIGSTOP)
    for _ in range(2):  # a member for taking the lock, and perhaps one for releasing it
        try:
            async with locks.held("master-of-db", exclusive=False) as hold:
                hold.check()
        except LocksAway:
            continue
        break
    else:
        pytest.fail("it asks the member that hangs again and again")
    await connections.close()
