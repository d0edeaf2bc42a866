"""Intents of inverse edges, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tao.leader.inverse_path import InversePath
from tao.model.rows import WriteKeys
from tao.planning import coordination


def overwritten_unread() -> AbstractContextManager[object]:
    """Let a write of one side replace an older intent of its pair, which it has not read."""
    add_keys = coordination._add_keys_of_edges

    def add_keys_without_intents(keys: WriteKeys, *rest: Any) -> None:
        intents = set(keys.intents)
        add_keys(keys, *rest)
        keys.intents.intersection_update(intents)

    return patch.object(coordination, "_add_keys_of_edges", add_keys_without_intents)


def not_searched() -> AbstractContextManager[object]:
    """Look for no intents, neither in a shard that is taken nor later."""
    return patch.object(InversePath, "_searches", lambda _, *, are_searched: [])
