"""The settings of the simulated servers: the roles' own settings, with less frequent periodic jobs.

At the product's intervals each of these jobs would be most of what happens. They stay frequent enough to happen several
times in every act, in between everything else. The run's ``pace`` multiplies the seconds between them; timeouts, above
all those of answers, are the same at any pace.

Bounds are so low that plans reach them (`tests.sim.bounds`), and high enough for all that happens while nothing fails.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final

from tao.client.settings import ClientSettings
from tao.delivery.settings import DeliverySettings, SpoolSettings
from tao.follower.counters import CounterSettings
from tao.follower.miss_path import DirectReadSettings
from tao.follower.pair_filters import PairFilterSettings
from tao.follower.settings import FollowerSettings
from tao.follower.subscriptions import SubscriptionSettings
from tao.journal.settings import JournalSettings
from tao.leader.consistency_checker import CheckerSettings
from tao.leader.heartbeats import HeartbeatSettings
from tao.leader.inverse_path import InverseSettings
from tao.leader.jobs import JobSettings
from tao.leader.ownership import OwnershipSettings
from tao.leader.settings import LeaderSettings
from tao.leader.write_path import WritePathSettings
from tao.observability.key_history import KeyHistorySettings
from tao.routing.budgets import RetrySettings
from tao.routing.fair_shares import ShareSettings
from tao.serving.registration import RegistrationSettings
from tao.serving.requests import PauseSettings
from tao.serving.single_flight import FillSettings
from tao.serving.sources import DatabaseReadSettings
from tao.tailer.settings import OutboxSettings, RewindSettings, TailerSettings, TailSettings
from tao.watcher.settings import ProbeSettings, WatcherSettings
from tao.wire.links import LinkSettings
from tao.wire.settings import ServingSettings
from tao.worker.runner import RunnerSettings
from tao.worker.settings import WorkerSettings
from tests.sim.network import SESSION
from tests.sim.topologies import registers

_NOWHERE: Final = Path("simulated")

STEP_SECONDS: Final = 1.0
"""Time between two steps of a server that registers itself: an operator's command waits for all eight."""
REMOVE_SECONDS: Final = 8.0
"""Time after which such a server is removed when it is gone: many faults last longer."""

LOG: Final = DeliverySettings(
    log_messages_per_shard=16,
    log_bytes_total=12_000,
    window_unacknowledged_bytes=3_000,
    max_delivery_bytes=1_500,
    max_subscribers=4,
    catching_up_shards=2,
    committed_bytes=8_000,
)
SPOOL_BYTES: Final = 4_000
OUTBOX: Final = OutboxSettings(
    relay_bytes=1_500, unacknowledged_bytes=2_500, leader_bytes=1_500, retries=RetrySettings(burst=30.0)
)
REWIND: Final = RewindSettings(max_bytes=8_000)
WRITES: Final = WritePathSettings(max_waiting_per_shard=24, max_batch_writes=8, gather_seconds=0.002)
INVERSES: Final = InverseSettings(max_waiting_per_pair=8)
FILLS: Final = FillSettings(max_fetches=100)
SHARES: Final = ShareSettings(max_under_way=40, max_under_way_per_caller=20, max_waiting_per_caller=400)
MISSES: Final = DatabaseReadSettings(max_gathered=8)
DIRECT_READS: Final = DirectReadSettings(max_under_way=100)
STALLS: Final = PauseSettings(max_held=4)
STORY: Final = KeyHistorySettings(key_events=300, shard_events=30)
CHECKER: Final = CheckerSettings(max_samples_per_second=2)
RETRIES: Final = RetrySettings(burst=100.0)
MAX_FLOORS: Final = 14
"""Most version floors of a shard."""
KEPT_ANSWERS_BYTES: Final = 12_000
SHORT_PREFIX_EDGES: Final = 1
"""Edges that caches keep of a list in some runs: fewer than most lists of a plan have."""
SERVING: Final = ServingSettings(max_unanswered=40)
SDK: Final = ClientSettings(
    timeout_seconds=4.0,
    max_waiting_queries=110,
    own_writes_keys=16,
    retries=RETRIES,
    links=LinkSettings(session=SESSION, max_waiting=16),
)


def registration_settings(name: str) -> RegistrationSettings:
    """Return how the server of that name registers itself, if it does."""
    role, region, rest = name.split("-")
    return RegistrationSettings(
        join=registers(name),
        region=region,
        tier="leaders" if role == "leader" else rest[0],
        grpc=f"{name}:1",
        frames=f"{name}:2",
        admin=f"{name}:3",
        step_seconds=STEP_SECONDS,
    )


