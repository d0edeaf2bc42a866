"""A whole tailer: a real binlog on one side, a leader's port on the other, `tao tailer` between them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tao.model.changes import Message
from tao.model.delivery import Span
from tao.model.ids import make_id
from tao.model.relay import Relay, Relayed, Touch
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.model.writes import ObjAdd
from tao.replication.accounts import ServiceAccounts
from tao.schema.codec import encode_fields
from tao.topology.document import dump_topology
from tao.wire.convert import relay_from_pb, relayed_to_pb
from tao.wire.frames_server import FrameServer
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.binlog_rig import SHARDS, BinlogRig, open_rig, until
from tests.rigs.pacing import PATIENT_SECONDS
from tests.unit.planning.stored_rows import NOW, SCHEMA, USER

pytestmark = [pytest.mark.database, pytest.mark.e2e]


class Leader:
    """A server on the port of the region's only leader that records what is delivered to it."""

    def __init__(self) -> None:
        self.relays: list[Relay] = []
        self.holding = False
        self.held: list[Reply] = []
        self.has_messages = False
        """Whether it says that it has the messages of commits of its own, and enters them."""
        self.entered: Span | None = None
        """The span of the first commit of its own that it was asked for. It then wants what follows the span's start,
        as a leader does that has just taken the shard."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        assert reply.peer.role == "tailer"
        is_whole = request.HasField("relay")
        self.relays.append(relay_from_pb(request.relay if is_whole else request.relay_by_reference))
        if self.holding:
            self.held.append(reply)
        else:
            reply.send(pb.Answer(relayed=relayed_to_pb(self._answer(self.relays[-1]))))

    def _answer(self, relay: Relay) -> Relayed:
        if self.entered is not None or not relay.references:
            return Relayed(takes_references=self.has_messages)
        (span,) = relay.spans
        self.entered = span
        return Relayed(wanted=(Span(span.shard, span.source, span.after, span.after),), takes_references=True)

    @property
    def messages(self) -> list[Message]:
        return [message for relay in self.relays for each in relay.changes for message in each.messages]


class Rig:
    """The surroundings of a tailer, and the tailer as a process."""

    def __init__(self, binlog: BinlogRig, leader: Leader, folder: Path) -> None:
        self.binlog = binlog
        self.leader = leader
        self.settings_file = folder / "tailer.yaml"
        self.process: asyncio.subprocess.Process | None = None
        self._sequence = 0

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tao.cli", "tailer", "--settings", str(self.settings_file)
        )

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        async with asyncio.timeout(PATIENT_SECONDS):
            status = await self.process.wait()
        self.process = None
        return status

    async def write(self) -> Message:
        self._sequence += 1
        data = encode_fields(SCHEMA.otype(USER), {"name": "a"})
        (change,) = await self.binlog.write(ObjAdd(make_id(1, NOW + self._sequence, 0), USER, data, False))
        return change


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[Rig]:
    leader = Leader()
    server = FrameServer(leader, ServingSettings(), name="leader-1", topology_version=lambda: 1)
    address = await server.start(f"unix:{tmp_path}/leader.sock")
    async with open_rig(tmp_path / "one", database_accounts) as binlog:
        rig = Rig(binlog, leader, tmp_path)
        database_server = DatabaseServer(name="db-east", port=binlog.instance.port)
        topology = Topology(
            version=1,
            shards=len(SHARDS),
            regions=(
                Region(
                    name="east",
                    leaders=Tier(
                        name="leaders", servers=(CacheServer(name="leader-1", grpc="127.0.0.1:1", frames=address),)
                    ),
                    followers=(Tier(name="near", servers=(CacheServer(name="near-1", grpc="127.0.0.1:2"),)),),
                ),
            ),
            databases=(
                Database(
                    name="db", master_region="east", servers={"east": database_server}, shards=((0, len(SHARDS) - 1),)
                ),
            ),
        )
        (tmp_path / "topology.json").write_text(dump_topology(topology))
        (tmp_path / "schema.yaml").write_text((Path(__file__).parents[2] / "config/schema.yaml").read_text())
        settings = {
            "name": "tailer-east-db",
            "region": "east",
            "database_server": "db-east",
            "topology_file": str(tmp_path / "topology.json"),
            "schema_file": str(tmp_path / "schema.yaml"),
            "state_folder": str(tmp_path / "state"),
            "user": database_accounts.replicator.user,
            "password": database_accounts.replicator.password,
            "reader": {"heartbeat_seconds": 0.1},
        }
        rig.settings_file.write_text(yaml.safe_dump(settings))
        yield rig
        if rig.process is not None:
            await rig.stop(signal.SIGKILL)
    await server.close()


def stored(rig: Rig) -> str:
    file = rig.settings_file.parent / "state/db-east.position.json"
    return str(json.loads(file.read_text())["position"]) if file.exists() else "none"


async def test_a_tailer_delivers_resumes_after_a_kill_and_resends_what_was_not_acknowledged(rig: Rig) -> None:
    await rig.start()
    await until(lambda: stored(rig) != "none")
    assert [relay.bulk_shards for relay in rig.leader.relays] == [SHARDS]
    first = await rig.write()
    await until(lambda: rig.leader.messages == [first])
    acknowledged = await rig.binlog.reader().current_position()
    await until(lambda: stored(rig) == acknowledged)
    rig.leader.holding = True
    second = await rig.write()
    await until(lambda: rig.leader.messages == [first, second])
    await rig.stop(signal.SIGKILL)
    assert stored(rig) == acknowledged
    rig.leader.relays.clear()
    rig.leader.holding = False
    third = await rig.write()
    await rig.start()
    await until(lambda: rig.leader.messages == [second, third])
    reached = await rig.binlog.reader().current_position()
    await until(lambda: stored(rig) == reached)
    await rig.binlog.sql(
        f"UPDATE tao_00001.objects SET data = x'80' WHERE id = {make_id(1, NOW + 1, 0)}",
        "INSERT INTO tao_00000.heartbeat VALUES ('leader-1', 1700000000123)",
    )
    await until(lambda: any(relay.source_unix_ms == 1_700_000_000_123 for relay in rig.leader.relays))
    assert [touch for relay in rig.leader.relays for touch in relay.touches] == [
        Touch(make_id(1, NOW + 1, 0), 0, (1 << 48) + 1)
    ]
    assert {relay.source for relay in rig.leader.relays} == {"db"}
    assert not any(relay.bulk_shards for relay in rig.leader.relays)
    assert await rig.stop() == 0
    assert stored(rig) == await rig.binlog.reader().current_position()


async def test_what_a_leader_asks_for_again_has_its_messages_though_it_is_asked_for_its_own(rig: Rig) -> None:
    rig.leader.has_messages = True
    await rig.start()
    await until(lambda: stored(rig) != "none")
    written: list[Message] = []
    while rig.leader.entered is None:  # what is read before the leader's first answer is decoded
        written.append(await rig.write())
        await until(lambda: rig.leader.entered is not None or rig.leader.messages == written)
    await until(lambda: rig.leader.messages == written)
    assert [span.number for span in rig.leader.relays[-1].spans] == [rig.leader.entered.number]
