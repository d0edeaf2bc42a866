"""The note's first table: every aim, what was measured, met or not; of `run`, `geo` and `peers`, out of their JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from loadtest.report.found import Found, number, percent, table

AIMED_HIT_RATE: Final = 0.964
AIMED_SHARE: Final = 0.2
"""Of the payloads, in the cache."""

Row = tuple[str, str, str, str]
"""Aim, where, measured, verdict."""


def aims(found: Found) -> list[str]:
    """All of them in one place; scenarios that are missing are named."""
    rows: list[tuple[str, ...]] = []
    for name, aims_of in (("run", _of_run), ("peers", _of_peers), ("geo", _of_geo)):
        measured = found.get(name)
        rows += [(f"all of `{name}`", "–", "–", "not measured")] if measured is None else aims_of(measured)
    met = sum(row[-1] == "met" for row in rows)
    return [f"{met} of {len(rows)} met.", "", *table(("aim", "in", "measured", "verdict"), rows)]


def _of_run(measured: Mapping[str, Any]) -> Iterator[Row]:
    where, share = f"`run`, {measured['workload']}", measured["cache_bytes"] / measured["data_bytes"]
    enough = measured["hit_rate"] >= AIMED_HIT_RATE and share <= AIMED_SHARE
    yield (
        f"hit rate at least {percent(AIMED_HIT_RATE)} with a cache of {percent(AIMED_SHARE, 0)} of the data at most",
        where,
        f"{percent(measured['hit_rate'], 2)} with {percent(share, 0)}",
        _verdict(enough),
    )
    failed = sum(measured["failed"].values())
    yield "no failed request", where, number(failed), _verdict(not failed)


def _of_peers(measured: Mapping[str, Any]) -> Iterator[Row]:
    for each in measured["aims"]:
        where = ", ".join(filter(None, ("`peers`", each["shape"])))
        yield each["aim"], where, number(each["value"], 2), _verdict(each["met"])


def _of_geo(measured: Mapping[str, Any]) -> Iterator[Row]:
    where = f"`geo`, {measured['rtt_ms']:g} ms apart"
    for each in measured["aims"]:
        aim = f"`{each['figure']}` {number(each['bound'])} ms at most"
        yield aim, where, f"{number(each['value'])} ms", _verdict(each["met"])


def _verdict(met: bool) -> str:
    return "met" if met else "not met"
