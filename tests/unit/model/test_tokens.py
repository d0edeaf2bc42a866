"""Write tokens: what they promise, how they merge, what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import InvalidArgument, StaleRead
from tao.model.graph import ListKey
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.tokens import MAX_KEYS, MAX_PENDING, MAX_TEXT_BYTES, PendingInverse, WriteToken

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
        try:
            assert each in read.pending_in(ListKey(each.id1, each.atype))
        except StaleRead as error:
            assert "use a token of fewer writes" in error.message  # noqa: PT017 - one of the two must hold
    assert not read.without_pending().has_pending


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
