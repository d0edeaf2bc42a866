"""Locks in etcd, beside the topology: keys with leases, so that etcd removes those of a holder that is gone.

``PREFIX/locks/NAME/exclusive`` is the lock of the one who holds it alone, and ``PREFIX/locks/NAME/shared/…`` that of
each one who shares it. Both are taken by a transaction that finds the other kind missing.

A lock is lost when its lease ends. The holder renews it, and counts from before each renewal by its own clock, so it
counts the lock as lost before etcd does. While etcd does not answer, nobody takes a lock, and a holder loses its own.

A call may be carried out a second time, after its lock was released (`tao.etcd.client`). What it stores then is bound
to a lease that has ended or soon ends: an exclusive lock has a lease of its own, and those that are held for a moment
share one that is never renewed. The process that finds such a lock of its own in its way removes it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from tao.etcd.client import EtcdClient, EtcdRefused, EtcdUnavailable, delete, end_of, is_absent, put
from tao.etcd.location import EtcdLocation, Location
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import TaoError
from tao.replication.locks import (
    MASTERSHIP,
    FileLocks,
    LockHold,
    LockLost,
    Locks,
    LocksAway,
    LockTaken,
    LockTerms,
    keep_alive,
)
from tao.topology.stores import EtcdConnections

_SHARED: Final = LockTerms(touch_seconds=1.0, holder_timeout_seconds=3.0, takeover_seconds=5.0)
"""The terms of locks that are held for a moment, under one lease of the process: renewals of masters' leases. Locks are
taken under a lease for ``touch_seconds``, and under a new one then."""

_SHARED_SECONDS: Final = 0.7
"""Time limit of taking and of releasing such a lock: the lease that is to be renewed lasts 2.5 s, and while etcd is
away there has to be time for a second attempt without the lock."""

_END_PAUSE_SECONDS: Final = 0.2
"""Pause between two attempts to end the lease of an exclusive lock."""


def open_locks(place: Location, etcd: EtcdConnections, clock: Callable[[], float] = time.monotonic) -> Locks:
    """Return the locks beside a topology document: in files, or in etcd."""
    return FileLocks(place, clock=clock) if isinstance(place, Path) else EtcdLocks(etcd.to(place), place, clock=clock)


class EtcdLocks:
    """Implements `Locks` with keys in etcd."""

    can_be_away = True

    def __init__(self, client: EtcdClient, location: EtcdLocation, *, clock: Callable[[], float]) -> None:
        """``clock``: returns seconds, and keeps counting while the process is paused."""
        self._client: Final = client
        self._location: Final = location
        self._clock: Final = clock
        self._shared: _Lease | None = None
        self._released: dict[bytes, _Lease] = {}
        """Locks that this process held for a moment, and holds no more, while their leases last."""
        self._granting: Final = asyncio.Lock()
        """Held while the shared lease is replaced: renewals of many masters begin at one time."""
        self._ending: Final = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def held(self, name: str, *, exclusive: bool, terms: LockTerms | None = None) -> AsyncIterator[LockHold]:
        """See `Locks.held`. Raises `LocksAway` when etcd does not answer, and when it refuses a lock for a moment: an
        etcd that is full, or whose rights were changed, shows no more of who holds a lock than one that is away."""
        is_single = exclusive or terms is not None
        try:
            if is_single:
                key, lease = await self._take_single(name, terms or MASTERSHIP, exclusive=exclusive)
            else:
                async with asyncio.timeout(_SHARED_SECONDS):
                    lease = await self._shared_lease()
                    key = await self._take(name, lease, exclusive=False)
        except (TimeoutError, EtcdUnavailable, EtcdRefused) as error:
            if is_single and isinstance(error, EtcdRefused):
                raise
            reason = "etcd did not answer in time" if isinstance(error, TimeoutError) else error.message
            raise LocksAway(f"it cannot be seen who holds {name}: {reason}") from error
        try:
            if exclusive and terms is None:  # nobody else renews it
                async with keep_alive(lease, MASTERSHIP):
                    yield lease
            else:
                yield lease
        finally:
            await self._release(key, lease)

    async def _shared_lease(self) -> _Lease:
        """Return the lease of this process, for locks that are held for a moment. The one before ends by itself, and
        with it a key that was stored late, or could not be removed."""
        async with self._granting:
            shared = self._shared
            if shared is None or not shared.is_held() or shared.stood_seconds() > _SHARED.touch_seconds:
                shared = self._shared = await self._grant(_SHARED)
            return shared

    async def _grant(self, terms: LockTerms) -> _Lease:
        began = self._clock()
        number = await self._client.grant_lease(math.ceil(terms.takeover_seconds))
        return _Lease(self._client, self._clock, number, terms, began)

    async def _take_single(self, name: str, terms: LockTerms, *, exclusive: bool) -> tuple[bytes, _Lease]:
        """Take a lock under a lease of its own, which ends when it is not taken."""
        lease = await self._grant(terms)
        try:
            return await self._take(name, lease, exclusive=exclusive), lease
        except LockTaken:
            await self._end(lease)
            raise
        except BaseException:
            self._end_later(lease)  # the key may have been stored
            raise

    async def _take(self, name: str, lease: _Lease, *, exclusive: bool) -> bytes:
        """Store the key of a hold, and return it. Raises `LockTaken`."""
        root = self._location.key(f"locks/{name}/")
        alone, shared = root + b"exclusive", root + b"shared/"
        key = alone if exclusive else shared + f"{lease.number:x}-{lease.next_use()}".encode()
        free = [is_absent(alone), *([is_absent(shared, end_of(shared))] if exclusive else [])]
        looks = [
            pb.RequestOp(request_range=pb.RangeRequest(key=key)),
            pb.RequestOp(request_range=pb.RangeRequest(key=shared, range_end=end_of(shared), keys_only=True)),
        ]
        try:
            answer = await self._client.transact(free, [put(key, b"", lease.number)], looks)
        except EtcdRefused as error:
            if "lease not found" not in error.message:
                raise
            lease.give_up()
            raise LocksAway(f"{name} cannot be taken: etcd has forgotten the lease of this process") from error
        if not answer.succeeded:
            found = answer.responses[0].response_range.kvs
            # An attempt whose answer was lost may have stored it.
            if not found or found[0].lease != lease.number:
                if exclusive:
                    await self._remove_released(answer.responses[1].response_range)
                raise LockTaken(f"{name} is held by another process: a watcher or an operator is at it")
        return key

    async def _release(self, key: bytes, lease: _Lease) -> None:
        """Release a lock. Where etcd does not answer, it ends with its lease."""
        if not lease.is_shared:
            await self._end(lease)
            return
        self._released = {key: lease for key, lease in self._released.items() if not lease.is_over()} | {key: lease}
        with suppress(TaoError, TimeoutError):
            async with asyncio.timeout(_SHARED_SECONDS):
                await self._client.transact((), [delete(key)])

    async def _remove_released(self, shared: pb.RangeResponse) -> None:
        """Remove the locks that this process does not hold any more: a call that is carried out again after the release
        would stop a promotion until its lease ends."""
        released = [delete(each.key) for each in shared.kvs if each.key in self._released]
        if released:
            await self._client.transact((), released)

    async def _end(self, lease: _Lease) -> None:
        """End the lease of a single hold."""
        lease.give_up()
        try:
            await self._client.revoke_lease(lease.number)
        except TaoError:
            self._end_later(lease)

    def _end_later(self, lease: _Lease) -> None:
        """End the lease of a single hold as soon as etcd answers, unless it ends by itself before."""

        async def end() -> None:
            while not lease.is_over():
                with suppress(TaoError):
                    await self._client.revoke_lease(lease.number)
                    return
                await asyncio.sleep(_END_PAUSE_SECONDS)

        lease.give_up()
        task = asyncio.create_task(end(), name="end a lock's lease")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _Lease:
    """Implements `LockHold`: holds as long as its lease."""

    def __init__(
        self, client: EtcdClient, clock: Callable[[], float], number: int, terms: LockTerms, began: float
    ) -> None:
        self._client: Final = client
        self._clock: Final = clock
        self.number: Final = number
        self._terms: Final = terms
        self._touched_at = began
        self.is_shared: Final = terms is _SHARED
        """Whether several holds of the process have this lease."""
        self._is_lost = False
        self._uses = 0

    def next_use(self) -> int:
        """Return a number for the next key under this lease."""
        self._uses += 1
        return self._uses

    def stood_seconds(self) -> float:
        """Return the seconds since the last renewal began."""
        return self._clock() - self._touched_at

    def is_over(self) -> bool:
        """Return whether etcd has ended the lease by now, unless it was renewed by a call that came late."""
        return self.stood_seconds() > math.ceil(self._terms.takeover_seconds)

    def is_held(self) -> bool:
        self._is_lost = self._is_lost or self.stood_seconds() > self._terms.holder_timeout_seconds
        return not self._is_lost

    def check(self) -> None:
        if not self.is_held():
            raise LockLost("this process stood still or was cut off from etcd, and another one may have its place")

    async def touch(self) -> None:
        self.check()
        began = self._clock()
        try:
            async with asyncio.timeout(self._terms.holder_timeout_seconds):
                kept = await self._client.keep_lease(self.number)
        except (TimeoutError, EtcdUnavailable):
            return  # it may still be renewed in time; else it is lost by the clock
        if not kept:
            self.give_up()
        self.check()
        self._touched_at = began

    def give_up(self) -> None:
        """Count the lock as lost."""
        self._is_lost = True
