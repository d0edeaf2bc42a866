"""The misses of one request: all of them are answered once, whatever becomes of what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tao.model.errors import InvalidArgument, TaoError, Unavailable
from tao.model.queries import Fetched, Query
from tao.serving.batch_settings import BatchSettings
from tao.serving.fills import Fills
from tao.serving.flights import Asker
from tao.serving.missed_slots import Misses
from tao.serving.read_batch import OPERATIONS
from tao.wire.identity import PeerIdentity
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import SCHEMA
from tests.rigs.pacing import until

VALUE = Fetched(b"\0" * 8 + b"value", 1, "database")


class Heard:
    """A `Reply` that keeps what is sent."""

    peer = PeerIdentity("", "")

    def __init__(self) -> None:
        self.answers: list[pb.Answer] = []
        self.closed = False

    def send(self, answer: pb.Answer) -> None:
        assert not self.is_whole, "an answer after the last one"
        self.answers.append(answer)

    def on_close(self, callback: object) -> None:
        """Nobody asks."""

    @property
    def is_whole(self) -> bool:
        return bool(self.answers) and not self.answers[-1].more

    @property
    def values(self) -> list[int]:
        return [slot for answer in self.answers for slot in answer.read.slots]

    @property
    def reasons(self) -> dict[int, str]:
        return {
            slot: error.reason
            for answer in self.answers
            for slot, error in zip(answer.read.failed_slots, answer.read.errors, strict=True)
        }


class Asked:
    """A batch of so many objects, none of which is cached. ``now``: what is answered at once, others wait."""

    def __init__(
        self,
        slots: int,
        *,
        now: Callable[[int], Fetched | TaoError | None] = lambda slot: None,
        at_once: int = 512,
        deadline_ms: int = 60_000,
    ) -> None:
        self.reply = Heard()
        self.waiting: dict[int, Asker] = {}
        self.begun: list[int] = []
        self.failures = [0] * len(OPERATIONS)
        self._slots = slots
        self._now = now
        self._settings = BatchSettings(max_misses_at_once=at_once)
        self._request = pb.Request(deadline_ms=deadline_ms, read=pb.ReadBatch(obj_ids=range(1, slots + 1)))

    def begin(self) -> Asked:
        settings = self._settings
        misses = Misses(cast(Fills, self), SCHEMA, lambda _: None, lambda _: 0.0, settings, self.failures)
        slots, sizes = list(range(self._slots)), (self._slots, 0, 0, 0, 0)
        misses.answer(self._request, sizes, slots, cast(Reply, self.reply), settings.max_answer_bytes)
        return self

    def answer(self, query: Query, minimum: int, asker: Asker, *, critical: bool) -> None:
        """In the place of `Fills.answer`."""
        slot = cast(Any, query).id - 1
        self.begun.append(slot)
        now = self._now(slot)
        if now is None:
            self.waiting[slot] = asker
        else:
            asker.take(now)


async def test_what_is_not_there_when_the_time_is_over_fails_and_is_given_up() -> None:
    asked = Asked(3, now=lambda slot: None if slot == 1 else VALUE, deadline_ms=20).begin()
    await until(lambda: asked.reply.is_whole)
    assert asked.reply.values == [0, 2]
    assert asked.reply.reasons == {1: "DEADLINE_EXCEEDED"}
    late = asked.waiting[1]
    assert late.gone
    late.take(VALUE)
    assert asked.reply.values == [0, 2]


async def test_slots_that_nobody_had_begun_fail_with_the_others() -> None:
    asked = Asked(3, at_once=1, deadline_ms=20).begin()
    await until(lambda: asked.reply.is_whole)
    assert asked.begun == [0]
    assert asked.reply.reasons == dict.fromkeys(range(3), "DEADLINE_EXCEEDED")


async def test_those_that_wait_for_their_turn_follow_whatever_became_of_the_one_before() -> None:
    asked = Asked(4, at_once=2).begin()
    assert asked.begun == [0, 1]
    asked.waiting[1].take(Unavailable("away"))
    assert asked.begun == [0, 1, 2]
    asked.waiting[2].take(VALUE)
    asked.waiting[0].take(VALUE)
    asked.waiting[3].take(VALUE)
    await until(lambda: asked.reply.is_whole)
    assert sorted(asked.reply.values) == [0, 2, 3]
    assert asked.reply.reasons == {1: "UNAVAILABLE"}
    assert asked.failures[0] == 1


@pytest.mark.parametrize("outcome", [VALUE, Unavailable("away")])
async def test_thousands_that_are_answered_at_once_follow_each_other_and_not_within_each_other(
    outcome: Fetched | TaoError,
) -> None:
    asked = Asked(5_000, now=lambda _: outcome, at_once=1).begin()
    await until(lambda: asked.reply.is_whole)
    assert len(asked.reply.values) + len(asked.reply.reasons) == 5_000


async def test_a_slot_is_answered_once_though_it_is_told_twice() -> None:
    asked = Asked(3, at_once=1).begin()
    first = asked.waiting[0]
    first.take(VALUE)
    first.take(Unavailable("again"))
    assert asked.begun == [0, 1], "nor is another one begun in its place"
    asked.waiting[1].take(VALUE)
    asked.waiting[2].take(VALUE)
    await until(lambda: asked.reply.is_whole)
    assert asked.reply.values == [0, 1, 2]
    assert asked.reply.reasons == {}


async def test_nothing_more_is_begun_for_a_peer_that_is_gone() -> None:
    asked = Asked(3, at_once=1).begin()
    asked.reply.closed = True
    assert asked.waiting[0].gone
    asked.waiting[0].take(VALUE)
    assert asked.begun == [0]


async def test_an_error_that_nobody_expects_ends_all_and_is_heard_of() -> None:
    def broken(slot: int) -> None:
        if slot == 2:
            raise RuntimeError("nobody expects this")

    asked = Asked(4, now=broken)
    with pytest.raises(RuntimeError, match="nobody expects this"):
        asked.begin()
    assert asked.reply.is_whole
    assert asked.reply.reasons == dict.fromkeys(range(4), "INTERNAL")
    assert asked.waiting[0].gone


async def test_what_no_query_may_ask_for_fails_alone() -> None:
    asked = Asked(2, now=lambda slot: VALUE if slot else InvalidArgument("no")).begin()
    await until(lambda: asked.reply.is_whole)
    assert asked.reply.values == [1]
    assert asked.reply.reasons == {0: "INVALID_ARGUMENT"}
