"""An etcd over links that are cut, beneath the product's own locks and topology in etcd.

Its members are one machine. A call travels there and is carried out when it arrives, perhaps twice; its answer may be
lost on the way back. While etcd is away leases do not end, and all of them last for their whole length again when it is
back, as after an election. A watch that is cut stays silent, and one whose beginning has been compacted breaks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from tao.etcd.client import EtcdClient, EtcdRefused, EtcdUnavailable, WatchBroken
from tao.etcd.location import EtcdSettings
from tao.etcd.v3 import kv_pb2
from tao.etcd.v3 import rpc_pb2 as pb
from tests.rigs.memory_etcd import PLACE, MemoryEtcd
from tests.sim.loop import CURRENT, SimLoop

ETCD: Final = "etcd"
"""The machine of etcd."""
_TWICE_SHARE: Final = 0.02
"""Share of the transactions that are carried out a second time, up to `_TWICE_SECONDS` later."""
_TWICE_SECONDS: Final = 3.0
_KEPT_CHANGES: Final = 100
"""Changes that a watch may begin with; older ones are compacted."""
_WATCH_SECONDS: Final = 0.1
_PAUSE_SECONDS: Final = 0.05
KeyRange = tuple[bytes, bytes]
"""The first key, and the one after the last."""
_Answer = TypeVar("_Answer")


class Links(Protocol):
    """The links between etcd and the processes that use it."""

    @property
    def loop(self) -> SimLoop: ...

    @property
    def random(self) -> random.Random: ...

    @property
    def refuses(self) -> bool:
        """Whether connections through a cut are refused at once."""

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether nothing gets from one machine to the other."""

    def one_way_seconds(self, one: str, other: str) -> float:
        """Return how long a message takes."""


@dataclass(frozen=True, slots=True)
class EtcdSnapshot:
    """What etcd had at a revision."""

    revision: int
    keys: dict[bytes, kv_pb2.KeyValue]
    leases: dict[int, tuple[int, float]]


class SimEtcd(MemoryEtcd):
    """What all members have. Each process has its own client of it."""

    def __init__(self, machines: Links, on_change: Callable[[SimEtcd], None]) -> None:
        """``on_change`` is called after each transaction that was carried out."""
        super().__init__(machines.loop.time)
        self.machines: Final = machines
        self._on_change: Final = on_change
        self.is_away = False
        self.restarts = 0
        self.changes: list[pb.WatchResponse] = []
        self.compacted = 0
        """Revision of the last change that a watch cannot begin with any more."""
        self.idle_watches: Final[dict[asyncio.Future[int], KeyRange]] = {}
        """Watches that wait for the revision of the next change of their keys."""

    def carry_out(self, request: pb.TxnRequest) -> pb.TxnResponse:
        before = dict(self.keys)
        answer = super().carry_out(request)
        self._record(before)
        self._on_change(self)
        return answer

    def read_at_once(self, key: bytes, range_end: bytes = b"") -> pb.RangeResponse:
        """Read without a step of the loop."""
        return self._range(pb.RangeRequest(key=key, range_end=range_end))

    def stop(self) -> None:
        """Answer nothing."""
        self.is_away = True
        self._end_watches()

    def start(self) -> None:
        """Answer again, with all leases renewed."""
        self.is_away = False
        self.restarts += 1
        self.leases = {number: (seconds, self._now() + seconds) for number, (seconds, _) in self.leases.items()}
        self._end_watches()

    def compact(self) -> None:
        """Forget the history up to now."""
        self.changes, self.compacted = [], self.revision

    def snapshot(self) -> EtcdSnapshot:
        """Return a copy of all keys and leases."""
        return EtcdSnapshot(self.revision, dict(self.keys), dict(self.leases))

    def restore(self, snapshot: EtcdSnapshot) -> None:
        """Begin anew with a snapshot, while stopped."""
        self.revision, self.keys, self.leases = snapshot.revision, dict(snapshot.keys), dict(snapshot.leases)
        self.changes, self.compacted = [], snapshot.revision

    def change_of(self, keys: KeyRange, revision: int) -> pb.WatchResponse | None:
        """Return the first change of some keys at or after a revision. Raises `WatchBroken` when it may have been
        compacted."""
        if revision <= self.compacted:
            raise WatchBroken("compacted")
        for each in self.changes:
            if each.header.revision >= revision:
                events = [event for event in each.events if _is_of(keys, event)]
                if events:
                    return pb.WatchResponse(header=each.header, events=events)
        return None

    def _end_watches(self) -> None:
        for watch in self.idle_watches:
            self.wake(watch)

    def wake(self, watch: asyncio.Future[int]) -> None:
        """Have an idle watch look what has changed now, and go on after that."""
        if not watch.done():
            watch.set_result(self.revision + 1)

    def _end_leases(self) -> None:
        if not self.is_away:
            super()._end_leases()

    def _record(self, before: dict[bytes, kv_pb2.KeyValue]) -> None:
        put = [kv_pb2.Event(kv=each) for key, each in self.keys.items() if before.get(key) is not each]
        gone = [
            kv_pb2.Event(type=kv_pb2.Event.DELETE, kv=kv_pb2.KeyValue(key=key, mod_revision=self.revision))
            for key in before
            if key not in self.keys
        ]
        if put or gone:
            self.changes.append(pb.WatchResponse(header=pb.ResponseHeader(revision=self.revision), events=put + gone))
            for watch, keys in self.idle_watches.items():
                if not watch.done() and any(_is_of(keys, event) for event in (*put, *gone)):
                    watch.set_result(self.revision)
        if len(self.changes) > _KEPT_CHANGES:
            self.compacted = self.changes.pop(0).header.revision


