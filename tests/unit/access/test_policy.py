"""What documents grant, as a table."""

from __future__ import annotations

import pytest

from tao.access.document import Operation, load_access
from tao.access.policy import ALL_TYPES, Budget, Rights, compile_policy
from tao.schema.registry import load_schema

SCHEMA = load_schema(
    """
format: 1
objects:
  user: {number: 1}
  page: {number: 2}
associations:
  friend: {number: 1, inverse: friend}
  likes: {number: 4, inverse: liked_by}
  liked_by: {number: 5, inverse: likes}
  comment: {number: 10}
""",
    "schema.yaml",
)
USER, PAGE = 1, 2
FRIEND, LIKES, LIKED_BY, COMMENT = 1, 4, 5, 10


def rights(role: str, caller: str = "web") -> Rights:
    text = f"format: 1\nversion: 1\nroles:\n  one: {role}\ncallers:\n  web: [one]\n"
    return compile_policy(load_access(text, "access.yaml"), SCHEMA).rights(caller)


def types(bits: int) -> set[int]:
    return {number for number in range(64) if bits >> number & 1}


def test_what_no_role_grants_is_denied() -> None:
    for caller in ("web", "somebody", ""):
        found = rights("{}", caller)
        assert all(found.of(operation) == (0, 0) for operation in Operation)
        assert not found.reads_all


def test_all_covers_types_that_the_schema_does_not_have_yet() -> None:
    found = rights("{read: all, write: {associations: all}}")
    assert found.read == (ALL_TYPES, ALL_TYPES)
    assert found.write == (0, ALL_TYPES)
    assert found.read.objects >> 60_000 & 1


@pytest.mark.parametrize(
    ("granted", "covered"),
    [
        ("[friend]", {FRIEND}),
        ("[likes]", set()),
        ("[liked_by]", set()),
        ("[likes, liked_by]", {LIKES, LIKED_BY}),
        ("[comment, likes]", {COMMENT}),
    ],
)
def test_an_edge_is_written_only_with_the_right_on_its_inverse(granted: str, covered: set[int]) -> None:
    found = rights(f"{{write: {{associations: {granted}}}, read: {{associations: {granted}}}}}")
    assert types(found.write.associations) == covered
    assert types(found.read.associations) >= covered


def test_critical_reads_need_the_right_to_read() -> None:
    found = rights("{read: {objects: [user]}, critical: {objects: [user, page], associations: [friend]}}")
    assert types(found.critical.objects) == {USER}
    assert found.critical.associations == 0


def test_unknown_types_grant_nothing() -> None:
    assert rights("{read: {objects: [nothing]}}").read == (0, 0)


def test_a_caller_may_skip_the_checks_of_reads_only_with_every_right_to_read() -> None:
    assert rights("{read: all, critical: all}").reads_all
    assert not rights("{read: all}").reads_all
    assert not rights("{read: all, critical: all, min_staleness_ms: 1}").reads_all


@pytest.mark.parametrize(
    ("granted", "budget"),
    [
        ("[small]", Budget(64, 500)),
        ("[small, large]", Budget(256, None)),
        ("[small, watcher]", Budget(64, 500)),
        ("[small, free]", None),
        ("[watcher]", None),
        ("[]", None),
    ],
)
def test_the_largest_budget_of_all_roles_that_grant_work_counts_and_one_without_bounds_nothing(
    granted: str, budget: Budget | None
) -> None:
    text = f"""
format: 1
version: 1
roles:
  small: {{read: all, budget: {{units_under_way: 64, units_per_second: 500}}}}
  large: {{write: {{objects: [user]}}, budget: {{units_under_way: 256}}}}
  free: {{read: {{objects: [page]}}}}
  watcher: {{watch: all}}
callers: {{web: {granted}}}
"""
    assert compile_policy(load_access(text, "access.yaml"), SCHEMA).rights("web").budget == budget


def test_the_rights_of_several_roles_are_added_and_the_least_bound_counts() -> None:
    text = """
format: 1
version: 3
roles:
  a: {write: {associations: [likes]}, read: {objects: [user]}, min_staleness_ms: 5000}
  b: {write: {associations: [liked_by]}, read: {objects: [user]}, min_staleness_ms: 3000}
  c: {write: {objects: [user]}}
  d: {read: {objects: [page]}}
callers: {web: [a, b, c], free: [a, d]}
others: [b]
"""
    policy = compile_policy(load_access(text, "access.yaml"), SCHEMA)
    web = policy.rights("web")
    assert types(web.write.associations) == {LIKES, LIKED_BY}
    assert web.min_staleness_ms == policy.rights("other").min_staleness_ms == 3000
    assert policy.rights("free").min_staleness_ms == 0, "one of its roles grants reads with any bound"
    assert policy.rights("other").write.associations == 0
    assert (policy.version, policy.enforced) == (3, True)
