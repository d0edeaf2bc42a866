"""The rules of the house that no linter knows: what lies where, how long a module may be, what the floors may import.

import-linter holds the same floors against the import graph; the walk here also sees `from time import monotonic`
inside a function, and names the line (DESIGN §14).
"""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_MODULE_LINES = 400
TOP_LEVEL = (
    ".ci/run",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "config",
    "docker",
    "docs/DESIGN.md",
    "loadtest",
    "protos/tao/wire/v1",
    "pyproject.toml",
    "requirements.lock",
    "sql",
    "tao/py.typed",
    "tests",
)
PURE_PACKAGES = ("model", "schema", "cache", "routing", "planning")
IMPURE_MODULES = frozenset({"asyncio", "grpc", "aiomysql", "socket", "time", "random", "logging", "prometheus_client"})


def is_generated(path: Path) -> bool:
    return re.search(r"_pb2(_grpc)?\.pyi?$", path.name) is not None


def written_modules(*folders: str) -> list[Path]:
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not is_generated(path)]


def imported_top_levels(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module.split(".")[0]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def named_dependencies() -> set[str]:
    """Every distribution that pyproject.toml names, in the spelling of a lock: lower case, one dash between words."""
    table = project()
    main, groups = table["project"], table["dependency-groups"]
    assert isinstance(main, dict)
    assert isinstance(groups, dict)
    lists = [main["dependencies"], *main["optional-dependencies"].values(), *groups.values()]
    names = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirements in lists for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in names if match is not None}


def lock_text() -> str:
    return (ROOT / "requirements.lock").read_text()


@pytest.mark.parametrize("entry", TOP_LEVEL)
def test_the_top_level_has(entry: str) -> None:
    assert (ROOT / entry).exists()


def test_floors_0_to_2_do_no_io_and_read_no_clock() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package in PURE_PACKAGES
        for path in written_modules(f"tao/{package}")
        for line, name in imported_top_levels(ast.parse(path.read_text()))
        if name in IMPURE_MODULES
    ]
    assert offences == []


def test_a_module_is_small_enough_to_hold_in_the_head() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in written_modules("tao", "loadtest", "tests")}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def test_a_module_says_at_its_head_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in written_modules("tao", "loadtest", "tests")
        if (text := path.read_text()).strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert silent == []


def test_the_lock_names_every_dependency_once_for_a_python_and_with_hashes() -> None:
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
