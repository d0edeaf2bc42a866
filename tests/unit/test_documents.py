"""The documents say what is: sections that the code cites exist, metrics and commands have their true names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tao.cli.commands import tao

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/DESIGN.md", "docs/MYSQL.md", "docs/deployment.md", "docs/operations.md", "docs/sdk.md")
INSTRUMENTS = ("counter", "gauge", "gauge_family", "histogram")
ROLES = ("serving", "follower", "leader", "tailer", "watcher")


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_section_of_the_design_that_is_cited_exists() -> None:
    sections = set(re.findall(r"^## (\d+) ", text_of("docs/DESIGN.md"), re.MULTILINE))
    assert sections == {str(number) for number in range(1, 17)}
    cited = {
        (str(path.relative_to(ROOT)), number)
        for path in (*sources("tao", "tests", "loadtest"), *(ROOT / name for name in DOCUMENTS))
        for citation in re.findall(r"DESIGN(?:\.md)?(?:\]\(\S+\))? ((?:§\d+(?:, | and )?)+)", path.read_text())
        for number in re.findall(r"\d+", citation)
    }
    assert cited
    assert [each for each in cited if each[1] not in sections] == []


def test_every_link_between_the_documents_leads_somewhere() -> None:
    links = [
        (name, target)
        for name in DOCUMENTS
        for target in re.findall(r"\]\(([^)#]+)\)", text_of(name))
        if not target.startswith("http")
    ]
    assert links
    assert [(name, target) for name, target in links if not (ROOT / name).parent.joinpath(target).exists()] == []


def registered_metrics() -> Iterator[str]:
    for path in sources(*(f"tao/{role}" for role in ROLES)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in INSTRUMENTS:
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield f"tao_{name.value}"


def test_the_operations_guide_lists_every_metric_and_no_other() -> None:
    listed = set(re.findall(r"`(tao_[a-z_]+)(?:\{[^}]*\})?`", text_of("docs/operations.md")))
    accounts = {"tao_admin", "tao_leader", "tao_reader", "tao_replicator"}
    # The six of delivery are registered in loops.
    delivery = {name for name in listed if name.startswith("tao_delivery_")}
    assert len(delivery) == 6
    assert listed - accounts - delivery == set(registered_metrics())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_that_a_document_shows_exists_with_its_options(name: str) -> None:
    shown = re.findall(r"(?:^    |`|&& )tao ([a-z][^`\n#&]*)", text_of(name), re.MULTILINE)
    for line in (part for each in shown for part in re.split(r"\s{2,}tao ", each)):
        words = line.split()
        command: click.Command = tao
        while words and isinstance(command, click.Group) and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert command is not tao, f"{name}: tao {line}"
        options = {option for parameter in command.params for option in parameter.opts}
        assert [word for word in words if word.startswith("--") and word.split("=")[0] not in options] == [], line
