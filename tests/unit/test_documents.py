"""The documents say what is: paths and links lead somewhere, commands exist, generated pages follow the code."""

from __future__ import annotations

import ast
import codeop
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import pytest

from docs.generate import pages, registered_metrics
from loadtest.__main__ import main as loadtest
from loadtest.catalogue import bench_scenarios
from tao.cli.commands import tao
from tao.client.web.metrics import METRICS as WEB_METRICS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "SECURITY.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
PAGES = pages()
GENERATED = {str(path) for path in PAGES}
OF_LOADTEST = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "loadtest").rglob("*.md")))
"""Pages of the benchmarks that are no part of the site."""
METRICS = {f"tao_{each.name}" for each in registered_metrics()} | WEB_METRICS
MEASURED = "docs/explanation/benchmarks.md"
"""Made by `make report`, in lines as long as its sentences."""
MYSQL = "docs/reference/mysql.md"
"""Names options of database servers that nothing here sets."""
WRITTEN = tuple(name for name in DOCUMENTS if name not in GENERATED)
MAX_COLUMNS = 100
MAX_PAGE_LINES = 200
SHORT_SHELVES = ("docs/explanation/", "docs/how-to/")
LONG = (MEASURED, "docs/how-to/deploy.md", "docs/how-to/web-frameworks.md")
"""The last two lead through a whole installation, and have a whole program for each framework."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def prose_lines(name: str) -> Iterator[str]:
    """The lines of a page without tables and code."""
    fenced = False
    for line in text_of(name).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ", "![")):
            yield line


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    assert text_of(name) == PAGES[Path(name)], f"{name} is out of date: run `make reference`"


def test_generated_pages_depend_on_neither_the_terminal_nor_the_environment() -> None:
    program = "import tao.cli.commands, tao.leader.server, docs.generate as g; print(g.pages() == eval(input()))"
    foreign = {**os.environ, "COLUMNS": "40", "TAO_TOPOLOGY": "/elsewhere.json", "TAO_CONNECT": "host:1", "LANG": "C"}
    known = repr(PAGES).replace("PosixPath", "__import__('pathlib').PosixPath")
    done = subprocess.run(
        [sys.executable, "-c", program], input=known, cwd=ROOT, env=foreign, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md", "loadtest/README.md"])
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent.joinpath(file) if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors that the site gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_every_page_stands_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"(?:- |: )([\w/-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE))
    assert {f"docs/{name}" for name in listed} == set(DOCUMENTS) - {"README.md", "SECURITY.md"}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_prose_of_a_page_is_at_most_a_hundred_columns_wide(name: str) -> None:
    if name != MEASURED:
        assert [line for line in prose_lines(name) if len(line) > MAX_COLUMNS] == []


@pytest.mark.parametrize("name", [name for name in WRITTEN if name.startswith(SHORT_SHELVES) and name not in LONG])
def test_a_page_to_be_read_as_a_whole_is_at_most_two_hundred_lines_long(name: str) -> None:
    assert len(text_of(name).splitlines()) <= MAX_PAGE_LINES


def test_every_path_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`((?:tao|protos|sql|config|docs|tests|loadtest)(?:/[\w.]+)*)`", architecture())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()] == []


def test_the_architecture_lists_the_layers_that_are_enforced() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    enforced = [sorted(name for name in re.findall(r"\w+", layer) if exists(name)) for layer in reversed(layers)]
    described = re.findall(r"^\| \d+ \| (.*?) \|", architecture(), re.MULTILINE)
    assert [sorted(re.findall(r"`tao/(\w+)`", layer)) for layer in described] == [each for each in enforced if each]


def exists(name: str) -> bool:
    return (ROOT / "tao" / name).is_dir() or (ROOT / "tao" / f"{name}.py").is_file()


def architecture() -> str:
    return text_of("docs/explanation/architecture.md")


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != MEASURED])
def test_a_metric_that_a_document_names_exists(name: str) -> None:
    accounts = {"tao_admin", "tao_watcher", "tao_leader", "tao_reader", "tao_replicator"}
    other = {"tao_atc13", "tao_graph"}
    named = set(re.findall(r"`(tao_[a-z_]+[a-z])(?:\{[^}]*\})?`", text_of(name))) - accounts - other
    assert named <= METRICS


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_that_a_document_shows_exists_with_its_options(name: str) -> None:
    shown = re.findall(r"(?:^ {4,}|`|&& |/)tao ([a-z][^`\n#&]*)", text_of(name).replace("\\\n", " "), re.MULTILINE)
    for line in (part for each in shown for part in re.split(r"\s{2,}tao ", each)):
        words = line.split()
        command: click.Command = tao
        while words and isinstance(command, click.Group) and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert command is not tao, f"{name}: tao {line}"
        options = {option for parameter in command.params for option in parameter.opts}
        assert [word for word in words if word.startswith("--") and word.split("=")[0] not in options] == [], line


def commands_of(program: str, name: str) -> Iterator[list[str]]:
    """Yield the words behind a program's name, of each command in a block of code or in quotes."""
    text = text_of(name).replace("\\\n", " ")
    for shown in re.findall(rf"(?:^ {{4,}}|`){re.escape(program)}(?![\w.]) ?([^`#\n]*)", text, re.MULTILINE):
        yield shlex.split(shown)


