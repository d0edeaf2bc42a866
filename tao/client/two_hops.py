"""Two hops: who is connected to many of one's own neighbours, as in "people you may know".

Each level reads its lists in one tick, so a level is one message per follower. A cap on every level bounds the work: a
hub contributes its newest edges, and no more. Candidates are counted here, because the ranking is the application's:
those of a follower's lists when its answer has come, while others are still at work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Unpack

import msgspec

from tao.client.batches import by_server
from tao.client.consistency import Consistency, Freshness, from_keywords
from tao.client.edge_sets import EdgeSet, SetDescription, SetOperations, UnreadList, expression_in
from tao.client.validation import check_number
from tao.model.edge_block import checked_header, id2_column
from tao.model.errors import InvalidArgument, TaoError
from tao.model.graph import MAX_ID2_SET
from tao.wire.read_batch import RANGE

MAX_FAN_OUT: Final = 1_000
MAX_CANDIDATES: Final = 1_000
_VIA: Final = 3
_SPARE: Final = 4
"""Exclusions are looked up for so many times as many candidates as are asked for, at first; then for twice as many each
time, so that few rounds go over all candidates when most are excluded."""
_MIN_BATCH: Final = 128

Weigh = Callable[[int, int], float]
"""Returns what a neighbour adds to the score of each of its candidates, from its id and the length of its list."""


class Candidate(msgspec.Struct, frozen=True):
    """An id at the second hop. ``mutual`` neighbours lead to it, the first three of which are in ``via``; ``score`` is
    the sum of their weights, and equal to ``mutual`` when none were given."""

    id: int
    mutual: int
    score: float
    via: list[int]


class TwoHops(msgspec.Struct, frozen=True):
    """The best ``candidates``, best first. ``visited`` is the number of edges that were read, and ``missing`` names the
    lists that could not be read: the answer is partial, unless it is empty."""

    candidates: list[Candidate]
    visited: int
    missing: list[UnreadList]


class KeptTwoHops(msgspec.Struct, frozen=True):
    """What `Graph.keep_two_hop` changed in the list: how many candidates it ``added`` or moved, and ``removed``.
    ``missing``: see `TwoHops`; while it is not empty, nothing is removed and no number of mutual neighbours lowered."""

    added: int
    removed: int
    missing: list[UnreadList]


class _Neighbours(NamedTuple):
    """The lists of the second level that were read: the id of each neighbour, and its edge block. ``mutual``: how many
    of the lists each id is in."""

    blocks: dict[int, bytes]
    mutual: Counter[int]
    direct: frozenset[int]
    has_more: bool
    visited: int
    missing: list[UnreadList]


class TwoHopOperations(SetOperations):
    """Two hops over the lists of a graph."""

    async def two_hop(
        self,
        id1: int,
        atypes: str | Sequence[str],
        *,
        limit: int = 50,
        fan_out: int = 500,
        exclude: SetDescription | None = None,
        weigh: Weigh | None = None,
        **freshness: Unpack[Freshness],
    ) -> TwoHops:
        """Return the ``limit`` ids (1 to 1,000) that most neighbours of ``id1`` lead to, ties by id.

        ``atypes`` is the type of both hops, or a pair of types. Of each list the newest ``fan_out`` edges count (1 to
        1,000). Neither ``id1`` nor what it is connected to directly is a candidate, nor what is in the set ``exclude``.
        ``weigh(neighbour, length)`` replaces the weight 1 of each neighbour.

        A list of either hop that cannot be read is named in `TwoHops.missing`. An exclusion that cannot be read fails
        the call. Raises `InvalidArgument` and `UnknownType`."""
        consistency = from_keywords(**freshness) if freshness else None
        first, second = _two_types(atypes)
        check_number(limit, "limit", 1, MAX_CANDIDATES)
        check_number(fan_out, "fan_out", 1, MAX_FAN_OUT)
        hidden = [] if exclude is None else [EdgeSet(self, expression_in(self, exclude))]
        neighbours = await self._neighbours(id1, (first, second), fan_out, consistency)
        mutual = neighbours.mutual
        for each in (id1, *neighbours.direct):
            mutual.pop(each, None)
        scores = mutual if weigh is None else _weighed(mutual, neighbours.blocks, weigh)
        if neighbours.has_more:
            hidden.append(self.edge_set(id1, first))
        chosen: list[int] = []
        for batch in _in_ranking(scores, max(_MIN_BATCH, _SPARE * limit)):
            inside = await asyncio.gather(*(edges.among(batch, consistency=consistency) for edges in hidden))
            chosen += [candidate for candidate in batch if not any(candidate in found for found in inside)]
            if len(chosen) >= limit:
                break
        via = _via({each: mutual[each] for each in chosen[:limit]}, neighbours.blocks)
        candidates = [Candidate(each, mutual[each], scores[each], via[each]) for each in chosen[:limit]]
        return TwoHops(candidates, neighbours.visited, neighbours.missing)

    async def keep_two_hop(
        self,
        id1: int,
        atypes: str | Sequence[str],
        *,
        into: str,
        limit: int = 200,
        fan_out: int = 500,
        exclude: SetDescription | None = None,
        **freshness: Unpack[Freshness],
    ) -> KeptTwoHops:
        """Find candidates as `two_hop` does, and make the list ``(id1, into)`` hold just these, each edge with its
        number of mutual neighbours as its time: the order of the list is the ranking. Writes only what differs. When
        lists could not be read, the numbers are too low: it removes nothing then, and lowers no number.
        Raises as `two_hop`, and `SomeFailed` when writes fail."""
        self._builder.count(id1, into)
        found = await self.two_hop(id1, atypes, limit=limit, fan_out=fan_out, exclude=exclude, **freshness)
        wanted = {each.id: each.mutual for each in found.candidates}
        kept = {edge.id2: edge.time async for edge in self.assoc_iter(id1, into, **freshness)}
        added = [
            (id1, into, id2, time)
            for id2, time in wanted.items()
            if (time > kept.get(id2, 0) if found.missing else time != kept.get(id2))
        ]
        removed = [] if found.missing else [(id1, into, id2) for id2 in kept if id2 not in wanted]
        if added:
            await self.assoc_add_many(added)
        if removed:
            await self.assoc_delete_many(removed)
        return KeptTwoHops(len(added), len(removed), found.missing)

    async def _neighbours(
        self, id1: int, atypes: tuple[str, str], fan_out: int, consistency: Consistency | None
    ) -> _Neighbours:
        """Read the newest edges of the list of ``id1``, then those of the lists at their other ends."""
        first, second = atypes
        row, _ = self._builder.range(id1, first, 0, fan_out)
        number = self._builder.range(id1, second, 0, fan_out)[0].atype
        (own,) = await self._read_many(RANGE, [row], consistency)
        if isinstance(own, TaoError):
            unread = UnreadList(id1, first, own)
            return _Neighbours({}, Counter(), frozenset(), has_more=False, visited=0, missing=[unread])
        _, count, length, _ = checked_header(own)
        direct = id2_column(own).tolist()
        found: dict[int, bytes | TaoError] = {}
        mutual: Counter[int] = Counter()

        async def count_ids(neighbours: Sequence[int]) -> None:
            rows = [row._replace(id1=each, atype=number) for each in neighbours]
            for each, value in zip(neighbours, await self._read_many(RANGE, rows, consistency), strict=True):
                found[each] = value
                if not isinstance(value, TaoError):
                    mutual.update(id2_column(value).tolist())

        parts = by_server([(each,) for each in direct], direct, self._router.reader)
        await asyncio.gather(*(count_ids(neighbours) for _, neighbours in parts.values()))
        blocks: dict[int, bytes] = {}
        missing: list[UnreadList] = []
        for each in direct:  # in this order, whichever answer came first
            value = found[each]
            if isinstance(value, TaoError):
                missing.append(UnreadList(each, second, value))
            else:
                blocks[each] = value
        visited = length + sum(checked_header(block)[2] for block in blocks.values())
        return _Neighbours(blocks, mutual, frozenset(direct), count > length, visited, missing)


def _two_types(atypes: str | Sequence[str]) -> tuple[str, str]:
    if isinstance(atypes, str):
        return atypes, atypes
    if not isinstance(atypes, (list, tuple)) or len(atypes) != 2:
        raise InvalidArgument(f"atypes is {atypes!r}; it must be one type for both hops, or a pair of types")
    return atypes[0], atypes[1]


def _weighed(mutual: Mapping[int, int], blocks: Mapping[int, bytes], weigh: Weigh) -> dict[int, float]:
    scores = dict.fromkeys(mutual, 0.0)
    for neighbour, block in blocks.items():
        weight = weigh(neighbour, checked_header(block)[1])
        for each in id2_column(block).tolist():
            if each in scores:
                scores[each] += weight
    return scores


def _in_ranking(scores: Mapping[int, float], size: int) -> Iterator[list[int]]:
    """Yield ids in batches, the first of ``size``, each next one of twice as many up to 6,000: those with the highest
    scores first, of equal ones the lower ids first.

    Most ids have one of the lowest scores and are never reached, so only ids down to the score that is reached are
    sorted."""
    sizes = Counter(scores.values())
    levels = sorted(sizes, reverse=True)
    while levels:
        end = count = 0
        while end < len(levels) and count < size:
            count += sizes[levels[end]]
            end += 1
        high, low = levels[0], levels[end - 1]
        levels = levels[end:]
        batch = sorted([each for each, score in scores.items() if high >= score >= low])
        batch.sort(key=scores.__getitem__, reverse=True)  # a stable sort: equal scores stay in the order of their ids
        first = 0
        while first < count:
            yield batch[first : first + size]
            first += size
            size = min(2 * size, MAX_ID2_SET)


def _via(candidates: Mapping[int, int], blocks: Mapping[int, bytes]) -> dict[int, list[int]]:
    """Return the first neighbours that lead to each candidate, which has so many of them. One pass over the lists, as
    far as needed, finds those of all candidates."""
    via: dict[int, list[int]] = {each: [] for each in candidates}
    wanted = set(candidates)
    for neighbour, block in blocks.items():
        if not wanted:
            break
        for each in wanted.intersection(id2_column(block).tolist()):
            via[each].append(neighbour)
            if len(via[each]) == min(candidates[each], _VIA):
                wanted.discard(each)
    return via
