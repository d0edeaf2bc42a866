"""The copies that this follower keeps for others, and the writes of a lost acceptor that it makes from them.

An acceptor is lost when no sign of it has come for ``takeover_seconds``. Its copies become entries of this journal
then, with the writes, callers and times that they have: what the acceptor would have made. If it comes back, both make
them, and they take effect once, as all that a journal accepts. The time is counted in ticks, so that a pause of this
process is no silence of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tao.journal.applier import Applier
from tao.journal.copies import SIGNS, Copies
from tao.journal.copy_rows import (
    IS_COPY,
    NO_COPY,
    Adopted,
    Agreement,
    Copy,
    Kept,
    Origin,
    adopt,
    change_copies,
    copied_numbers,
    count_copies,
    find_copy,
    size_of_copy,
    undo_adoption,
)
from tao.journal.entries import Entry, priority_of
from tao.journal.settings import JournalSettings
from tao.journal.store import JournalStore
from tao.model.errors import NoCopy, OutcomeUnknown, Overloaded, TaoError, Unavailable
from tao.model.receipts import Receipt
from tao.serving.configuration import ServerContext
from tao.wire.session import Reply, failure
from tao.wire.v1 import session_pb2 as pb

_PAGE_COPIES: Final = 256


@dataclass(slots=True)
class _Held:
    copies: int = 0
    silent_ticks: int = 0


class HeldCopies:
    """Keeps copies for other followers, and makes the writes of those that are lost."""

    def __init__(
        self,
        context: ServerContext,
        store: JournalStore,
        copies: Copies,
        applier: Applier,
        settings: JournalSettings,
    ) -> None:
        self._context: Final = context
        self._store: Final = store
        self._copies: Final = copies
        self._applier: Final = applier
        self._settings: Final = settings
        self._log: Final = context.log
        self._spawn: Final = context.spawn_as("copies of a lost acceptor")
        self._held: Final[dict[Origin, _Held]] = {}
        self._is_counted = False
        self._set_aside = 0  # files that were set aside before the copies were counted
        self._counted_bytes = 0  # of the copies on disk
        self._coming_bytes = 0  # of those on their way to it
        self.adopted = 0
        """Copies that have become entries of this journal, since the start."""

    @property
    def copies(self) -> int:
        """Copies held for other followers."""
        return sum(held.copies for held in self._held.values())

    @property
    def bytes(self) -> int:
        """Size of the copies held, and of those on their way to the disk."""
        return self._counted_bytes + self._coming_bytes

    def keep(self, request: pb.Request, reply: Reply) -> None:
        """Change the copies of an acceptor as it asks, and answer once that is on disk. Raises `Unavailable` and
        `InvalidArgument`."""
        asked = request.keep_copies
        if not self._is_counted:
            raise Unavailable(f"the journal of {self._context.name} is not open yet: {self._store.trouble}")
        origin = Origin(reply.peer.name, asked.journal)
        copies = [Copy(_entry(each), each.proof) for each in asked.copies]
        size = sum(size_of_copy(copy.entry.body) for copy in copies)
        self._of(origin).silent_ticks = 0
        refusal: TaoError | None = None
        if copies and self.bytes + size > self._settings.max_copy_bytes:
            refusal = Overloaded(
                f"the copies kept by {self._context.name} are full: {self.bytes} bytes of at most "
                f"{self._settings.max_copy_bytes} (journal.max_copy_bytes)"
            )
            copies, size = [], 0
        self._coming_bytes += size
        agreement = Agreement(asked.after, asked.up_to, frozenset(asked.held)) if asked.up_to else None
        gone, damaged = list(asked.gone), list(asked.damaged)

        def kept(change: Kept | None) -> None:
            self._coming_bytes -= size
            if change is None:
                unknown = f"the journal of {self._context.name} failed while it was written: {self._store.trouble}"
                reply.send(failure(OutcomeUnknown(unknown)))
                self._count_anew()
                return
            held = self._of(origin)
            self._counted_bytes += change.bytes
            held.copies += change.copies
            if damaged:
                self._spawn(self._repair(origin, damaged))
            if refusal is not None:
                reply.send(failure(refusal))
                return
            answer = pb.KeptCopies(missing=change.missing, copies=held.copies, keeper=self._store.id)
            reply.send(pb.Answer(kept_copies=answer))

        self._store.run(lambda connection: change_copies(connection, origin, copies, gone, agreement), kept)

    def answer(self, receipt: Receipt, reply: Reply) -> None:
        """Answer for a write that another follower has accepted: with the receipt under which it waits here once that
        follower is lost, with the same receipt before that, and with `NoCopy` when no copy is here."""
        origin = Origin(receipt.server, receipt.journal)

        def found(number: int | None) -> None:
            if number is None:
                unread = f"the journal of {self._context.name} cannot be read: {self._store.trouble}"
                reply.send(failure(Unavailable(unread)))
            elif number == NO_COPY:
                reply.send(
                    failure(
                        NoCopy(
                            f"{receipt.server} has accepted the write, and {self._context.name} has no copy of it: ask "
                            f"{receipt.server}"
                        )
                    )
                )
            else:
                waits = receipt if number == IS_COPY else self._store.receipt(self._context.name, number)
                result = pb.WriteResult(accepted=waits.encoded())
                reply.send(pb.Answer(write=pb.WriteAnswer(slots=[0], results=[result])))

        self._store.run(lambda connection: find_copy(connection, origin, receipt.number, receipt.proof), found)

    async def watch(self) -> None:
        """Make the writes of lost acceptors, until cancelled."""
        while True:
            if not self._is_counted or self._set_aside != self._store.set_aside:
                await self.count()
            if not self._is_counted:
                await asyncio.sleep(self._settings.retry_seconds)
                continue
            await asyncio.sleep(self._settings.takeover_seconds / SIGNS)
            for origin, held in list(self._held.items()):
                held.silent_ticks += 1
                if held.silent_ticks > SIGNS and held.copies:
                    await self._take_over(origin, held)
                elif held.silent_ticks > SIGNS:
                    del self._held[origin]

    async def count(self) -> None:
        """Count the copies on disk, if it can be read. Before that none are kept."""
        self._set_aside = self._store.set_aside
        if not self._store.id:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def counted(found: dict[Origin, tuple[int, int]] | None) -> None:
            # Here, and not once this task goes on: what changes the copies next is counted on top of it.
            if found is not None:
                for held in self._held.values():
                    held.copies = 0
                for origin, (count, _) in found.items():
                    self._of(origin).copies = count
                self._counted_bytes = sum(size for _, size in found.values())
                self._is_counted = True
            if not done.done():  # cancelled
                done.set_result(None)

        self._store.run(count_copies, counted)
        await done

    def _of(self, origin: Origin) -> _Held:
        return self._held.setdefault(origin, _Held())

    def _count_anew(self) -> None:
        """Count the copies once the disk can be read: what a failed commit has left there is not known."""
        if self._is_counted:
            self._is_counted = False
            self._spawn(self._count_again())

    async def _count_again(self) -> None:
        while not self._is_counted:
            await asyncio.sleep(self._settings.retry_seconds)
            await self.count()

    async def _take_over(self, origin: Origin, held: _Held) -> None:
        """Make the writes of an acceptor, until a sign of it comes."""
        self._log.warning("journal_taken_over", acceptor=origin.acceptor, copies=held.copies)
        while held.silent_ticks > SIGNS:
            numbers = await self._store.result_of(lambda connection: copied_numbers(connection, origin, _PAGE_COPIES))
            if not numbers or not await self._adopt(origin, numbers):
                return

    async def _repair(self, origin: Origin, numbers: Sequence[int]) -> None:
        """Make the writes that the acceptor's disk has damaged; it asks again if this disk fails."""
        await self._adopt(origin, numbers)

    async def _adopt(self, origin: Origin, numbers: Sequence[int]) -> bool:
        """Make entries of this journal of copies. Returns whether the disk has them."""
        done: asyncio.Future[Adopted | None] = asyncio.get_running_loop().create_future()
        # Now, and not once it is their turn: what is accepted meanwhile is stored behind them, with higher numbers.
        pairs = [(number, self._store.take_number()) for number in sorted(numbers)]

        def begin() -> None:
            now_ms = self._context.clock.unix_ms()
            self._store.run(
                lambda connection: adopt(connection, origin, pairs, now_ms),
                end,
                lambda connection: undo_adoption(connection, origin, pairs),
            )

        def end(found: Adopted | None) -> None:
            if found is not None:
                self._count_adopted(origin, found)
            else:
                self._count_anew()
            if not done.done():  # cancelled
                done.set_result(found)

        self._copies.in_order(begin)
        return await done is not None

    def _count_adopted(self, origin: Origin, found: Adopted) -> None:
        if not found.copies:
            return  # the acceptor has had them deleted, or names a damaged row again
        self._of(origin).copies -= found.copies
        self._counted_bytes -= found.bytes
        self.adopted += len(found.entries)
        self._store.note_adopted(found.entries, torn=len(found.damaged))
        for number in found.damaged:
            self._log.error("journal_copy_torn", acceptor=origin.acceptor, number=number)
        self._applier.add(found.entries)
        self._copies.agree_again()


def _entry(copy: pb.WriteCopy) -> Entry:
    return Entry(copy.number, priority_of(copy.priority), copy.shard, copy.accepted_unix_ms, copy.body)
