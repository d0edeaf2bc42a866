"""What befalls the servers, links and watchers of `tests.sim.lost_masters`, one or two incidents an hour."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tao.watcher.settings import ProbeSettings
from tests.sim.etcd import ETCD
from tests.sim.replicated import Server

if TYPE_CHECKING:
    from tests.sim.lost_masters import Hour

LIVELY_SECONDS: Final = 0.5
"""A master that has run for so long between two pauses has answered a question that was under way."""
_STOPPED_SECONDS: Final = 10.0
"""How long etcd stands still before a snapshot is restored: longer than any lease in it."""


def _any_seconds(hour: Hour, most: float) -> float:
    """Return how long a fault lasts: often about as long as what watchers wait for, or for good."""
    return hour.random.choice((0.2 * hour.random.random(), hour.random.random(), 10.0)) * most


def _replicas(hour: Hour) -> list[Server]:
    return [server for server in hour.machines.servers.values() if server is not hour.master]


def _cut_some_watchers(hour: Hour) -> None:
    """Cut the master off from some watchers, and not from its replicas."""
    watchers = [name for name in hour.watchers if hour.random.random() < 0.7]
    hour.cut_off([hour.master.name], watchers, _any_seconds(hour, 12))


def _cut_other_watchers(hour: Hour) -> None:
    """Cut the watchers of other regions off from the master's region, and no database server."""
    region = hour.master.region
    others = [name for name in hour.watchers if name not in hour.of_region(region)]
    hour.cut_off(others, hour.of_region(region), _any_seconds(hour, 12))


def _cut_replicas(hour: Hour) -> None:
    hour.cut_off([hour.master.name], [each.name for each in _replicas(hour)], _any_seconds(hour, 12))


def _cut_region(hour: Hour) -> None:
    region = hour.random.choice(("east", "east", *hour.region_names()))
    inside = hour.of_region(region)
    hour.cut_off(inside, [name for name in hour.all_names() if name not in inside], _any_seconds(hour, 14))


def _cut_machine(hour: Hour) -> None:
    """Lose the master's machine to all but, perhaps, its region's clients."""
    hour.cut_off(
        [hour.master.name],
        [name for name in hour.all_names() if "client" not in name or hour.random.random() < 0.5],
        _any_seconds(hour, 14),
    )


def _cut_rack(hour: Hour) -> None:
    """Cut off the master with one watcher of its region, and the region's clients."""
    region = hour.master.region
    others = [f"{region}-watcher-2"] if hour.watchers_a_region > 1 else []
    inside = [hour.master.name, f"{region}-client", *others]
    hour.cut_off(inside, [name for name in hour.all_names() if name not in inside], _any_seconds(hour, 14))


def _restart_replica(hour: Hour) -> None:
    hour.kill(hour.random.choice(_replicas(hour)), _any_seconds(hour, 5))


def _slow_master(hour: Hour) -> None:
    hour.machines.slow[hour.master.name] = 2.5 * hour.random.random()
    hour.later(_any_seconds(hour, 12), hour.machines.heal)


def _pause_master(hour: Hour, until: float = 0.0) -> None:
    """Let the master pause again and again for ten seconds, each time for less than makes it a lost one."""
    until = until or hour.loop.now + 10.0
    seconds = 0.95 * hour.random.random() * ProbeSettings().master_hangs_seconds
    hour.stand_still(hour.master, seconds)
    if hour.loop.now < until:
        hour.later(seconds + LIVELY_SECONDS + hour.random.random(), partial(_pause_master, hour, until))


def _refuse_watchers(hour: Hour) -> None:
    """Let the master stand still until it is being replaced, and refuse the watchers' account from then on."""
    hour.stand_still(hour.master, ProbeSettings().master_hangs_seconds + 2.0 * hour.random.random())
    hour.master.refuses_until = hour.loop.now + _any_seconds(hour, 12)


def _stop_disk(hour: Hour) -> None:
    hour.master.disk_stands_still_until = hour.loop.now + _any_seconds(hour, 10)


def _pause_watchers(hour: Hour) -> None:
    for watcher in hour.watchers.values():
        if hour.random.random() < 0.6:
            hour.loop.pause(watcher.process)
            hour.later(_any_seconds(hour, 10), partial(hour.loop.resume, watcher.process))


INCIDENTS: Final[dict[str, Callable[[Hour], None]]] = {
    "master killed": lambda hour: hour.kill(hour.master, None),
    "master restarted": lambda hour: hour.kill(hour.master, _any_seconds(hour, 6)),
    "master stands still": lambda hour: hour.stand_still(hour.master, _any_seconds(hour, 10)),
    "master pauses": _pause_master,
    "master's disk stands still": _stop_disk,
    "master refuses watchers": _refuse_watchers,
    "master slow": _slow_master,
    "master cut off from watchers": _cut_some_watchers,
    "other watchers cut off": _cut_other_watchers,
    "master cut off from replicas": _cut_replicas,
    "master's machine cut off": _cut_machine,
    "rack cut off": _cut_rack,
    "region cut off": _cut_region,
    "replica restarted": _restart_replica,
    "replica stands still": lambda hour: hour.stand_still(hour.random.choice(_replicas(hour)), _any_seconds(hour, 10)),
    "watchers paused": _pause_watchers,
}


def _stop_etcd(hour: Hour) -> None:
    assert hour.etcd is not None, "this befalls an etcd"
    hour.etcd.stop()
    hour.later(_any_seconds(hour, 12), hour.etcd.start)


def _cut_etcd(hour: Hour) -> None:
    """Cut etcd off from the watchers of some regions, or from some watchers of all."""
    watchers = [*hour.watchers]
    if hour.random.random() < 0.5:
        watchers = hour.of_region(hour.random.choice(hour.region_names()))
    elif hour.random.random() < 0.7:
        watchers = [name for name in watchers if hour.random.random() < 0.5]
    hour.cut_off([ETCD], watchers, _any_seconds(hour, 12))


def _restore_etcd(hour: Hour) -> None:
    """Restore a snapshot of now, a little later."""
    assert hour.etcd is not None, "this befalls an etcd"
    stops_after = 6.0 * hour.random.random()
    hour.later(stops_after, hour.etcd.stop)
    hour.later(stops_after + _STOPPED_SECONDS, partial(hour.restore_etcd, hour.etcd.snapshot()))


OF_ETCD: Final[dict[str, Callable[[Hour], None]]] = {
    "etcd away": _stop_etcd,
    "etcd cut off": _cut_etcd,
    "etcd restored": _restore_etcd,
}
