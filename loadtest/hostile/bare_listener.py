"""A listener that accepts connections, holds them until their peers leave, reads what they send, and does nothing else.

It shows what an attack by connections alone costs other programs on the same machine, whichever server it is made on.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tao.devcluster.ports import LOOPBACK

_BACKLOG: Final = 1_024


@asynccontextmanager
async def bare_listener(log: Path) -> AsyncIterator[str]:
    """Run the listener in a process of its own, and yield its address. ``log`` receives its standard error."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", __file__, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    try:
        assert process.stdout is not None
        yield f"{LOOPBACK}:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


def _serve() -> None:
    held: dict[int, socket.socket] = {}
    with socket.create_server((LOOPBACK, 0), backlog=_BACKLOG) as listener, select.epoll() as epoll:
        print(listener.getsockname()[1], flush=True)
        epoll.register(listener, select.EPOLLIN)
        while True:
            for number, _ in epoll.poll():
                if number == listener.fileno():
                    accepted, _ = listener.accept()
                    held[accepted.fileno()] = accepted
                    epoll.register(accepted, select.EPOLLIN)
                elif not _is_open(held[number]):
                    held.pop(number).close()


def _is_open(connection: socket.socket) -> bool:
    """Read what has arrived, and return whether the peer is still there."""
    try:
        return bool(connection.recv(1 << 14))
    except ConnectionError:
        return False


if __name__ == "__main__":
    _serve()
