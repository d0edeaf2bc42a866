"""Answers that are kept beside the cached prefix of their list."""

from __future__ import annotations

from array import array

import pytest

from tao.cache import CacheSettings
from tao.cache.kept_answers import Asked, KeptAnswers
from tao.model.errors import SettingsError

PREFIX, ANSWER = b"p" * 100, b"a" * 60


def asked(*id2s: int) -> Asked:
    return Asked(array("Q", id2s).tobytes(), 9, 0)


def test_an_answer_is_found_beside_the_very_prefix_it_was_put_beside() -> None:
    kept = KeptAnswers(10_000)
    kept.put(PREFIX, 1, 2, asked(3, 4), ANSWER)
    assert kept.has(1, 2)
    assert kept.find(PREFIX, 1, 2, asked(3, 4)) == ANSWER
    assert kept.find(PREFIX, 1, 2, asked(4, 3)) is None
    assert kept.find(PREFIX, 1, 3, asked(3, 4)) is None
    assert kept.used == 1
    equal = bytes(bytearray(PREFIX))
    assert kept.find(equal, 1, 2, asked(3, 4)) is None, "an entry that was dropped and filled again"
    assert not kept.has(1, 2)
    assert kept.size_bytes == 0


def test_a_new_prefix_takes_the_place_of_the_former_one_with_its_answers() -> None:
    kept = KeptAnswers(10_000)
    kept.put(PREFIX, 1, 2, asked(3, 4), ANSWER)
    before = kept.size_bytes
    kept.put(PREFIX, 1, 2, asked(3, 4), ANSWER)
    assert kept.size_bytes == before
    newer = b"q" * 100
    kept.put(newer, 1, 2, asked(5, 6), ANSWER)
    assert kept.size_bytes == before
    assert kept.find(newer, 1, 2, asked(3, 4)) is None


def test_what_was_used_least_recently_leaves_first() -> None:
    kept = KeptAnswers(2_000)
    kept.put(PREFIX, 1, 2, asked(1, 2), ANSWER)
    kept.put(PREFIX, 2, 2, asked(1, 2), ANSWER)
    assert kept.find(PREFIX, 1, 2, asked(1, 2)) is not None
    kept.put(PREFIX, 3, 2, asked(1, 2), ANSWER)
    assert [kept.has(id1, 2) for id1 in (1, 2, 3)] == [True, False, True]
    for other in range(20):
        kept.put(PREFIX, 3, 2, asked(other, other), ANSWER)
        assert kept.size_bytes <= 2_000
    assert kept.find(PREFIX, 3, 2, asked(19, 19)) is not None
    assert kept.find(PREFIX, 3, 2, asked(1, 2)) is None


def test_an_answer_without_room_is_not_kept() -> None:
    kept = KeptAnswers(100)
    kept.put(PREFIX, 1, 2, asked(1, 2), ANSWER)
    assert not kept.has(1, 2)
    assert kept.size_bytes == 0


def test_a_bound_below_zero_is_rejected() -> None:
    with pytest.raises(SettingsError):
        CacheSettings(kept_answers_bytes=-1)
