"""The compiled policy against an interpreter that reads the document anew for each question."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.access.decisions import Decisions, TypeKind
from tao.access.document import AccessDocument, Operation
from tao.schema.registry import Schema, load_schema
from tests.rigs.effort import examples

OBJECTS = {"user": 1, "page": 2, "photo": 63, "note": 64}
INVERSES = {"friend": "friend", "likes": "liked_by", "liked_by": "likes", "comment": None, "follows": "followers"}
ASSOCIATIONS = {name: 100 + number for number, name in enumerate(INVERSES | {"followers": "follows"})}
UNKNOWN = ("planet", "orbits")


def _schema() -> Schema:
    inverse_of = INVERSES | {"followers": "follows"}
    objects = "".join(f"  {name}: {{number: {number}}}\n" for name, number in OBJECTS.items())
    edges = "".join(
        f"  {name}: {{number: {number}{f', inverse: {inverse_of[name]}' if inverse_of[name] else ''}}}\n"
        for name, number in ASSOCIATIONS.items()
    )
    return load_schema(f"format: 1\nobjects:\n{objects}associations:\n{edges}", "schema.yaml")


SCHEMA = _schema()
CALLERS = ("web", "jobs", "nobody", "unlisted", "")


def allows(document: dict[str, Any], caller: str, operation: str, group: str, name: str) -> bool:
    """Say what a document means, question by question, as its reference page puts it."""
    if caller == "":
        roles = document["anonymous"]
    elif caller in document["callers"]:
        roles = document["callers"][caller]
    else:
        roles = document["others"]

    def granted(wanted: str, type_name: str) -> bool:
        for role in roles:
            types = document["roles"][role].get(wanted, {})
            if types == "all" or types.get(group, []) == "all" or type_name in types.get(group, []):
                return True
        return False

    known = OBJECTS if group == "objects" else ASSOCIATIONS
    if name not in known:
        return any(
            (types := document["roles"][role].get(operation, {})) == "all" or types.get(group) == "all"
            for role in roles
        ) and (operation != "critical" or allows(document, caller, "read", group, name))
    if not granted(operation, name):
        return False
    if operation == "critical":
        return granted("read", name)
    if operation == "write" and group == "associations":
        inverse = (INVERSES | {"followers": "follows"})[name]
        return inverse is None or granted("write", inverse)
    return True


def type_sets(names: tuple[str, ...]) -> st.SearchStrategy[object]:
    return st.just("all") | st.lists(st.sampled_from(names), max_size=4)


GRANTS = st.just("all") | st.fixed_dictionaries(
    {},
    optional={
        "objects": type_sets((*OBJECTS, *UNKNOWN)),
        "associations": type_sets((*ASSOCIATIONS, *UNKNOWN)),
    },
)
ROLES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.fixed_dictionaries({}, optional={operation.value: GRANTS for operation in Operation}),
    min_size=1,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    roles = draw(ROLES)
    some = st.lists(st.sampled_from(sorted(roles)), max_size=3)
    return {
        "format": 1,
        "version": 1,
        "roles": roles,
        "callers": {"web": draw(some), "jobs": draw(some), "nobody": []},
        "others": draw(some),
        "anonymous": draw(some),
    }


@given(document=documents())
@settings(max_examples=examples(500), deadline=None)
def test_the_compiled_policy_decides_as_the_document_reads(document: dict[str, Any]) -> None:
    decisions = Decisions(AccessDocument.model_validate(document), SCHEMA)
    for caller in CALLERS:
        rights = decisions.policy.rights(caller)
        for operation in Operation:
            for name, number in OBJECTS.items():
                expected = allows(document, caller, operation.value, "objects", name)
                assert bool(rights.of(operation).objects >> number & 1) is expected
            for name, number in ASSOCIATIONS.items():
                expected = allows(document, caller, operation.value, "associations", name)
                assert bool(rights.of(operation).associations >> number & 1) is expected


@given(document=documents(), name=st.sampled_from([*OBJECTS, *ASSOCIATIONS, *UNKNOWN]))
@settings(max_examples=examples(500), deadline=None)
def test_a_verdict_has_reasons_for_what_the_document_says(document: dict[str, Any], name: str) -> None:
    decisions = Decisions(AccessDocument.model_validate(document), SCHEMA)
    for caller in CALLERS:
        for operation in Operation:
            for kind, group in ((TypeKind.OBJECT, "objects"), (TypeKind.ASSOCIATION, "associations")):
                verdict = decisions.verdict(caller, operation, kind, name)
                assert verdict.allowed is allows(document, caller, operation.value, group, name)
                assert bool(verdict.why) is not verdict.allowed
                assert not verdict.allowed or verdict.granted_by
