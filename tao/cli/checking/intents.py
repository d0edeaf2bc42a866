"""`tao repair`: intents that nobody settles, found and sent to whoever coordinates their pairs (DESIGN.md §6).

Leaders settle what is left over by themselves, within seconds. What stands for longer they could not: the far side's
database refuses it, say, or nobody leads its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tao.cli.checking.mending import MAX_FOUND, LeaderResult, have_mended
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import IntentRow
from tao.peers.links import Link, Links
from tao.routing.routes import Routes
from tao.storage.writes import MySqlWriteStore
from tao.wire.v1 import session_pb2 as pb

OLD_SECONDS: Final = 60.0
"""Leaders take up what is ten seconds old, a hundred at a time; clocks differ, too."""

INTENTS_PER_CALL: Final = 100
CALL_SECONDS: Final = 30.0


async def find_old_intents(routes: Routes, store: MySqlWriteStore, *, before_unix_ms: int) -> list[IntentRow]:
    """The oldest first, at most `MAX_FOUND`."""
    return await store.old_intents(range(routes.shards), before_unix_ms=before_unix_ms, limit=MAX_FOUND)


async def settle(routes: Routes, links: Links, intents: Sequence[IntentRow]) -> list[LeaderResult]:
    """Have the coordinating leaders settle these."""

    async def ask(link: Link, some: Sequence[IntentRow]) -> int:
        pairs = [
            pb.Pair(low_id=each.low_id, high_id=each.high_id, atypes=each.atypes, token=each.token) for each in some
        ]
        answer = await link.ask(pb.Request(settle_pairs=pb.SettlePairs(pairs=pairs)), CALL_SECONDS)
        return answer.settled_pairs.settled

    return await have_mended(routes, links, intents, lambda each: each.low_id >> SHARD_SHIFT, ask, INTENTS_PER_CALL)
