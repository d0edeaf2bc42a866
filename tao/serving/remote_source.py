"""Fetch misses from another cache server: a follower from its leader, a leader from the master region's leader.

The misses of one tick travel in one message, whose answer serves all of them in one pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tao.model.edge_block import check_block
from tao.model.errors import DatabaseDown, InternalError, NotMine, ProtocolError, TaoError, Unavailable
from tao.model.graph import COUNT_VALUE_BYTES, OBJECT_HEADER_BYTES
from tao.model.queries import CountQuery, Fetched, ObjectQuery, Query, shard_of
from tao.model.topology import CacheServer
from tao.serving.configuration import ServerContext
from tao.serving.fetch_source import Take, TickBatcher, deliver
from tao.wire.convert import error_from_pb
from tao.wire.links import LinksPort
from tao.wire.read_batch import encode_queries
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Batches and attempts of requests to the server above."""

    max_batch_queries: int = 512
    """Most queries in one message to a leader: an answer with so many lists stays well below the largest frame."""

    max_attempts: int = 6
    """Most attempts of one fetch while the leader does not own the shard yet, or cannot be reached."""

    first_pause_seconds: float = 0.05
    """Pause before the second attempt; it doubles. A leader takes its shards within a few hundred milliseconds of the
    topology that gives them to it, and the six attempts span a second and a half."""


class _Asked(msgspec.Struct):
    query: Query
    shard: int
    minimum: int
    critical: bool
    until: float
    take: Take
    attempt: int = 1
    is_answered: bool = False  # this attempt; the next one is another `_Asked`


class RemoteSource:
    """A `FetchSource` that asks other cache servers."""

    def __init__(
        self,
        context: ServerContext,
        locate: Callable[[int], CacheServer],
        settings: RemoteSettings,
        *,
        gives_up: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """``locate`` maps a shard to the server to ask, by the topology that is current when it is called.
        ``gives_up`` returns true for a shard for which a failed request is not repeated."""
        self._configuration: Final = context.configuration
        self._locate: Final = locate
        self._links: Final[LinksPort] = context.links
        self._spawn: Final = context.spawn_as("repeated fetch")
        self._settings: Final = settings
        self._budget: Final = context.budget
        self._gives_up: Final = gives_up
        self._now: Final = asyncio.get_running_loop().time
        self._gathering: TickBatcher[tuple[CacheServer, bool], _Asked] = TickBatcher(
            self._ask_leader, settings.max_batch_queries
        )

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """Fetch one query; all attempts together take at most ``timeout_seconds``. See
        `tao.serving.fetch_source.FetchSource`."""
        self._ask(_Asked(query, shard_of(query), minimum, critical, self._now() + timeout_seconds, take))

    def _ask(self, asked: _Asked) -> None:
        try:
            leader = self._locate(asked.shard)
        except TaoError as error:
            deliver(asked.take, error)
        else:
            self._gathering.add((leader, asked.critical), asked)

    def _ask_leader(self, to: tuple[CacheServer, bool], asked: list[_Asked]) -> None:
        leader, critical = to
        # The request's batch is filled in place, because protobuf copies a message that is assigned to a field.
        request = pb.Request(topology_version=self._configuration.routes.version)
        order = encode_queries([(one.query, one.minimum) for one in asked], request.read)
        if critical:
            request.read.critical = True
        by_slot = [asked[index] for index in order]
        timeout_seconds = max(one.until for one in asked) - self._now()
        self._links.to(leader).send(request, timeout_seconds, lambda answer: self._take(by_slot, answer))

    def _take(self, by_slot: Sequence[_Asked], answer: pb.Answer) -> None:
        if answer.HasField("error"):
            error = error_from_pb(answer.error)
            for one in by_slot:
                self._fail(one, error)
            return
        # Protobuf creates a sub-message that is merely read, so only fields with content are read.
        read = answer.read
        if values := read.values:
            self._budget.earn(len(values))
            epochs = dict(zip(read.epoch_shards, read.version_epochs, strict=False))
            missed, served_by = set(read.missed_slots), read.served_by
            slots: Sequence[int] = read.slots or range(len(values))
            for slot, value in zip(slots, values, strict=False):
                one = by_slot[slot]
                if not one.is_answered:
                    one.is_answered = True
                    origin = served_by if slot in missed else "leader"
                    wrong = _fault_of(one.query, value)
                    deliver(one.take, wrong or Fetched(value, epochs.get(one.shard, 0), origin))
        if failed := read.failed_slots:
            for slot, failure in zip(failed, read.errors, strict=False):
                self._fail(by_slot[slot], error_from_pb(failure))
        if not answer.more:
            for one in by_slot:
                if not one.is_answered:
                    self._fail(one, ProtocolError("the leader's answer lacks a value for a query"))

    def _fail(self, asked: _Asked, error: TaoError) -> None:
        if asked.is_answered:
            return
        asked.is_answered = True
        # The leader knows that the database is down; a repeated request brings it back no sooner.
        if isinstance(error, NotMine | Unavailable) and not isinstance(error, DatabaseDown):
            now, settings = self._now(), self._settings
            pause_seconds = settings.first_pause_seconds * 2 ** (asked.attempt - 1)
            # Also when the leader is known to be down by now: the caller may have another source to ask.
            gone = self._gives_up(asked.shard) or now + pause_seconds >= asked.until
            if not gone and asked.attempt < settings.max_attempts and self._budget.spend(now):
                try:
                    self._spawn(self._ask_again(asked, pause_seconds))
                except TaoError as refused:
                    error = refused
                else:
                    return
        deliver(asked.take, error)

    async def _ask_again(self, asked: _Asked, pause_seconds: float) -> None:
        await asyncio.sleep(pause_seconds)
        try:
            await self._configuration.refresh()
        except Exception as error:
            # A bug there must not leave a fetch that never finishes; the failed task is logged.
            deliver(asked.take, InternalError(f"{type(error).__name__} in a fetch; see the server's log"))
            raise
        self._ask(msgspec.structs.replace(asked, attempt=asked.attempt + 1, is_answered=False))


def _fault_of(query: Query, value: bytes) -> ProtocolError | None:
    """Return what is wrong with a leader's value, or None. It is checked before the value is cached, because an invalid
    value would fail every batch that asks for it."""
    if isinstance(query, ObjectQuery):
        if len(value) < OBJECT_HEADER_BYTES:
            return ProtocolError(f"the leader's object has {len(value)} bytes, fewer than {OBJECT_HEADER_BYTES}")
    elif isinstance(query, CountQuery):
        if len(value) != COUNT_VALUE_BYTES:
            return ProtocolError(f"the leader's count has {len(value)} bytes instead of {COUNT_VALUE_BYTES}")
    else:
        try:
            check_block(value)
        except ProtocolError as error:
            return error
    return None
