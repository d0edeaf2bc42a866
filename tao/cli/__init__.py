"""The commands of `tao`: each parses its options, calls `tao.admin`, and prints a table or JSON.

A command that changes something shows what it will do and asks, unless `--yes` is given. The module of a command is
imported when the command is called, so that `tao --help` is quick.
"""

from __future__ import annotations

import os
import sys

from tao.cli.extras import missing_module_text


def main() -> None:
    """Run the console script and exit with a status that `tao --help` lists."""
    _limit_grpc_log()
    try:
        from tao.cli.commands import tao
    except ModuleNotFoundError as missing:
        text = missing_module_text(missing, sys.argv[1:])
        if not text:
            raise
        sys.stderr.write(f"tao: {text}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("\ntao: interrupted\n")
        sys.exit(130)
    tao(prog_name="tao")


def import_servers() -> None:
    """Import what the servers of all roles need, before a fork of this process runs `main`."""
    _limit_grpc_log()
    from tao.cli import commands, servers  # noqa: F401

    servers.import_roles()


def _limit_grpc_log() -> None:
    # gRPC logs every failed TLS handshake, past the log of the process: strangers must not fill a disk with lines.
    # It reads the level when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
