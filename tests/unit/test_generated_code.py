"""The generated code under tao/wire/v1 and tao/etcd/v3 is what the message definitions under protos/ say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = (Path("tao/wire/v1"), Path("tao/etcd/v3"))


def generated_files(root: Path) -> dict[str, str]:
    found = (path for folder in GENERATED for path in sorted((root / folder).glob("*_pb2*.py*")))
    return {str(path.relative_to(root)): path.read_text() for path in found}


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the compiler is part of the development environment only")
    for folder in GENERATED:
        (tmp_path / folder).mkdir(parents=True)
    subprocess.run([ROOT / ".ci/generate-code", Path(sys.executable).parent, tmp_path], check=True, capture_output=True)
    fresh, committed = generated_files(tmp_path), generated_files(ROOT)
    assert sorted(fresh) == sorted(committed), "run `make proto`"
    outdated = [name for name, text in fresh.items() if committed[name] != text]
    assert outdated == [], "run `make proto`"
