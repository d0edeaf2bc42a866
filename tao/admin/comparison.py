"""The result of comparing the contents of several servers with the databases that they came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from tao.model.errors import TaoError

MAX_FINDINGS: Final = 1_000
"""The most wrong items that are described; further ones are only counted."""


@dataclass(slots=True, kw_only=True)
class ServerReport:
    """The result at one server. ``in_flight``: items that differed at first, and not any more when they were read
    again."""

    server: str
    in_flight: int = 0
    wrong: int = 0
    error: str = ""


_Line = TypeVar("_Line", bound=ServerReport)
_Finding = TypeVar("_Finding")


@dataclass(slots=True)
class Report(Generic[_Line, _Finding]):
    """The results at all servers, and a description of what is wrong."""

    servers: list[_Line] = field(default_factory=list)
    findings: list[_Finding] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """The number of wrong items at all servers."""
        return sum(server.wrong for server in self.servers)

    @property
    def unchecked(self) -> int:
        """The number of servers that could not be asked, or only in part."""
        return sum(bool(server.error) for server in self.servers)

    @property
    def clean(self) -> bool:
        """True when no compared item is wrong and every server could be asked."""
        return not self.wrong and not self.unchecked

    @contextmanager
    def checking(self, line: _Line) -> Iterator[None]:
        """Add the line of a server, and note an error that ends its check there."""
        self.servers.append(line)
        try:
            yield
        except TaoError as error:
            line.error = error.message

    def add(self, line: _Line, finding: _Finding) -> None:
        """Note a wrong item at a server."""
        line.wrong += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
