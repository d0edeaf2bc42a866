"""The operator's commands: `tao ...`. Each parses, calls one thing below, and prints a table or JSON.

A command that changes something shows what it will do and asks, unless told `--yes`. Commands import what they need
when they run, so that `tao --help` is quick and the SDK's installation can show what is missing.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script. Exit statuses are those that `tao --help` tells."""
    try:
        from tao.cli.commands import tao
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("tao"):
            raise
        sys.stderr.write(f"tao: {missing.name} is not installed: `pip install 'tao-graph[server]'` brings it\n")
        sys.exit(2)
    tao(prog_name="tao")
