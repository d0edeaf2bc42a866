"""A rush: more operations than there is room for, so that queues and logs reach their bounds (`tests.sim.bounds`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.sim.plans import Fault
from tests.sim.topologies import REGIONS
from tests.sim.world import World

_TIMES: Final = 4
_EVERY_SECONDS: Final = 0.4
_SLOW_SECONDS: Final = 3.0


def rush(world: World, invalidate: Callable[[str, str], None], fault: Fault) -> Callable[[], None]:
    """Let every client read and write everything repeatedly while one part does not keep up.

    That part is the databases of a region, a follower that receives nothing from its leaders, leaders that no tailer
    reaches, or leaders that acknowledge what tailers send only seconds later. ``invalidate`` makes a leader of a region
    read everything again. Returns the function that ends it.
    """
    region = REGIONS[fault.pick % world.shape.regions]
    leaders, followers, tailers = (
        [name for name in world.names(role) if world.processes[name].region == region]
        for role in ("leader", "follower", "tailer")
    )
    network = world.network
    slow = [name for name, database in world.databases.items() if database.region == region]
    if fault.other % 4 == 3:
        slow = tailers

    def hurry() -> None:
        for name in slow:
            network.slow.pop(name, None)

    end: Callable[[], None] = network.heal
    match fault.other % 4:
        case 0:
            network.slow.update(dict.fromkeys(slow, _SLOW_SECONDS))
            for leader in leaders:
                invalidate(leader, region)
            end = hurry
        case 1:
            network.cut([followers[fault.pick % len(followers)]], leaders)
        case 2:
            network.cut(tailers, leaders)
        case _:
            network.slow.update(dict.fromkeys(slow, _SLOW_SECONDS))
            end = hurry
    for time in range(_TIMES):
        world.loop.call_later(0.1 + _EVERY_SECONDS * time, _everybody, world)
    return end


def _everybody(world: World) -> None:
    for client in world.clients:
        world.spawn(client.rush(), client.process)
