"""Running a command, `tao`'s or an operator's, to its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tao.model.errors import OperatorError

TAO: Final = (sys.executable, "-P", "-m", "tao.cli")
"""The command-line program of this installation."""


class Ended(NamedTuple):
    """How a command ended: its exit status, and what it printed."""

    status: int
    output: str
    errors: str


async def run_command(
    *words: str, seconds: float | None = None, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> Ended:
    """Run a command; it is killed when this is cancelled. Raises `OperatorError` when it does not end in time."""
    process = await asyncio.create_subprocess_exec(
        *words,
        env=env,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate()
    except TimeoutError:
        raise OperatorError(f"{' '.join(words)} does not end within {seconds:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(errors="replace").strip(), errors.decode(errors="replace").strip())
