"""Check the rules of the repository that no linter knows: its layout, module sizes, and the imports of pure layers.

The import linter checks the same layers against the import graph. The walk here also sees `from time import monotonic`
inside a function, and names the line.
"""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_MODULE_LINES = 800
MAX_FUNCTION_LINES = 70
MAX_CONSTRUCTOR_PARAMETERS = 7
TERMS_IN_ING = frozenset({"framing", "paging", "routing", "ring", "string", "logging", "pacing"})
"""Words of the field that look like present participles."""
TOP_LEVEL = (
    ".ci/run",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "config",
    "docker",
    "docs/explanation/invariants.md",
    "loadtest",
    "protos/tao/wire/v1",
    "pyproject.toml",
    "requirements.lock",
    "sql",
    "tao/py.typed",
    "tests",
)
PURE_PACKAGES = ("model", "schema", "sets", "access", "cache", "routing", "planning")
IMPURE_MODULES = frozenset({"asyncio", "grpc", "aiomysql", "socket", "time", "random", "logging", "prometheus_client"})


def is_generated(path: Path) -> bool:
    return re.search(r"_pb2(_grpc)?\.pyi?$", path.name) is not None


def written_modules(*folders: str) -> list[Path]:
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not is_generated(path)]


class Import(NamedTuple):
    """The import of a module, or of names in it."""

    line: int
    module: str
    names: tuple[str, ...] = ()
    level: int = 0


class Definition(NamedTuple):
    """A function."""

    name: str
    line: int
    lines: int
    parameters: int


class Module(NamedTuple):
    """What the tests look at in a module. Its tree is not kept: those of all modules are millions of objects."""

    has_docstring: bool
    imports: list[Import]
    definitions: list[Definition]


@cache
def module_of(path: Path) -> Module:
    tree = ast.parse(text := path.read_text())
    found = Module(not text.strip() or ast.get_docstring(tree) is not None, [], [])
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names, lineno=line):
                found.imports.extend(Import(line, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=level, lineno=line):
                found.imports.append(Import(line, module, tuple(alias.name for alias in names), level))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                parameters = len(node.args.args) + len(node.args.kwonlyargs)
                found.definitions.append(Definition(node.name, node.lineno, lines, parameters))
    return found


def imported_top_levels(path: Path) -> Iterator[tuple[int, str]]:
    return ((each.line, each.module.split(".")[0]) for each in module_of(path).imports if not each.level)


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def named_dependencies() -> set[str]:
    """Return the distributions that pyproject.toml names, spelled as in a lock: lower case, one dash between words."""
    table = project()
    main, groups = table["project"], table["dependency-groups"]
    assert isinstance(main, dict)
    assert isinstance(groups, dict)
    lists = [main["dependencies"], *main["optional-dependencies"].values(), *groups.values()]
    names = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirements in lists for requirement in requirements)
    found = {re.sub(r"[-_.]+", "-", match[0]).lower() for match in names if match is not None}
    return found - {main["name"]}  # an extra may include another extra of this project


def lock_text() -> str:
    return (ROOT / "requirements.lock").read_text()


@pytest.mark.parametrize("entry", TOP_LEVEL)
def test_the_top_level_has(entry: str) -> None:
    assert (ROOT / entry).exists()


def test_the_pure_packages_do_no_io_and_read_no_clock() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package in PURE_PACKAGES
        for path in written_modules(f"tao/{package}")
        for line, name in imported_top_levels(path)
        if name in IMPURE_MODULES
    ]
    assert offences == []


def test_no_module_is_longer_than_the_limit() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in written_modules("tao", "loadtest", "tests")}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def definitions(*folders: str) -> Iterator[tuple[Path, Definition]]:
    return ((path, each) for path in written_modules(*folders) for each in module_of(path).definitions)


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{each.name}": each.lines for path, each in definitions("tao", "loadtest", "tests")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_no_constructor_takes_more_parameters_than_it_can_explain() -> None:
    parameters = {
        f"{path.relative_to(ROOT)}:{each.line}": each.parameters - 1
        for path, each in definitions("tao", "loadtest")
        if each.name == "__init__"
    }
    assert {name: number for name, number in parameters.items() if number > MAX_CONSTRUCTOR_PARAMETERS} == {}


def test_modules_are_named_by_nouns() -> None:
    stems = {path.relative_to(ROOT): path.stem for path in written_modules("tao", "loadtest")}
    assert [
        path for path, stem in stems.items() if stem.endswith("ing") and stem.split("_")[-1] not in TERMS_IN_ING
    ] == []


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of this repository that a module imports, for types only or within a function too."""
    found: set[str] = set()
    for each in module_of(path).imports:
        inner = {f"{each.module}.{name}" for name in each.names}
        found |= inner & modules
        if not inner or inner - modules:
            found.add(each.module)
    return found & modules


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in written_modules("tao", "loadtest")
    }
    imports = {name: imported_modules(path, set(paths)) - {name} for name, path in paths.items()}
    # A module without imports is in no circle; neither is one that imports only such modules.
    while free := {name for name, needed in imports.items() if not needed & imports.keys()}:
        imports = {name: needed for name, needed in imports.items() if name not in free}
    # What only imports circles is in none itself.
    while idle := imports.keys() - {each for needed in imports.values() for each in needed}:
        imports = {name: needed for name, needed in imports.items() if name not in idle}
    assert sorted(imports) == []


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in written_modules("tao", "loadtest", "tests")
        if not module_of(path).has_docstring
    ]
    assert silent == []


def test_the_lock_names_every_dependency_once_with_hashes() -> None:
    text = lock_text()
    locked = re.findall(r"^([a-z0-9-]+)==\S+( ; [^\\]+)? \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert len(locked) == len(set(locked)) == len(re.findall(r"^[^#\s]", text, re.MULTILINE))
    assert named_dependencies() <= {name for name, _ in locked}


def test_the_lock_has_no_addresses() -> None:
    assert "http" not in lock_text()
    assert "index-url" not in lock_text()
    assert "file:" not in lock_text()


def test_the_wheel_carries_what_is_read_at_run_time(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
    for source, target in (("sql", "tao/_sql"), ("config", "tao/_config")):
        files = [path for path in (ROOT / source).rglob("*") if path.is_file()]
        assert files
        assert {f"{target}/{path.relative_to(ROOT / source)}" for path in files} <= carried
    assert {name.split("/")[0] for name in carried if ".dist-info" not in name} == {"tao"}
