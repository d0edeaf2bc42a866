"""Access documents: their content, and the faults reported."""

from __future__ import annotations

import pytest

from tao.access.document import ALL, Operation, load_access
from tao.model.errors import AccessError

DOCUMENT = """
format: 1
version: 7
mode: count
roles:
  reader:
    read: all
    min_staleness_ms: 3000
  writer:
    read: {objects: [user], associations: all}
    write:
      objects: [user, page]
callers:
  web: [reader, writer]
  "spiffe://tao/jobs": [reader]
others: [reader]
"""


def test_a_document_is_read() -> None:
    document = load_access(DOCUMENT, "access.yaml")
    assert (document.version, document.mode) == (7, "count")
    assert document.roles["reader"].types(Operation.READ).objects == ALL
    writer = document.roles["writer"]
    assert (writer.read.objects, writer.read.associations) == (("user",), ALL)
    assert (writer.write.objects, writer.write.associations) == (("user", "page"), ())
    assert writer.min_staleness_ms is None


def test_a_caller_has_the_roles_of_its_name_else_those_of_others_and_nobody_those_of_anonymous() -> None:
    document = load_access(DOCUMENT, "access.yaml")
    assert list(document.roles_of("web")) == ["reader", "writer"]
    assert list(document.roles_of("spiffe://tao/jobs")) == ["reader"]
    assert list(document.roles_of("somebody")) == ["reader"]
    assert list(document.roles_of("")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: the access document is empty"),
        ("- 1", "f.yaml:1: must be a mapping"),
        ("format: 1", "f.yaml:1: version: is missing"),
        ("format: 1\nversion: 0", "f.yaml:2: version: "),
        ("format: 1\nversion: '1'", "f.yaml:2: version: "),
        ("format: 1\nversion: 1\nmode: off", "f.yaml:3: mode: "),
        ("format: 1\nversion: 1\nrole: {}", "f.yaml:3: role: unknown key; did you mean 'roles'?"),
        (
            "format: 1\nversion: 1\nroles:\n  a:\n    reed: all",
            "f.yaml:5: roles.a.reed: unknown key; did you mean 'read'?",
        ),
        ("format: 1\nversion: 1\nroles:\n  a:\n    read: some", "f.yaml:5: roles.a.read: must be a mapping"),
        (
            "format: 1\nversion: 1\nroles:\n  a:\n    read:\n      objects: user",
            "f.yaml:6: roles.a.read.objects: must be a list of names of types, or the word all",
        ),
        ("format: 1\nversion: 1\nroles:\n  a:\n    budget: 0", "f.yaml:5: roles.a.budget: "),
        ("format: 1\nversion: 1\nroles:\n  a b: {}", "f.yaml:4: roles.a b: as a name: "),
        ("format: 1\nversion: 1\nothers: all", "f.yaml:3: others: "),
        (
            "format: 1\nversion: 1\nroles:\n  reader: {}\ncallers:\n  web:\n  - reader\n  - redaer",
            "f.yaml:8: callers.web.1: there is no role 'redaer'; did you mean 'reader'?",
        ),
        ("format: 1\nversion: 1\nanonymous: [x]", "f.yaml:3: anonymous.0: there is no role 'x'"),
        ("format: 1\nversion: 1\ncallers: {a: [], a: []}", "f.yaml:3: the key 'a' appears twice"),
    ],
)
def test_a_fault_is_reported_with_line_and_path(text: str, message: str) -> None:
    with pytest.raises(AccessError) as caught:
        load_access(text, "f.yaml")
    assert caught.value.message.startswith(message)


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(AccessError) as caught:
        load_access("format: 1\nversion: 1\ncallers:\n  a: [x]\n  b: [y]\n", "f.yaml")
    assert [line.partition(": ")[0] for line in caught.value.message.splitlines()] == ["f.yaml:4", "f.yaml:5"]
