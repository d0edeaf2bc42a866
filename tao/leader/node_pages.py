"""Move the edges of a node, page by page, to the lists of their effective states.

The near ends of a page are moved in one transaction. Each is then copied to its far end, wherever that is, with the
state of the node. Copies of edges with states are joined, so no pair is held for them: an older one does no harm, and a
page may be done again. What a far end knows more is joined here. Far shards that do not answer are owed: the job goes
on past them, and comes back to them alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Final

import msgspec

from tao.leader.ownership import Ownership
from tao.leader.remote_inverses import Copied, Deposed, OtherLeaders, joins_of
from tao.leader.write_path import WritePath, Written
from tao.model.errors import TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.writes import Coordinator, PlacedPage, PlaceEdges, SettleEdge, group_of
from tao.serving.configuration import ServerContext

_LEADER_SECONDS: Final = 3.0
"""Time limit for the copies of a page at one leader, which commits them in groups; its queue holds many pages."""


class NodePages:
    """Executes `PlaceEdges`."""

    def __init__(
        self,
        context: ServerContext,
        writes: WritePath,
        ownership: Ownership,
        others: OtherLeaders,
    ) -> None:
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._writes: Final = writes
        self._ownership: Final = ownership
        self._others: Final = others

    async def place(self, write: PlaceEdges, deadline: float) -> Written:
        """Move the edges of a page at both ends. The result names the far shards that are owed: those that do not
        answer, and those that the write says are not to be asked. Raises `TaoError`: then the page may be done in part,
        and is to be done again."""
        row = self._ownership.row(write.id1 >> SHARD_SHIFT)
        written = await self._writes.commit(write, deadline, both_sides=True)
        page = written.outcome.page
        assert page is not None, "a page that is placed has a result"
        owed: set[int] = set()
        by_shard: dict[int, list[SettleEdge]] = {}
        for copy in page.copies:
            by_shard.setdefault(copy.id1 >> SHARD_SHIFT, []).append(copy)
        if write.asks_nobody:
            others = [shard for shard in by_shard if not self._writes.owns_together((row.shard, shard))]
            owed.update(group_of(shard) for shard in others if by_shard.pop(shard))
        coordinator = Coordinator(row.shard, row.generation)
        # What is left of the time is for the joins.
        seconds = min(_LEADER_SECONDS, (deadline - self._clock.monotonic()) / 2)
        done = await asyncio.gather(
            *(
                self._others.settle(shard, copies, coordinator, seconds, background=True)
                for shard, copies in by_shard.items()
            ),
            return_exceptions=True,
        )
        raised: list[SettleEdge] = []
        for shard, result in zip(by_shard, done, strict=True):
            if isinstance(result, Copied):
                raised += result.raised
            elif isinstance(result, TaoError) and not isinstance(result, Deposed):
                self._log.info("node_page_owed", node=write.id1, far_shard=shard, reason=result.message)
                owed.add(group_of(shard))
            else:
                raise result
        await self._join(raised, page, deadline)
        outcome = msgspec.structs.replace(
            written.outcome, page=msgspec.structs.replace(page, owed_groups=tuple(sorted(owed)))
        )
        return dataclasses.replace(written, outcome=outcome)

    async def _join(self, raised: Sequence[SettleEdge], page: PlacedPage, deadline: float) -> None:
        """Join at the near end what the far ends know more. Raises the `TaoError` of a join that failed; the others
        need not be repeated."""
        known = {copy.id1: registers for copy, registers in zip(page.copies, page.known, strict=True)}
        joins: list[SettleEdge] = []
        for far in raised:
            assert far.registers is not None, "only copies of edges with states are raised"
            if known[far.id1].joined(far.registers) == known[far.id1]:
                continue
            near = self._configuration.schema.atype(far.atype).inverse
            assert near is not None, "only edges with an inverse are copied"
            joins.append(msgspec.structs.replace(far, id1=far.id2, atype=near, id2=far.id1))
        commits = [self._writes.commit(write, deadline, both_sides=True) for write in joins_of(joins)]
        for result in await asyncio.gather(*commits, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