class SimEtcdClient(EtcdClient):
    """The calls of one process."""

    def __init__(self, etcd: SimEtcd) -> None:
        super().__init__(PLACE, EtcdSettings())
        self._etcd: Final = etcd
        self._machines: Final = etcd.machines

    async def read(self, key: bytes, range_end: bytes = b"") -> pb.RangeResponse:
        return await self._trip(lambda: self._etcd.read(key, range_end))

    async def transact(
        self, compare: Sequence[pb.Compare], success: Sequence[pb.RequestOp], failure: Sequence[pb.RequestOp] = ()
    ) -> pb.TxnResponse:
        if self._machines.random.random() < _TWICE_SHARE:
            request = pb.TxnRequest(compare=compare, success=success, failure=failure)
            late = _TWICE_SECONDS * self._machines.random.random()
            again = partial(self._carry_out_again, request, self._etcd.restarts)
            self._machines.loop.call_later(late, again, context=Context())  # whatever befalls the process meanwhile
        return await self._trip(lambda: self._etcd.transact(compare, success, failure))

    async def grant_lease(self, seconds: int) -> int:
        return await self._trip(lambda: self._etcd.grant_lease(seconds))

    async def keep_lease(self, lease: int) -> bool:
        return await self._trip(lambda: self._etcd.keep_lease(lease))

    async def revoke_lease(self, lease: int) -> None:
        await self._trip(lambda: self._etcd.revoke_lease(lease))

    async def watch(
        self, key: bytes, range_end: bytes, start_revision: int, idle_seconds: float
    ) -> AsyncGenerator[pb.WatchResponse | None, None]:
        loop, etcd, restarts, keys = self._machines.loop, self._etcd, self._etcd.restarts, (key, range_end)
        following, heard_at, look_at = start_revision, loop.now, loop.now
        while True:
            while look_at <= loop.now:
                look_at += _WATCH_SECONDS
            await asyncio.sleep(look_at - loop.now)
            if etcd.is_away or etcd.restarts != restarts:
                raise WatchBroken("etcd was stopped")
            is_cut = self._is_cut()
            change = None if is_cut else etcd.change_of(keys, following)
            if change is not None:
                following, heard_at = change.header.revision + 1, loop.now
                yield change
            elif loop.now - heard_at >= idle_seconds:
                heard_at = loop.now
                yield None
            elif not is_cut:
                following = await self._next_change(keys, heard_at + idle_seconds)

    async def _next_change(self, keys: KeyRange, until: float) -> int:
        """Return the revision of the next change of some keys. Return also when it is time, or etcd stops."""
        etcd, loop = self._etcd, self._machines.loop
        waiting: asyncio.Future[int] = loop.create_future()
        etcd.idle_watches[waiting] = keys
        timer = loop.call_at(until, etcd.wake, waiting)
        try:
            return await waiting
        finally:
            timer.cancel()
            del etcd.idle_watches[waiting]

    def _carry_out_again(self, request: pb.TxnRequest, restarts: int) -> None:
        if not self._etcd.is_away and self._etcd.restarts == restarts:
            with suppress(EtcdRefused):  # its lease has ended
                self._etcd.carry_out(request)

    def _is_cut(self) -> bool:
        process = CURRENT.get()
        assert process is not None, "only simulated processes call etcd"
        return self._machines.is_cut(process.name, ETCD)

    async def _trip(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Make a call, again and again until it is answered or its time is up. Raises `EtcdUnavailable`."""
        process, machines = CURRENT.get(), self._machines
        assert process is not None, "only simulated processes call etcd"
        deadline = machines.loop.now + self._settings.timeout_seconds
        while machines.loop.now < deadline:
            wait = machines.one_way_seconds(process.name, ETCD)
            await asyncio.sleep(wait)
            if not (self._is_cut() or self._etcd.is_away):
                answer = await call()
                await asyncio.sleep(wait)
                if not (self._is_cut() or self._etcd.is_away):
                    return answer
            elif self._is_cut() and not machines.refuses:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        await asyncio.sleep(max(0.0, deadline - machines.loop.now))
        raise EtcdUnavailable("etcd did not answer in time")


def _is_of(keys: KeyRange, event: kv_pb2.Event) -> bool:
    return keys[0] <= event.kv.key < keys[1]
