"""Misses that go to another cache server: a follower's to its leader, a leader's to the master region's (DESIGN.md §5,
§8). Those of one tick travel in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.edge_block import check_block
from tao.model.errors import DatabaseDown, NotMine, ProtocolError, TaoError, Unavailable
from tao.model.graph import COUNT_VALUE_BYTES, OBJECT_HEADER_BYTES
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import CountQuery, Fetched, ObjectQuery, Query
from tao.model.topology import CacheServer
from tao.routing.retry_budget import RetryBudget
from tao.serving.columns import put_queries
from tao.serving.configuration import Configuration
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


@dataclass(slots=True)
class _Asked:
    query: Query
    minimum: int
    critical: bool
    timeout_seconds: float
    answer: asyncio.Future[Fetched]


class RemoteSource:
    """A `FillSource` over links."""

    def __init__(
        self,
        configuration: Configuration,
        locate: Callable[[int], CacheServer],
        links: LinksPort,
        settings: RemoteSettings,
        budget: RetryBudget,
        gives_up: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """``locate``: shard → whom to ask, by the configuration as it is then. ``budget``: of all that this server asks
        again. ``gives_up``: whether asking for a shard
        that could not be had is not worth repeating."""
        self._configuration: Final = configuration
        self._locate: Final = locate
        self._links: Final = links
        self._settings: Final = settings
        self._budget: Final = budget
        self._gives_up: Final = gives_up
        self._gathering: Gathering[tuple[CacheServer, bool], _Asked] = Gathering(
            self._ask_leader, settings.max_batch_queries
        )

    async def fetch(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        """As `tao.serving.fills.FillSource`; all attempts together within ``timeout_seconds``."""
        shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_seconds
        pause = self._settings.first_pause_seconds
        for attempt in range(1, self._settings.max_attempts + 1):
            leader = self._locate(shard)
            answer: asyncio.Future[Fetched] = loop.create_future()
            self._gathering.add((leader, critical), _Asked(query, minimum, critical, until - loop.time(), answer))
            try:
                fetched = await answer
            except DatabaseDown:
                raise  # the leader knows; asking it again brings the database back no sooner
            except (NotMine, Unavailable):
                # Also when the leader is known to be away by now: whoever asks may have another way to go.
                gone = self._gives_up(shard) or loop.time() + pause >= until
                if gone or attempt == self._settings.max_attempts or not self._budget.spend(loop.time()):
                    raise
            else:
                self._budget.earn()
                return fetched
            await asyncio.sleep(pause)
            pause *= 2
            await self._configuration.refresh()
        raise AssertionError("the last attempt returns or raises")

    def _ask_leader(self, to: tuple[CacheServer, bool], asked: list[_Asked]) -> None:
        leader, critical = to
        # Filled in place: a batch that is given to a message is copied.
        request = pb.Request(topology_version=self._configuration.routes.version)
        order = put_queries([(one.query, one.minimum) for one in asked], request.read)
        if critical:
            request.read.critical = True
        by_slot = [asked[index] for index in order]
        timeout_seconds = max(one.timeout_seconds for one in asked)
        self._links.to(leader).send(request, timeout_seconds, lambda answer: _take(by_slot, answer))


def _take(by_slot: Sequence[_Asked], answer: pb.Answer) -> None:
    if answer.HasField("error"):
        error = error_from_pb(answer.error)
        for one in by_slot:
            _fail(one, error)
        return
    # A field that is merely looked at is made for it: so only those that say something are.
    read = answer.read
    if values := read.values:
        epochs = dict(zip(read.epoch_shards, read.version_epochs, strict=False))
        missed, served_by = set(read.missed_slots), read.served_by
        slots: Sequence[int] = read.slots or range(len(values))
        for slot, value in zip(slots, values, strict=False):
            one = by_slot[slot]
            shard = (one.query.id if isinstance(one.query, ObjectQuery) else one.query.id1) >> SHARD_SHIFT
            if not one.answer.done():
                try:
                    _check(one.query, value)
                except ProtocolError as error:
                    _fail(one, error)
                    continue
                origin = served_by if slot in missed else "leader"
                one.answer.set_result(Fetched(value, epochs.get(shard, 0), origin))
    if failed := read.failed_slots:
        for slot, failure in zip(failed, read.errors, strict=False):
            _fail(by_slot[slot], error_from_pb(failure))
    if not answer.more:
        for one in by_slot:
            if not one.answer.done():
                _fail(one, ProtocolError("the leader's answer is over and lacks a query"))


def _check(query: Query, value: bytes) -> None:
    """Once, before it is kept: a value that is none would fail every batch that asks for it. Raises `ProtocolError`."""
    if isinstance(query, ObjectQuery):
        if len(value) < OBJECT_HEADER_BYTES:
            raise ProtocolError(f"an object has at least {OBJECT_HEADER_BYTES} bytes, the leader's {len(value)}")
    elif isinstance(query, CountQuery):
        if len(value) != COUNT_VALUE_BYTES:
            raise ProtocolError(f"a count value has {COUNT_VALUE_BYTES} bytes, the leader's {len(value)}")
    else:
        check_block(value)


def _fail(one: _Asked, error: TaoError) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
        one.answer.exception()  # whoever asked may be gone
