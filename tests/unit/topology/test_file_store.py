"""The topology in a file: compare-and-set, and watching through trouble."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tao.model.errors import TopologyConflict, TopologyError
from tao.model.ports import TopologyStore
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.routing.topology_changes import record_change
from tao.topology import file_store
from tao.topology.document import dump_topology, parse_topology
from tao.topology.edits import as_version, begin_record, mark_server
from tao.topology.file_store import TopologyFile
from tests.rigs.pacing import PATIENT_SECONDS


class Ear:
    """Hears documents and errors, and lets a test wait for them."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.errors: list[str] = []
        self._news = asyncio.Event()

    def changed(self, topology: Topology) -> None:
        self.versions.append(topology.version)
        self._news.set()

    def failed(self, error: TopologyError) -> None:
        self.errors.append(error.message)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENT_SECONDS):
            while not true():
                self._news.clear()
                await self._news.wait()


def store(path: Path, ear: Ear, **settings: float) -> TopologyFile:
    return TopologyFile(path, poll_seconds=0.01, on_error=ear.failed, **settings)


def write(path: Path, text: str) -> None:
    """Write as an editor does: in place, with a moment in which the file is empty."""
    path.write_text(text)


def exists(path: Path) -> bool:
    return path.exists()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "topology.json"


async def test_the_first_document_is_stored_as_version_1_and_read_back(path: Path, topology: Topology) -> None:
    port: TopologyStore = store(path, Ear())
    stored = await port.change(0, topology)
    assert stored.version == 1
    assert await port.load() == stored
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".topology.json.lock", "topology.json"]


async def test_of_two_changes_of_one_version_one_wins_and_the_other_is_rejected(path: Path, topology: Topology) -> None:
    first, second = store(path, Ear()), store(path, Ear())
    await first.change(0, topology)
    down = mark_server(topology, "w-1", down=True)
    results = await asyncio.gather(first.change(1, down), second.change(1, topology), return_exceptions=True)
    assert {type(result) for result in results} == {Topology, TopologyConflict}
    assert (await first.load()).version == 2


async def test_a_document_that_breaks_a_rule_is_not_stored(path: Path, topology: Topology) -> None:
    with pytest.raises(TopologyError, match="at least one"):
        await store(path, Ear()).change(0, msgspec.structs.replace(topology, regions=()))
    assert not exists(path)


async def test_no_document_is_an_error_that_names_the_file(path: Path) -> None:
    with pytest.raises(TopologyError, match=r"topology.json: cannot be read: No such file"):
        await store(path, Ear()).load()


async def test_a_folder_that_is_not_there_is_an_error_and_not_a_crash(tmp_path: Path, topology: Topology) -> None:
    with pytest.raises(TopologyError, match="cannot be changed"):
        await store(tmp_path / "nowhere" / "topology.json", Ear()).change(0, topology)


