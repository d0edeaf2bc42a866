"""`tao access` checks a document and explains a decision, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tao.admin.documents import example_schema_file
from tao.cli.commands import tao

GOOD = """
format: 1
version: 4
roles:
  reader: {read: all, critical: all, watch: all}
  fan: {write: {associations: [likes, liked_by]}}
callers:
  web: [reader, fan]
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(tao, ["access", *arguments, "--schema", str(example_schema_file())])


def explain(file: Path, *arguments: str) -> Result:
    return call("explain", "--file", str(file), *arguments)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "access.yaml"
    path.write_text(GOOD)
    return path


def test_a_good_document_is_usable(file: Path) -> None:
    result = call("check", str(file))
    assert (result.exit_code, result.stdout.strip()) == (
        0,
        "usable: version 4, mode enforce, 1 caller, 2 roles, nothing odd",
    )
    assert json.loads(call("check", str(file), "--json").stdout)["odd"] == []


def test_what_is_odd_is_listed_and_the_exit_status_says_so(file: Path) -> None:
    file.write_text(GOOD.replace("liked_by", "liked_bye"))
    result = call("check", str(file))
    assert result.exit_code == 1
    assert "did you mean 'liked_by'?" in result.stdout
    assert "2 odd" in result.stdout
    paths = {each["path"] for each in json.loads(call("check", str(file), "--json").stdout)["odd"]}
    assert paths == {"roles.fan.write.associations", "callers.web"}


def test_a_faulty_or_missing_document_is_an_operator_s_error_in_one_line(file: Path) -> None:
    file.write_text(GOOD.replace("[reader, fan]", "[reader, fin]"))
    result = call("check", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"tao: {file}:8: callers.web.1: there is no role 'fin'; did you mean 'fan'?\n"
    missing = call("check", str(file.with_name("none.yaml")))
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)


def test_an_allowed_operation_names_the_role_that_grants_it(file: Path) -> None:
    result = explain(file, "--caller", "web", "--operation", "write", "--type", "likes")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "allowed: write of the association type 'likes'",
        "  caller 'web' has the roles reader, fan; granted by fan",
    ]


def test_a_denied_operation_says_what_is_missing(file: Path) -> None:
    result = explain(file, "--operation", "read", "--type", "user")
    assert result.exit_code == 1
    why = "none of its roles grants read of the object type 'user'"
    assert result.stdout.splitlines() == [
        "denied: read of the object type 'user'",
        f"  a peer that names no caller has no role (anonymous); {why}",
    ]
    (verdict,) = json.loads(explain(file, "--operation", "read", "--type", "user", "--json").stdout)["verdicts"]
    assert (verdict["allowed"], verdict["granted_by"], verdict["kind"]) == (False, [], "object")


def test_an_unknown_type_or_operation_is_a_mistake_of_the_caller(file: Path) -> None:
    assert explain(file, "--operation", "read", "--type", "usr").exit_code == 2
    assert explain(file, "--operation", "reed", "--type", "user").exit_code == 2
