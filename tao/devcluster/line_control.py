"""What is said to the delay line of a development cluster, and what it answers: one JSON line each way.

The line (`tao.devcluster.delay_line`) is a process of its own; whoever may enter the state folder may cut it, heal it
and change its round trip through the Unix socket that lies there.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from tao.model.errors import OperatorError, ProtocolError, Unavailable

_ANSWER_SECONDS = 5.0
_READY_PAUSE_SECONDS = 0.02
MAX_LINE_BYTES = 64 << 10
"""Of a request or an answer: some hundred pairs of regions."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Who connects to ``listen`` on loopback stands in ``source`` and is led to ``host:port``, in ``target``."""

    source: str
    target: str
    listen: int
    host: str
    port: int


class LineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The line's settings file (JSON)."""

    control: str
    """Path of the Unix socket."""
    routes: list[Route]
    """Every address of one region that another uses."""
    rtt_ms: float
    """Round trip between any two regions; half of it is added each way."""
    max_direction_bytes: int = 16 << 20
    """On their way in one direction of one connection: half a gigabyte a second at 30 ms, above any need here."""
    max_connections: int = 400
    """Of all routes together; each takes two of the 1,024 descriptors that the line's selector can watch."""


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """How is the line?"""


class SetRoundTrip(msgspec.Struct, frozen=True, tag="rtt"):
    """From now on, for what is sent from now on."""

    rtt_ms: float


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Cut two regions off from each other: connections are reset and new ones refused. ``silent``: nothing is closed
    and nothing arrives, as when a router drops every packet; what was sent arrives after healing, as TCP resends it."""

    between: tuple[str, str]
    silent: bool = False


class Heal(msgspec.Struct, frozen=True, tag="heal"):
    """Undo the cut between two regions, or every cut."""

    between: tuple[str, str] | None = None


Command = AskStatus | SetRoundTrip | Cut | Heal


class PairStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The line between two regions, both directions. ``state``: open, cut (refusing) or silent."""

    regions: tuple[str, str]
    state: str
    connections: int
    carried_bytes: int


class LineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="line"):
    """The whole line."""

    rtt_ms: float
    pairs: list[PairStatus]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command made no sense; nothing was changed."""

    message: str


async def ask_line(control: Path, command: Command) -> LineStatus:
    """The line's state once it has done ``command``.

    Raises `OperatorError` when it refuses, `Unavailable` when nobody answers in time, `ProtocolError` for nonsense.
    """
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(control), limit=MAX_LINE_BYTES)
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
    """Return once the line listens. Raises `OperatorError` when that takes longer."""
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
        raise OperatorError(f"not ready within {timeout_seconds:g} s (nobody answers at {control})") from None
