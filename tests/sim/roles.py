"""What simulated servers are told: the roles' own settings, with rarer periodic jobs than a process has.

At the product's pace each of these jobs would be most of what happens. They stay frequent enough to happen several
times in every act, in between everything else. How rare they are is the run's ``pace``, which multiplies the seconds
between them; what is waited for, answers above all, is waited for as long at any pace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tao.delivery.settings import SpoolSettings
from tao.follower.maintenance_path import SubscriptionSettings
from tao.follower.settings import FollowerSettings
from tao.leader.consistency_checker import CheckerSettings
from tao.leader.heartbeats import HeartbeatSettings
from tao.leader.inverse_path import InverseSettings
from tao.leader.ownership import OwnershipSettings
from tao.leader.settings import LeaderSettings
from tao.tailer.settings import TailerSettings, TailSettings

_NOWHERE: Final = Path("simulated")


def leader_settings(name: str, pace: float) -> LeaderSettings:
    """Of the leader of that name."""
    return LeaderSettings(
        name=name,
        topology_file=_NOWHERE,
        schema_file=_NOWHERE,
        leader_user="",
        leader_password="",
        reader_user="",
        reader_password="",
        ownership=OwnershipSettings(check_seconds=12.0 * pace, retry_seconds=3.0 * pace),
        inverses=InverseSettings(repair_seconds=15.0 * pace),
        heartbeats=HeartbeatSettings(interval_seconds=15.0 * pace),
        checker=CheckerSettings(tick_seconds=6.0 * pace),
        spool=SpoolSettings(folder=Path(name)),
    )


def follower_settings(name: str, pace: float, *, reads_databases: bool) -> FollowerSettings:
    """Of the follower of that name. ``reads_databases``: it has an account there, for when leaders are away."""
    return FollowerSettings(
        name=name,
        topology_file=_NOWHERE,
        schema_file=_NOWHERE,
        reader_user="reader" if reads_databases else "",
        subscriptions=SubscriptionSettings(retry_seconds=2.5 * pace, answer_timeout_seconds=8.0),
    )


def tailer_settings(name: str, region: str, pace: float) -> TailerSettings:
    """Of the tailer of that name (``tailer-REGION-DATABASE``)."""
    _, _, database = name.split("-")
    return TailerSettings(
        name=name,
        region=region,
        database_server=f"{database}-{region}",
        topology_file=_NOWHERE,
        schema_file=_NOWHERE,
        state_folder=Path(name),
        password="",
        tail=TailSettings(checkpoint_seconds=8.0 * pace),
    )
