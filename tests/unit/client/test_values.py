"""Objects, associations and lists: lazily decoded, immutable, comparable."""

from __future__ import annotations

import pytest

from tao.client import Assoc, AssocList, Object, ProtocolError
from tao.client.values import Accepted
from tao.model.edge_block import COMPLETE, LIMIT_CUT, encode_block
from tao.model.graph import Edge
from tao.model.receipts import Receipt
from tao.model.tokens import WriteToken
from tao.schema.codec import decode_fields, encode_fields
from tao.schema.types import FieldValue, GraphType
from tests.unit.client.fakes import SCHEMA

USER = SCHEMA.otype("user")
FOLLOWS = SCHEMA.atype("follows")
ALICE = encode_fields(USER, {"name": "Alice"})


def edges(*id2s: int, flags: int = COMPLETE) -> AssocList:
    notify = encode_fields(FOLLOWS, {"notify": True})
    block = encode_block(1, 400, [Edge(id2, id2 * 10, notify) for id2 in id2s], flags)
    return AssocList(1, FOLLOWS, block)


def test_fields_are_decoded_once_on_first_access(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counting(kind: GraphType, data: bytes) -> dict[str, FieldValue | None]:
        decoded.append(data)
        return decode_fields(kind, data)

    monkeypatch.setattr("tao.client.values.decode_fields", counting)
    alice = Object(7, USER, ALICE)
    assert (alice.id, alice.otype, decoded) == (7, "user", [])
    assert alice.fields is alice.fields
    assert dict(alice.fields) == {"name": "Alice", "home": ""}
    assert decoded == [ALICE]
    followed = edges(*range(100, 0, -1))
    assert [each.id2 for each in followed] == list(range(100, 0, -1))
    assert followed[3].fields["notify"] is True
    assert len(decoded) == 2


def test_values_cannot_be_changed() -> None:
    alice = Object(7, USER, ALICE)
    with pytest.raises(AttributeError):
        alice.id = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        alice.fields["name"] = "Bob"  # type: ignore[index]
    with pytest.raises(AttributeError):
        edges(1)[0].time = 3  # type: ignore[misc]


def test_objects_with_equal_id_type_and_fields_are_equal() -> None:
    alice = Object(7, USER, ALICE)
    assert alice == Object(7, USER, encode_fields(USER, {"name": "Alice", "home": ""}))
    assert hash(alice) == hash(Object(7, USER, ALICE))
    assert alice != Object(7, USER, b"")
    assert alice != Object(8, USER, ALICE)
    assert alice != Object(7, SCHEMA.otype("page"), ALICE)
    assert alice != "alice"
    edge = Assoc(1, FOLLOWS, 2, 3)
    assert edge == Assoc(1, FOLLOWS, 2, 3, encode_fields(FOLLOWS, {"notify": False}))
    assert len({edge, Assoc(1, FOLLOWS, 2, 3), Assoc(1, FOLLOWS, 2, 4)}) == 2
    assert edge != (1, 2)


def test_a_receipt_is_printed_as_its_id_without_the_proof() -> None:
    async def wait(_: Accepted, __: float | None) -> WriteToken:
        raise AssertionError("nobody waits")

    receipt = Accepted(Receipt("follower-1b", "the-journal", 17, b"the-proof").encoded(), (3,), wait)
    assert f"{receipt} {receipt!r}" == "<Receipt follower-1b/17> <Receipt follower-1b/17>"


def test_a_list_is_a_sequence_with_columns() -> None:
    followed = edges(5, 4, 3)
    assert (len(followed), followed.id2s, followed.times) == (3, [5, 4, 3], [50, 40, 30])
    assert (followed.id1, followed.atype, followed.list_count, followed.limit_cut) == (1, "follows", 400, False)
    assert followed[-1] == followed[2]
    assert followed[:2] == [followed[0], followed[1]]
    assert followed == edges(5, 4, 3)
    assert followed == list(followed)
    assert followed != edges(5, 4)
    assert followed != 5
    assert edges(5, flags=LIMIT_CUT).limit_cut


def test_the_representation_of_a_value_shows_its_content() -> None:
    assert repr(Object(7, USER, ALICE)) == "Object(id=7, otype='user', fields={'name': 'Alice', 'home': ''})"
    edge = "Assoc(id1=1, atype='follows', id2=5, time=50, fields={'notify': True})"
    assert repr(edges(5)) == f"AssocList([{edge}])"


@pytest.mark.parametrize("block", [b"", b"x" * 23, b"x" * 24, encode_block(1, 1, [Edge(1, 1)], 0)[:-1]])
def test_bytes_that_are_no_edge_block_are_a_protocol_error(block: bytes) -> None:
    with pytest.raises(ProtocolError):
        AssocList(1, FOLLOWS, block)
