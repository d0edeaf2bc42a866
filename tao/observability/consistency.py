"""Consistency in nines: how many of the looks into caches found what had to be there (DESIGN.md §15, invariant 2).

Nines of few looks mean little, so of looks that found nothing wrong only what they show is claimed: with 95 percent
confidence, less than three in N are wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_SHOWN_BY_NONE_WRONG: Final = 3.0
"""The rule of three: none wrong of N is as likely as not to be luck (1 in 20) at a rate of 3/N."""


@dataclass(frozen=True, slots=True)
class Consistency:
    """``wrong`` of ``looks`` were wrong."""

    looks: int
    wrong: int

    @property
    def nines(self) -> float:
        """5.0: one in 100,000 is wrong. 0 when nothing is known."""
        if not self.looks:
            return 0.0
        rate = (self.wrong or min(_SHOWN_BY_NONE_WRONG, self.looks)) / self.looks
        return max(0.0, -math.log10(rate))

    @property
    def percent(self) -> str:
        """With as many digits as matter: 99.9998 %."""
        if not self.looks:
            return "-"
        if not self.wrong:
            return "100 %"
        digits = max(0, math.floor(self.nines) - 1)
        # Rounded down, and not by way of a float: what is not whole must not look so.
        shown = (self.looks - self.wrong) * 100 * 10**digits // self.looks
        return f"{shown // 10**digits}{f'.{shown % 10**digits:0{digits}}' if digits else ''} %"

    def text(self, what: str) -> str:
        """A sentence's part: "99.9998 % (5.6 nines) of 500,000 entries"."""
        if not self.looks:
            return f"nothing is known: no {what}"
        known = f"{self.nines:.1f} nines" if self.wrong else f"at least {self.nines:.1f} nines"
        return f"{self.percent} ({known}) of {self.looks:,} {what}"
