"""Limits of databases by control groups: which files of either version say what, and what a refusal leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.peers.resource_limits import ServerGroups, disk_of, server_groups

_MB = 1 << 20


def groups(folder: Path, *, version_2: bool, memory_stat: str) -> ServerGroups:
    (folder / "memory.stat").write_text(memory_stat)
    return ServerGroups(memory=str(folder), disk=str(folder), is_version_2=version_2, device="8:0")


def test_version_1_limits_held_memory_with_a_rest_and_operations_of_the_disk(tmp_path: Path) -> None:
    found = groups(tmp_path, version_2=False, memory_stat=f"cache {900 * _MB}\nrss {60 * _MB}\nshmem {40 * _MB}\n")
    limits = found.limit(500)
    assert (limits.held_mb, limits.memory_mb, limits.operations_per_second) == (100, 124, 500)
    assert limits.unlimited == []
    assert (tmp_path / "memory.limit_in_bytes").read_text() == str(124 * _MB)
    for name in ("read", "write"):
        assert (tmp_path / f"blkio.throttle.{name}_iops_device").read_text() == "8:0 500"


def test_version_2_limits_both_in_one_group(tmp_path: Path) -> None:
    found = groups(tmp_path, version_2=True, memory_stat=f"anon {10 * _MB}\nfile {90 * _MB}\nshmem 0\n")
    limits = found.limit(500)
    assert (limits.held_mb, limits.memory_mb) == (10, 34)
    assert (tmp_path / "memory.max").read_text() == str(34 * _MB)
    assert (tmp_path / "io.max").read_text() == "8:0 riops=500 wiops=500"


def test_what_the_system_refuses_is_not_limited_and_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.peers.resource_limits._MOUNT", tmp_path / "nowhere")
    with server_groups("mysql", tmp_path) as found:
        found.enter(1)
        limits = found.limit(500)
    assert (limits.memory_mb, limits.operations_per_second) == (None, None)
    assert [reason.partition(":")[0] for reason in limits.unlimited][:2] == ["memory", "io"]


def test_groups_are_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.peers.resource_limits._MOUNT", tmp_path)
    for controller in ("memory", "blkio"):
        (tmp_path / controller).mkdir()
    with server_groups("mysql", tmp_path) as found:
        assert found.memory is not None
        assert Path(found.memory).is_dir()
        assert found.device == disk_of(tmp_path)
    assert list((tmp_path / "memory").iterdir()) == list((tmp_path / "blkio").iterdir()) == []
