"""Refusals of requests, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tao.leader.inverse_path import InversePath
from tao.model.errors import InvalidArgument
from tao.model.writes import ObjAdd
from tao.planning import write_plan
from tao.planning.draft import add_object, delete_edge


def unused_ids_are_refused() -> AbstractContextManager[object]:
    """Refuse an object with a reserved id as if another one had that id, and none ever had it."""

    def refuse(draft: Any, write: ObjAdd) -> Any:
        if draft.object(write.id) is None and not write.allocated:
            raise InvalidArgument(f"object {write.id} exists with other content")
        return add_object(draft, write)

    return patch.object(write_plan, "add_object", refuse)


def far_ends_do_not_change_their_type() -> AbstractContextManager[object]:
    """Let a coordinator change the type of an edge at the other end by an intent, where none can express the change."""
    return patch.object(InversePath, "_changes_far_side", lambda *_: False)


def missing_edges_are_not_deleted() -> AbstractContextManager[object]:
    """Refuse to delete an edge that does not exist, which is to succeed."""

    def refuse(*asked: Any) -> Any:
        outcome = delete_edge(*asked)
        if not outcome.found:
            raise InvalidArgument("there is no such edge")
        return outcome

    return patch.object(write_plan, "delete_edge", refuse)
