"""Topology and schema of a running server: what is used, what is rejected, who is notified; and the schema file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from tao.admin.documents import example_schema_file
from tao.model.errors import SchemaError, TopologyError, Unavailable
from tao.model.topology import Topology
from tao.observability.logs import logger
from tao.serving.configuration import Configuration, SchemaFile
from tao.topology.document import decode_topology, encode_region
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import SCHEMA, make_topology
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import loop_clock, quiet, until

TEXT = (Path(__file__).parents[3] / "config/schema.yaml").read_text()
GROWN = TEXT.replace("  checkin:\n    number: 2\n", "  robot:\n    number: 77\n\n  checkin:\n    number: 2\n")
BROKEN = TEXT.replace("home: {number: 2, type: str", "home: {number: 2, type: int")


@pytest.fixture
def configuration() -> Configuration:
    return Configuration(make_topology(2), SCHEMA, logger("test"))


def watch(configuration: Configuration, version: int, schema_hash: str) -> tuple[list[pb.Answer], MemoryReply]:
    answers: list[pb.Answer] = []
    reply = MemoryReply(answers.append)
    request = pb.Request(watch=pb.Watch(topology_version=version, schema_hash=schema_hash))
    configuration.watch(request, reply, "east")
    return answers, reply


def test_only_a_newer_topology_is_used_and_passed_to_listeners(configuration: Configuration) -> None:
    heard: list[int] = []
    configuration.on_routes(lambda routes: heard.append(routes.version))
    for version in (1, 2, 4, 3, 4, 5):
        configuration.use_topology(make_topology(version))
    assert heard == [4, 5]
    assert configuration.routes.version == configuration.topology_document().version == 5


class Looks:
    """A topology document, and how often it was read."""

    def __init__(self) -> None:
        self.document = make_topology(2)
        self.count = 0

    async def load(self) -> Topology:
        self.count += 1
        return self.document


async def test_a_version_that_a_peer_names_is_looked_for_at_once_and_then_after_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = loop_clock(monkeypatch)
    looks = Looks()
    configuration = Configuration(looks.document, SCHEMA, logger("test"), looks.load)
    for version in (0, 1, 2):
        configuration.note_version(version)
    await quiet()
    assert looks.count == 0, "it is known"
    looks.document = make_topology(3)
    configuration.note_version(3)
    configuration.note_version(1 << 60)  # while it is being read
    await until(lambda: configuration.routes.version == 3)
    for _ in range(100):
        configuration.note_version(1 << 60)  # which nobody will ever see
        await asyncio.sleep(0)
    assert looks.count == 1, "a peer that names any version does not keep the server busy"

    clock.now += 10.0
    configuration.note_version(1 << 60)
    await quiet()
    assert looks.count == 2


async def test_those_who_wait_for_a_version_share_the_looks_and_their_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = loop_clock(monkeypatch)
    looks = Looks()
    configuration = Configuration(looks.document, SCHEMA, logger("test"), looks.load)
    for _ in range(100):
        await configuration.look_for(3, 30.0)  # which nobody can see
    assert looks.count == 1

    looks.document = make_topology(3)
    clock.now += 10.0
    await asyncio.gather(*(configuration.look_for(3, 30.0) for _ in range(10)))
    assert (configuration.routes.version, looks.count) == (3, 2)


async def test_who_waits_for_a_version_waits_no_longer_than_it_may() -> None:
    async def load() -> Topology:
        await asyncio.Event().wait()
        raise AssertionError

    configuration = Configuration(make_topology(2), SCHEMA, logger("test"), load)
    await asyncio.wait_for(configuration.look_for(3, 0.001), 30)
    await asyncio.wait_for(configuration.look_for(3, -1.0), 30)


async def test_a_document_that_cannot_be_read_is_logged_once_for_many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_clock(monkeypatch)

    async def load() -> Topology:
        raise Unavailable("etcd is away")

    with capture_logs() as logs:
        configuration = Configuration(make_topology(2), SCHEMA, logger("test"), load)
        for _ in range(20):
            assert not await configuration.refresh()
    assert [line["event"] for line in logs] == ["topology_refresh_failed"]


def test_a_compatible_schema_is_in_use_at_once(configuration: Configuration) -> None:
    heard: list[str] = []
    configuration.on_schema(lambda schema: heard.append(schema.version_hash))
    assert GROWN != TEXT
    assert configuration.use_schema_text(GROWN, "schema.yaml")
    assert configuration.use_schema_text(GROWN, "schema.yaml")
    assert heard == [configuration.schema.version_hash]
    assert configuration.schema.otype(77).name == "robot"


@pytest.mark.parametrize("text", ["objects: [", "format: 1\n", BROKEN])
def test_an_invalid_or_incompatible_schema_is_rejected_and_the_old_one_stays_in_use(
    configuration: Configuration, text: str
) -> None:
    answers, _ = watch(configuration, 2, SCHEMA.version_hash)
    assert not configuration.use_schema_text(text, "schema.yaml")
    assert configuration.schema is SCHEMA
    assert answers == []


def test_watchers_receive_what_is_newer_than_theirs_at_once_and_on_every_change(configuration: Configuration) -> None:
    behind, _ = watch(configuration, 1, "another")
    current, reply = watch(configuration, 2, SCHEMA.version_hash)
    assert [(each.watch.HasField("topology"), each.watch.HasField("schema")) for each in behind] == [(True, True)]
    assert current == []
    configuration.use_topology(make_topology(3))
    configuration.use_schema_text(GROWN, "schema.yaml")
    assert [each.watch.topology.version for each in current] == [3, 0]
    assert current[1].watch.schema.hash == configuration.schema.version_hash
    assert all(each.more for each in current)
    reply.close()
    configuration.use_topology(make_topology(4))
    assert len(current) == 2, "nobody there any more"
    assert len(behind) == 4


def in_two_regions(version: int) -> Topology:
    found = make_topology(version)
    west = msgspec.structs.replace(found.regions[0], name="west")
    return msgspec.structs.replace(found, regions=(*found.regions, west), changes=())


def test_an_application_receives_its_region_s_part_and_a_former_one_all_it_can_read() -> None:
    configuration = Configuration(in_two_regions(2), SCHEMA, logger("test"))
    events: dict[str | None, list[pb.Answer]] = {None: [], "": [], "west": [], "nowhere": []}
    for region, heard in events.items():
        asked = pb.Watch(topology_version=1, schema_hash=SCHEMA.version_hash, region=region)
        configuration.watch(pb.Request(watch=asked), MemoryReply(heard.append), "east")
    configuration.use_topology(in_two_regions(3))
    received = {
        region: [decode_topology(each.watch.topology.json, "server") for each in heard]
        for region, heard in events.items()
    }
    assert {
        region: [([each.name for each in topology.regions], topology.version) for topology in topologies]
        for region, topologies in received.items()
    } == {
        None: [(["east", "west"], 2), (["east", "west"], 3)],
        "": [(["east"], 2), (["east"], 3)],
        "west": [(["west"], 2), (["west"], 3)],
        "nowhere": [(["east", "west"], 2), (["east", "west"], 3)],
    }
    whole = configuration.topology_document().json
    assert "changes" not in json.loads(whole), "a former version would refuse it"
    assert decode_topology(whole, "server").version == 3


def test_a_document_is_written_once_for_all_who_ask(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def encode(topology: Topology, region: str) -> bytes:
        written.append(region)
        return encode_region(topology, region)

    monkeypatch.setattr("tao.serving.configuration.encode_region", encode)
    for _ in range(5):
        configuration.watch(pb.Request(watch=pb.Watch(region="east")), MemoryReply(lambda _: None), "east")
    configuration.use_topology(make_topology(3))
    assert written == ["east", "east"], "one of each version"


async def test_an_event_is_made_once_for_the_watchers_of_a_region(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[pb.Answer] = []
    for number, region in enumerate(("east", "east", "west")):
        reply = MemoryReply(heard.append, number)
        configuration.watch(pb.Request(watch=pb.Watch(topology_version=2, region=region)), reply, "east")
    heard.clear()
    made: list[str | None] = []
    document = configuration.topology_document

    def count(region: str | None = None) -> pb.TopologyDocument:
        made.append(region)
        return document(region)

    monkeypatch.setattr(configuration, "topology_document", count)
    configuration.use_topology(make_topology(3))
    assert sorted(map(str, made)) == ["east", "west"]
    assert [(each.number, each.watch.topology.version) for each in heard] == [(0, 3), (1, 3), (2, 3)]


async def test_a_refresh_says_whether_the_document_was_read() -> None:
    answers: list[Topology | TopologyError] = [make_topology(2), TopologyError("half written"), make_topology(3)]

    async def load() -> Topology:
        found = answers.pop(0)
        if isinstance(found, TopologyError):
            raise found
        return found

    configuration = Configuration(make_topology(2), SCHEMA, logger("test"), load)
    assert [await configuration.refresh() for _ in range(3)] == [True, False, True]
    assert configuration.routes.version == 3


async def test_a_caller_waits_for_the_document_no_longer_than_it_likes_and_the_read_goes_on() -> None:
    read: asyncio.Future[Topology] = asyncio.get_running_loop().create_future()

    async def load() -> Topology:
        return await read

    configuration = Configuration(make_topology(2), SCHEMA, logger("test"), load)
    patient = asyncio.ensure_future(configuration.refresh())
    assert not await configuration.refresh(0.0)
    read.set_result(make_topology(3))
    assert await patient
    assert configuration.routes.version == 3


async def test_a_read_that_began_before_a_pause_does_not_count_as_one_after_it() -> None:
    """It may have read the document that was replaced, twice, while the process was paused."""
    reads: list[asyncio.Future[Topology]] = []

    async def load() -> Topology:
        reads.append(asyncio.get_running_loop().create_future())
        return await reads[-1]

    configuration = Configuration(make_topology(2), SCHEMA, logger("test"), load)
    before = asyncio.ensure_future(configuration.refresh())
    await until(lambda: len(reads) == 1)
    after = [asyncio.ensure_future(configuration.refresh_after_pause()) for _ in range(2)]
    await quiet()
    reads[0].set_result(make_topology(3))
    await until(lambda: len(reads) == 2)
    assert before.done()
    assert not any(each.done() for each in after)
    reads[1].set_result(make_topology(5))
    assert await asyncio.gather(*after) == [True, True]
    assert configuration.routes.version == 5
    assert len(reads) == 2


async def test_a_read_that_fails_across_a_pause_is_followed_by_another() -> None:
    first: asyncio.Future[Topology] = asyncio.get_running_loop().create_future()
    reads = [first]

    async def load() -> Topology:
        return await reads.pop() if reads else make_topology(3)

    configuration = Configuration(make_topology(2), SCHEMA, logger("test"), load)
    before = asyncio.ensure_future(configuration.refresh())
    await until(lambda: not reads)
    after = asyncio.ensure_future(configuration.refresh_after_pause())
    await quiet()
    first.set_exception(TopologyError("half written"))
    assert [await before, await after] == [False, True]


async def test_a_listener_that_fails_does_not_keep_the_next_change_from_being_noticed(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    text = example_schema_file().read_text()
    path.write_text(text)
    file = SchemaFile(path, poll_seconds=0.001)
    await file.load()
    heard: asyncio.Queue[str] = asyncio.Queue()

    def listen(changed: str, source: str) -> None:
        heard.put_nowait(changed)
        if "first" in changed:
            raise RuntimeError("a listener's bug")

    watching = asyncio.create_task(file.watch(listen))
    for word in ("first", "second"):
        (tmp_path / "new").write_text(f"# {word}\n{text}")
        (tmp_path / "new").replace(path)
        assert word in await asyncio.wait_for(heard.get(), 10)
    watching.cancel()


async def test_a_file_that_cannot_be_read_gives_a_plain_error(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    with pytest.raises(SchemaError, match=r"schema\.yaml: cannot be read: No such file or directory$"):
        await SchemaFile(path).load()
    path.write_bytes(b"types: \xff")
    with pytest.raises(SchemaError, match=r"schema\.yaml: is not UTF-8 text: invalid start byte at byte 7$"):
        await SchemaFile(path).load()
