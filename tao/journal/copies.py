"""The second copy of what this follower accepts (``copies: 2``): on the disk of another follower of its tier.

An accepted write is first on the sibling's disk and then here. So a write that was refused here can only be made if
this follower is lost, or cut off for ``takeover_seconds``, before it has had the copy deleted. That is reported as
`OutcomeUnknown`; repeating the write is harmless, since a journal accepts only what commutes. Groups of writes are
copied one after the other, all that has gathered at a time, so they are stored in the order of their numbers.

The sibling deletes the copies of what is made, keeps those of parked writes, and hears from this follower at least
every sixth of ``takeover_seconds``. After an interruption the two agree again, page by page: the sibling deletes what
is not held here any more, and gets what it lacks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.journal.copy_rows import Held, Origin, held_entries, numbers_adopted_from
from tao.journal.entries import Entry
from tao.journal.schedule import MAX_BATCH_BYTES
from tao.journal.settings import JournalSettings
from tao.journal.store import MAX_UNSETTLED, JournalStore, size_of
from tao.model.errors import NoCopy, OutcomeUnknown, Overloaded, TaoError, TopologyError, Unavailable
from tao.model.topology import CacheServer
from tao.serving.configuration import ServerContext
from tao.wire.v1 import session_pb2 as pb

SIGNS: Final = 6
"""Signs of an acceptor in the time after which it counts as lost."""
_GATHER_SECONDS: Final = 0.1
"""Time from a write that is made to the message that has its copy deleted, with others that were made meanwhile."""
_ANSWER_SECONDS: Final = 5.0
"""Longest wait for an answer on which no caller waits."""
_PAGE_ENTRIES: Final = 256
_IF_MADE: Final = (
    "The write is not accepted, and made only if this follower is lost, or cut off for takeover_seconds, before it has "
    "had the copy deleted; such writes commute, so it may be repeated"
)

Stored = Callable[[TaoError | None], None]


@dataclass(slots=True)
class _Group:
    """Writes that are accepted together."""

    entries: Sequence[Entry]
    stored: Stored
    size: int


@dataclass(slots=True)
class _Sibling:
    """What this follower knows of the copies that another one keeps for it."""

    agrees: bool = False
    """Whether the other keeps copies of what is held here, and of nothing else."""
    doubts: int = 0
    """How often ``agrees`` was given up: an agreement that was begun before does not count."""
    retry_at: float = 0.0
    """The time from which it is asked again after a failure."""
    passed_over_until: float = 0.0
    """The time until which others are asked to take copies, where there are some, because it has not taken one."""
    has_no_room: bool = False
    """Whether it has refused the last copy for want of room: it answers then, and only a copy shows that it has room
    again."""
    has_message_under_way: bool = False
    """Whether a message to it is under way."""
    journal: str = ""
    """Its journal, which has the copies."""
    copies: int = 0
    """Copies that it had when it last answered."""
    gone: list[int] = field(default_factory=list)
    """Numbers whose copies are to be deleted."""
    gone_since: set[int] | None = None
    """All numbers of ``gone`` since the two began to agree again; None when they agree."""
    sign_at: float = 0.0
    """The time at which it last heard from this follower."""

    def doubt(self) -> None:
        """Give up the agreement: the two have to agree anew."""
        self.agrees = False
        self.doubts += 1


class Copies:
    """Stores entries, after a sibling has their copies."""

    def __init__(self, context: ServerContext, store: JournalStore, settings: JournalSettings) -> None:
        self._context: Final = context
        self._store: Final = store
        self._settings: Final = settings
        self._log: Final = context.log
        self._spawn: Final = context.spawn_as("copies of accepted writes")
        self._queue: Final[deque[_Group | Callable[[], None]]] = deque()
        self._sends = False
        self._unsettled: Final[set[int]] = set()  # the first number of each group that is not stored yet
        self._waiting = 0  # writes of these groups
        self._waiting_bytes = 0  # their size, until the store counts them
        self._siblings: Final[dict[str, _Sibling]] = {}
        self._current = ""
        self._wake: Final = asyncio.Event()
        self._torn_rows = 0
        self.trouble = ""
        """The reason why the last write could not be copied; empty when it was, or when the sibling answers again."""
        self.copied = 0
        """Writes of which a sibling has taken a copy, since the start."""
        self.refused = 0
        """Writes that were refused since no sibling has taken a copy, since the start."""
        if settings.copies > 1:
            store.on_gone = self.forget
            self._wake.set()

    @property
    def sibling(self) -> str:
        """The name of the follower that keeps the copies; empty when none does."""
        return self._current if self._settings.copies > 1 else ""

    @property
    def agrees(self) -> bool:
        """Whether that follower has a copy of everything held here."""
        found = self._siblings.get(self._current)
        return found is not None and found.agrees

    # ---- accepting -------------------------------------------------------------------------------------------------

    def append(self, entries: Sequence[Entry], stored: Stored) -> None:
        """Store entries as `JournalStore.append`, and before that their copies at the sibling.

        ``stored`` may get `NoCopy`, which says that nothing was accepted, or `OutcomeUnknown`."""
        if self._settings.copies == 1:
            self._store.append(entries, stored)
            return
        if self._waiting + len(entries) > MAX_UNSETTLED:
            raise Overloaded(
                f"{self._waiting} writes wait for their copies at {self._current or 'another follower'} already. "
                "Nothing was accepted; try again later"
            )
        size = sum([size_of(entry) for entry in entries])
        # Before the copy: what is refused without one is made by nobody.
        self._store.check_room(self._waiting_bytes + size)
        self._put(_Group(entries, stored, size))
        self._unsettled.add(entries[0].number)
        self._waiting += len(entries)
        self._waiting_bytes += size

    def in_order(self, do: Callable[[], None]) -> None:
        """Call ``do`` once everything appended before is on its way to the disk."""
        if self._queue or self._sends:
            self._put(do)
        else:
            do()

    def _put(self, item: _Group | Callable[[], None]) -> None:
        if not self._sends:
            self._spawn(self._send_all())
            self._sends = True
        self._queue.append(item)

    async def _send_all(self) -> None:
        try:
            while self._queue:
                first = self._queue[0]
                if not isinstance(first, _Group):
                    self._queue.popleft()
                    first()
                    continue
                groups = self._gathered()
                error = await self._copy([entry for group in groups for entry in group.entries])
                for group in groups:
                    self._settle(group, error)
        finally:
            self._sends = False

    def _gathered(self) -> list[_Group]:
        """Return the groups that are copied next, in one message where they fit."""
        groups: list[_Group] = []
        size = 0
        while self._queue and isinstance(group := self._queue[0], _Group):
            size += sum(len(entry.body) for entry in group.entries)
            if groups and size > MAX_BATCH_BYTES:
                break
            groups.append(group)
            self._queue.popleft()
        return groups

    async def _copy(self, entries: Sequence[Entry]) -> TaoError | None:
        """Have a sibling store copies: the next one along the ring if one does not. Returns why a write is not
        accepted."""
        tried: set[str] = set()
        may_have_copy = False
        while (server := self._choose(tried)) is not None:
            tried.add(server.name)
            sibling = self._known(server.name)
            sent = 0
            try:
                for part in _parts(entries):
                    await self._send(server, self._message(server.name, part), self._settings.copy_seconds)
                    sent += len(part)
            except TaoError as error:
                self.trouble = f"{server.name} has not taken a copy: {error.message}"
                may_have_copy = may_have_copy or sent > 0 or isinstance(error, OutcomeUnknown)
                sibling.has_no_room = isinstance(error, Overloaded)
                sibling.passed_over_until = self._context.clock.monotonic() + self._settings.takeover_seconds
                continue
            self.trouble = ""
            sibling.has_no_room = False
            sibling.passed_over_until = 0.0
            self.copied += len(entries)
            return None
        if not tried:
            self.trouble = f"no other follower of tier {self._context.tier} can be reached"
            return NoCopy(f"{self.trouble}, and journal.copies is 2. Nothing was accepted; try again later")
        if may_have_copy:
            return OutcomeUnknown(f"{self.trouble}. {_IF_MADE}")
        return NoCopy(f"{self.trouble}. Nothing was accepted; try again later")

    def _settle(self, group: _Group, error: TaoError | None) -> None:
        """Store a group that was copied, or refuse it."""

        def stored(failed: TaoError | None) -> None:
            self._unsettled.remove(group.entries[0].number)
            self._waiting -= len(group.entries)
            if failed is not None:
                self.forget([entry.number for entry in group.entries])
                if error is None:
                    failed = OutcomeUnknown(f"it was copied, and not stored here: {failed.message}. {_IF_MADE}")
            group.stored(failed)

        self._waiting_bytes -= group.size
        try:
            if error is None:
                self._store.append(group.entries, stored)
                return
            self.refused += len(group.entries)
            refusal = error
        except TaoError as full:
            refusal = full
        try:
            stored(refusal)
        except Exception as failure:  # noqa: BLE001 - the groups behind it must be stored
            self._log.error("journal_report_failed", exc_info=failure)

    # ---- the siblings ----------------------------------------------------------------------------------------------

    def forget(self, numbers: Sequence[int]) -> None:
        """Have the copies of these entries deleted."""
        for sibling in self._siblings.values():
            if sibling.agrees or sibling.gone_since is not None:
                sibling.gone += numbers
            if sibling.gone_since is not None:
                sibling.gone_since.update(numbers)
        self._wake.set()

    def agree_again(self) -> None:
        """Compare what is held here with the copies."""
        for sibling in self._siblings.values():
            sibling.doubt()
        self._wake.set()

    async def keep(self) -> None:
        """Have copies deleted, agree with siblings, and give them signs, until cancelled."""
        interval = self._settings.takeover_seconds / SIGNS
        while True:
            try:
                async with asyncio.timeout(self._pause_seconds(interval)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(min(_GATHER_SECONDS, interval))
            self._wake.clear()
            if not self._store.id:
                continue
            if self._torn_rows != self._store.torn_rows:
                self._torn_rows = self._store.torn_rows
                self.agree_again()
                self._wake.clear()
            self._choose()
            for server in self.others():
                self._look_after(server)

    def _pause_seconds(self, interval: float) -> float:
        """Return the time until signs are due, or before that another attempt at a sibling that has not answered."""
        now = self._context.clock.monotonic()
        return min([interval, *(each.retry_at - now for each in self._siblings.values() if each.retry_at > now)])

    def _look_after(self, server: CacheServer) -> None:
        """Start a task that sends a sibling what is due. Each has its own: one that hangs delays no signs for
        others."""
        sibling = self._siblings[server.name]
        now, interval = self._context.clock.monotonic(), self._settings.takeover_seconds / SIGNS
        is_sign_due = sibling.copies > 0 and now - sibling.sign_at >= interval / 2
        if sibling.has_message_under_way or (sibling.agrees and not sibling.gone and not is_sign_due):
            return
        if self._context.links.is_down(server):
            if sibling.agrees:  # they compare once it is back: until then, what it must delete is not gathered
                sibling.doubt()
                sibling.gone.clear()
            return
        if now < sibling.retry_at:
            return
        try:
            self._spawn(self._send_due(server, sibling))
            sibling.has_message_under_way = True
        except TaoError as error:
            self._note_unanswered(server, sibling, error)

    async def _send_due(self, server: CacheServer, sibling: _Sibling) -> None:
        """Send what is due to a sibling."""
        try:
            if sibling.agrees:
                await self._send(server, self._message(server.name), _ANSWER_SECONDS)
            else:
                await self._agree(server, sibling)
        except TaoError as error:
            self._note_unanswered(server, sibling, error)
        finally:
            sibling.has_message_under_way = False
            self._wake.set()  # for what has become due meanwhile

    def _note_unanswered(self, server: CacheServer, sibling: _Sibling, error: TaoError) -> None:
        interval = self._settings.takeover_seconds / SIGNS
        sibling.retry_at = self._context.clock.monotonic() + min(interval, self._settings.retry_seconds)
        self._log.info("journal_copies_unanswered", sibling=server.name, reason=error.message)

    async def _agree(self, server: CacheServer, sibling: _Sibling) -> None:
        """Agree with a sibling: compare page by page. Raises `TaoError`."""
        doubts = sibling.doubts
        sibling.gone.clear()
        sibling.gone_since = set()
        try:
            if server.name != self._current:
                kept = await self._send(server, self._message(server.name), _ANSWER_SECONDS)
                if not kept.copies:
                    sibling.agrees = sibling.doubts == doubts
                    return
            # What is being accepted is on the sibling's disk before it is here: leave it for the next time.
            end = min(self._unsettled, default=self._store.next_number) - 1
            after = 0
            while after < end:
                page = await self._held(after, end)
                held = {entry.number: entry for entry in page.entries if entry.number not in sibling.gone_since}
                message = self._message(server.name)
                message.after, message.up_to = after, page.up_to
                message.held.extend([*held, *page.damaged])
                message.damaged.extend(page.damaged)
                answer = await self._send(server, message, _ANSWER_SECONDS)
                if server.name == self._current and answer.missing:
                    own = await self._adopted_from(server.name, sibling.journal, after, page.up_to)
                    missing = [held[each] for each in answer.missing if each in held and each not in own]
                    for part in _parts([entry for entry in missing if entry.number not in sibling.gone_since]):
                        await self._send(server, self._message(server.name, part), _ANSWER_SECONDS)
                after = page.up_to
            sibling.agrees = sibling.doubts == doubts
        finally:
            sibling.gone_since = None

    async def _held(self, after: int, end: int) -> Held:
        """Return the next page of what is held here. Raises `Unavailable`."""
        page = await self._store.result_of(lambda connection: held_entries(connection, after, end, _PAGE_ENTRIES))
        if page is None:
            raise Unavailable(f"the journal cannot be read: {self._store.trouble}")
        return page

    async def _adopted_from(self, name: str, journal: str, after: int, up_to: int) -> frozenset[int]:
        """Return the numbers of entries here that the sibling has accepted itself: it still has those that are not
        made, so it needs no copies. Raises `Unavailable`."""
        origin = Origin(name, journal)
        found = await self._store.result_of(lambda connection: numbers_adopted_from(connection, origin, after, up_to))
        if found is None:
            raise Unavailable(f"the journal cannot be read: {self._store.trouble}")
        return found

    def _message(self, name: str, entries: Sequence[Entry] = ()) -> pb.KeepCopies:
        """Return the next message to a sibling."""
        sibling = self._known(name)
        message = pb.KeepCopies(journal=self._store.id, gone=sibling.gone)
        sibling.gone.clear()
        for entry in entries:
            message.copies.add(
                number=entry.number,
                priority=entry.priority,
                shard=entry.shard,
                accepted_unix_ms=entry.accepted_ms,
                body=entry.body,
                proof=self._store.receipt(self._context.name, entry.number).proof,
            )
        return message

    async def _send(self, server: CacheServer, message: pb.KeepCopies, timeout_seconds: float) -> pb.KeptCopies:
        """Send a message. Raises `TaoError`, and then agrees anew later."""
        sibling = self._known(server.name)
        try:
            answer = await self._context.links.to(server).ask(pb.Request(keep_copies=message), timeout_seconds)
        except BaseException:
            sibling.doubt()
            raise
        kept = answer.kept_copies
        if sibling.journal not in ("", kept.keeper):
            sibling.doubt()
        sibling.journal, sibling.copies = kept.keeper, kept.copies
        sibling.sign_at = self._context.clock.monotonic()
        if server.name == self._current and not sibling.has_no_room:
            self.trouble = ""
        return kept

    def _known(self, name: str) -> _Sibling:
        """Return what is known of a sibling; one that leaves the topology meanwhile may be talked to once more."""
        return self._siblings.setdefault(name, _Sibling())

    def others(self) -> list[CacheServer]:
        """Return the other followers of the tier, the one along the ring first; none when it has left the topology."""
        routes = self._context.configuration.routes
        try:
            others = routes.tier(self._context.region, self._context.tier).successors(self._context.name)
        except TopologyError:
            others = ()
        for name in self._siblings.keys() - {server.name for server in others}:
            del self._siblings[name]
        for server in others:
            self._known(server.name)
        return list(others)

    def _choose(self, tried: Collection[str] = ()) -> CacheServer | None:
        """Return the follower that is to keep the copies now, of those that are up and were not ``tried``: the first
        along the ring that has not failed to take a copy a moment ago. If all have, it is the one whose failure is the
        longest ago."""
        links, now = self._context.links, self._context.clock.monotonic()
        up = [server for server in self.others() if not server.down and not links.is_down(server)]
        if not up:
            self._current = ""
        untried = [server for server in up if server.name not in tried]
        chosen = min(untried, key=lambda each: max(now, self._siblings[each.name].passed_over_until), default=None)
        if chosen is not None and chosen.name != self._current:
            self._current = chosen.name
            self._siblings[chosen.name].doubt()  # it gets a copy of what is held already
            self._wake.set()
        return chosen


def _parts(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return entries in parts that fit into one message each."""
    parts: list[list[Entry]] = []
    size = 0
    for entry in entries:
        size += len(entry.body)
        if not parts or size > MAX_BATCH_BYTES:
            parts.append([])
            size = len(entry.body)
        parts[-1].append(entry)
    return parts
