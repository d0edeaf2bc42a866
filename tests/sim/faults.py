"""Faults, begun and ended."""

from __future__ import annotations

from typing import Final

from tests.sim.plans import Fault
from tests.sim.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self._world: Final = world

    def begin(self, fault: Fault) -> None:
        return

    def mend(self) -> None:
        return
