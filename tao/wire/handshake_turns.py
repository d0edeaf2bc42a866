"""The pace of TLS handshakes at the frames port.

The start of a handshake costs the server half a millisecond and a stranger nothing, so each waits for its turn
(`tao.wire.stranger_turns`): one in a turn of the loop, and a bounded number in a second for peers that then show no
credential. An address from which somebody has greeted, and is connected, has turns in common with other such addresses
alone: strangers at other addresses do not delay its newcomers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Final

from tao.wire.settings import DoorstepSettings
from tao.wire.stranger_turns import Pace, StrangerTurns, Turn

_PENDING_OF_A_TURN: Final = 16
"""Pending connections of one address for each turn that may be saved up. Saved turns are taken one right after the
other, so those who are still to be accepted wait for them; honest peers give theirs back within milliseconds."""


class Handshake:
    """One handshake, from the arrival of the client's first message."""

    __slots__ = ("_pace", "_turn")

    def __init__(self, turn: Turn, pace: Pace) -> None:
        self._turn: Final = turn
        self._pace: Final = pace

    def wait(self) -> None:
        """Wait for its turn, which may be now."""
        self._pace.turns.add(self._turn)
        self._pace.give_turns()

    def withdraw(self) -> None:
        """Wait no longer."""
        self._pace.turns.withdraw(self._turn)

    def greeted(self) -> None:
        """Give its turn back: its peer has shown a credential."""
        self._pace.turns.give_back(self._turn)
        self._pace.give_turns()


class HandshakeTurns:
    """The handshakes of one port."""

    def __init__(self, settings: DoorstepSettings, *, now: Callable[[], float] = monotonic) -> None:
        """``now`` returns the time in seconds."""
        rate, saved = settings.stranger_handshakes_per_second, settings.max_pending_per_address / _PENDING_OF_A_TURN
        self._of_strangers: Final = Pace(StrangerTurns(rate, saved, now), one_in_a_turn=True)
        self._of_known_addresses: Final = Pace(StrangerTurns(rate, saved, now), one_in_a_turn=True)
        self._greeted: Final[Counter[str]] = Counter()

    def make(self, address: str, start: Callable[[], None]) -> Handshake:
        """Return a handshake with a peer of this address; ``start`` begins it."""
        pace = self._of_known_addresses if address in self._greeted else self._of_strangers
        return Handshake(Turn(address, start), pace)

    def greeted(self, address: str) -> None:
        """Note that a peer of this address has greeted."""
        self._greeted[address] += 1

    def left(self, address: str) -> None:
        """Note that such a peer has left."""
        self._greeted[address] -= 1
        if not self._greeted[address]:
            del self._greeted[address]

    def stop(self) -> None:
        """Start no more handshakes."""
        self._of_strangers.stop()
        self._of_known_addresses.stop()
