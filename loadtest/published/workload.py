"""The registered workloads: published shares as numbers, and assumptions under names of their own.

One value holds everything that a generator needs, so that a report can compare what was asked for with what was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from loadtest.published import figures
from loadtest.published.shapes import Concentration, CutExponential, Degrees, LogNormal, Skew, Zipf
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

LONGEST_LIST: Final = 10_000
"""Edges of the longest lists, assumed. With it, LinkBench's outdegrees have their published mean of 4.74 a node; the
counts above 512,000 that one in a hundred of TAO's counts returns need more memory than a test has."""

LONG_LIST: Final = 1_000
"""The length that stands for the 512,000 edges above which one in a hundred of TAO's counts was, assumed. A few of the
lists are so long; unless the requests ask for them, the tail of the counts depends on chance."""

_MEDIAN_OVER_MEAN_SIGMA: Final = 1.0
_TAOBENCH_SKEW: Final = Zipf(0.8)
"""Skew of keys, assumed; the skew of shards is published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadAssumptions:
    """The figures that no publication gives."""

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
    link_without_data: float
    """Share of the edges that have no data."""
    object_bytes: CutExponential | LogNormal
    long_counts: float = 0.0
    """Share of the counts above zero that are of lists of `LONG_LIST` edges and more."""
    limit_one: float = 0.0
    """Share of ranges that want one edge."""
    large_limit: float = 1.0
    """Share of the other ranges with a limit of 1,000 (the rest: 50, assumed)."""
    ids_of_a_get: tuple[float, int] | None = None
    """``(p, most)`` of the geometric number of ids that one assoc_get names; None: one."""
    read_many: figures.TransactionSize | None = None
    write_many: figures.TransactionSize | None = None
    shard_skew: tuple[float, ...] = ()
    """Shares of all requests that go to the busiest shards; () leaves shards to the popularity of their keys."""
    assumed: WorkloadAssumptions


def _normalised(shares: Mapping[Kind, float]) -> dict[Kind, float]:
    total = sum(shares.values())
    return {kind: share / total for kind, share in shares.items()}


def tao_atc13() -> Workload:
    """Return the workload that TAO answered in 2013 (USENIX ATC, sections 7 and 8).

    The paper does not state its skew; the skew is that of traces of TAO's followers which Facebook published with
    CacheLib.
    """
    paper, followers = figures.atc13(), figures.tao_followers()
    read, write = paper.requests["read"], paper.requests["write"]
    return Workload(
        name="tao_atc13",
        source=f"{paper.source}; skew: {followers.source}",
        mix=_normalised(
            {Kind(name): read * share for name, share in paper.reads.items()}
            | {Kind(name): write * share for name, share in paper.writes.items()}
        ),
        non_empty={
            **{Kind(name): share for name, share in paper.non_empty.items()},
            Kind.ASSOC_COUNT: 1 - paper.assoc_count["returns_zero"],
        },
        object_skew=_measured_skew(followers.objects),
        list_skew=_measured_skew(followers.lists),
        degrees=Degrees.of_percentages(figures.linkbench().outdegree_cdf_percent, LONGEST_LIST).with_single_share(
            paper.range_result_size["share_of_nonempty_with_one_edge"]
        ),
        link_bytes=CutExponential(paper.data_bytes["assoc_mean_when_present"], _most_payload(paper)),
        link_without_data=paper.data_bytes["assoc_without_data"],
        object_bytes=LogNormal(paper.data_bytes["object_mean"], _MEDIAN_OVER_MEAN_SIGMA, 64 << 10),
        long_counts=paper.assoc_count["nonzero_share_at_or_above_512k"],
        limit_one=paper.range_limit["share_limit_1"],
        large_limit=paper.range_limit["share_of_the_rest_at_or_above_1000"],
        assumed=WorkloadAssumptions(write_skew=Zipf(0.75), again=0.6),
    )


def linkbench() -> Workload:
    """Return the workload of the database below the cache (LinkBench's default configuration)."""
    bench = figures.linkbench()
    names = {
        "get_link_list": Kind.ASSOC_RANGE,
        "get_node": Kind.OBJ_GET,
        "add_link": Kind.ASSOC_ADD,
        "update_link": Kind.ASSOC_OVERWRITE,
        "update_node": Kind.OBJ_UPDATE,
        "count_links": Kind.ASSOC_COUNT,
        "delete_link": Kind.ASSOC_DELETE,
        "add_node": Kind.OBJ_ADD,
        "delete_node": Kind.OBJ_DELETE,
        "get_link": Kind.ASSOC_GET,
    }
    return Workload(
        name="linkbench",
        source=bench.source,
        mix=_normalised({names[name]: percent for name, percent in bench.operations_percent.items()}),
        non_empty={Kind.OBJ_GET: 1.0},
        object_skew=Zipf(bench.zipf_shape["read"]),
        list_skew=Zipf(bench.zipf_shape["read"]),
        degrees=Degrees.of_percentages(bench.outdegree_cdf_percent, LONGEST_LIST),
        link_bytes=CutExponential(bench.payload_median_bytes["link"], 240),
        link_without_data=0.0,
        object_bytes=LogNormal(bench.payload_median_bytes["node"], 0.5, 64 << 10),
        ids_of_a_get=(bench.multiget.p, bench.multiget.max),
        assumed=WorkloadAssumptions(write_skew=Zipf(bench.zipf_shape["write"]), again=0.0),
    )


def taobench_a() -> Workload:
    """Return TAOBench's workload of one application: a quarter of the requests are writes."""
    return _taobench("taobench_a", figures.taobench().workload_a)


def taobench_o() -> Workload:
    """Return TAOBench's workload of all applications together."""
    return _taobench("taobench_o", figures.taobench().workload_o)


def _taobench(name: str, mix: figures.TaoBenchMix) -> Workload:
    bench = figures.taobench()
    read, write = mix.operations_percent["read"], mix.operations_percent["write"]
    writes = {"assoc_update": Kind.ASSOC_OVERWRITE}
    return Workload(
        name=name,
        source=bench.source,
        mix=_normalised(
            {Kind(each): read * share / 100 for each, share in mix.reads_percent.items()}
            | {writes.get(each) or Kind(each): write * share / 100 for each, share in mix.writes_percent.items()}
            | {
                Kind.READ_MANY: mix.operations_percent["read_txn"],
                Kind.WRITE_MANY: mix.operations_percent["write_txn"],
            }
        ),
        non_empty={Kind.OBJ_GET: 1.0},
        object_skew=_TAOBENCH_SKEW,
        list_skew=_TAOBENCH_SKEW,
        degrees=Degrees.of_percentages(figures.linkbench().outdegree_cdf_percent, LONGEST_LIST),
        link_bytes=CutExponential(bench.value_bytes / 2, 240),
        link_without_data=0.0,
        object_bytes=LogNormal(bench.value_bytes, 0.25, 64 << 10),
        read_many=bench.read_txn_size,
        write_many=bench.write_txn_size,
        shard_skew=tuple(percent / 100 for percent in bench.shard_skew_percent),
        assumed=WorkloadAssumptions(write_skew=Zipf(0.75), again=0.0),
    )


def _measured_skew(requests: figures.Requests) -> Concentration:
    points = sorted((float(keys), share) for keys, share in requests.share_of_requests.items())
    return Concentration(tuple(points), requests.hottest)


def _most_payload(paper: figures.Atc13) -> int:
    # This is what the default table holds, less the framing of one field.
    return int(paper.data_bytes["assoc_max_default_table"]) - 6


_WORKLOADS: Final = {each.__name__: each for each in (tao_atc13, linkbench, taobench_a, taobench_o)}


def workload_names() -> tuple[str, ...]:
    """Return the names of all workloads."""
    return tuple(_WORKLOADS)


def workload_named(name: str) -> Workload:
    """Return the workload of that name. Raises `OperatorError` when there is none."""
    made = _WORKLOADS.get(name)
    if made is None:
        raise OperatorError(f"there is no workload {name!r}; there are {', '.join(_WORKLOADS)}")
    return made()
