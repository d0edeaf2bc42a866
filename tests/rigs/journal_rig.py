"""A journal with a write path that a test scripts: what it makes is joined into registers, as a leader does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self, cast

import msgspec

from tao.journal.journal import Journal
from tao.journal.settings import JournalSettings
from tao.model.edge_states import NO_OPERATION, EdgeRegisters
from tao.model.errors import TaoError, error_from_reason
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import Database, DatabaseServer
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.serving.forward_path import ForwardPath, WriteResults, shards_of_write
from tao.wire.convert import error_from_pb
from tao.wire.identity import PeerIdentity
from tao.wire.session import Reply, RequestHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import SCHEMA, SHARDS, make_topology
from tests.rigs.links_rig import MemoryLinks, MemoryReply
from tests.rigs.pacing import Tasks, until
from tests.rigs.server_context import make_context

SUBSCRIBES: Final = 15
EdgeName = tuple[int, int, int]


class ScriptedWrites:
    """A write path. ``refuse`` returns the error of a write, or None to make it."""

    def __init__(self) -> None:
        self.refuse: Callable[[pb.Write], TaoError | None] = lambda _: None
        self.registers: dict[EdgeName, EdgeRegisters] = {}
        self.requests: list[pb.Request] = []
        self.made: list[int] = []
        """The id1 of each write that was made, in order."""
        self.holds = asyncio.Event()
        self.holds.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def forward(
        self,
        request: pb.Request,
        slots: Iterable[int],
        results: WriteResults,
        deadline: float,
        peer: PeerIdentity,
        *,
        for_any_shard: bool = False,
    ) -> None:
        assert for_any_shard
        assert peer.role == "follower"
        self.requests.append(request)
        task = asyncio.ensure_future(self._make(request, list(slots), results))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lose(self) -> None:
        """Lose what is under way: it is never made."""
        for task in self._tasks:
            task.cancel()

    async def _make(self, request: pb.Request, slots: list[int], results: WriteResults) -> None:
        await self.holds.wait()
        for slot in slots:
            write = request.write.writes[slot]
            error = self.refuse(write)
            if error is not None:
                results.fail(slot, error)
                continue
            self._join(write)
            results.add(slot, pb.WriteResult(found=False))

    def _join(self, write: pb.Write) -> None:
        if write.HasField("assoc_merge"):
            merge = write.assoc_merge
            name = merge.id1, merge.atype, merge.id2
            payload_us = (merge.payload_us or merge.state_us) if merge.has_payload else 0
            operation = EdgeRegisters(merge.state, merge.state_us, payload_us, merge.time, merge.data)
            self.registers[name] = self.registers.get(name, NO_OPERATION).joined(operation)
            self.made.append(merge.id1)


class JournalRig:
    """A journal in a folder. Leave the block to stop it; what it holds is on disk."""

    def __init__(
        self,
        folder: Path,
        writes: ScriptedWrites | None = None,
        *,
        databases: int = 1,
        name: str = "near-1",
        **settings: float,
    ) -> None:
        """``databases`` hold the shards in turn."""
        self.name = name
        self.writes = writes or ScriptedWrites()
        self.tasks = Tasks()
        bounds = {"first_delay_seconds": 0.001, "max_delay_seconds": 0.002, "probe_seconds": 3_600.0, **settings}
        self.settings = JournalSettings(folder=folder, **bounds)  # type: ignore[arg-type]
        self.links = MemoryLinks(name)
        topology = msgspec.structs.replace(make_topology(), databases=make_databases(databases))
        configuration = Configuration(topology, SCHEMA, logger("test"))
        self.context = make_context(configuration, self.links.as_links(), self.tasks, name=name)
        self.journal = Journal(self.context, folder, self.settings, cast(ForwardPath, self.writes), lambda _: None)
        self.set_clock(1_000_000_000_000_000)

    def use_followers(self, *names: str) -> Self:
        """Have the tier consist of these followers."""
        configuration = self.context.configuration
        topology = make_topology(configuration.routes.version + 1, servers=names)
        databases = configuration.routes.topology.databases
        configuration.use_topology(msgspec.structs.replace(topology, databases=databases))
        return self

    def set_clock(self, unix_us: int) -> None:
        """Take this as the time of all leaders now."""
        for leader in ("leader-1", "leader-2"):
            self.journal.clocks.note(leader, self.context.clock.monotonic(), unix_us)

    async def __aenter__(self) -> Self:
        await self.journal.open()
        self.tasks(self.journal.held.watch())
        if self.settings.copies > 1:
            self.tasks(self.journal.copies.keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.tasks.close()
        await self.journal.close()

    @property
    def figures(self) -> dict[str, Any]:  # Any: a JSON document
        return self.journal.control.figures()

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Handle the requests of other followers."""
        journal = self.journal
        handlers = {
            "write": journal.acceptor.accept,
            "keep_copies": journal.held.keep,
            "await_applied": journal.acceptor.await_applied,
        }
        handlers[request.WhichOneof("body") or ""](request, reply)

    def connect(self, other: JournalRig) -> None:
        """Have this follower and another one reach each other."""
        self.links[other.name].handler = cast(RequestHandler, other)
        other.links[self.name].handler = cast(RequestHandler, self)

    async def accept(self, *writes: pb.Write, priority: int = 2) -> list[bytes | TaoError]:
        """Return a receipt or the error of each write."""
        answers: list[pb.Answer] = []
        request = pb.Request(write=pb.WriteBatch(writes=writes, accept=True, priority=priority))
        self.journal.acceptor.accept(request, MemoryReply(answers.append))
        await until(lambda: answers and not answers[-1].more)
        results: dict[int, pb.WriteResult] = {}
        for each in answers:
            results.update(zip(each.write.slots, each.write.results, strict=True))
        return [
            error_from_pb(results[slot].error) if results[slot].HasField("error") else results[slot].accepted
            for slot in range(len(writes))
        ]

    async def applied(self, receipt: bytes | TaoError, deadline_ms: int = 60_000) -> pb.WriteResult | TaoError:
        """Return the result of an accepted write."""
        assert isinstance(receipt, bytes)
        answers: list[pb.Answer] = []
        request = pb.Request(await_applied=pb.AwaitApplied(accepted=receipt), deadline_ms=deadline_ms)
        self.journal.acceptor.await_applied(request, MemoryReply(answers.append))
        await until(lambda: answers)
        error = answers[0].error
        return (
            error_from_reason(error.reason, error.message)
            if answers[0].HasField("error")
            else (answers[0].write.results[0])
        )

    async def control(self, **change: int | str) -> pb.Answer:
        """Change the journal as an operator does."""
        answers: list[pb.Answer] = []
        request = pb.Request(change_journal=pb.ChangeJournal(**change))  # type: ignore[arg-type]
        self.journal.control.change(request, MemoryReply(answers.append, peer="operator"))
        await until(lambda: answers)
        return answers[0]

    async def idle(self) -> None:
        """Wait until nothing waits."""
        await until(lambda: not sum(self.figures["waiting"].values()))


def make_databases(count: int) -> tuple[Database, ...]:
    """Return databases that hold the shards in turn."""
    return tuple(
        Database(
            name=f"db-{each}",
            master_region="east",
            servers={"east": DatabaseServer(name=f"db-{each}")},
            shards=tuple((shard, shard) for shard in range(each, SHARDS, count)),
        )
        for each in range(count)
    )


def coordinator_of(write: pb.Write) -> int:
    """Return the shard whose leader makes a write."""
    return shards_of_write(write, SCHEMA)[1]


def id_on(shard: int, number: int = 1) -> int:
    return shard << SHARD_SHIFT | number


def edge(shard: int, id2: int, time: int = 1, number: int = 1, *, other: int | None = None) -> pb.Write:
    """Return an edge to be added, whose ends are in ``shard`` and in the ``other`` one, by default the same."""
    end = id_on(shard if other is None else other, id2)
    return pb.Write(assoc_add=pb.AssocAdd(id1=id_on(shard, number), atype=SUBSCRIBES, id2=end, time=time))


def ends(writes: ScriptedWrites) -> set[int]:
    """Return the numbers of the second ends of the edges that were made."""
    return {id2 & ((1 << SHARD_SHIFT) - 1) for _, _, id2 in writes.registers}
