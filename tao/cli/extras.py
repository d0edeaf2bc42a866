"""The extras of the installation that bring what a command needs."""

from __future__ import annotations

from collections.abc import Sequence

_TOOLS = ("tao.devcluster", "tao.demonstration")


def missing_module_text(missing: ModuleNotFoundError, arguments: Sequence[str]) -> str:
    """Return which extra brings a missing module, as text for a person; empty when no extra brings it."""
    name = missing.name or ""
    if name.startswith(_TOOLS):
        return (
            "the development cluster is not part of this installation: run `pip install 'tao-graph[dev]'`, or name a "
            "cluster with --connect or --topology"
        )
    if name.partition(".")[0] == "tao":
        return ""
    extra = "dev" if arguments and arguments[0] in ("dev", "demo") else "server"
    return f"{name} is not installed: run `pip install 'tao-graph[{extra}]'`"
