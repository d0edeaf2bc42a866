"""Which writes a journal enters: those of types whose lists are bounded."""

from __future__ import annotations

import pytest

from tao.journal.commutativity import commuting_write
from tao.model.edge_states import State
from tao.model.errors import NotCommutative
from tao.schema.registry import load_schema
from tao.wire.v1 import session_pb2 as pb

PINS, NOW_US = 1, 1_750_000_000_000_000
BOUNDED = load_schema(
    """
format: 1
objects: {user: {number: 1}}
associations:
  pins: {number: 1, max_edges: 2, states: {archived: 11, removed: 12}}
""",
    "schema.yaml",
)


@pytest.mark.parametrize(
    "write",
    [
        pb.Write(assoc_add=pb.AssocAdd(id1=1, atype=PINS, id2=2, time=1)),
        pb.Write(assoc_merge=pb.AssocMerge(id1=1, atype=PINS, id2=2, has_payload=True, time=1)),
        pb.Write(assoc_merge=pb.AssocMerge(id1=1, atype=PINS, id2=2, has_payload=True, state_us=NOW_US)),
    ],
)
def test_an_add_that_a_full_list_would_refuse_later_is_not_accepted(write: pb.Write) -> None:
    with pytest.raises(NotCommutative, match="'pins' has max_edges"):
        commuting_write(write, BOUNDED, lambda: NOW_US)


@pytest.mark.parametrize(
    "write",
    [
        pb.Write(assoc_delete=pb.AssocDelete(id1=1, atype=PINS, id2=2)),
        pb.Write(assoc_merge=pb.AssocMerge(id1=1, atype=PINS, id2=2, state=State.NORMAL)),
        pb.Write(assoc_merge=pb.AssocMerge(id1=1, atype=PINS, id2=2, state=State.ARCHIVED)),
    ],
)
def test_an_operation_that_needs_no_room_is_accepted(write: pb.Write) -> None:
    assert commuting_write(write, BOUNDED, lambda: NOW_US).assoc_merge.state_us == NOW_US
