"""The settings file of a leader. Its addresses and its databases are in the topology document."""

from __future__ import annotations

from dataclasses import dataclass, field

from tao.delivery.settings import DeliverySettings, SpoolSettings
from tao.leader.consistency_checker import CheckerSettings
from tao.leader.heartbeats import HeartbeatSettings
from tao.leader.inverse_path import InverseSettings
from tao.leader.jobs import JobSettings
from tao.leader.membership_filters import MembershipSettings
from tao.leader.miss_path import ReplicaSettings
from tao.leader.ownership import OwnershipSettings
from tao.leader.relay_path import RelayPathSettings
from tao.leader.replica_shards import ReplicaShardSettings
from tao.leader.write_path import WritePathSettings
from tao.model.settings import renamed
from tao.routing.fair_shares import ShareSettings
from tao.serving.settings import CacheServerSettings
from tao.serving.single_flight import FillSettings
from tao.serving.sources import DatabaseReadSettings, RemoteSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings(CacheServerSettings):
    """The settings of one leader process."""

    leader_user: str
    """The database account that reads and writes."""

    leader_password: str = field(repr=False)

    reader_user: str
    """The database account that only reads, for fills."""

    reader_password: str = field(repr=False)

    fills: FillSettings = FillSettings(max_refetches=2)
    """Bounds of fills. A leader refetches less often than a follower, because its source itself repeats a read that is
    behind."""

    shares: ShareSettings = ShareSettings(
        max_under_way=32_768,
        max_under_way_per_caller=8_192,
        max_under_way_beside_others=1_024,
        max_master_reads_beside_others=128,
    )
    """Shares of followers, and of the callers that they name. A follower may have more under way than its clients
    together, so that work waits at followers, which know whose it is; a caller as much as eight of them let it. Beside
    the fills of followers no caller is alone, so critical reads have the room of 32 followers."""

    misses: DatabaseReadSettings = DatabaseReadSettings()
    replica: ReplicaSettings = ReplicaSettings()
    membership: MembershipSettings = MembershipSettings()
    ownership: OwnershipSettings = OwnershipSettings()
    writes: WritePathSettings = WritePathSettings()
    inverses: InverseSettings = InverseSettings()
    jobs: JobSettings = JobSettings()
    replica_shards: ReplicaShardSettings = renamed(ReplicaShardSettings(), formerly="hosting")
    relays: RelayPathSettings = RelayPathSettings()
    heartbeats: HeartbeatSettings = HeartbeatSettings()
    master_region: RemoteSettings = RemoteSettings()
    delivery: DeliverySettings = DeliverySettings()
    spool: SpoolSettings = SpoolSettings()
    checker: CheckerSettings = CheckerSettings()
