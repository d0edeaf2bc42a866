"""Structured logs: an event with fields, one line each.

A JSON line looks like this; fields of the event follow the fixed ones::

    {"time": "2025-01-31T12:00:00.000000Z", "level": "warning", "role": "leader", "server": "leader-1",
     "logger": "tao.delivery", "event": "subscriber reset", "subscriber": "follower-2", "shard": 7}

``event`` is constant text (what happened), so that lines can be counted by it; everything that varies is a field. An
exception adds ``exception``, its traceback as text. Libraries that log through the standard library produce the same
form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]
Form = Literal["json", "console"]
Logger = FilteringBoundLogger
"""Logs events: ``info(event, **fields)`` and so on. ``exception`` within an ``except`` block adds the traceback."""

_LEVELS: Final[dict[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_FIRST: Final = ("time", "level", "role", "server", "logger", "event")


def configure_logs(role: str, server: str, level: Level, form: Form, stream: TextIO) -> None:
    """Set up the logs of this process. A second call replaces the first."""
    renderer: Processor
    if form == "json":
        renderer = structlog.processors.JSONRenderer(serializer=_to_json)
    else:
        renderer = structlog.dev.ConsoleRenderer(
            timestamp_key="time", colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _constant_fields(role, server),
    ]
    if form == "json":
        # The console renderer formats tracebacks by itself, and better.
        processors += [structlog.processors.format_exc_info, _fixed_fields_first]
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Lossy(stream))),
        # The cache is off, so that loggers made before this call (at import, in a test) follow it too. This costs 5 µs
        # a line, and nothing is logged per request.
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Forward()], level=max(_LEVELS[level], logging.INFO), force=True)


def logger(name: str) -> Logger:
    """Return a logger whose lines carry ``logger=name``. It works before `configure_logs`, and follows it."""
    return cast(Logger, structlog.get_logger(logger_name=name))


class _Lossy:
    """Drops lines that cannot be written, for instance to a full disk. Logging must not end the thread or task that
    logs, least of all one that reports the full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class _Forward(logging.Handler):
    """Turns records of the standard library (asyncio, grpc, drivers) into structured events."""

    def emit(self, record: logging.LogRecord) -> None:
        logger(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info or None)


def _constant_fields(role: str, server: str) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    def add(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["role"] = role
        event["server"] = server
        event["logger"] = event.pop("logger_name", "")  # structlog has an argument named "logger" itself
        return event

    return add


def _fixed_fields_first(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Put the fields of each line into the same order, because people read lines too."""
    return {**{key: event[key] for key in _FIRST if key in event}, **event}


def _to_json(event: object, default: object = None, **_: object) -> str:
    """Render values that JSON does not know by their ``repr``. ``default`` is structlog's own fallback."""
    return msgspec.json.encode(event, enc_hook=repr).decode()