@pytest.mark.parametrize("name", [*DOCUMENTS, *OF_LOADTEST, "CHANGELOG.md"])
def test_every_benchmark_that_a_document_shows_exists_with_its_options(name: str) -> None:
    scenarios = set(bench_scenarios())
    for words in commands_of("python -m loadtest", name):
        command = loadtest.commands.get(words[0]) if words else None
        assert not words or command is not None, f"{name}: {words}"
        options = {
            option for each in (command.params if command else ()) for option in (*each.opts, *each.secondary_opts)
        }
        assert [word for word in words if word.startswith("--") and word not in options] == [], words
        if words[:1] in (["bench"], ["compare"]):
            chosen = {after for before, after in pairwise(words) if before == "--only"}
            assert chosen <= scenarios, words


@pytest.mark.parametrize("name", [*DOCUMENTS, *OF_LOADTEST, "CHANGELOG.md"])
def test_every_target_of_make_that_a_document_shows_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.MULTILINE))
    # The packages of Debian that the first page names begin with make's own.
    shown = {words[0] for words in commands_of("make", name) if words and words[0] != "python3-venv"}
    assert shown <= targets


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in {MEASURED, MYSQL}])
def test_every_identifier_that_a_document_names_stands_in_the_repository(name: str) -> None:
    """Catches settings, log events, columns, options and methods that were renamed."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text_of(name)))
    named = set(re.findall(r"\b[A-Za-z]\w*_\w*[a-z0-9]\b", quoted))
    assert named - identifiers() - METRICS - EXAMPLES == set()


EXAMPLES = {"new_type", "tao_00042", "tao_00007"}


@cache
def identifiers() -> frozenset[str]:
    """Every word of the code, the migrations, the example files and the message definitions."""
    suffixes = {".py", ".pyx", ".sql", ".yaml", ".cnf", ".json", ".proto", ".service", ".toml"}
    folders = ("tao", "sql", "config", "protos", "loadtest", "tests", "docker")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    here = Path(__file__)
    return frozenset(
        word for path in files if path != here for word in (path.stem, *re.findall(r"\w+", path.read_text()))
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).parent / "mkdocs"
    done = subprocess.run(
        [str(mkdocs), "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def settings_by_group() -> dict[str, set[str]]:
    """The settings of each group, as the reference lists them for all files together."""
    found: dict[str, set[str]] = {}
    group = ""
    for line in PAGES[Path("docs/reference/settings.md")].splitlines():
        if heading := re.match(r"##+ `?([\w.]+)`?", line):
            group = heading[1]
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.setdefault(group, set()).add(row[1])
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_a_setting_that_a_document_names_with_its_group_exists(name: str) -> None:
    groups = settings_by_group()
    known = {word for group in groups for word in group.split(".")} | {"story", "stalls", "amends", "hosting"}
    named = re.findall(r"`([a-z_]+)\.([a-z_]+)`", text_of(name))
    wrong = [
        f"{group}.{field}"
        for group, field in named
        if group in known and field not in groups.get(group, set()) and f"{group}.{field}" not in groups
    ]
    assert wrong == []


def sessions(name: str) -> Iterator[str]:
    """Yield the Python blocks of a document that `python -m asyncio` runs: those that use `await` at the top level."""
    for block in re.findall(r"^```python\n(.*?)^```$", text_of(name), re.MULTILINE | re.DOTALL):
        try:
            compile(block, name, "exec")
        except SyntaxError:
            yield block


def console_error(session: str) -> str:
    """Return the line at which an interactive console refuses a session that is pasted into it, or an empty string."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    statement: list[str] = []
    for line in [*session.splitlines(), ""]:
        statement.append(line)
        try:
            if compiler("\n".join(statement), symbol="single") is not None:
                statement = []
        except SyntaxError:
            return line
    return "\n".join(statement).strip()


def test_a_console_refuses_a_block_without_an_empty_line_behind_it() -> None:
    block = "with graph.trace() as trace:\n    await graph.obj_get(1)\n"
    assert console_error(block + "await graph.close()\n") == "await graph.close()"
    assert console_error(block + "\nawait graph.close()\n") == ""


@pytest.mark.parametrize("name", WRITTEN)
def test_every_session_of_a_document_can_be_pasted_into_a_console(name: str) -> None:
    for session in sessions(name):
        assert console_error(session) == "", session
