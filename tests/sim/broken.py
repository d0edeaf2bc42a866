"""What a variant of the product is: one broken rule, and the plans that reveal it (`tests.sim.variants`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.sim.plans import Shape


@dataclass(frozen=True, slots=True)
class Variant:
    """One broken rule, the plans that reveal it, and the checks that must notice.

    ``broken`` breaks the product while a block runs; ``faults`` and ``shape`` bring out the consequence, which is one
    of ``violates`` (invariants of docs/explanation/invariants.md or words of `Violation`) and nothing else. It must be
    found within ``seeds`` runs of ``acts``, from seed ``first`` on: far more than it takes, since every change of the
    product changes what a seed brings about. Seed ``first`` has brought it about before. ``single_share``: see
    `make_plan`.
    """

    name: str
    broken: Callable[[], AbstractContextManager[object]]
    violates: frozenset[str]
    faults: Mapping[str, int]
    shape: Shape = field(default_factory=lambda: Shape(leaders=2))
    seeds: int = 200
    acts: int = 2
    first: int = 0
    single_share: float = 0.0
    with_states: bool = False
    with_jobs: bool = False
    with_journals: bool = False
    with_growth: bool = False
    with_counters: bool = False
    two_hop_share: float = 0.0
    members_share: float = 0.0
