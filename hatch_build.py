"""Compiles the hot paths where there is a compiler; elsewhere their twins in Python are used.

An editable install (`make env`) gets the modules in their place in the checkout, a wheel carries them. Without Cython
or a C compiler the build says so and goes on: the wheel is then one for every platform. ``TAO_PURE=1`` asks for that.
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

SOURCES = "tao/*/*_core.pyx"


class CompiledCore(BuildHookInterface[Any]):
    """Called by hatchling before it builds a wheel; ``version`` is ``editable`` for ``pip install --editable``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build each module beside its source, and have the wheel carry it."""
        if os.environ.get("TAO_PURE") == "1":
            return
        suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
        modules = {source: source.with_name(source.stem + suffix) for source in sorted(Path(self.root).glob(SOURCES))}
        try:
            for source, module in modules.items():
                if not module.exists() or module.stat().st_mtime <= source.stat().st_mtime:
                    compile_module(source, module)
        except (OSError, subprocess.CalledProcessError) as error:
            for module in modules.values():  # all or none: `tao --version` names one core
                module.unlink(missing_ok=True)
            self.app.display_warning(f"no core is compiled, the twins in Python will be used: {error}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            for module in modules.values():
                build_data["force_include"][str(module)] = str(module.relative_to(self.root))


def compile_module(source: Path, module: Path) -> None:
    """With the compiler that Python itself was built with. Raises `OSError`, `subprocess.CalledProcessError`."""
    variables = sysconfig.get_config_vars()
    with TemporaryDirectory(dir=source.parent, prefix=".build-") as folder:
        code, built = Path(folder, f"{source.stem}.c"), Path(folder, module.name)
        name = f"tao.{source.parent.name}.{source.stem}"
        cython = [sys.executable, "-m", "cython", "-3", f"--module-name={name}"]
        subprocess.run([*cython, str(source), "-o", str(code)], check=True, capture_output=True)
        compiler = shlex.split(os.environ.get("CC") or variables.get("CC") or "cc")
        options = [*shlex.split(variables.get("CCSHARED") or "-fPIC"), "-shared", "-O2", "-DNDEBUG", "-w"]
        headers = Path(sysconfig.get_path("include"))
        # Debian's headers include one by its path from the folder above, which is the system's own only for its Python.
        include = [f"-I{headers}", "-idirafter", str(headers.parent)]
        subprocess.run([*compiler, *options, *include, str(code), "-o", str(built)], check=True, capture_output=True)
        built.replace(module)
