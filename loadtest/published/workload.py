"""The registered workloads, whose figures are in `workloads.yaml`, each with its source or marked as assumed.

One value holds everything that a generator needs, so that a report can compare what was asked for with what was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.published.shapes import CutExponential, Degrees, Geometric, LogNormal, Skew, Zipf
from tao.model.errors import OperatorError


class Kind(StrEnum):
    """The kinds of requests: operations of the API, and their many-forms where a workload has transactions."""

    OBJ_GET = "obj_get"
    ASSOC_COUNT = "assoc_count"
    ASSOC_RANGE = "assoc_range"
    ASSOC_TIME_RANGE = "assoc_time_range"
    ASSOC_GET = "assoc_get"
    READ_MANY = "read_many"
    OBJ_ADD = "obj_add"
    OBJ_UPDATE = "obj_update"
    OBJ_DELETE = "obj_delete"
    ASSOC_ADD = "assoc_add"
    ASSOC_OVERWRITE = "assoc_overwrite"
    ASSOC_DELETE = "assoc_delete"
    ASSOC_CHANGE_TYPE = "assoc_change_type"
    WRITE_MANY = "write_many"


READS: Final = (
    Kind.OBJ_GET, Kind.ASSOC_COUNT, Kind.ASSOC_RANGE, Kind.ASSOC_TIME_RANGE, Kind.ASSOC_GET, Kind.READ_MANY,
)  # fmt: skip
"""The kinds that change nothing."""

LONG_LIST: Final = 1_000
"""The length that stands for the 512,000 edges above which one in a hundred of TAO's counts was, assumed. A few of the
lists are so long; unless the requests ask for them, the tail of the counts depends on chance."""

_FIGURES: Final = Path(__file__).with_name("workloads.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadAssumptions:
    """The figures that no publication of TAO's requests gives."""

    write_skew: Zipf
    """Skew of the writes, over objects and over lists."""
    again: float
    """Share of reads that repeat one of the last few hundred keys of their kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload. Shares of ``mix`` add up to 1."""

    name: str
    source: str
    mix: Mapping[Kind, float]
    non_empty: Mapping[Kind, float]
    """Share of a read's requests that find something; the kinds not named here choose any key by its popularity."""
    object_skew: Skew
    """Skew of the objects that are read."""
    list_skew: Skew
    """Skew of the lists that are read."""
    degrees: Degrees
    link_bytes: CutExponential | LogNormal
    link_without_data: float = 0.0
    """Share of the edges that have no data."""
    object_bytes: CutExponential | LogNormal
    long_counts: float = 0.0
    """Share of the counts above zero that are of lists of `LONG_LIST` edges and more."""
    limit_one: float = 0.0
    """Share of ranges that want one edge."""
    large_limit: float = 1.0
    """Share of the other ranges with a limit of 1,000 (the rest: 50, assumed)."""
    ids_of_a_get: Geometric = Geometric()
    """Number of ids that one assoc_get names."""
    read_many: Geometric = Geometric()
    write_many: Geometric = Geometric()
    shard_skew: tuple[float, ...] = ()
    """Shares of all requests that go to the busiest shards; () leaves shards to the popularity of their keys."""
    assumed: WorkloadAssumptions


def published_results() -> Mapping[str, Any]:
    """Return what TAO's paper reports: hit rate, failures, and latencies by operation in milliseconds. `Any`: numbers
    at several depths."""
    results: Mapping[str, Any] = _figures()["results"]
    return results


def workload_names() -> tuple[str, ...]:
    """Return the names of all workloads."""
    return tuple(_figures()["workloads"])


def workload_named(name: str) -> Workload:
    """Return the workload of that name. Raises `OperatorError` when there is none."""
    all_workloads = _figures()["workloads"]
    if name not in all_workloads:
        raise OperatorError(f"there is no workload {name!r}; there are {', '.join(all_workloads)}")
    found = all_workloads[name]
    shares = {kind: group["share"] * part for group in found["requests"] for kind, part in group["of"].items()}
    total = sum(shares.values())
    mix = {kind: share / total for kind, share in shares.items()}
    workload = msgspec.convert({**found, "name": name, "mix": mix}, Workload)
    if "single_share" in found:
        return replace(workload, degrees=workload.degrees.with_single_share(found["single_share"]))
    return workload


def tao_atc13() -> Workload:
    """Return the workload that TAO answered in 2013."""
    return workload_named("tao_atc13")


def _figures() -> dict[str, Any]:
    # Any: texts and numbers, of which `msgspec.convert` makes a typed value.
    found: dict[str, Any] = msgspec.yaml.decode(_FIGURES.read_bytes())
    return found
