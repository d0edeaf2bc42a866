"""The budgets that are proposed for arenas."""

from __future__ import annotations

from tao.cache.memory_advice import ArenaUse, propose

MB = 1 << 20


def use(name: str, budget: int, **seen: int) -> ArenaUse:
    return ArenaUse(name, **{"bytes": budget, "budget_bytes": budget, "evictions": 0, "returned": 0, "kept": 0, **seen})


def budgets(*arenas: ArenaUse) -> list[int]:
    proposals = propose(arenas)
    assert sum(each.proposed_bytes for each in proposals) <= sum(arena.budget_bytes for arena in arenas)
    return [each.proposed_bytes for each in proposals]


def test_an_arena_without_evictions_gives_what_it_does_not_use_to_those_that_want_it() -> None:
    idle = use("idle", 80 * MB, bytes=8 * MB)
    one = use("one", 10 * MB, evictions=5_000, returned=300)
    two = use("two", 10 * MB, evictions=5_000, returned=100)
    assert budgets(idle, one, two) == [10 * MB, 10 * MB + 70 * MB * 3 // 4, 10 * MB + 70 * MB // 4]


def test_an_eighth_moves_from_where_a_byte_is_worth_least_to_where_it_is_worth_most() -> None:
    rich = use("rich", 80 * MB, evictions=50_000, returned=100, kept=1_000)
    poor = use("poor", 40 * MB, evictions=50_000, returned=9_000, kept=90_000)
    assert budgets(rich, poor) == [75 * MB, 45 * MB]


def test_nothing_moves_when_all_are_worth_about_the_same() -> None:
    one = use("one", 40 * MB, evictions=50_000, returned=5_000, kept=50_000)
    two = use("two", 40 * MB, evictions=50_000, returned=5_500, kept=50_000)
    assert budgets(one, two) == [40 * MB, 40 * MB]
    assert "more memory" in propose([one, two])[1].reason


def test_what_has_seen_little_keeps_its_budget() -> None:
    assert budgets(use("one", MB, evictions=9, returned=9), use("two", MB, bytes=0)) == [MB, MB]
