"""Batches of one tick: a destination whose batch cannot be sent costs no other one its batch."""

from __future__ import annotations

import pytest

from tao.model.errors import NotMine
from tao.serving.sources import TickBatcher
from tests.rigs.pacing import quiet


class Batches:
    """What a batcher has sent and failed. Batches for ``refusals`` raise the error there."""

    def __init__(self, max_items: int = 100) -> None:
        self.sent: list[tuple[str, list[int]]] = []
        self.failed: list[tuple[str, list[int], Exception]] = []
        self.refusals: dict[str, Exception] = {}
        self.batcher: TickBatcher[str, int] = TickBatcher(self._send, self._fail, max_items)

    def _send(self, destination: str, items: list[int]) -> None:
        if destination in self.refusals:
            raise self.refusals[destination]
        self.sent.append((destination, items))

    def _fail(self, destination: str, items: list[int], error: Exception) -> None:
        self.failed.append((destination, items, error))


@pytest.mark.parametrize("error", [NotMine("moving", 7), ValueError("a bug")])
async def test_a_batch_that_cannot_be_sent_fails_and_the_others_are_sent(error: Exception) -> None:
    batches = Batches()
    batches.refusals["b"] = error
    for number, destination in enumerate("abcab"):
        batches.batcher.add(destination, number)
    await quiet()
    assert batches.sent == [("a", [0, 3]), ("c", [2])]
    assert batches.failed == [("b", [1, 4], error)]
    batches.refusals.clear()
    batches.batcher.add("b", 5)
    await quiet()
    assert batches.sent[2:] == [("b", [5])], "the next tick begins anew"


async def test_a_full_batch_that_cannot_be_sent_fails_without_an_error_for_whoever_completed_it() -> None:
    batches = Batches(max_items=2)
    batches.refusals["a"] = error = NotMine("moving", 7)
    batches.batcher.add("a", 0)
    batches.batcher.add("b", 1)
    batches.batcher.add("a", 2)
    assert batches.failed == [("a", [0, 2], error)]
    await quiet()
    assert batches.sent == [("b", [1])]
