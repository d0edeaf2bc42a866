"""Have pending inverse edges written before the lists that lack them are read.

A write of an edge between shards of two databases is acknowledged when one end is written. Where the other end cannot
be reached, its inverse edge is *pending*: the write's result, and every token of it, names the list that lacks it. A
read of the list with such a token, or after such a write of the same graph, first asks the coordinator of the pair,
which is the leader of the edge's other end, to write it. The answer has the version of the list that holds the edge,
and the read asks for that version. When the coordinator cannot be reached, or cannot write the edge either, the read
fails with `StaleRead`. Of inverse edges beyond those that a token names, all between two shards are settled, and the
list is read from its master.

An edge that is known to be written, in a version of the list that is not known, is read from the master once. The
answer has a version with the edge, and later reads ask for that one.

What a read has settled is forgotten: by this graph, and by the token that a `recording` makes for the next request
(`Recording.renewed`). Without that, a token that is renewed again and again would have its pairs settled before every
read for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tao.client.consistency import Consistency
from tao.client.dispatcher import Dispatcher
from tao.client.own_writes import MAX_PENDING_OF_LIST, OwnWrites
from tao.model.errors import StaleRead, TaoError, Unavailable
from tao.model.graph import COUNT_VALUE_BYTES, ListKey, version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import PendingInverse, PendingShard, WriteToken
from tao.schema.registry import Schema
from tao.wire.convert import reached_versions, settle_request, settle_shards_request, shard_messages_from_pb
from tao.wire.read_batch import QueryRow, RowKey
from tao.wire.v1 import session_pb2 as pb

SETTLE_TIME_SHARE: Final = 0.75
"""Time for settling, as a share of an operation's time: with the default of 2 s it is enough for another leader to take
over the shards of one that died. The read itself may take all of its time after that."""


class WrittenInverses:
    """Inverse edges that are written, by their lists, which are about to be read from their masters."""

    def __init__(self, edges: Mapping[RowKey, Sequence[PendingInverse]], own_writes: OwnWrites) -> None:
        self._edges: Final = edges
        self._own_writes: Final = own_writes
        self._before: Final = own_writes.writes_left_pending

    def note_read(self, rows: Sequence[QueryRow], values: Sequence[bytes | TaoError]) -> None:
        """Take the versions of the lists that have the edges from the answers."""
        if not self._edges:
            return
        versions: dict[PendingInverse, int] = {}
        for row, value in zip(rows, values, strict=True):
            # The answer to a question about existence has no version.
            if not isinstance(value, TaoError) and len(value) >= COUNT_VALUE_BYTES:
                versions.update(dict.fromkeys(self._edges.get(row[:2], ()), version_of(value)))
        self._own_writes.settled(versions, (), self._before)


class PendingInverses:
    """Settles the pending inverses of the lists that an operation reads."""

    def __init__(self, dispatcher: Dispatcher, own_writes: OwnWrites, schema: Callable[[], Schema]) -> None:
        """``own_writes`` has the pending inverses of this graph's writes."""
        self._dispatcher: Final = dispatcher
        self._own_writes: Final = own_writes
        self._schema: Final = schema

    async def settle(
        self, rows: Sequence[QueryRow], consistency: Consistency, own: Mapping[RowKey, Mapping[PendingInverse, int]]
    ) -> tuple[Consistency, dict[RowKey, TaoError]]:
        """Settle what the token of the demand and ``own`` name in the lists of these rows.

        Returns the demand that the rows are to be read with, and the errors of the lists that are not settled."""
        token = consistency.token
        failed: dict[RowKey, TaoError] = {}
        pending: dict[PendingInverse, None] = {}
        written: list[PendingInverse] = []
        between: dict[PendingShard, None] = {}
        keys = {row[:2] for row in rows if len(row) > 1}
        for key in keys:
            missing = own.get(key, {})
            if len(missing) > MAX_PENDING_OF_LIST:
                failed[key] = StaleRead(
                    f"list {key} lacks the inverse edges of more than {MAX_PENDING_OF_LIST} recent writes of this "
                    "process; try again later, or read it through a graph with attach_own_writes=False"
                )
                continue
            # What is known to be written is read from the master, and needs no coordinator, which may be away by now.
            pending |= dict.fromkeys(each for each, number in missing.items() if number)
            written += [each for each, number in missing.items() if not number]
            if token is not None:
                pending |= dict.fromkeys(token.pending_in(ListKey(*key)))
                between |= dict.fromkeys(token.pending_at(key[0] >> SHARD_SHIFT))
        before = self._own_writes.writes_left_pending
        results, errors = await asyncio.gather(
            asyncio.gather(*map(self._settle_one, pending)), asyncio.gather(*map(self._settle_between, between))
        )
        versions = dict.fromkeys(written, 0)
        for each, result in zip(pending, results, strict=True):
            if isinstance(result, TaoError):
                failed[each[:2]] = result
            else:
                versions[each] = result
        shards = [pair for pair, error in zip(between, errors, strict=True) if error is None]
        failed_shards = {pair.shard: error for pair, error in zip(between, errors, strict=True) if error is not None}
        for key in keys:
            if error := failed_shards.get(key[0] >> SHARD_SHIFT):
                failed.setdefault(key, error)
        self._own_writes.settled(versions, shards, before)
        critical = {each.id1 >> SHARD_SHIFT for each, version in versions.items() if not version}
        critical |= {pair.shard for pair in shards}
        if token is not None or critical:
            settled = WriteToken() if token is None else token.settled(versions, shards)
            consistency = replace(consistency, token=settled.merged(WriteToken(shards=critical)))
        return consistency, failed

    def written(self, rows: Sequence[QueryRow], own: Mapping[RowKey, Mapping[PendingInverse, int]]) -> WrittenInverses:
        """Return what ``own`` names in the lists of these rows that is written, but in which version is not known. Call
        it before the rows are read by the demand of `settle`, and `WrittenInverses.note_read` afterwards."""
        edges = {row[:2]: [each for each, number in own.get(row[:2], {}).items() if not number] for row in rows}
        return WrittenInverses({key: some for key, some in edges.items() if some}, self._own_writes)

    async def _settle_between(self, pending: PendingShard) -> TaoError | None:
        """Have everything between two shards written. Return the error when that fails."""
        try:
            shards = pending.coordinator_shards()
        except StaleRead as error:
            return error
        results = await asyncio.gather(
            *(self._ask(shard, settle_shards_request(shard, pending.shard)) for shard in shards)
        )
        return next(
            (
                StaleRead(
                    f"lists of shard {pending.shard} may lack inverse edges of earlier writes, which could not be "
                    f"written just now ({result.message}); try again"
                )
                for result in results
                if isinstance(result, TaoError)
            ),
            None,
        )

    async def _settle_one(self, pending: PendingInverse) -> int | TaoError:
        """Return the version of the list that holds the edge, 0 when the answer does not have it, or the error."""
        try:
            request = settle_request((pending,), self._schema())
        except TaoError as error:
            return error
        answer = await self._ask(pending.coordinator_id >> SHARD_SHIFT, request)
        if isinstance(answer, TaoError):
            return StaleRead(
                f"list ({pending.id1}, {pending.atype}) lacks the inverse of an edge at {pending.coordinator_id}, "
                f"which could not be written just now ({answer.message}); try again"
            )
        changes = map(shard_messages_from_pb, answer.changes)
        return reached_versions(changes).get((pending.id1, pending.atype), 0)

    async def _ask(self, coordinator_shard: int, request: pb.Request) -> pb.SettledPairs | TaoError:
        # Servers of an earlier version refuse the request or settle nothing, which is no mistake of the reader.
        try:
            answer = await self._dispatcher.ask(coordinator_shard, request, time_share=SETTLE_TIME_SHARE)
        except TaoError as error:
            return error
        if not answer.settled_pairs.settled:
            return Unavailable("the coordinator could not settle it")
        return answer.settled_pairs
