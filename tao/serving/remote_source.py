"""Misses that go to another cache server: a follower's to its leader, a leader's to the master region's (DESIGN.md §5,
§8). Those of one tick travel in one message, whose answer serves all of them in one pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tao.model.edge_block import check_block
from tao.model.errors import DatabaseDown, InternalError, NotMine, ProtocolError, TaoError, Unavailable
from tao.model.graph import COUNT_VALUE_BYTES, OBJECT_HEADER_BYTES
from tao.model.queries import CountQuery, Fetched, ObjectQuery, Query, shard_of
from tao.model.topology import CacheServer
from tao.routing.retry_budget import RetryBudget
from tao.serving.columns import put_queries
from tao.serving.configuration import Configuration
from tao.serving.fill_source import Take, give
from tao.serving.gathering import Gathering
from tao.serving.links import LinksPort
from tao.wire.convert import error_from_pb
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How the server above is asked."""

    max_batch_queries: int = 512
    """Queries in one message to a leader: an answer of so many lists stays well below the largest frame."""

    max_attempts: int = 6
    """Tries of one fill while the leader says that it does not own the shard (yet) or cannot be reached."""

    first_pause_seconds: float = 0.05
    """Pause before the second try; it doubles. A leader takes its shards within a few hundred milliseconds of
    the topology that gives them to it, and the six tries span a second and a half."""


class _Asked(msgspec.Struct):
    query: Query
    shard: int
    minimum: int
    critical: bool
    until: float
    take: Take
    attempt: int = 1
    is_answered: bool = False  # it, and the next attempt is another one


class RemoteSource:
    """A `FillSource` over links."""

    def __init__(
        self,
        configuration: Configuration,
        locate: Callable[[int], CacheServer],
        links: LinksPort,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: RemoteSettings,
        budget: RetryBudget,
        gives_up: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """``locate``: shard → whom to ask, by the configuration as it is then. ``budget``: of all that this server asks
        again. ``gives_up``: whether asking for a shard that could not be had is not worth repeating."""
        self._configuration: Final = configuration
        self._locate: Final = locate
        self._links: Final = links
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._budget: Final = budget
        self._gives_up: Final = gives_up
        self._now: Final = asyncio.get_running_loop().time
        self._gathering: Gathering[tuple[CacheServer, bool], _Asked] = Gathering(
            self._ask_leader, settings.max_batch_queries
        )

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """As `tao.serving.fill_source.FillSource`; all attempts together within ``timeout_seconds``."""
        self._ask(_Asked(query, shard_of(query), minimum, critical, self._now() + timeout_seconds, take))

    def _ask(self, asked: _Asked) -> None:
        try:
            leader = self._locate(asked.shard)
        except TaoError as error:
            give(asked.take, error)
        else:
            self._gathering.add((leader, asked.critical), asked)

    def _ask_leader(self, to: tuple[CacheServer, bool], asked: list[_Asked]) -> None:
        leader, critical = to
        # Filled in place: a batch that is given to a message is copied.
        request = pb.Request(topology_version=self._configuration.routes.version)
        order = put_queries([(one.query, one.minimum) for one in asked], request.read)
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
        # A field that is merely looked at is made for it: so only those that say something are.
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
                    give(one.take, wrong or Fetched(value, epochs.get(one.shard, 0), origin))
        if failed := read.failed_slots:
            for slot, failure in zip(failed, read.errors, strict=False):
                self._fail(by_slot[slot], error_from_pb(failure))
        if not answer.more:
            for one in by_slot:
                if not one.is_answered:
                    self._fail(one, ProtocolError("the leader's answer is over and lacks a query"))

    def _fail(self, asked: _Asked, error: TaoError) -> None:
        if asked.is_answered:
            return
        asked.is_answered = True
        # The leader knows of a database that is down; asking it again brings that back no sooner.
        if isinstance(error, NotMine | Unavailable) and not isinstance(error, DatabaseDown):
            now, settings = self._now(), self._settings
            pause_seconds = settings.first_pause_seconds * 2 ** (asked.attempt - 1)
            # Also when the leader is known to be away by now: whoever asks may have another way to go.
            gone = self._gives_up(asked.shard) or now + pause_seconds >= asked.until
            if not gone and asked.attempt < settings.max_attempts and self._budget.spend(now):
                try:
                    self._spawn(self._ask_again(asked, pause_seconds))
                except TaoError as refused:
                    error = refused
                else:
                    return
        give(asked.take, error)

    async def _ask_again(self, asked: _Asked, pause_seconds: float) -> None:
        await asyncio.sleep(pause_seconds)
        try:
            await self._configuration.refresh()
        except Exception as error:
            # A bug there must not leave a flight that never lands; the task's end is logged.
            give(asked.take, InternalError(f"{type(error).__name__} in a fill; see the server's log"))
            raise
        self._ask(msgspec.structs.replace(asked, attempt=asked.attempt + 1, is_answered=False))


def _fault_of(query: Query, value: bytes) -> ProtocolError | None:
    """Asked once, before it is kept: a value that is none would fail every batch that asks for it."""
    if isinstance(query, ObjectQuery):
        if len(value) < OBJECT_HEADER_BYTES:
            return ProtocolError(f"an object has at least {OBJECT_HEADER_BYTES} bytes, the leader's {len(value)}")
    elif isinstance(query, CountQuery):
        if len(value) != COUNT_VALUE_BYTES:
            return ProtocolError(f"a count value has {COUNT_VALUE_BYTES} bytes, the leader's {len(value)}")
    else:
        try:
            check_block(value)
        except ProtocolError as error:
            return error
    return None
