"""What `peers` aims at, every aim judged; and ratios in which more than 1 is in tao's favour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from loadtest.peers.names import MANY, MEMCACHED, MYSQL, OPEN, REDIS, TAO
from loadtest.peers.shape_figures import ShapeFigure
from loadtest.peers.staleness import ONE_TIER, StaleReads
from loadtest.results import Listing

PEERS: Final = (REDIS, MEMCACHED, MYSQL)
_THROUGHPUT: Final = {REDIS: 3.0, MYSQL: 5.0}


class JudgedAim(msgspec.Struct, frozen=True, kw_only=True):
    """An aim: ``value`` is to be at least ``bound`` (a ratio) or no more than it (a number of what must not be)."""

    aim: str
    shape: str
    """"" where it is of no shape of load."""
    value: float
    bound: float
    met: bool


Shapes = Mapping[str, Mapping[str, ShapeFigure]]
"""Shape → contestant → figure, of those that were measured, in order."""


def ratios(ours: ShapeFigure, theirs: ShapeFigure) -> dict[str, float]:
    """By what is compared."""
    return {
        "throughput": _divided(ours.per_second, theirs.per_second),
        "p50": _divided(theirs.p50_us, ours.p50_us),
        "p99": _divided(theirs.p99_us, ours.p99_us),
        "server_cpu": _divided(theirs.server_cpu_us, ours.server_cpu_us),
        "client_cpu": _divided(theirs.client_cpu_us, ours.client_cpu_us),
        "total_cpu": _divided(theirs.total_cpu_us, ours.total_cpu_us),
    }


def _divided(above: float, below: float) -> float:
    # CPU is counted in ticks of ten milliseconds: a short turn may have none.
    return round(above / below, 3) if below else 0.0


def judged(shapes: Shapes, stale: Sequence[StaleReads]) -> list[JudgedAim]:
    """Every aim that what was measured can be held against. ``stale``: of tao; empty when nobody looked."""
    return [*_throughputs(shapes), *_tails(shapes), *_nothing_wrong(shapes, stale)]


def _of_kinds(shapes: Shapes, *kinds: str) -> Iterator[tuple[str, Mapping[str, ShapeFigure]]]:
    """Those of these kinds of load in which tao took part."""
    return ((shape, of) for shape, of in shapes.items() if TAO in of and of[TAO].kind in kinds)


def _throughputs(shapes: Shapes) -> Iterator[JudgedAim]:
    for shape, of in _of_kinds(shapes, MANY):
        for name, bound in _THROUGHPUT.items():
            if name in of:
                value = ratios(of[TAO], of[name])["throughput"]
                aim = f"throughput at least {bound:g} × {name}"
                yield JudgedAim(aim=aim, shape=shape, value=value, bound=bound, met=value >= bound)


def _tails(shapes: Shapes) -> Iterator[JudgedAim]:
    for shape, of in _of_kinds(shapes, MANY, OPEN):
        for name in (each for each in PEERS if each in of):
            value = ratios(of[TAO], of[name])["p99"]
            yield JudgedAim(aim=f"p99 lower than {name}", shape=shape, value=value, bound=1.0, met=value > 1)


def _nothing_wrong(shapes: Shapes, stale: Sequence[StaleReads]) -> Iterator[JudgedAim]:
    if stale:
        within = sum(each.stale for each in stale if each.within == ONE_TIER)
        yield JudgedAim(aim="no stale read of tao within the tier", shape="", value=within, bound=0, met=not within)
    ours = [of[TAO] for of in shapes.values() if TAO in of]
    if ours:
        failed = sum(sum(each.failed.values()) for each in ours)
        yield JudgedAim(aim="no failed request of tao", shape="", value=failed, bound=0, met=not failed)


def aims_listing(aims: Sequence[JudgedAim]) -> Listing:
    """For the table."""
    rows: list[tuple[str, ...]] = [
        (f"{each.aim}{f' ({each.shape})' if each.shape else ''}", f"{each.value:g}", "met" if each.met else "not met")
        for each in aims
    ]
    return Listing(title="", columns=("aim", "measured", "verdict"), rows=rows)


def peers_win(shapes: Shapes) -> list[str]:
    """Where a peer is better, over all shapes and everything compared; a constant rate is nobody's throughput."""
    found = []
    for shape, of in ((shape, of) for shape, of in shapes.items() if TAO in of):
        for name in (each for each in PEERS if each in of):
            better = [
                f"{what.replace('_', ' ').replace('cpu', 'CPU')} ({value:.2f} ×)"
                for what, value in ratios(of[TAO], of[name]).items()
                if 0 < value < 1 and not (what == "throughput" and of[name].kind == OPEN)
            ]
            if better:
                found.append(f"{shape}: {name} is better in {', '.join(better)}")
    return found
