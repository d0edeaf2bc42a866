"""Database servers that were masters, and are back: an operator has them follow again, or seeds them anew."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Final

from tao.devcluster.cluster import DevCluster
from tao.devcluster.state_folder import service_accounts
from tao.model.errors import OperatorError

_COMMAND_SECONDS: Final = 120.0
_REJOIN_SECONDS: Final = 180.0
_REJOIN_PAUSE_SECONDS: Final = 1.0
"""The watcher may still be at work on a server that has just come back."""


async def bring_back(cluster: DevCluster, name: str) -> str:
    """`tao rejoin` for a former master that runs again, seeded anew when it is refused for what it alone has; returns
    "rejoined" or "seeded". Raises `OperatorError`."""
    said = ""
    with suppress(TimeoutError):
        async with asyncio.timeout(_REJOIN_SECONDS):
            while True:
                status, said = await command(cluster, "rejoin", name)
                if status == 0:
                    return "rejoined"
                if "tao reseed" in said:
                    status, said = await command(cluster, "reseed", name)
                    if status == 0:
                        return "seeded"
                await asyncio.sleep(_REJOIN_PAUSE_SECONDS)
    raise OperatorError(f"{name} does not rejoin: {said}")


async def command(cluster: DevCluster, *words: str) -> tuple[int, str]:
    """Exit status and errors of a command, as an operator runs it."""
    accounts = service_accounts(cluster.record.passwords)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tao.cli", *words, "--topology", str(cluster.topology_path), "--yes", "--json"),
        env={
            **os.environ,
            "TAO_ADMIN_PASSWORD": accounts.administrator.password,
            "TAO_REPLICATOR_PASSWORD": accounts.replicator.password,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            _, errors = await process.communicate()
    except TimeoutError:
        raise OperatorError(f"tao {' '.join(words)} does not end within {_COMMAND_SECONDS:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return process.returncode or 0, errors.decode(errors="replace").strip()
