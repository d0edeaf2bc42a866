"""The settings file of a follower. Its addresses, region and tier are in the topology document, under its name."""

from __future__ import annotations

from dataclasses import dataclass, field

from tao.follower.counters import CounterSettings
from tao.follower.miss_path import DirectReadSettings
from tao.follower.pair_filters import PairFilterSettings
from tao.follower.service import UnarySettings
from tao.follower.subscriptions import SubscriptionSettings
from tao.journal.settings import JournalSettings
from tao.model.settings import renamed
from tao.routing.read_rates import RateSettings
from tao.serving.forward_path import SiblingInvalidationSettings
from tao.serving.settings import CacheServerSettings
from tao.serving.single_flight import FillSettings
from tao.serving.sources import DatabaseReadSettings, RemoteSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerSettings(CacheServerSettings):
    """The settings of one follower process."""

    reader_user: str = ""
    """Database account that may only read, for misses and critical reads that no leader can serve. Empty: they
    fail."""

    reader_password: str = field(default="", repr=False)

    fills: FillSettings = FillSettings()
    misses: RemoteSettings = RemoteSettings()
    direct_reads: DirectReadSettings = DirectReadSettings()
    database: DatabaseReadSettings = DatabaseReadSettings(max_rereads=3)
    """Few rereads: a database that is behind catches up within milliseconds, or the master region is asked."""

    sibling_invalidation: SiblingInvalidationSettings = renamed(SiblingInvalidationSettings(), formerly="amends")
    rates: RateSettings = RateSettings()
    subscriptions: SubscriptionSettings = SubscriptionSettings()
    pair_filters: PairFilterSettings = PairFilterSettings()
    unary: UnarySettings = UnarySettings()
    journal: JournalSettings = JournalSettings()
    counters: CounterSettings = CounterSettings()
