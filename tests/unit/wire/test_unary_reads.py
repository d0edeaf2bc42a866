"""What unary reads may ask for besides their query reaches the batch."""

from __future__ import annotations

from typing import Any

import pytest

from tao.wire.unary import unary_methods
from tao.wire.v1 import graph_pb2 as graph

READS = (
    ("ObjGet", graph.ObjGetRequest, {"id": 7}),
    ("AssocGet", graph.AssocGetRequest, {"id1": 7, "atype": 4, "id2s": [8]}),
    ("AssocCount", graph.AssocCountRequest, {"id1": 7, "atype": 4}),
    ("AssocRange", graph.AssocRangeRequest, {"id1": 7, "atype": 4, "limit": 5}),
    ("AssocTimeRange", graph.AssocTimeRangeRequest, {"id1": 7, "atype": 4, "limit": 5}),
)


@pytest.mark.parametrize(("name", "kind", "fields"), READS, ids=[name for name, _, _ in READS])
def test_every_unary_read_takes_a_bound_on_staleness(name: str, kind: Any, fields: dict[str, Any]) -> None:
    method = next(each for each in unary_methods(lambda: 0) if each.name == name)
    assert method.to_request(kind(**fields, max_staleness_ms=9)).read.max_staleness_ms == 9
    assert method.to_request(kind(**fields)).read.max_staleness_ms == 0
