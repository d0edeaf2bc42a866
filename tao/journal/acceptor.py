"""Accept writes into the journal, and report their results to callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from tao.journal.applier import Applier
from tao.journal.commutativity import commuting_write
from tao.journal.copies import Copies
from tao.journal.entries import Entry, EntryBody, LostEntry, ParkedEntry, Priority, encode_body, priority_of
from tao.journal.held_copies import HeldCopies
from tao.journal.leader_clocks import LeaderClocks
from tao.journal.store import Found, JournalStore
from tao.model.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NoCopy,
    NoJournal,
    OutcomeUnknown,
    TaoError,
    Unavailable,
)
from tao.model.receipts import Receipt
from tao.planning.write_plan import validate
from tao.routing.budgets import work_seconds
from tao.serving.access import OnBehalfOf
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import WriteResults, admitted_writes, shards_of_write
from tao.wire.convert import write_from_pb
from tao.wire.identity import SERVER_ROLES
from tao.wire.session import Reply, failure
from tao.wire.v1 import session_pb2 as pb

_LOOK_SECONDS: Final = 1.0
"""Longest wait for another follower to say whether it has a copy of a write that is lost here."""


class Acceptor:
    """Handles the requests of applications that concern one journal."""

    def __init__(
        self,
        context: ServerContext,
        store: JournalStore,
        applier: Applier,
        copies: Copies,
        held: HeldCopies,
        clocks: LeaderClocks,
        admit: Callable[[int], TaoError | None],
    ) -> None:
        """``admit`` returns why this follower does not serve a shard, or None."""
        self._context: Final = context
        self._configuration: Final = context.configuration
        self._spawn: Final = context.spawn_as("receipt of a lost write")
        self._store: Final = store
        self._applier: Final = applier
        self._copies: Final = copies
        self._held: Final = held
        self._clocks: Final = clocks
        self._admit: Final = admit
        self.accepted: Final[dict[Priority, int]] = dict.fromkeys(Priority, 0)
        """Writes accepted since the start."""
        self.refused = 0
        """Writes refused since the start, for whatever reason."""

    def accept(self, request: pb.Request, reply: Reply) -> None:
        """Enter the writes of a batch, each by itself, and answer once they are on disk. Raises `InvalidArgument` for
        an unknown priority."""
        batch = request.write
        priority = priority_of(batch.priority)
        if not batch.writes:
            reply.send(pb.Answer(write=pb.WriteAnswer()))
            return
        results = WriteResults(reply, len(batch.writes), want_changes=False)
        entries: list[Entry] = []
        slots: list[int] = []
        behalf = OnBehalfOf.sender(request, reply.peer)
        hands_over = reply.peer.role in SERVER_ROLES
        for slot in admitted_writes(self._configuration.access, request, reply.peer, results):
            try:
                entries.append(self._entry(batch.writes[slot], priority, behalf, hands_over=hands_over))
                slots.append(slot)
            except TaoError as error:
                self._refuse(results, slot, error)
        if not entries:
            return
        writes = [batch.writes[slot] for slot in slots]

        def stored(error: TaoError | None) -> None:
            if error is None:
                self._accepted(results, slots, writes, entries)
                return
            for slot in slots:
                self._refuse(results, slot, error)

        try:
            self._copies.append(entries, stored)
        except TaoError as error:
            for slot in slots:
                self._refuse(results, slot, error)

    def await_applied(self, request: pb.Request, reply: Reply) -> None:
        """Answer with the result of an accepted write once there is one; for the write of another follower, with the
        receipt to ask by. So it does for a write that this follower has lost, as with a journal that was set aside, if
        another one has a copy of it. Raises `InvalidArgument` for what is no receipt, `Unavailable` while the journal
        was not read yet, and `Overloaded`."""
        receipt = Receipt.decoded(request.await_applied.accepted)
        if receipt.server != self._context.name:
            self._held.answer(receipt, reply)
            return
        if not self._store.id:
            raise Unavailable(f"the journal of this follower cannot be read yet: {self._store.trouble}")
        if receipt.journal != self._store.id:
            self._answer_lost(
                receipt, reply, "the journal that held the write could not be read, and was set aside; see its log"
            )
            return
        number = receipt.number
        if receipt != self._store.receipt(self._context.name, number):
            raise InvalidArgument("the receipt is not one that this follower has given")
        result = self._applier.result(number)
        if result is not None:
            _send(reply, result)
            return

        seconds = work_seconds(request.deadline_ms)

        def deliver(result: pb.WriteResult) -> None:
            _send(reply, result)

        self._applier.wait_for(number, deliver)
        reply.on_close(lambda: self._applier.stop_waiting(number, deliver))

        def explain(entry: Found | None) -> None:
            if isinstance(entry, Entry):
                standing = self._applier.standing(entry)
                text = f"the write is accepted and still waits: {standing}. Do not repeat it; ask again later"
                reply.send(failure(DeadlineExceeded(text)))

        def give_up() -> None:
            self._applier.stop_waiting(number, deliver)
            if not reply.closed:
                self._store.find(number, explain)

        asyncio.get_running_loop().call_later(seconds, give_up)
        if self._applier.is_known(number):
            return

        def found(entry: Found | None) -> None:
            if self._applier.result(number) is None and not isinstance(entry, Entry):
                self._applier.stop_waiting(number, deliver)
                self._answer_found(entry, receipt, reply)

        self._store.find(number, found)

    def _answer_found(self, entry: ParkedEntry | LostEntry | bytes | None, receipt: Receipt, reply: Reply) -> None:
        """Answer for an entry that does not wait here."""
        if isinstance(entry, ParkedEntry):
            reason = f"the write is parked: {entry.message}"
            _send(reply, pb.WriteResult(error=pb.Error(reason=entry.reason, message=reason)))
        elif isinstance(entry, LostEntry):
            self._answer_lost(receipt, reply, entry.message)
        elif isinstance(entry, bytes):
            _send(reply, pb.WriteResult(accepted=entry))
        elif self._store.trouble:
            reply.send(failure(Unavailable(f"the journal cannot be read: {self._store.trouble}")))
        else:
            _send(reply, pb.WriteResult(forgotten=True))

    def _answer_lost(self, receipt: Receipt, reply: Reply, why: str) -> None:
        """Answer for an entry that this follower has lost: another one may have a copy, or has made the write."""
        try:
            self._spawn(self._ask_for_copy(receipt, reply, why))
        except TaoError as error:
            reply.send(failure(error))

    async def _ask_for_copy(self, receipt: Receipt, reply: Reply, why: str) -> None:
        """Answer with what another follower knows of a lost write. Its outcome is unknown only when all of them answer
        that they have no copy."""
        others = self._copies.others()
        request = pb.Request(await_applied=pb.AwaitApplied(accepted=receipt.encoded()))
        asked = [self._context.links.to(server).ask(request, _LOOK_SECONDS) for server in others]
        found: list[pb.Answer] = []
        silent: list[str] = []
        for server, answer in zip(others, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, pb.Answer):
                found.append(answer)
            elif not isinstance(answer, TaoError):
                raise answer
            elif not isinstance(answer, NoCopy | NoJournal):
                silent.append(f"{server.name} may have a copy, and does not answer ({answer.message})")
        if found:
            # The receipt of a follower that has made the write, before that of one which still keeps the copy.
            found.sort(key=lambda answer: answer.write.results[0].accepted == receipt.encoded())
            reply.send(pb.Answer(write=found[0].write))
        elif silent:
            reply.send(failure(Unavailable(f"{why}. {'; '.join(silent)}: ask again later")))
        else:
            reply.send(failure(OutcomeUnknown(why)))

    def _entry(self, write: pb.Write, priority: Priority, behalf: OnBehalfOf, *, hands_over: bool) -> Entry:
        """Return the entry of a write. ``hands_over``: another follower sends what it had accepted."""
        schema = self._configuration.schema
        validate(write_from_pb(write), schema)
        home, coordinator = shards_of_write(write, schema)
        refusal = None if hands_over else self._admit(home)
        if refusal is not None:
            raise refusal
        leader = self._clocks.stamping(coordinator)
        entered = commuting_write(write, schema, lambda: self._clocks.stamp(leader))
        body = encode_body(EntryBody(entered.SerializeToString(), behalf.caller, behalf.operator))
        return Entry(self._store.take_number(), priority, coordinator, self._context.clock.unix_ms(), body)

    def _accepted(
        self, results: WriteResults, slots: Sequence[int], writes: Sequence[pb.Write], entries: Sequence[Entry]
    ) -> None:
        for slot, write, entry in zip(slots, writes, entries, strict=True):
            receipt = self._store.receipt(self._context.name, entry.number).encoded()
            results.add(slot, pb.WriteResult(id=write.obj_add.id, accepted=receipt))
        self.accepted[entries[0].priority] += len(entries)
        self._applier.add(entries)

    def _refuse(self, results: WriteResults, slot: int, error: TaoError) -> None:
        self.refused += 1
        results.fail(slot, error)


def _send(reply: Reply, result: pb.WriteResult) -> None:
    if result.HasField("error"):
        reply.send(pb.Answer(error=result.error))
    else:
        reply.send(pb.Answer(write=pb.WriteAnswer(slots=[0], results=[result])))
