"""Write tokens on the wire: what a leader says a write has reached, and what the unary methods make of it."""

from __future__ import annotations

from typing import Any

import pytest

from tao.model.changes import (
    ListChange,
    ListInvalidation,
    ObjectChange,
    ObjectInvalidation,
    ShardInvalidation,
    ShardMessages,
)
from tao.model.errors import InvalidArgument
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import WriteToken
from tao.model.writes import WriteOutcome
from tao.wire.convert import outcome_to_pb, token_of
from tao.wire.unary import UnaryMethod, unary_methods
from tao.wire.v1 import graph_pb2 as graph
from tao.wire.v1 import session_pb2 as pb

METHODS: dict[str, UnaryMethod] = {method.name: method for method in unary_methods(lambda: 0)}
FAR = 3 << SHARD_SHIFT | 9
TOKEN = WriteToken([(FAR, 0, 6), (FAR, 4, 8)])

LISTS: list[tuple[str, Any, dict[str, Any]]] = [
    ("AssocGet", graph.AssocGetRequest, {"id2s": [1]}),
    ("AssocCount", graph.AssocCountRequest, {}),
    ("AssocRange", graph.AssocRangeRequest, {"limit": 5}),
    ("AssocTimeRange", graph.AssocTimeRangeRequest, {"limit": 5}),
]


def asked(name: str, kind: Any, fields: dict[str, Any], after: str) -> pb.ReadBatch:
    named = {"id": FAR} if name == "ObjGet" else {"id1": FAR, "atype": 4}
    return METHODS[name].to_request(kind(after=after, **named, **fields)).read


EVERY_READ = pytest.mark.parametrize(("name", "kind", "fields"), [("ObjGet", graph.ObjGetRequest, {}), *LISTS])


def test_a_result_names_what_the_write_has_reached_on_both_sides() -> None:
    messages = [
        ShardMessages(0, 1, (ObjectChange(1, 4, 5, 1, b""), ListChange(2, 3, 6, 7, 1))),
        ShardMessages(3, 1, (ListChange(FAR, 4, 0, 8, 1), ListInvalidation(FAR, 4, 7), ObjectInvalidation(FAR, 6))),
    ]
    result = outcome_to_pb(WriteOutcome(found=True), messages)
    assert token_of([result]) == WriteToken([(1, 0, 5), (2, 3, 7), (FAR, 4, 8), (FAR, 0, 6)])


def test_what_has_no_version_is_not_named() -> None:
    messages = [ShardMessages(0, 1, (ListInvalidation(1, 2, 0), ShardInvalidation(0)))]
    assert not token_of([outcome_to_pb(WriteOutcome(), messages)])


@pytest.mark.parametrize("name", ["ObjAdd", "ObjUpdate", "ObjDelete", "AssocAdd", "AssocDelete", "AssocChangeType"])
def test_every_unary_write_returns_its_token(name: str) -> None:
    result = pb.WriteResult(id=FAR, found=True, changed_ids=[FAR], changed_atypes=[4], changed_versions=[8])
    reply: Any = METHODS[name].to_reply(pb.Answer(write=pb.WriteAnswer(results=[result])))
    assert WriteToken.from_text(reply.token) == WriteToken([(FAR, 4, 8)])


def test_a_unary_write_that_found_nothing_has_no_token() -> None:
    reply: Any = METHODS["ObjDelete"].to_reply(pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult()])))
    assert reply.token == ""


@EVERY_READ
def test_every_unary_read_is_held_to_its_token(name: str, kind: Any, fields: dict[str, Any]) -> None:
    batch = asked(name, kind, fields, TOKEN.text())
    assert (list(batch.minimum_slots), list(batch.minimum_versions)) == ([0], [6 if name == "ObjGet" else 8])
    assert not batch.critical


@EVERY_READ
def test_a_shard_that_the_token_cannot_name_is_read_critically(name: str, kind: Any, fields: dict[str, Any]) -> None:
    batch = asked(name, kind, fields, WriteToken([(FAR, 4, 8)], shards=[3]).text())
    assert batch.critical
    assert not batch.minimum_slots


@EVERY_READ
@pytest.mark.parametrize("after", ["", WriteToken([(1, 0, 2), (FAR, 5, 1)], shards=[2]).text()])
def test_without_a_word_on_its_key_a_read_asks_for_nothing(
    name: str, kind: Any, fields: dict[str, Any], after: str
) -> None:
    batch = asked(name, kind, fields, after)
    assert not batch.critical
    assert not batch.minimum_slots


@EVERY_READ
def test_garbage_is_refused(name: str, kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="token"):
        asked(name, kind, fields, "garbage")
