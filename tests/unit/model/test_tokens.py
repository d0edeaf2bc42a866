"""Write tokens: what they promise, how they merge, what they refuse."""

from __future__ import annotations

import base64
import zlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tao.model.errors import InvalidArgument, StaleRead
from tao.model.graph import ListKey
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.tokens import (
    ANY_SHARD,
    MAX_KEYS,
    MAX_PENDING,
    MAX_PENDING_SHARDS,
    MAX_TEXT_BYTES,
    PendingInverse,
    PendingShard,
    WriteToken,
)

triples = st.tuples(st.integers(1, MAX_ID), st.integers(0, 65535), st.integers(0, 2**63 - 1))


@given(st.lists(triples, max_size=50), st.lists(st.integers(0, 65535), max_size=8))
def test_the_text_form_says_the_same_as_the_token(keys: list[tuple[int, int, int]], shards: list[int]) -> None:
    token = WriteToken(keys, shards)
    assert WriteToken.from_text(token.text()) == token
    assert len(token.text()) <= MAX_TEXT_BYTES


@given(st.lists(triples, max_size=60), st.lists(triples, max_size=60))
def test_a_merged_token_demands_at_least_what_each_demands(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]]
) -> None:
    merged = WriteToken(first).merged(WriteToken(second))
    for key, atype, version in [*first, *second]:
        held = merged.minimum_of_list(ListKey(key, atype)) if atype else merged.minimum_of_object(key)
        assert held >= version or merged.is_critical(key >> SHARD_SHIFT)


def test_beyond_its_bound_the_oldest_keys_become_critical_for_their_shard() -> None:
    token = WriteToken([(shard << SHARD_SHIFT | 1, 0, 5) for shard in range(MAX_KEYS + 2)])
    assert [shard for shard in range(MAX_KEYS + 2) if token.is_critical(shard)] == [0, 1]
    assert token.minimum_of_object(2 << SHARD_SHIFT | 1) == 5


def test_of_more_shards_than_it_can_name_a_token_keeps_no_more_than_say_so() -> None:
    token = WriteToken()
    for shard in range(2_000):
        token = token.merged(WriteToken(shards=[shard]))
    assert token.is_critical(1_999)
    assert WriteToken.from_text(token.text()) == token
    assert len(token.text()) < 250


def test_a_key_written_again_counts_as_new_and_keeps_the_higher_version() -> None:
    keys = [(1, 0, 9), *((n, 0, 1) for n in range(2, MAX_KEYS + 1)), (1, 0, 3), (99, 0, 1)]
    token = WriteToken(keys)
    assert token.minimum_of_object(1) == 9


pending = st.builds(
    lambda ends, atype: PendingInverse(max(ends), atype, min(ends)),
    st.lists(st.integers(1, MAX_ID), min_size=2, max_size=2, unique=True),
    st.integers(1, 65535),
)


@given(st.lists(triples, max_size=40), st.lists(pending, max_size=40), st.lists(pending, max_size=40))
def test_no_pending_inverse_is_forgotten(
    keys: list[tuple[int, int, int]], first: list[PendingInverse], second: list[PendingInverse]
) -> None:
    token = WriteToken(keys, pending=first).merged(WriteToken(pending=second))
    assert len(token.named_pending) <= MAX_PENDING
    assert len(token.text()) <= MAX_TEXT_BYTES
    read = WriteToken.from_text(token.text())
    assert read == token
    for each in [*first, *second]:
        shard, coordinator = each.id1 >> SHARD_SHIFT, each.coordinator_id >> SHARD_SHIFT
        between = {pair.coordinator_shard for pair in read.pending_at(shard)}
        assert each in read.pending_in(ListKey(each.id1, each.atype)) or between & {coordinator, ANY_SHARD}


@given(st.lists(pending, max_size=40), st.sets(st.integers(0, 39)), st.integers(0, 3))
def test_what_is_settled_is_named_no_more_and_its_version_is(
    every: list[PendingInverse], places: set[int], version: int
) -> None:
    token = WriteToken(pending=every)
    settled = {each: version for place, each in enumerate(token.named_pending) if place in places}
    left = token.settled(settled)
    assert set(left.named_pending) == set(token.named_pending) - set(settled)
    for each in settled:
        reached = left.minimum_of_list(ListKey(each.id1, each.atype))
        assert reached == version if version else left.is_critical(each.id1 >> SHARD_SHIFT)
    shards = {each.id1 >> SHARD_SHIFT for each in every}
    between = [pair for shard in shards for pair in token.pending_at(shard)]
    assert [pair for shard in shards for pair in left.pending_at(shard)] == between
    nothing = left.settled(dict.fromkeys(left.named_pending, 0), between)
    if len(between) <= MAX_PENDING_SHARDS:
        assert not nothing.has_pending
        assert all(nothing.is_critical(pair.shard) for pair in between)


def of_shards(coordinator: int, shard: int) -> PendingInverse:
    return PendingInverse(shard << SHARD_SHIFT | 1, 7, coordinator << SHARD_SHIFT | 1)


