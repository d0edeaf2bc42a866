"""Have replicas connect to their masters again as soon as these can be reached.

A replica that has lost its master tries to connect once a second, the shortest pause that servers allow; where packets
vanish, an attempt hangs for seconds besides. Under semi-synchronous replication all commits of the master wait that
much longer than a cut lasts, and with the commits all pending inverses. So the watchers of a replica's region look for
its master more often, and have the replica try at once when the address of the master answers again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from tao.model.errors import TaoError
from tao.model.topology import region_of_place
from tao.replication.promotion import Promoter
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet
from tao.watcher.probes import WatcherContext

_LOOK_SECONDS: Final = 0.1
"""Interval between two looks for a master. A look is one connection, which is refused while nothing listens."""

_ANSWER_SECONDS: Final = 0.5
"""Longest wait for an answer to a look: several round trips between distant regions. Where packets vanish, a new
connection finds the end of the cut sooner than one that repeats its first packet after seconds."""

_FORGET_SECONDS: Final = 5.0
"""Time after which a replica is forgotten that is not observed any more, because it has left the topology."""


@dataclass(slots=True)
class _CutOff:
    """A replica without a connection to its master, as it was observed last."""

    replicas: ReplicationSet
    observed_at: float


class Reconnection:
    """Looks for the masters of one region's replicas that have lost them."""

    def __init__(self, region: str, promoter: Promoter, context: WatcherContext) -> None:
        self._region: Final = region
        self._promoter: Final = promoter
        self._tasks: Final = context.tasks
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._cut_off: Final[dict[tuple[str, str], _CutOff]] = {}
        """By database and place. A replica stays here until it was seen to receive, so it is looked after once."""
        self.reconnected = 0

    def observe(self, replicas: ReplicationSet, members: list[SetMember]) -> None:
        """Look for the master from now on if a replica of this region has lost it, and no more once it receives."""
        now, database = self._clock.monotonic(), replicas.database.name
        for member in members:
            place = database, member.region
            if not self._has_lost_master(replicas, member):
                self._cut_off.pop(place, None)
            elif (known := self._cut_off.get(place)) is not None:
                known.replicas, known.observed_at = replicas, now
            else:
                cut_off = self._cut_off[place] = _CutOff(replicas, now)
                self._tasks.start(self._look_for_master(place, cut_off), f"master of {member.name}")

    def _has_lost_master(self, replicas: ReplicationSet, member: SetMember) -> bool:
        """Return whether the member is a replica of this region that tries to connect to the topology's master."""
        following = None if member.state is None else member.state.following
        return (
            following is not None
            and following.connecting
            and not following.stopped
            and not member.is_master
            and region_of_place(member.region) == self._region
            and replicas.follows(member, replicas.database.master_region)
        )

    async def _look_for_master(self, place: tuple[str, str], cut_off: _CutOff) -> None:
        """Look until the master's address answers. If it did not at first, have the replica connect; otherwise the
        replica has another reason, and many broken connections would make the master refuse its machine."""
        database, region = place
        was_away = False
        while self._cut_off.get(place) is cut_off:
            if self._clock.monotonic() - cut_off.observed_at > _FORGET_SECONDS:
                del self._cut_off[place]
            elif not await cut_off.replicas.master_listens(region, _ANSWER_SECONDS):
                was_away = True
                await asyncio.sleep(_LOOK_SECONDS)
            elif was_away:
                await self._connect_again(database, region)
                return
            else:
                return

    async def _connect_again(self, database: str, region: str) -> None:
        try:
            if await self._promoter.connect_again(database, region):
                self.reconnected += 1
                self._log.info("replica_reconnected", database=database, region=region)
        except TaoError as error:
            # The replica goes on to try by itself. A promotion that is under way must not be disturbed.
            self._log.info("replica_left_to_itself", database=database, region=region, reason=error.message)