def leader_settings(name: str, pace: float, *, has_workers: bool) -> LeaderSettings:
    """Return the settings of the leader of that name. Without workers nobody cares for jobs."""
    return LeaderSettings(
        name=name,
        topology_file=_NOWHERE,
        schema_file=_NOWHERE,
        registration=registration_settings(name),
        insecure=True,  # the simulated network has names, and nobody else reaches it
        leader_user="",
        leader_password="",
        reader_user="",
        reader_password="",
        ownership=OwnershipSettings(check_seconds=12.0 * pace, retry_seconds=3.0 * pace),
        inverses=replace(INVERSES, repair_seconds=15.0 * pace),
        jobs=JobSettings(search_seconds=2.0 * pace, care_seconds=40.0 * pace if has_workers else inf),
        heartbeats=HeartbeatSettings(interval_seconds=15.0 * pace, takeover_seconds=5.0 * pace),
        checker=replace(CHECKER, tick_seconds=6.0 * pace),
        spool=SpoolSettings(folder=Path(name), max_bytes=SPOOL_BYTES),
        delivery=LOG,
        writes=WRITES,
        fills=replace(FILLS, max_refetches=2),  # as on a leader
        misses=MISSES,
        pause_detection=STALLS,
        key_history=STORY,
        retries=RETRIES,
    )


def follower_settings(
    name: str, pace: float, journal: JournalSettings, *, reads_databases: bool, has_filters: bool
) -> FollowerSettings:
    """Return the settings of the follower of that name.

    ``reads_databases``: it has a database account, for when leaders are away. ``has_filters``: it has pair filters.
    """
    return FollowerSettings(
        name=name,
        topology_file=_NOWHERE,
        schema_file=_NOWHERE,
        registration=registration_settings(name),
        insecure=True,  # the simulated network has names, and nobody else reaches it
        reader_user="reader" if reads_databases else "",
        shares=SHARES,
        subscriptions=SubscriptionSettings(retry_seconds=2.5 * pace, answer_timeout_seconds=8.0),
        fills=FILLS,
        database=replace(MISSES, max_rereads=3),
        direct_reads=DIRECT_READS,
        journal=journal,
        pair_filters=PairFilterSettings(
            max_mb=1 if has_filters else 0,
            page_edges=2,  # so few that lists lie on several pages
            edges_per_second=8,
            check_seconds=4.0 * pace,
            retry_seconds=10.0 * pace,
        ),
        counters=CounterSettings(
            life_seconds=round(40.0 * pace),
            tick_seconds=1.5 * pace,
            max_batches=2,
            max_batch_flushes=3,
            retry_seconds=2.0 * pace,
            max_retry_seconds=8.0 * pace,
        ),
        pause_detection=STALLS,
        key_history=STORY,
        retries=RETRIES,
    )


def watcher_settings(name: str, region: str) -> WatcherSettings:
    """Return the settings of the watcher of that name.

    Its intervals are those of leases and locks, which go on at any pace.
    """
    return WatcherSettings(
        insecure=True,  # the simulated network has names, and nobody else reaches it
        name=name,
        region=region,
        topology_file=_NOWHERE,
        remove_after_seconds=REMOVE_SECONDS,
        administrator_user="tao_admin",
        administrator_password="simulated",
        replicator_password="simulated",
        probes=ProbeSettings(interval_seconds=1.0),
    )


def worker_settings(name: str, region: str, pace: float, lease_seconds: float) -> WorkerSettings:
    """Return the settings of the worker of that name. Its pages are so small that a job has several."""
    runner = RunnerSettings(
        lease_seconds=lease_seconds, poll_seconds=3.0 * pace, page_edges=4, edges_per_second=40.0, normal_jobs=3
    )
    return WorkerSettings(name=name, region=region, topology_file=_NOWHERE, runner=runner)


def tailer_settings(name: str, region: str, pace: float) -> TailerSettings:
    """Return the settings of the tailer of that name (``tailer-REGION-DATABASE``)."""
    _, _, database = name.split("-")
    return TailerSettings(
        name=name,
        insecure=True,
        region=region,
        database_server=f"{database}-{region}",
        topology_file=_NOWHERE,
        schema_file=_NOWHERE,
        state_folder=Path(name),
        password="",
        tail=TailSettings(checkpoint_seconds=8.0 * pace),
        delivery=OUTBOX,
        rewind=REWIND,
    )
