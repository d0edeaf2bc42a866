"""The commands of the delay line of a development cluster, and its answers: one JSON line each way.

The line (`tao.devcluster.delay_line`) is a process of its own. Everybody who can enter the state folder can cut it,
heal it and change its round trip through the Unix socket there.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from tao.model.errors import OperatorError, ProtocolError, Unavailable

_ANSWER_SECONDS = 5.0
_READY_PAUSE_SECONDS = 0.02


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A port of the line: connections to ``listen`` come from ``source`` and go to ``host:port`` in ``target``."""

    source: str
    target: str
    listen: int
    host: str
    port: int


class LineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the line's settings file (JSON)."""

    control: str
    """The path of the Unix socket for commands."""
    routes: list[Route]
    """One route for every address of a region that another region uses."""
    rtt_ms: float
    """The round trip between two regions in milliseconds; half of it is added each way."""
    max_direction_bytes: int = 16 << 20
    """The limit of bytes on their way in one direction of a connection: half a gigabyte a second at 30 ms."""
    max_connections: int = 400
    """The limit over all routes; each connection takes two of the 1,024 descriptors that select() can watch."""


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """Asks for the state of the line."""


class SetRoundTrip(msgspec.Struct, frozen=True, tag="rtt"):
    """Sets the round trip of bytes that are sent from now on."""

    rtt_ms: float


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Cuts the line between two regions: connections are reset and new ones refused.

    ``silent``: nothing is closed and nothing arrives, as when a router drops every packet. What was sent arrives after
    healing, as TCP resends it. ``to_port``: cut only the ways to this port, of one server; 0: all. Such a cut is not
    silent, and the state of the line stays open."""

    between: tuple[str, str]
    silent: bool = False
    to_port: int = 0


class Heal(msgspec.Struct, frozen=True, tag="heal"):
    """Undoes the cut between two regions, or every cut."""

    between: tuple[str, str] | None = None


Command = AskStatus | SetRoundTrip | Cut | Heal


class PairStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the line between two regions. ``state``: open, cut (connections are refused) or silent."""

    regions: tuple[str, str]
    state: str
    connections: int
    carried_bytes: int


class LineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="line"):
    """The state of the whole line."""

    rtt_ms: float
    pairs: list[PairStatus]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The answer to a wrong command; nothing was changed."""

    message: str


async def ask_line(control: Path, command: Command) -> LineStatus:
    """Send a command to the line and return the line's state after it.

    Raises `OperatorError` for a wrong command, `Unavailable` when the line does not answer in time, and `ProtocolError`
    for an answer that cannot be decoded.
    """
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(control))
            try:
                writer.write(msgspec.json.encode(command) + b"\n")
                text = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise Unavailable(f"the delay line at {control} does not answer: {str(error) or 'too late'}") from error
    try:
        answer = msgspec.json.decode(text, type=LineStatus | Refused)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the delay line at {control} answers with something else: {error}") from error
    if isinstance(answer, Refused):
        raise OperatorError(answer.message)
    return answer


async def wait_until_line_answers(control: Path, timeout_seconds: float) -> None:
    """Return once the line answers. Raises `OperatorError` when that takes longer than ``timeout_seconds``."""
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    await ask_line(control, AskStatus())
                except Unavailable:
                    await asyncio.sleep(_READY_PAUSE_SECONDS)
                else:
                    return
    except TimeoutError:
        raise OperatorError(f"not ready within {timeout_seconds:g} s (it does not answer at {control})") from None
