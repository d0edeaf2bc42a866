"""A log line is an event with fields, in the documented shape."""

from __future__ import annotations

import errno
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from tao.observability.logs import Level, configure_logs, logger


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def configured(level: Level = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logs("leader", "l-1", level, "json", stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_the_fixed_fields_first_and_then_the_events() -> None:
    log = logger("tao.delivery")
    stream = configured()
    log.warning("subscriber reset", subscriber="f-2", shard=7)
    (line,) = lines(stream)
    assert list(line) == ["time", "level", "role", "server", "logger", "event", "subscriber", "shard"]
    assert (line["level"], line["role"], line["server"], line["logger"]) == ("warning", "leader", "l-1", "tao.delivery")
    assert line["time"].endswith("Z")


def test_lines_below_the_level_are_not_written() -> None:
    stream = configured("warning")
    logger("x").info("quiet")
    assert lines(stream) == []


def test_an_exception_is_a_field_of_its_line() -> None:
    stream = configured()
    try:
        raise ValueError("broken")
    except ValueError:
        logger("x").exception("failed")
    (line,) = lines(stream)
    assert "ValueError: broken" in line["exception"]
    assert line["level"] == "error"


def test_a_value_that_json_does_not_know_is_shown_and_breaks_nothing() -> None:
    stream = configured()
    logger("x").info("odd", value=object)
    assert "object" in lines(stream)[0]["value"]


def test_libraries_that_use_the_standard_library_come_out_in_the_same_shape() -> None:
    stream = configured()
    logging.getLogger("asyncio").error("task %s died", 5)
    logging.getLogger("asyncio").debug("chatter")
    (line,) = lines(stream)
    assert (line["logger"], line["event"], line["level"]) == ("asyncio", "task 5 died", "error")


def test_the_console_form_is_for_people() -> None:
    stream = io.StringIO()
    configure_logs("leader", "l-1", "info", "console", stream)
    logger("x").info("hello", shard=3)
    assert "hello" in stream.getvalue()
    assert "shard=3" in stream.getvalue()


def test_a_log_that_cannot_be_written_loses_lines_and_nothing_else() -> None:
    class FullDisk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream = FullDisk()
    configure_logs("leader", "leader-1", "info", "json", stream)
    logger("spool").error("spool_failed")
    stream.full = False
    logger("spool").info("spool_well")
    assert stream.getvalue().count("spool_") == 1
