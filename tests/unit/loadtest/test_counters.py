"""`counters`: when the value of a counter under load is taken for its last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from loadtest import counters
from loadtest.counters import _Followers, _settled
from tao.client import Counter
from tao.model.errors import OperatorError


@dataclass
class FakeGraph:
    """Answers with one value after the other, and then with the last of them."""

    values: Sequence[int]
    truth: int
    asked: int = 0

    async def counter_get(self, _id: int, _counter: str, *, critical: bool = False) -> Counter:
        if critical:
            return Counter(self.truth, 0)
        self.asked += 1
        return Counter(self.values[min(self.asked, len(self.values)) - 1], 0)


@dataclass
class FakeFollowers:
    """Two followers, which write for the first looks at them."""

    graphs: Sequence[FakeGraph]
    looks: list[tuple[int, int]] = field(default_factory=list)

    async def stats(self) -> list[dict[str, Any]]:
        queued, under_way = self.looks.pop(0) if self.looks else (0, 0)
        return [{"queued": 0, "batches_under_way": 0}, {"queued": queued, "batches_under_way": under_way}]


async def settled(followers: FakeFollowers) -> int:
    return await _settled(cast(_Followers, followers))


async def test_followers_that_miss_as_much_of_each_other_do_not_agree_on_a_value() -> None:
    followers = FakeFollowers([FakeGraph([750, 750, 1_000], 1_000), FakeGraph([750, 1_000], 1_000)])
    assert await settled(followers) == 1_000
    assert [graph.asked for graph in followers.graphs] == [3, 3]


async def test_what_is_queued_or_under_way_is_waited_for() -> None:
    followers = FakeFollowers([FakeGraph([7], 7), FakeGraph([7], 7)], [(1, 0), (0, 1)])
    assert await settled(followers) == 7
    assert followers.looks == []


async def test_followers_that_never_agree_are_told_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_PATIENT_SECONDS", 0.2)
    with pytest.raises(OperatorError, match=r"do not agree on the value.*: \[1, 2, 3\]"):
        await settled(FakeFollowers([FakeGraph([1], 3), FakeGraph([2], 3)]))


async def test_a_lost_addition_is_a_value_and_no_wait() -> None:
    assert await settled(FakeFollowers([FakeGraph([999], 999), FakeGraph([999], 999)])) == 999
