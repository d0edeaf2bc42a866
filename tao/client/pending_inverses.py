"""Have pending inverse edges written before the lists that lack them are read.

A write of an edge between shards of two databases is acknowledged when one end is written. Where the other end cannot
be reached, its inverse edge is *pending*: the write's result, and every token of it, names the list that lacks it. A
read of the list with such a token, or after such a write of the same graph, first asks the coordinator of the pair,
which is the leader of the edge's other end, to write it. The answer has the version of the list that holds the edge,
and the read asks for that version. When the coordinator cannot be reached, or cannot write the edge either, the read
fails with `StaleRead`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tao.client.consistency import Consistency
from tao.client.dispatcher import Dispatcher
from tao.client.own_writes import MAX_PENDING_OF_LIST, OwnWrites
from tao.model.errors import StaleRead, TaoError, Unavailable
from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import PendingInverse, WriteToken
from tao.schema.registry import Schema
from tao.wire.convert import reached_versions, settle_request, shard_messages_from_pb
from tao.wire.read_batch import QueryRow, RowKey

SETTLE_TIME_SHARE: Final = 0.5
"""Time for settling, as a share of an operation's time. The read itself may take all of its time after that."""


class PendingInverses:
    """Settles the pending inverses of the lists that an operation reads."""

    def __init__(self, dispatcher: Dispatcher, own_writes: OwnWrites, schema: Callable[[], Schema]) -> None:
        """``own_writes`` has the pending inverses of this graph's writes."""
        self._dispatcher: Final = dispatcher
        self._own_writes: Final = own_writes
        self._schema: Final = schema

    async def settle(
        self, rows: Sequence[QueryRow], consistency: Consistency, own: Mapping[RowKey, Collection[PendingInverse]]
    ) -> tuple[Consistency, dict[RowKey, TaoError]]:
        """Settle what the token of the demand and ``own`` name in the lists of these rows.

        Returns the demand that the rows are to be read with, and the errors of the lists that are not settled."""
        token = consistency.token
        failed: dict[RowKey, TaoError] = {}
        pending: dict[PendingInverse, None] = {}
        for key in {row[:2] for row in rows if len(row) > 1}:
            missing = own.get(key, ())
            if len(missing) > MAX_PENDING_OF_LIST:
                failed[key] = StaleRead(
                    f"list {key} lacks the inverse edges of more than {MAX_PENDING_OF_LIST} recent writes of this "
                    "process; try again later, or read it through a graph with attach_own_writes=False"
                )
                continue
            pending |= dict.fromkeys(missing)
            try:
                if token is not None:
                    pending |= dict.fromkeys(token.pending_in(ListKey(*key)))
            except StaleRead as error:
                failed[key] = error
        results = await asyncio.gather(*map(self._settle_one, pending))
        reached: list[tuple[int, int, int]] = []
        unknown: set[int] = set()
        for each, result in zip(pending, results, strict=True):
            if isinstance(result, TaoError):
                failed[each[:2]] = result
            elif result:
                reached.append((each.id1, each.atype, result))
            else:
                unknown.add(each.id1 >> SHARD_SHIFT)
        if token is not None or unknown:
            newer = WriteToken(reached, unknown)
            consistency = replace(consistency, token=newer if token is None else token.without_pending().merged(newer))
        return consistency, failed

    async def _settle_one(self, pending: PendingInverse) -> int | TaoError:
        """Return the version of the list that holds the edge, 0 when the answer does not have it, or the error."""
        try:
            request = settle_request((pending,), self._schema())
        except TaoError as error:
            return error
        shard = pending.coordinator_id >> SHARD_SHIFT
        try:
            answer = await self._dispatcher.ask(shard, request, time_share=SETTLE_TIME_SHARE)
            if not answer.settled_pairs.settled:
                raise Unavailable("its coordinator could not settle the pair")
        except TaoError as error:
            # Servers of an earlier version refuse the request, which is no mistake of the reader.
            return StaleRead(
                f"list ({pending.id1}, {pending.atype}) lacks the inverse of an edge at {pending.coordinator_id}, "
                f"which could not be written just now ({error.message}); try again"
            )
        changes = map(shard_messages_from_pb, answer.settled_pairs.changes)
        version = reached_versions(changes).get((pending.id1, pending.atype), 0)
        if version:
            self._own_writes.settled(pending, version)
        return version
