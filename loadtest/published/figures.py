"""The published figures as data, each with its source, as far as a generator reproduces them.

The files beside this module hold only what was published. What a generator needs and nobody published is in
`loadtest.published.workload`, marked as an assumption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

_FOLDER: Final = Path(__file__).parent


class Atc13(msgspec.Struct, frozen=True):
    """TAO's production workload: shares are of all requests of their group."""

    source: str
    requests: dict[str, float]
    reads: dict[str, float]
    writes: dict[str, float]
    non_empty: dict[str, float]
    """Share of an operation's reads that find something."""
    assoc_count: dict[str, float]
    range_limit: dict[str, float]
    range_result_size: dict[str, float]
    data_bytes: dict[str, float]
    published_results: dict[str, Any]
    """Hit rate, failures and latencies (milliseconds by operation); `Any`: numbers at several depths."""


class Multiget(msgspec.Struct, frozen=True):
    """The number of ids that one get_link names: geometric, cut at ``max``."""

    distribution: str
    p: float
    min: int
    max: int


class LinkBench(msgspec.Struct, frozen=True):
    """LinkBench's default workload, as the database below the cache saw it."""

    source: str
    operations_percent: dict[str, float]
    zipf_shape: dict[str, float]
    multiget: Multiget
    payload_median_bytes: dict[str, int]
    outdegree_cdf_percent: dict[str, float]
    links_per_node_loaded: float


class TaoBenchMix(msgspec.Struct, frozen=True):
    """One of TAOBench's two workloads; percents of all operations, of the reads, of the writes."""

    operations_percent: dict[str, float]
    reads_percent: dict[str, float]
    writes_percent: dict[str, float]


class TransactionSize(msgspec.Struct, frozen=True):
    """Operations in one transaction."""

    mean: float
    max: int


class TaoBench(msgspec.Struct, frozen=True):
    """TAOBench's workloads A (application) and O (overall)."""

    source: str
    workload_a: TaoBenchMix
    workload_o: TaoBenchMix
    read_txn_size: TransactionSize
    write_txn_size: TransactionSize
    value_bytes: int
    shard_skew_percent: tuple[float, ...]
    """Percents of all requests that go to the busiest shards, the busiest first."""
    shards: int


class Requests(msgspec.Struct, frozen=True):
    """The distribution of a trace's requests over its keys."""

    keys: int
    requests: int
    asked_once: float
    """Share of the requests whose key nobody asked for again."""
    hottest: float
    """Share of the requests that one key took."""
    share_of_requests: dict[str, float]
    """Share of the requests by share of the keys, the most requested first."""


class TaoFollowers(msgspec.Struct, frozen=True):
    """Popularity as TAO's followers saw it, years after the paper."""

    source: str
    note: str
    lists: Requests
    objects: Requests


def atc13() -> Atc13:
    """Read figures 3 to 6 of the paper."""
    return msgspec.json.decode((_FOLDER / "tao_atc13.json").read_bytes(), type=Atc13)


def linkbench() -> LinkBench:
    """Read the default configuration of LinkBench."""
    return msgspec.json.decode((_FOLDER / "linkbench.json").read_bytes(), type=LinkBench)


def taobench() -> TaoBench:
    """Read both workloads of TAOBench."""
    return msgspec.json.decode((_FOLDER / "taobench.json").read_bytes(), type=TaoBench)


def tao_followers() -> TaoFollowers:
    """Read the popularity of association lists and of objects."""
    return msgspec.json.decode((_FOLDER / "tao_followers.json").read_bytes(), type=TaoFollowers)
