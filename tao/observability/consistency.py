"""Consistency in nines: the part of the checks of caches that found the right value (invariant 2 of the design).

Nines of few checks mean little. So of checks that found no fault only what they prove is claimed: with 95 percent
confidence, fewer than three in N are wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_SHOWN_BY_NONE_WRONG: Final = 3.0
"""The rule of three: at a rate of 3/N, finding no fault in N checks has a probability of 1 in 20."""


@dataclass(frozen=True, slots=True)
class MeasuredConsistency:
    """The outcome of ``looks`` checks, of which ``wrong`` found a fault."""

    looks: int
    wrong: int

    @property
    def nines(self) -> float:
        """Return the nines: 5.0 when one check in 100,000 is wrong, 0 when nothing is known."""
        if not self.looks:
            return 0.0
        rate = (self.wrong or min(_SHOWN_BY_NONE_WRONG, self.looks)) / self.looks
        return max(0.0, -math.log10(rate))

    @property
    def percent(self) -> str:
        """Return the percentage with the digits that matter: 99.9998 %."""
        if not self.looks:
            return "-"
        if not self.wrong:
            return "100 %"
        digits = max(0, math.floor(self.nines) - 1)
        # Rounded down, and not by way of a float: a value below 100 % must not be shown as 100 %.
        shown = (self.looks - self.wrong) * 100 * 10**digits // self.looks
        return f"{shown // 10**digits}{f'.{shown % 10**digits:0{digits}}' if digits else ''} %"

    def text(self, what: str) -> str:
        """Return a part of a sentence: "99.9998 % (5.6 nines) of 500,000 entries"."""
        if not self.looks:
            return f"nothing is known: no {what}"
        known = f"{self.nines:.1f} nines" if self.wrong else f"at least {self.nines:.1f} nines"
        return f"{self.percent} ({known}) of {self.looks:,} {what}"
