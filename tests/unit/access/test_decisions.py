"""Verdicts with their reasons, and what is odd about documents."""

from __future__ import annotations

import pytest

from tao.access.decisions import Decisions, oddities
from tao.access.document import Operation, load_access
from tao.model.errors import UnknownType
from tao.schema.registry import load_schema

SCHEMA = load_schema(
    """
format: 1
objects:
  user: {number: 1}
  note: {number: 3}
associations:
  likes: {number: 4, inverse: liked_by}
  liked_by: {number: 5, inverse: likes, reverse_lookup: true}
  note: {number: 14}
""",
    "schema.yaml",
)
DOCUMENT = load_access(
    """
format: 1
version: 1
roles:
  reader: {read: {objects: [user], associations: all}}
  fan: {write: {associations: [likes]}}
  master: {critical: all}
  dropper: {administer: {objects: [user]}}
  chief: {administer: all}
callers:
  web: [reader, fan, master]
  operator/ann: [dropper]
  operator/root: [chief, dropper]
anonymous: [reader]
""",
    "access.yaml",
)
DECISIONS = Decisions(DOCUMENT, SCHEMA)
NO_INVERSE = "none of its roles grants write of 'liked_by', the inverse type of 'likes'"
NOT_ALL = "an operator needs administer of all types for it, which none of its roles grants"
NO_READ = "none of its roles grants read of the object type 'user', which critical needs too"


@pytest.mark.parametrize(
    ("caller", "operation", "type_name", "allowed", "says"),
    [
        ("web", Operation.READ, "user", True, ("reader",)),
        ("web", Operation.READ, "likes", True, ("reader",)),
        ("web", Operation.CRITICAL, "user", True, ("master",)),
        ("web", Operation.WRITE, "user", False, "none of its roles grants write of the object type 'user'"),
        ("web", Operation.WRITE, "likes", False, NO_INVERSE),
        ("", Operation.READ, "user", True, ("reader",)),
        ("operator/ann", Operation.ADMINISTER, "user", True, ("dropper",)),
        ("operator/ann", Operation.READ, "user", False, NOT_ALL),
        ("operator/root", Operation.READ, "user", True, ("chief",)),
        ("operator/new", Operation.ADMINISTER, "user", True, ()),
        ("operator", Operation.READ, "user", True, ()),
        ("other", Operation.READ, "user", False, "none of its roles grants read of the object type 'user'"),
    ],
)
def test_a_verdict_names_the_roles_that_grant_it_or_what_is_missing(
    caller: str, operation: Operation, type_name: str, allowed: bool, says: tuple[str, ...] | str
) -> None:
    (verdict,) = DECISIONS.explain(caller, operation, type_name)
    assert verdict.allowed is allowed
    assert (verdict.granted_by if allowed else verdict.why) == says


def test_a_critical_read_of_a_type_that_may_not_be_read_says_so() -> None:
    read, listed = DECISIONS.explain("web", Operation.CRITICAL, "note")
    assert (read.kind, read.allowed, listed.kind, listed.allowed) == ("object", False, "association", True)
    assert read.why == "none of its roles grants read of the object type 'note', which critical needs too"


def test_a_verdict_says_who_the_caller_is() -> None:
    who = {caller: DECISIONS.who(caller) for caller in ("web", "other", "")}
    assert who["web"] == "caller 'web' has the roles reader, fan, master"
    assert who["other"] == "caller 'other' has no role (others)"
    assert DECISIONS.who("operator/new") == "operator 'operator/new' is not named"
    assert who[""] == "a peer that names no caller has the role reader (anonymous)"


def test_an_unknown_type_is_refused_with_a_hint() -> None:
    with pytest.raises(UnknownType, match="did you mean 'likes'"):
        DECISIONS.explain("web", Operation.READ, "liks")


def test_what_is_odd_is_listed() -> None:
    document = load_access(
        """
format: 1
version: 1
roles:
  reader: {read: {objects: [usr], associations: [liked_by]}}
  fan: {write: {associations: [likes]}, critical: {objects: [user]}}
  empty: {}
callers:
  web: [reader, fan]
  idle: []
""",
        "access.yaml",
    )
    assert [f"{each.path}: {each.what}" for each in oddities(document, SCHEMA)] == [
        "roles.reader.read.objects: the schema has no such type: 'usr'; did you mean 'user'?",
        "roles.empty: grants nothing",
        "roles.empty: no caller has this role",
        f"callers.web: write of 'likes' has no effect: {NO_INVERSE}",
        f"callers.web: critical of 'user' has no effect: {NO_READ}",
        "callers.web: may not watch all types: the SDK learns of a new topology or schema later",
        "callers.web: the SDK looks edges of 'liked_by' up in reverse, and it may not read 'likes'",
        "callers.idle: has no role: it may do nothing",
    ]
    writer = "{read: all, write: {associations: [likes, liked_by, note]}, watch: all}"
    document = load_access(f"format: 1\nversion: 1\nroles: {{it: {writer}}}\ncallers: {{web: [it]}}\n", "access.yaml")
    (odd,) = oddities(document, SCHEMA)
    assert odd.path == "callers.web"
    assert odd.what.startswith("writes edges with an inverse (likes, liked_by) that it may not read critically: ")
    assert oddities(load_access("format: 1\nversion: 1\n", "access.yaml"), SCHEMA) == []
