"""The product, broken on purpose: the simulator must notice each of these (DESIGN.md §15)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """``applied`` breaks the product for the time of a block."""

    name: str
    applied: Callable[[], AbstractContextManager[None]]
