"""What operators see of a journal, and what they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from tao.journal.acceptor import Acceptor
from tao.journal.applier import Applier
from tao.journal.copies import Copies
from tao.journal.entries import Entry, EntryBody, ParkedEntry, Priority, decode_body
from tao.journal.held_copies import HeldCopies
from tao.journal.leader_clocks import LeaderClocks
from tao.journal.schedule import MAX_BATCH_BYTES, LaneKey, Schedule
from tao.journal.settings import JournalSettings
from tao.journal.store import Found, JournalStore
from tao.model.errors import InvalidArgument, Overloaded, TaoError, Unavailable
from tao.model.topology import CacheServer
from tao.observability.metrics import Metrics
from tao.serving.access import OnBehalfOf
from tao.serving.configuration import ServerContext
from tao.wire.session import Reply, failure
from tao.wire.v1 import session_pb2 as pb

MAX_SHOWN: Final = 1_000
"""Most parked writes in one answer."""
_MOVED_AT_A_TIME: Final = 500
_MOVE_SECONDS: Final = 10.0
"""Longest wait for another follower to accept so many writes."""


@dataclass(frozen=True, slots=True)
class JournalParts:
    """The parts of a journal whose figures operators see."""

    store: JournalStore
    schedule: Schedule
    applier: Applier
    acceptor: Acceptor
    clocks: LeaderClocks
    copies: Copies
    held: HeldCopies


class JournalControl:
    """Handles the requests of operators that concern one journal."""

    def __init__(self, context: ServerContext, parts: JournalParts, settings: JournalSettings) -> None:
        self._context: Final = context
        self._store: Final = parts.store
        self._schedule: Final = parts.schedule
        self._applier: Final = parts.applier
        self._acceptor: Final = parts.acceptor
        self._clocks: Final = parts.clocks
        self._copies: Final = parts.copies
        self._held_copies: Final = parts.held
        self._settings: Final = settings
        self._spawn: Final = context.spawn_as("change of the journal")
        self._unparking: Final[set[int]] = set()
        self._lookups = 0  # changes that look for their parked write
        self._moves = False

    def inspect(self, request: pb.Request, reply: Reply) -> None:
        """Answer with the figures of the journal, and with parked writes."""
        asked = request.inspect_journal
        if not asked.parked_limit:
            _send(reply, self.figures())
            return

        def read(parked: list[ParkedEntry] | None) -> None:
            if parked is None:
                reply.send(failure(Unavailable(f"the journal cannot be read: {self._store.trouble}")))
            else:
                _send(reply, {**self.figures(), "writes": [_described(each) for each in parked]})

        self._store.read_parked(asked.parked_after, min(asked.parked_limit, MAX_SHOWN), read)

    def change(self, request: pb.Request, reply: Reply) -> None:
        """Put a parked write back, discard it, or hand everything to another follower."""
        asked = request.change_journal
        if self._moves or ((self._lookups or self._unparking) and asked.HasField("move_to")):
            # Either would take entries away under the other.
            raise Overloaded(f"another operator changes the journal of {self._context.name}; try again once it is done")
        match asked.WhichOneof("change"):
            case "inject":
                self._spawn(self._inject(asked.inject, reply))
                self._lookups += 1
            case "discard":
                self._spawn(self._discard(asked.discard, reply))
                self._lookups += 1
            case "move_to":
                target = self._target(asked.move_to)
                self._spawn(self._move(target, reply))
                self._moves = True
            case _:
                raise InvalidArgument("the request names no change of the journal")

    def figures(self) -> dict[str, object]:
        """Return the figures for operators and `/stats`."""
        store, oldest = self._store, self._applier.oldest_seconds()
        return {
            "waiting": _by_label(self._applier.waiting()),
            "oldest_seconds": _by_label(oldest),
            "late": max(oldest.values()) > self._settings.alarm_seconds,
            "parked": _by_label(store.parked),
            "accepted_total": _by_label(self._acceptor.accepted),
            "refused_total": self._acceptor.refused,
            "done_total": _by_label(self._applier.done),
            "errors_total": _by_label(self._applier.errors),
            "paused_shards": len(self._schedule.paused_shards),
            "bytes": store.bytes,
            "max_bytes": self._settings.max_bytes,
            "torn_rows": store.torn_rows,
            "set_aside_total": store.set_aside,
            "failures_total": store.failures,
            "trouble": store.trouble,
            "clock_ages_seconds": self._clocks.ages(),
            "copies": self._settings.copies,
            "sibling": self._copies.sibling,
            "sibling_agrees": self._copies.agrees,
            "sibling_trouble": self._copies.trouble,
            "copied_total": self._copies.copied,
            "uncopied_total": self._copies.refused,
            "held_copies": self._held_copies.copies,
            "held_copy_bytes": self._held_copies.bytes,
            "adopted_total": self._held_copies.adopted,
        }

    def register(self, metrics: Metrics) -> None:
        """Register the journal's metrics."""
        store, applier = self._store, self._applier
        metrics.gauge_family(
            "journal_waiting_entries",
            "Accepted writes that are not made yet, by priority.",
            "priority",
            lambda: _by_label(applier.waiting()),
        )
        metrics.gauge_family(
            "journal_oldest_seconds",
            "Age of the oldest accepted write that is not made yet, by priority; 0 when none waits.",
            "priority",
            lambda: _by_label(applier.oldest_seconds()),
        )
        metrics.gauge_family(
            "journal_parked_entries",
            "Accepted writes that were given up, by priority.",
            "priority",
            lambda: _by_label(store.parked),
        )
        metrics.gauge_family(
            "journal_accepted_total",
            "Writes accepted, by priority.",
            "priority",
            lambda: _by_label(self._acceptor.accepted),
        )
        metrics.gauge_family(
            "journal_done_total",
            "Accepted writes that were made, by priority.",
            "priority",
            lambda: _by_label(applier.done),
        )
        metrics.gauge_family(
            "journal_errors_total",
            "Attempts of accepted writes that failed and are repeated, by priority.",
            "priority",
            lambda: _by_label(applier.errors),
        )
        metrics.gauge("journal_bytes", "Size of the accepted writes held, waiting and parked.", lambda: store.bytes)
        metrics.gauge(
            "journal_paused_shards",
            "Shards whose accepted writes wait after an attempt that failed.",
            lambda: len(self._schedule.paused_shards),
        )
        metrics.gauge_family(
            "journal_faults_total",
            "Failures of the journal's disk, rows that were torn, and files that could not be read.",
            "kind",
            lambda: {"failure": store.failures, "torn": store.torn_rows, "set_aside": store.set_aside},
        )

        copies, held = self._copies, self._held_copies
        metrics.gauge(
            "journal_copy_entries", "Copies of accepted writes that are kept for other followers.", lambda: held.copies
        )
        metrics.gauge_family(
            "journal_copies_total",
            "Accepted writes of which another follower has taken a copy, writes refused because no follower took a "
            "copy, and copies taken over from lost followers.",
            "event",
            lambda: {"copied": copies.copied, "refused": copies.refused, "adopted": held.adopted},
        )

    async def _inject(self, number: int, reply: Reply) -> None:
        """Put a parked write back, under a new number."""
        found = await self._parked(number, reply)
        if found is None:
            return
        entry = msgspec.structs.replace(found.entry, number=self._store.take_number(), attempts=0)

        def stored(error: TaoError | None) -> None:
            self._unparking.discard(number)
            if error is not None:
                reply.send(failure(error))
                return
            receipt = self._store.receipt(self._context.name, entry.number).encoded()
            self._store.unpark(found.entry, receipt)
            self._applier.forget_result(number)
            self._applier.add([entry])
            _send(reply, {"number": number, "new_number": entry.number, "write": _described(found)})

        try:
            self._copies.append([entry], stored)
        except TaoError as error:
            stored(error)

    async def _discard(self, number: int, reply: Reply) -> None:
        """Forget a parked write."""
        found = await self._parked(number, reply)
        if found is not None:
            self._unparking.discard(number)
            self._store.unpark(found.entry)
            _send(reply, {"number": number, "write": _described(found)})

    def _target(self, name: str) -> CacheServer:
        """Return the follower that is to take the journal over. Raises `InvalidArgument` and `TopologyError`."""
        place = self._context.configuration.routes.locate(name)
        if place.role != "follower" or place.region != self._context.region or name == self._context.name:
            raise InvalidArgument(
                f"{name} is a {place.role} of region {place.region}: name another follower of {self._context.region}"
            )
        return self._context.configuration.routes.server(name)

    async def _move(self, target: CacheServer, reply: Reply) -> None:
        """Have another follower accept everything that waits or is parked here. What it has accepted leaves this
        journal, so an entry may for a moment be in both, and in neither never."""
        moved, refused, trouble, why = 0, 0, "", ""
        try:
            await self._applier.hold()
            async for entries, is_parked in self._held():
                receipts, reasons = await self._hand_over(target, entries)
                why = why or next(iter(reasons), "")
                moved += len(receipts)
                if is_parked:
                    for entry, receipt in receipts:
                        self._store.unpark(entry, receipt)
                else:
                    self._store.note_moved(receipts)
                refused += len(entries) - len(receipts)
            if refused:
                trouble = f"{target.name} has refused {refused} writes, which stay here; the first: {why}"
        except TaoError as error:
            trouble = error.message
        finally:
            self._moves = False
            self.restart_applier()
        _send(reply, {**self.figures(), "moved": moved, "to": target.name, "trouble": trouble})

    def restart_applier(self) -> None:
        """Have the applier go on with what is on disk, once that can be read."""

        def counted(lanes: dict[LaneKey, tuple[int, int]] | None) -> None:
            if lanes is None:
                asyncio.get_running_loop().call_later(self._settings.retry_seconds, self.restart_applier)
            else:
                self._applier.restart(lanes)

        self._store.count_waiting(counted)

    async def _held(self) -> AsyncIterator[tuple[Sequence[Entry], bool]]:
        """Return everything in the journal piece by piece, and whether it is parked. Raises `Unavailable`."""
        loop = asyncio.get_running_loop()
        for is_parked in (False, True):
            after = 0
            while True:
                answer: asyncio.Future[Sequence[Entry | ParkedEntry] | None] = loop.create_future()
                read = self._store.read_parked if is_parked else self._store.read_waiting
                read(after, _MOVED_AT_A_TIME, answer.set_result)
                found = await answer
                if found is None:
                    raise Unavailable(f"the journal cannot be read: {self._store.trouble}")
                entries = [each.entry if isinstance(each, ParkedEntry) else each for each in found]
                if not entries:
                    break
                after = entries[-1].number
                yield entries, is_parked

    async def _hand_over(
        self, target: CacheServer, entries: Sequence[Entry]
    ) -> tuple[list[tuple[Entry, bytes]], list[str]]:
        """Return the entries that the target has accepted, with its receipts, and why it has refused others. One that
        cannot be read is not handed over: the applier parks it here."""
        groups: dict[tuple[Priority, str | None, str, int], list[tuple[Entry, pb.Write]]] = {}
        size = 0
        for entry in entries:
            try:
                body = decode_body(entry.body)
                write = pb.Write.FromString(body.write)
            except (msgspec.DecodeError, DecodeError):
                continue
            size += len(entry.body)
            # The last part of the key separates entries that together would be too large for one message.
            key = entry.priority, body.caller, body.operator, size // MAX_BATCH_BYTES
            groups.setdefault(key, []).append((entry, write))
        receipts: list[tuple[Entry, bytes]] = []
        reasons: list[str] = []
        for (priority, caller, operator, _), group in groups.items():
            request = pb.Request(write=pb.WriteBatch(accept=True, priority=priority))
            OnBehalfOf(caller, operator).name_in(request)
            request.write.writes.extend(write for _, write in group)
            answer = await self._context.links.to(target).ask(request, _MOVE_SECONDS)
            for slot, result in zip(answer.write.slots, answer.write.results, strict=True):
                if result.accepted:
                    receipts.append((group[slot][0], result.accepted))
                else:
                    reasons.append(f"{result.error.reason}: {result.error.message}")
        return receipts, reasons

    async def _parked(self, number: int, reply: Reply) -> ParkedEntry | None:
        """Return a parked write, which no other change concerns now; None when there is none, which is answered."""
        try:
            found = None if number in self._unparking else await self._find(number)
            if isinstance(found, ParkedEntry) and number not in self._unparking:
                self._unparking.add(number)
                return found
        finally:
            self._lookups -= 1
        reply.send(
            failure(
                InvalidArgument(
                    f"no parked write has the number {number} at {self._context.name}; tao journal parked shows them"
                )
            )
        )
        return None

    async def _find(self, number: int) -> Found | None:
        answer: asyncio.Future[Found | None] = asyncio.get_running_loop().create_future()
        self._store.find(number, answer.set_result)
        return await answer


def _by_label(values: Mapping[Priority, float]) -> dict[str, float]:
    return {priority.label: value for priority, value in values.items()}


def _described(parked: ParkedEntry) -> dict[str, object]:
    """Return a parked write for people."""
    entry = parked.entry
    try:
        body = decode_body(entry.body)
        write = pb.Write.FromString(body.write)
    except (msgspec.DecodeError, DecodeError):  # which is why it is parked
        body, write = EntryBody(b"", None), pb.Write()
    return {
        "number": entry.number,
        "priority": entry.priority.label,
        "shard": entry.shard,
        "accepted_unix_ms": entry.accepted_ms,
        "attempts": entry.attempts,
        "caller": body.caller,
        "reason": parked.reason,
        "message": parked.message,
        "write": MessageToDict(write, preserving_proto_field_name=True),
    }


def _send(reply: Reply, document: object) -> None:
    reply.send(pb.Answer(journal=pb.JournalReport(json=msgspec.json.encode(document))))
