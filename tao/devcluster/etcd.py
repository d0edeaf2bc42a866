"""The etcd of a development cluster: one member, with its data in the state folder."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tao.devcluster.ports import LOOPBACK
from tao.etcd.client import EtcdClient
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.model.errors import OperatorError, RetryableError

ENVIRONMENT_VARIABLE: Final = "TAO_ETCD"
_SYSTEM_FOLDERS: Final = ("/usr/bin", "/usr/local/bin")
_PAUSE_SECONDS: Final = 0.05


def find_etcd(env: Mapping[str, str]) -> str:
    """Return the program that ``TAO_ETCD`` names, else ``etcd`` from ``PATH``. Raises `OperatorError`."""
    named = env.get(ENVIRONMENT_VARIABLE)
    found = shutil.which(named or "etcd", path=os.pathsep.join((env.get("PATH", ""), *_SYSTEM_FOLDERS)))
    if found is None:
        raise OperatorError(
            f"no etcd found: `apt-get install etcd-server` installs one, or set {ENVIRONMENT_VARIABLE} to the program"
        )
    return found


def etcd_command(program: str, data: Path, client_port: int, peer_port: int) -> list[str]:
    """Return the command line of a single member. Tests and demonstrations lose nothing that they need when the machine
    loses power, but etcd has no option for that before version 3.5 (``--unsafe-no-fsync``)."""
    client, peer = f"http://{LOOPBACK}:{client_port}", f"http://{LOOPBACK}:{peer_port}"
    options = {
        "name": "dev",
        "data-dir": str(data),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"dev={peer}",
        "log-level": "warn",
        "logger": "zap",
    }
    return [program, *(f"--{name}={value}" for name, value in options.items())]


async def wait_until_etcd_answers(client_port: int, timeout_seconds: float) -> None:
    """Wait until a member commits. Raises `OperatorError` after the time limit."""
    location = EtcdLocation((f"{LOOPBACK}:{client_port}",), "/tao")
    client = EtcdClient(location, EtcdSettings(timeout_seconds=1.0))
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    await client.read(location.key("topology/head"))
                    return
                except RetryableError:
                    await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        raise OperatorError(f"not ready within {timeout_seconds:g} s") from None
    finally:
        await client.close()
