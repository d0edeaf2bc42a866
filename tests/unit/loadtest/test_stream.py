"""Answers to prepared messages are looked at slot by slot, in whatever parts they came."""

from __future__ import annotations

import pytest

from loadtest.dataset import Operation, Query
from loadtest.drivers import WrongAnswer
from loadtest.stream import checked
from tao.model.edge_block import empty_block, encode_block
from tao.model.errors import Overloaded
from tao.model.graph import Edge, encode_count
from tao.wire.convert import error_to_pb
from tao.wire.v1 import session_pb2 as pb

COUNT = encode_count(7, 3)
EDGE = encode_block(7, 1, [Edge(2, 9, b"")], 0)
NONE = empty_block(7)
QUERIES = [
    Query(Operation.ASSOC_COUNT, 1, expected=3),
    Query(Operation.ASSOC_RANGE, 2, limit=1000, expected=0),
    Query(Operation.ASSOC_RANGE, 3, limit=1000, expected=1),
]


async def look_at(answer: pb.ReadAnswer) -> int:
    async def ask(request: pb.Request, timeout_seconds: float) -> pb.Answer:
        return pb.Answer(read=answer)

    (batch,) = await checked(ask, [QUERIES], 5, 1)
    assert list(batch.read.range_id1s) == [2, 3]
    return batch.expected


async def test_an_answer_that_came_in_parts_is_put_in_order() -> None:
    whole = pb.ReadAnswer(values=[COUNT, NONE, EDGE])
    joined = pb.ReadAnswer(slots=[0, 2, 1], values=[COUNT, EDGE, NONE])
    assert await look_at(whole) == await look_at(joined) == len(COUNT + NONE + EDGE)


async def test_what_is_not_stored_and_what_is_not_answered_end_the_measurement() -> None:
    with pytest.raises(WrongAnswer, match=r"id=2.*answered with 1"):
        await look_at(pb.ReadAnswer(values=[COUNT, EDGE, NONE]))
    failed = pb.ReadAnswer(slots=[0, 1], values=[COUNT, NONE], failed_slots=[2])
    failed.errors.append(error_to_pb(Overloaded("too much at once")))
    with pytest.raises(WrongAnswer, match=r"(?s)id=3.*too much at once"):
        await look_at(failed)
