"""Questions over several lists, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tao.model.errors import TaoError
from tao.sets.steps import Answer
from tao.sets.streams import ListStream


@contextmanager
def unread_list_is_empty() -> Iterator[None]:
    """Let a set take a list that cannot be read for an empty one."""

    def read(_: ListStream, answer: Answer) -> bytes | None:
        return None if isinstance(answer, TaoError) else answer

    with patch.multiple(ListStream, _read=read):
        yield
