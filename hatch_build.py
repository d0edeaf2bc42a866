"""Compiles the cache's core where there is a compiler; elsewhere its twin in Python is used (`tao.cache.packed`).

An editable install (`make env`) gets the module in its place in the checkout, a wheel carries it. Without Cython or a
C compiler the build says so and goes on: the wheel is then one for every platform. ``TAO_PURE=1`` asks for that.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "tao/cache/packed_core.pyx"


class CompiledCore(BuildHookInterface[Any]):
    """Called by hatchling before it builds a wheel; ``version`` is ``editable`` for ``pip install --editable``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the module beside its source, and have the wheel carry it."""
        source = Path(self.root, SOURCE)
        module = source.with_name(source.stem + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
        if os.environ.get("TAO_PURE") == "1":
            return
        try:
            if not module.exists() or module.stat().st_mtime <= source.stat().st_mtime:
                compile_module(source, module)
        except (OSError, subprocess.CalledProcessError) as error:
            module.unlink(missing_ok=True)
            self.app.display_warning(f"{source.name} is not compiled, its twin in Python will be used: {error}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["force_include"][str(module)] = str(module.relative_to(self.root))


def compile_module(source: Path, module: Path) -> None:
    """With the compiler that Python itself was built with. Raises `OSError`, `subprocess.CalledProcessError`."""
    variables = sysconfig.get_config_vars()
    with TemporaryDirectory(dir=source.parent, prefix=".build-") as folder:
        code, built = Path(folder, f"{source.stem}.c"), Path(folder, module.name)
        cython = [sys.executable, "-m", "cython", "-3", f"--module-name=tao.cache.{source.stem}"]
        subprocess.run([*cython, str(source), "-o", str(code)], check=True, capture_output=True)
        compiler = shlex.split(os.environ.get("CC") or variables.get("CC") or "cc")
        options = [*shlex.split(variables.get("CCSHARED") or "-fPIC"), "-shared", "-O2", "-DNDEBUG", "-w"]
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run([*compiler, *options, include, str(code), "-o", str(built)], check=True, capture_output=True)
        built.replace(module)
