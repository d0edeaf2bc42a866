"""How the versions of many lists are kept."""

from __future__ import annotations

from random import Random

from tao.cache.list_versions import ListVersions
from tao.model.ids import MAX_ID
from tests.rigs.leader_rig import make_id


def test_versions_of_many_lists_lie_in_many_small_tables() -> None:
    """So none of them takes long to grow."""
    versions, chance = ListVersions(), Random(3)
    expected: dict[int, int] = {}
    for number in range(20_000):
        id1 = make_id(number) if number % 3 else chance.randrange(1, MAX_ID)
        versions.put(id1, number + 1)
        expected[id1] = number + 1
        if not number % 5:
            versions.put(id1, number + 7)
            expected[id1] = number + 7
    assert all(versions.get(id1) == version for id1, version in expected.items())
    assert not any(versions.get(make_id(number)) for number in range(20_000, 21_000))
    assert max(table.size for table in versions._tables) <= 4096
    assert 16 * 20_000 < versions.size_bytes < 100 * 20_000
