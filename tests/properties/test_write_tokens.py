"""Write tokens never ask for less than the writes that they were made of, however they were merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tao.client.own_writes import CRITICAL, MinimumVersions
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import MAX_KEYS, WriteToken
from tao.wire.read_batch import CountRow, RangeRow

ids = st.builds(lambda shard, number: shard << SHARD_SHIFT | number, st.integers(0, 60), st.integers(1, 3))
atypes = st.integers(0, 2)
written = st.lists(st.tuples(ids, atypes, st.integers(1, 9)), max_size=3 * MAX_KEYS)


@given(st.lists(written, max_size=5))
def test_merged_tokens_ask_for_everything_that_went_into_them_even_as_text(
    portions: list[list[tuple[int, int, int]]],
) -> None:
    token = WriteToken()
    for portion in portions:
        token = token.merged(WriteToken(portion))
    minimum_of = MinimumVersions(WriteToken.from_text(token.text()), {}).of
    for key_id, atype, version in (each for portion in portions for each in portion):
        minimum = minimum_of(RangeRow(key_id, atype, 0, 5) if atype else (key_id,))
        assert minimum == CRITICAL or minimum >= version


@given(written, ids, atypes)
def test_a_token_of_few_keys_demands_nothing_of_other_keys(
    writes: list[tuple[int, int, int]], key_id: int, atype: int
) -> None:
    few = writes[:MAX_KEYS]
    versions = [version for *key, version in few if key == [key_id, atype]]
    row = CountRow(key_id, atype) if atype else (key_id,)
    assert MinimumVersions(WriteToken(few), {}).of(row) == max(versions, default=0)
