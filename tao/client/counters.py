"""Counters of objects: add to them, and read them.

What is added to one counter in one tick of the event loop travels as one addition, and the reads of a tick as one
message per server. Both go to the home follower of the object's shard, so a reader sees what was added in this tier,
also what that follower has not written yet."""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple, Unpack

from tao.client.consistency import Consistency, Freshness, from_keywords
from tao.client.jobs import JobOperations
from tao.client.operations import PRIORITY, all_or_raise
from tao.client.server_queues import ServerQueue, WriteRow
from tao.client.validation import check_id, check_items, check_number, shard_in
from tao.client.values import Counter
from tao.model.counters import MAX_BY
from tao.model.errors import (
    AnswerFull,
    Fenced,
    InvalidArgument,
    NotCommutative,
    NotMine,
    ProtocolError,
    StaleRead,
    TaoError,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT
from tao.wire.convert import error_from_pb
from tao.wire.v1 import session_pb2 as pb

_MAX_ASKED: Final = 6_000
"""Counters in one request."""
_ATTEMPTS: Final = 4
"""How often counters are asked for of which none is answered. An attempt that answers some does not count."""
_FIRST_PAUSE_SECONDS: Final = 0.02
_ASKED_AGAIN: Final = (AnswerFull, Fenced, NotMine, StaleRead, Unavailable)

CounterKey = tuple[int, int]


class _Addition:
    """What is added to one counter in this tick, and who waits for that."""

    __slots__ = ("by", "done", "waiters")

    def __init__(self, done: asyncio.Future[pb.WriteResult]) -> None:
        self.by = 0
        self.done: Final = done
        # Each caller has a future of its own: one that gives up must not cancel what the others wait for.
        self.waiters: Final[list[asyncio.Future[None]]] = []
        done.add_done_callback(self._tell)

    def _tell(self, done: asyncio.Future[pb.WriteResult]) -> None:
        error = done.exception()
        for waiter in self.waiters:
            if waiter.done():
                continue  # it has given up
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


class _Asked(NamedTuple):
    """A counter that is read, and who waits for it."""

    key: CounterKey
    found: asyncio.Future[Counter]


class CounterOperations(JobOperations):
    """The counters of a graph."""

    _additions: dict[CounterKey, _Addition]
    _counters_asked: dict[tuple[bool, int], list[_Asked]]
    _counter_tasks: set[asyncio.Task[None]]

    async def counter_add(self, id: int, counter: str, by: int = 1) -> None:
        """Add to a counter of an object, or take away (``by`` below 0). ``counter`` is the name in the schema:
        ``views``, or ``post.views`` where several object types have one. The object is not looked up.

        A follower counts it in memory and writes it within the counter's ``flush_seconds``; a crash of the follower
        loses what it has not written. Raises `Overloaded` when the follower holds too many counters,
        `OutcomeUnknown` when it may or may not have counted, and `NotCommutative` in a block of `Graph.journaled`: a
        journal accepts no additions."""
        if PRIORITY.get():
            raise NotCommutative(
                "a journal accepts no counter_add: made twice, it would count twice. Add to the counter outside of "
                "journaled(); a follower counts in memory, also while the database is away"
            )
        key = self._counter_key(id, counter)
        if type(by) is not int or not -MAX_BY <= by <= MAX_BY:
            by = check_number(by, "by", -MAX_BY, MAX_BY)
        if not by:
            return
        addition = self._additions.get(key)
        if addition is not None and abs(addition.by + by) > MAX_BY:
            self._send_additions()
            addition = None
        if addition is None:
            if not self._additions:
                self._loop.call_soon(self._send_additions)
            addition = self._additions[key] = _Addition(self._create_future())
        addition.by += by
        waiter: asyncio.Future[None] = self._create_future()
        addition.waiters.append(waiter)
        await waiter

    async def counter_get(self, id: int, counter: str, **freshness: Unpack[Freshness]) -> Counter:
        """Return the value of a counter; 0 for one that nobody has added to. See `counter_add` for the name.

        ``max_behind_ms`` of the result is an upper bound on how long ago an addition may have been acknowledged that
        the value lacks, while followers reach their leaders; None: not known. Tokens of writes do not name additions,
        so ``after`` is refused."""
        (found,) = await self._read_counters([self._counter_key(id, counter)], freshness)
        if isinstance(found, TaoError):
            raise found
        return found

    async def counter_get_many(
        self, counters: Iterable[Sequence[Any]], **freshness: Unpack[Freshness]
    ) -> list[Counter]:
        """Do `counter_get` for each ``(id, counter)``. Raises `SomeFailed`."""
        keys = [self._counter_key(*item) for item in check_items(counters, 2, 2)]
        return all_or_raise(await self._read_counters(keys, freshness))

    async def _read_counters(self, keys: Sequence[CounterKey], freshness: Freshness) -> list[Counter | TaoError]:
        demand = (from_keywords(**freshness) if freshness else None) or self._consistency
        if demand.token is not None:
            raise InvalidArgument("counters are not read after a token: additions have none")
        if keys and not self._counters_asked:
            self._loop.call_soon(self._ask_for_counters)
        asked = [_Asked(key, self._create_future()) for key in keys]
        if asked:
            self._counters_asked.setdefault((demand.critical, demand.max_staleness_ms or 0), []).extend(asked)
        results: list[Counter | TaoError] = []
        for each in await asyncio.gather(*(each.found for each in asked), return_exceptions=True):
            if isinstance(each, BaseException) and not isinstance(each, TaoError):
                raise each
            results.append(each)
        return results

    def _counter_key(self, id: int, counter: str) -> CounterKey:
        if not isinstance(counter, str):
            raise InvalidArgument(f"counter must be the name of a counter, not {counter!r}")
        shard_in(self._builder.shards, check_id(id), "id")
        return id, self._builder.schema.counter(counter).number

    def _send_additions(self) -> None:
        additions, self._additions = self._additions, {}
        for (counted_id, number), addition in additions.items():
            if addition.by:
                write = pb.Write(counter_add=pb.CounterAdd(id=counted_id, atype=number, by=addition.by))
                row = WriteRow(counted_id >> SHARD_SHIFT, write)
                self._router.writer(row.shard).writes_with(0).add(row, addition.done)
            else:
                addition.done.set_result(pb.WriteResult())

    # ---- reads -----------------------------------------------------------------------------------------------------

    def _ask_for_counters(self) -> None:
        asked, self._counters_asked = self._counters_asked, {}
        for (critical, max_staleness_ms), entries in asked.items():
            demand = Consistency(critical=critical, max_staleness_ms=max_staleness_ms or None)
            try:
                by_server = self._by_server(entries)
            except TaoError as error:
                _fail_all(entries, error)
                continue
            # A task for each server: what one serves late delays nothing that another one has to be asked for again.
            for some in by_server.values():
                task = self._loop.create_task(self._ask_until_answered(demand, some))
                self._counter_tasks.add(task)
                task.add_done_callback(self._counter_tasks.discard)

    def _by_server(self, entries: Iterable[_Asked]) -> dict[ServerQueue, list[_Asked]]:
        """Return the counters by the server that is asked for them now. Raises as `Router.writer`."""
        by_server: dict[ServerQueue, list[_Asked]] = {}
        for each in entries:
            by_server.setdefault(self._router.writer(each.key[0] >> SHARD_SHIFT), []).append(each)
        return by_server

    def _close_counters(self) -> None:
        """End the reads of counters: each of them fails with `Unavailable`."""
        asked, self._counters_asked = self._counters_asked, {}
        _fail_all(chain.from_iterable(asked.values()), Unavailable("the graph was closed"))
        for task in self._counter_tasks:
            task.cancel()

    async def _ask_until_answered(self, demand: Consistency, entries: list[_Asked]) -> None:
        """Ask the servers of the counters. What one of them does not serve is asked for again, within the time of one
        operation."""
        waiting = entries
        error: Exception = Unavailable("the graph was closed")
        try:
            deadline = self._loop.time() + self._timeout_seconds
            attempt, pause_seconds = 1, _FIRST_PAUSE_SECONDS
            while waiting:
                failed = await self._ask_servers(demand, waiting, deadline)
                has_progressed = len(failed) < len(waiting)
                is_last = attempt >= _ATTEMPTS or self._loop.time() + pause_seconds >= deadline
                waiting = []
                for each, reason in failed:
                    if isinstance(reason, _ASKED_AGAIN) and (has_progressed or not is_last):
                        waiting.append(each)
                    else:
                        _fail_all([each], reason)
                if waiting and not has_progressed:
                    await asyncio.sleep(pause_seconds)
                    attempt += 1
                    pause_seconds *= 4
        except Exception as fault:
            error = fault
            raise
        finally:
            _fail_all(entries, error)

    async def _ask_servers(
        self, demand: Consistency, entries: list[_Asked], deadline: float
    ) -> list[tuple[_Asked, TaoError]]:
        """Ask for counters at their servers. Return those that failed, with their errors."""
        time_share = max(0.0, deadline - self._loop.time()) / self._timeout_seconds
        asking = [
            self._ask_server(demand, some[start : start + _MAX_ASKED], time_share)
            for some in self._by_server(entries).values()
            for start in range(0, len(some), _MAX_ASKED)
        ]
        return [each for found in await asyncio.gather(*asking) for each in found]

    async def _ask_server(
        self, demand: Consistency, batch: Sequence[_Asked], time_share: float
    ) -> list[tuple[_Asked, TaoError]]:
        """Ask for these counters at one server. Return those that failed, with their errors."""
        asked = pb.GetCounters(critical=demand.critical, max_staleness_ms=demand.max_staleness_ms or 0)
        for each in batch:
            asked.ids.append(each.key[0])
            asked.atypes.append(each.key[1])
        try:
            request = pb.Request(get_counters=asked)
            answer = await self._dispatcher.ask(batch[0].key[0] >> SHARD_SHIFT, request, time_share=time_share)
            values = answer.counter_values
            if not len(values.values) == len(values.max_behind_ms) == len(batch):
                raise ProtocolError(f"{len(batch)} counters were answered by {len(values.values)} values")
        except TaoError as error:
            return [(each, error) for each in batch]
        errors = dict(zip(values.failed_slots, map(error_from_pb, values.errors), strict=False))
        newest = max((each.topology_version for each in errors.values() if isinstance(each, NotMine)), default=0)
        if newest > self._router.version:
            with suppress(TaoError):
                await self._configuration.refresh(newest, self._router.writer(batch[0].key[0] >> SHARD_SHIFT))
        failed: list[tuple[_Asked, TaoError]] = []
        for slot, (each, value, behind_ms) in enumerate(zip(batch, values.values, values.max_behind_ms, strict=True)):
            if slot in errors:
                failed.append((each, errors[slot]))
            elif not each.found.done():
                each.found.set_result(Counter(value, behind_ms if behind_ms >= 0 else None))
        return failed


def _fail_all(entries: Iterable[_Asked], error: Exception) -> None:
    for each in entries:
        if not each.found.done():
            each.found.set_exception(error)
