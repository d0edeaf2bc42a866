"""A client of the admin port.

The admin port speaks HTTP/1.1 and answers one request a connection; an HTTP client would be one more dependency for
four lines of text.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tao.model.errors import ProtocolError, Unavailable

_MAX_ANSWER_BYTES: Final = 16 << 20
PROBE_SECONDS: Final = 2.0


class NobodyListens(Unavailable):
    """The connection was refused: the machine is up, and no process listens on the port."""


async def admin_get(address: str, path: str, timeout_seconds: float = PROBE_SECONDS) -> tuple[int, bytes]:
    """Return status and body of ``GET path`` at ``host:port``.

    Raises `NobodyListens`, `Unavailable` when there is no answer in time, and `ProtocolError` when the answer is not
    HTTP.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(host, int(port), limit=_MAX_ANSWER_BYTES)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                length = int(headers.get("content-length", "0"))
                if length > _MAX_ANSWER_BYTES:
                    raise ProtocolError(f"{address}{path} answers with {length} bytes: more than any admin page has")
                return int(lines[0].split()[1]), await reader.readexactly(length)
            finally:
                writer.close()
    except ConnectionRefusedError as error:
        raise NobodyListens(f"{address}{path} does not answer: {error}") from error
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise Unavailable(f"{address}{path} does not answer: {str(error) or type(error).__name__}") from error
    except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise ProtocolError(f"{address}{path} does not speak HTTP: {error}") from error
