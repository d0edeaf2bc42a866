"""What the runner asks of a load process, as it travels between the two."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadtest.capacity.capacity_client import CapacityJob, GrowJob, MixJob
from loadtest.cold.herd_client import HerdJob
from loadtest.dataset import DatasetSize
from loadtest.peers.peers_process import PairJob, PeersJob
from loadtest.peers.staleness import StaleJob
from loadtest.published.load_process import AskJob, FillJob


class Pace(msgspec.Struct, frozen=True):
    """How long to measure: see `loadtest.scenario.BenchSettings`."""

    rounds: int
    round_seconds: float


class ReadsJob(msgspec.Struct, frozen=True, kw_only=True, tag="reads"):
    """Cached reads from one follower, beside Redis."""

    topology_file: str
    grpc: str
    frames: str
    topology_version: int
    follower_pid: int
    redis_port: int
    redis_pid: int
    size: DatasetSize
    awaiters: int
    """Concurrent awaiters of one client; separate connections as many."""
    pace: Pace


class StreamJob(msgspec.Struct, frozen=True, kw_only=True, tag="stream"):
    """Cached reads of one follower in batches on the stream, by operation."""

    topology_file: str
    grpc: str
    frames: str
    topology_version: int
    follower_pid: int
    size: DatasetSize
    atype: int
    """Of the lists."""
    batch: int
    """Queries in a message."""
    connections: int
    queries_per_second: float
    """Where the rate is constant."""
    pace: Pace


class WritesJob(msgspec.Struct, frozen=True, kw_only=True, tag="writes"):
    """Durable writes through a follower, beside the same transactions one by one."""

    topology_file: str
    server_pids: tuple[int, ...]
    """Follower and leader."""
    database_pid: int
    database_host: str
    database_port: int
    user: str
    password: str
    shards: int
    writers: int
    ids_per_shard: int
    pace: Pace


GeoPhase = Literal["writes", "visible", "reads"]


class GeoJob(msgspec.Struct, frozen=True, kw_only=True, tag="geo"):
    """One phase of `geo`, at constant rates. ``phase``: writes in both regions, visibility of the master region's
    writes in the other, or reads in the other."""

    topology_file: str
    phase: GeoPhase
    master_region: str
    remote_region: str
    shards: int
    objects: int
    seconds: float
    rtt_ms: float
    seed: int


class HotKeyJob(msgspec.Struct, frozen=True, kw_only=True, tag="hot_key"):
    """Reads of which half are for one object, the first of ``ids``, with and without a cache in the client."""

    topology_file: str
    admins: dict[str, str]
    """Of each follower, ``host:port``."""
    pids: dict[str, int]
    ids: tuple[int, ...]
    cloned: bool
    """Whether the object's shard has clones, for the name of the contestant."""
    clients: int
    awaiters: int
    """Of each client."""
    pace: Pace


Job = (
    HotKeyJob
    | ReadsJob
    | StreamJob
    | WritesJob
    | GeoJob
    | FillJob
    | AskJob
    | PeersJob
    | PairJob
    | StaleJob
    | HerdJob
    | GrowJob
    | CapacityJob
    | MixJob
)
