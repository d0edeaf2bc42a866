"""What a load process asks for the first time: no cache can have it because of this process."""

from __future__ import annotations

from loadtest.published.requests import Request
from loadtest.published.workload import Kind


class FirstReads:
    """The objects, lists and counts that a process has asked for."""

    def __init__(self, *, counts_apart: bool = False) -> None:
        """``counts_apart``: whether who has a list still has to ask for its count; without it a list's count is part of
        it, and the list none of its count."""
        self._counts_apart = counts_apart
        self._objects = set[int]()
        self._lists = set[int]()
        self._counts = set[int]()
        self.first_time = 0

    def note(self, request: Request) -> None:
        """Count the request when what it reads is asked for the first time."""
        node = request.node
        match request.kind:
            case Kind.OBJ_GET:
                known = self._objects
            case Kind.ASSOC_COUNT:
                known = self._counts
            case Kind.ASSOC_RANGE | Kind.ASSOC_TIME_RANGE | Kind.ASSOC_GET:
                if not self._counts_apart:
                    self._counts.add(node)
                known = self._lists
            case Kind.READ_MANY:
                self.first_time += len({*request.others} - self._objects)
                self._objects.update(request.others)
                return
            case _:
                return
        if node not in known:
            known.add(node)
            self.first_time += 1