def test_beyond_its_bound_a_token_names_the_shards_of_both_ends_of_pending_inverses() -> None:
    token = WriteToken(pending=[of_shards(shard, 90) for shard in range(MAX_PENDING + 2)])
    assert token.pending_at(90) == [PendingShard(90, 0), PendingShard(90, 1)]
    assert [list(each.coordinator_shards()) for each in token.pending_at(90)] == [[0], [1]]
    assert token.pending_at(91) == []
    assert not token.settled(dict.fromkeys(token.named_pending, 4), token.pending_at(90)).has_pending


def test_beyond_that_bound_any_shard_may_owe_an_inverse_unless_they_are_too_many_to_ask() -> None:
    token = WriteToken()
    for shard in range(MAX_PENDING + MAX_PENDING_SHARDS + 1):
        token = token.merged(WriteToken(pending=[of_shards(shard, 90 if shard % 2 else 9_000)]))
    (any_of,) = token.pending_at(9_000)
    assert any_of == PendingShard(9_000, ANY_SHARD)
    with pytest.raises(StaleRead, match="use a token of fewer writes"):
        any_of.coordinator_shards()
    assert list(PendingShard(90, ANY_SHARD).coordinator_shards()) == list(range(91))
    assert ANY_SHARD not in {each.coordinator_shard for each in token.pending_at(90)}


@given(
    st.lists(pending, max_size=150), st.lists(pending, max_size=150), st.lists(st.sets(st.integers(0, 299)), max_size=3)
)
@example([of_shards(shard, shard + 50) for shard in range(1, 100)], [], [{0}, set(range(99))])
def test_every_pending_inverse_that_is_not_settled_stays_covered(
    first: list[PendingInverse], second: list[PendingInverse], read: list[set[int]]
) -> None:
    """A list of each place that ``read`` names is read, and what the token asks for then is settled."""
    token = WriteToken(pending=first).merged(WriteToken(pending=second))
    every = [*first, *second]
    settled: set[PendingInverse] = set()
    for places in read:
        keys = {each.id1: each.atype for place, each in enumerate(every) if place in places}
        named = {inverse for id1, atype in keys.items() for inverse in token.pending_in(ListKey(id1, atype))}
        between = {pair for id1 in keys for pair in token.pending_at(id1 >> SHARD_SHIFT)}
        settled |= named | {each for each in every if between & pairs_of(each)}
        token = WriteToken.from_text(token.settled(dict.fromkeys(named, 4), between).text())
    for each in set(every) - settled:
        asked = pairs_of(each) & set(token.pending_at(each.id1 >> SHARD_SHIFT))
        assert asked or each in token.pending_in(ListKey(each.id1, each.atype))


def pairs_of(inverse: PendingInverse) -> set[PendingShard]:
    shard = inverse.id1 >> SHARD_SHIFT
    return {PendingShard(shard, inverse.coordinator_id >> SHARD_SHIFT), PendingShard(shard, ANY_SHARD)}


def test_a_token_of_more_shards_than_it_can_name_stands_for_all_of_them_whichever_is_settled() -> None:
    token = WriteToken(pending_shards=[(shard, ANY_SHARD) for shard in range(100, 140)])
    left = token.settled({}, token.pending_at(100))
    assert left.pending_at(139) == [PendingShard(139, ANY_SHARD)]


def test_a_token_of_an_earlier_version_names_the_shard_of_the_list_alone() -> None:
    text = _text_of([[], [], [(90 << SHARD_SHIFT | 1, 7, 5)], [91, 92]])
    token = WriteToken.from_text(text)
    assert token.pending_at(91) == [PendingShard(91, ANY_SHARD)]
    assert token.named_pending == (PendingInverse(90 << SHARD_SHIFT | 1, 7, 5),)


def test_an_earlier_version_finds_all_shards_of_unnamed_pending_inverses_in_a_token() -> None:
    token = WriteToken(pending=[of_shards(shard, 90 + shard) for shard in range(MAX_PENDING + 2)])
    raw = base64.urlsafe_b64decode(token.text() + "=" * (-len(token.text()) % 4))
    assert msgspec.msgpack.decode(raw[1:-4])[3] == [90, 91]


def _text_of(packed: list[object]) -> str:
    body = b"\x01" + msgspec.msgpack.encode(packed)
    return base64.urlsafe_b64encode(body + zlib.crc32(body).to_bytes(4, "little")).decode().rstrip("=")


def test_a_token_without_pending_inverses_has_the_form_that_earlier_versions_read() -> None:
    assert WriteToken([(5, 0, 1)], [7]).text() == "AZKRkwUAAZEHu2GGcQ"


@pytest.mark.parametrize("garbage", ["", "A", "%%%", "Zm9v", "x" * 4000, "é", WriteToken([(5, 0, 1)]).text()[:-2]])
def test_garbage_is_refused(garbage: str) -> None:
    with pytest.raises(InvalidArgument):
        WriteToken.from_text(garbage)


@given(st.data())
def test_a_token_with_any_character_changed_is_refused(data: st.DataObject) -> None:
    text = WriteToken([(5, 0, 1), (6, 2, 7)], [3]).text()
    place = data.draw(st.integers(0, len(text) - 2))  # the last character may carry padding bits only
    other = data.draw(st.sampled_from("ABCDxyz0-_").filter(lambda character: character != text[place]))
    with pytest.raises(InvalidArgument):
        WriteToken.from_text(text[:place] + other + text[place + 1 :])
