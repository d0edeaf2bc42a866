"""A follower that is added to a running cluster, and removed again: what the folder says at each moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.devcluster.cluster import DevCluster
from tao.devcluster.configuration import build_topology
from tao.devcluster.layout import PORT_KINDS, ClusterSettings, Member, Shape
from tao.devcluster.state_folder import ClusterRecord, StateFolder, TopologyOutline, new_passwords
from tao.follower.settings import FollowerSettings
from tao.model.errors import OperatorError
from tao.runtime.settings import load_settings
from tao.topology.document import dump_topology


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    shape = Shape()
    ports = {member.name: dict.fromkeys(PORT_KINDS.get(member.role, ()), 5) for member in shape.members}
    record = ClusterRecord(shape=shape, ports=ports, passwords=new_passwords(), topology_version=1, ready=True)
    folder = StateFolder(tmp_path / "dev")
    folder.create()
    folder.write(record)
    folder.write_file(folder.topology, dump_topology(build_topology(record, TopologyOutline())).encode())
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the members that were started; none is a process."""
    names: list[str] = []

    async def start_one(_: DevCluster, member: Member) -> None:
        names.append(member.name)

    monkeypatch.setattr(DevCluster, "_start_one", start_one)
    return names


def cluster_of(folder: StateFolder) -> DevCluster:
    cluster = DevCluster(ClusterSettings(state_dir=folder.path))
    cluster._record = folder.require()
    return cluster


async def test_followers_are_added_and_removed_in_order(folder: StateFolder, started: list[str]) -> None:
    cluster = cluster_of(folder)
    assert [await cluster.add_follower() for _ in range(2)] == started == ["follower-1c", "follower-1d"]
    record = folder.require()
    assert record.shape == Shape(added_followers=2)
    settings = load_settings(folder.settings_file("follower-1d"), FollowerSettings)
    assert settings.registration.grpc == f"127.0.0.1:{record.ports['follower-1d']['grpc']}"
    # They have left the topology, or were never in it: there is nothing to drain.
    assert [await cluster.remove_follower(1.0) for _ in range(2)] == ["follower-1d", "follower-1c"]
    assert folder.require().shape == Shape()
    assert not {"follower-1c", "follower-1d"} & folder.require().ports.keys()
    cluster.release()


async def test_a_follower_that_does_not_start_is_not_added(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folder.require()

    async def fail(_: DevCluster, member: Member) -> None:
        assert folder.require().shape == Shape(added_followers=1), "a crash now leaves a folder that names it"
        raise OperatorError(f"{member.name} does not start")

    monkeypatch.setattr(DevCluster, "_start_one", fail)
    with pytest.raises(OperatorError, match="follower-1c does not start"):
        await cluster_of(folder).add_follower()
    assert folder.require() == before


async def test_only_followers_that_were_added_are_removed(folder: StateFolder) -> None:
    with pytest.raises(OperatorError, match="`tao dev add-follower` adds one"):
        await cluster_of(folder).remove_follower(1.0)