async def test_a_change_waits_for_another_only_so_long(path: Path, topology: Topology) -> None:
    with (path.parent / ".topology.json.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TopologyError, match="held the lock"):
            await store(path, Ear(), lock_seconds=0.05).change(0, topology)


async def test_a_watcher_hears_every_newer_document_but_not_the_one_it_loaded(path: Path, topology: Topology) -> None:
    ear = Ear()
    watched, other = store(path, ear), store(path, Ear())
    await other.change(0, topology)
    await watched.load()
    stop = watched.watch(ear.changed)
    await other.change(1, topology)
    await ear.until(lambda: ear.versions == [2])
    await other.change(2, topology)
    await ear.until(lambda: ear.versions == [2, 3])
    stop()
    assert ear.errors == []


async def test_a_watcher_outlives_a_missing_a_half_written_and_a_wrong_document(path: Path, topology: Topology) -> None:
    ear = Ear()
    stop = store(path, ear).watch(ear.changed)
    await ear.until(lambda: len(ear.errors) == 1)
    text = dump_topology(topology)
    write(path, text[:100])
    await ear.until(lambda: len(ear.errors) >= 2)
    write(path, text)
    await ear.until(lambda: ear.versions == [1])
    before = len(ear.errors)
    write(path, text.replace('"w-1"', '"w-9"'))
    await ear.until(lambda: len(ear.errors) > before)
    write(path, dump_topology(msgspec.structs.replace(topology, version=2)))
    await ear.until(lambda: ear.versions == [1, 2])
    stop()


async def test_a_document_changed_under_its_old_version_is_reported_and_not_used(
    path: Path, topology: Topology
) -> None:
    ear = Ear()
    write(path, dump_topology(topology))
    stop = store(path, ear).watch(ear.changed)
    await ear.until(lambda: ear.versions == [1])
    down = msgspec.structs.replace(mark_server(topology, "w-1", down=True), version=1)
    write(path, dump_topology(down))
    await ear.until(lambda: any("its version 1 is not above 1" in error for error in ear.errors))
    assert ear.versions == [1]
    stop()


async def test_one_watchers_fault_does_not_keep_the_news_from_the_others(path: Path, topology: Topology) -> None:
    ear = Ear()
    write(path, dump_topology(topology))
    watched = store(path, ear)

    def broken(_: Topology) -> None:
        raise RuntimeError("broken watcher")

    stops = [watched.watch(broken), watched.watch(ear.changed)]
    await ear.until(lambda: ear.versions == [1] and len(ear.errors) == 1)
    assert "broken watcher" in ear.errors[0]
    for stop in stops:
        stop()


async def test_a_listener_to_errors_that_fails_itself_does_not_end_the_watch(path: Path, topology: Topology) -> None:
    ear = Ear()
    reported = asyncio.Event()

    def broken(_: TopologyError) -> None:
        reported.set()
        raise RuntimeError("the log is full")

    stop = TopologyFile(path, poll_seconds=0.01, on_error=broken).watch(ear.changed)
    await asyncio.wait_for(reported.wait(), PATIENT_SECONDS)
    write(path, dump_topology(topology))
    await ear.until(lambda: ear.versions == [1])
    stop()


async def test_a_look_that_fails_in_an_unforeseen_way_is_reported_and_the_watch_goes_on(
    path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    write(path, dump_topology(topology))
    with monkeypatch.context() as patched:
        patched.setattr("tao.topology.file_store.parse_topology", lambda *_: 1 // 0)
        stop = store(path, ear).watch(ear.changed)
        await ear.until(lambda: any("ZeroDivisionError" in error for error in ear.errors))
    await ear.until(lambda: ear.versions == [1])
    stop()


async def test_every_stored_change_is_recorded_in_the_document(path: Path, topology: Topology) -> None:
    file = store(path, Ear())
    first = await file.change(0, begin_record(topology))
    down = await file.change(1, mark_server(first, "l-1", down=True))
    up = await file.change(2, mark_server(down, "l-1", down=False))
    assert up == await file.load()
    assert [each.version for each in up.changes or ()] == [2, 3]
    assert [each.leaders for each in up.changes or ()] == [{"here": shards_text(first, "l-1")}] * 2
    as_one = await file.change(3, as_version(mark_server(mark_server(up, "l-1", True), "l-1", False), 9))
    assert as_one.changes is not None
    assert (as_one.changes[-1].version, as_one.changes[-1].leaders) == (4, {})


def shards_text(topology: Topology, leader: str) -> str:
    shards = Routes(topology).shards_of(leader)
    (change,) = record_change(topology, mark_server(topology, leader, down=True)).changes or ()
    assert shards
    return change.leaders["here"]


async def test_a_document_without_a_record_gets_none(path: Path, topology: Topology) -> None:
    file = store(path, Ear())
    first = await file.change(0, topology)
    assert (await file.change(1, mark_server(first, "l-1", down=True))).changes is None
    assert "changes" not in json.loads(dump_topology(await file.load()))


async def test_a_document_that_has_not_changed_is_parsed_once(
    path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose leader is gone looks for a newer one several times a second."""
    file = store(path, Ear())
    await file.change(0, topology)
    first = await file.load()
    parsed: list[str] = []

    def counted(text: bytes | str, source: str) -> Topology:
        parsed.append(source)
        return parse_topology(text, source)

    monkeypatch.setattr(file_store, "parse_topology", counted)
    assert [await file.load() for _ in range(3)] == [first] * 3
    assert not parsed
    changed = await file.change(first.version, first)
    assert await file.load() == changed
