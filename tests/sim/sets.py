"""Questions over several lists in the simulation: sets, feeds and two hops. Which ones clients ask, and whether the
histories of the lists explain the result.

Each answer of a list is checked as any read is. What is checked here is the whole: an id whose edge was the same in
every list, at every version between those that answered, is in the result just as a naive evaluation has it, once, and
in order. An id that came or went meanwhile may be in it or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple

from tao.client import Assoc, Candidate
from tao.model.graph import ABSENT, Edge, ListKey, decode_object, version_of
from tao.sets.cursor import Place
from tao.sets.expression import Combination, Expression, ListTerm, SetOperator, combine, union_of
from tao.sets.steps import FoundEdge
from tao.wire.read_batch import EXISTS, OBJECT, QueryRow
from tests.rigs.set_lists import SetLists

Windows = Mapping[ListKey, Sequence[Sequence[Edge]]]
"""The contents that each list had between the versions that answered."""


class Seen:
    """The answers to the reads of one question."""

    def __init__(self) -> None:
        self.lists: Final[dict[ListKey, list[int]]] = {}
        """The versions of each list that answered."""
        self.objects: Final[dict[int, list[bool]]] = {}
        """Whether each object existed, answer by answer."""

    def note(self, kind: int, row: QueryRow, value: bytes) -> None:
        """Note an answer. The answer whether an edge exists names no version."""
        if kind == OBJECT:
            self.objects.setdefault(row[0], []).append(decode_object(value)[1] != ABSENT)
        elif kind != EXISTS and len(row) > 1:
            self.lists.setdefault(ListKey(row[0], row.atype), []).append(version_of(value))


SEEN: Final[ContextVar[Seen | None]] = ContextVar("seen", default=None)
"""What the reads of this task and of its own tasks are noted in."""


def expression_of(ids: Sequence[int], atype: int, number: int) -> Expression:
    """Return one of some expressions over the lists of at least three ids."""
    one, two, *_ = lists = [ListTerm(each, atype) for each in ids]
    match number % 5:
        case 0:
            return combine(SetOperator.AND, one, two)
        case 1:
            return combine(SetOperator.WITHOUT, one, two)
        case 2:
            return combine(SetOperator.OR, one, two)
        case 3:
            return combine(SetOperator.WITHOUT, union_of(ids, atype), two)
        case _:
            return combine(SetOperator.AND, combine(SetOperator.OR, one, lists[2]), two)


def lists_of(expression: Expression) -> set[ListKey]:
    """Return the lists that an expression names."""
    if isinstance(expression, Combination):
        return lists_of(expression.left) | lists_of(expression.right)
    ids = (expression.id1,) if isinstance(expression, ListTerm) else expression.id1s
    return {ListKey(id1, expression.atype) for id1 in ids}


def unexplained_set(expression: Expression, found: Sequence[FoundEdge], windows: Windows) -> str:
    """Return what no state of the lists explains in the result of a set expression, or nothing."""
    if unread := lists_of(expression) - windows.keys():
        return f"{expression} was answered without {unread}"
    places = [Place(edge.time, edge.id2) for edge in found]
    if places != sorted(set(places), reverse=True):
        return f"{found} is not in order, or has an edge twice"
    moving = _moving(windows)
    store = SetLists(
        {
            key.id1: {edge.id2: edge.time for edge in contents[0] if edge.id2 not in moving}
            for key, contents in windows.items()
        }
    )
    steady = [edge[:3] for edge in found if edge.id2 not in moving]
    expected = [edge[:3] for edge in store.expected(expression)]
    if steady != expected:
        return f"{expression} gave {steady} of what stood still, where its lists have {expected}"
    return ""


class FeedWalk(NamedTuple):
    """A walk over all pages of a feed. ``own`` is the list of the reader's own posts, if they belong to the feed."""

    follows: ListKey
    posted: int
    own: ListKey | None
    edges: Sequence[Assoc]
    unread: frozenset[int]
    is_whole: bool
    """Whether every list could be read for every page."""


def unexplained_feed(walk: FeedWalk, seen: Seen, windows: Windows) -> str:
    """Return what no state of the lists explains in a walk over a feed, or nothing.

    A post of an author who was followed throughout is looked at, and is in the feed if its object existed whenever it
    was read."""
    places = [Place(edge.time, edge.id2) for edge in walk.edges]
    if places != sorted(set(places), reverse=True):
        return f"the feed is not in order, or has a post twice: {places}"
    if not walk.is_whole:
        return ""
    followed = [{edge.id2 for edge in content} for content in windows[walk.follows]]
    throughout = {ListKey(id2, walk.posted) for id2 in set.intersection(*followed)}
    if walk.own is not None:
        throughout.add(walk.own)
    if unread := throughout - windows.keys():
        return f"the feed of {walk.follows} was answered without {unread}"
    posted = {key: contents for key, contents in windows.items() if key.atype == walk.posted}
    moving = _moving(posted)
    moving.update(
        edge.id2 for key, states in posted.items() if key not in throughout for state in states for edge in state
    )
    newest: dict[int, int] = {}
    for key in throughout:
        for edge in windows[key][0]:
            newest[edge.id2] = max(edge.time, newest.get(edge.id2, 0))
    found = {edge.id2: edge.time for edge in walk.edges}
    for id2, time in newest.items():
        if id2 in moving or id2 in walk.unread:
            continue
        if id2 not in seen.objects:
            return f"the post {id2} of time {time} was never looked at, and stood still in the feed of {walk.follows}"
        existed = seen.objects[id2]
        if (all(existed) and found.get(id2) != time) or (not any(existed) and id2 in found):
            return f"the post {id2} of time {time} is in the feed at {found.get(id2)}; it existed when read: {existed}"
    return ""


class TwoHopAsked(NamedTuple):
    """A question for two hops, and the lists of it."""

    first: ListKey
    second: int
    limit: int
    fan_out: int
    excluded: ListKey | None


def unexplained_two_hop(
    asked: TwoHopAsked, found: Sequence[Candidate], missing: frozenset[ListKey], windows: Windows
) -> str:
    """Return what no state of the lists explains in an answer to two hops, or nothing. ``missing`` are the lists that
    the answer says it lacks."""
    if asked.first in missing:
        return f"{found} although {asked.first} could not be read" if found else ""
    order = [(-each.mutual, each.id) for each in found]
    if order != sorted(set(order)):
        return f"{found} is not in order, or has a candidate twice"
    if asked.first not in windows:
        return f"{found} was answered without {asked.first}"
    own = windows[asked.first]
    neighbours = [{edge.id2 for edge in content[: asked.fan_out]} for content in own]
    certain_neighbours = {ListKey(id2, asked.second) for id2 in set.intersection(*neighbours)}
    if unread := certain_neighbours - missing - windows.keys():
        return f"{found} was answered without {unread}"
    if found and asked.excluded is not None and asked.excluded not in windows:
        return f"{found} was answered without what is excluded by {asked.excluded}"
    hidden = [{edge.id2 for edge in content} for content in own]
    excludes = () if asked.excluded is None else windows.get(asked.excluded, ())
    excluded = [{edge.id2 for edge in content} for content in excludes]
    least, most = Counter[int](), Counter[int]()
    for id2 in set.union(*neighbours):
        key = ListKey(id2, asked.second)
        ends = [{edge.id2 for edge in content[: asked.fan_out]} for content in windows.get(key, ())]
        if ends and key in certain_neighbours and key not in missing:
            least.update(set.intersection(*ends))
        if ends:
            most.update(set.union(*ends))
    certainly_hidden = {asked.first.id1, *set.intersection(*hidden), *(set.intersection(*excluded) if excluded else ())}
    possibly_hidden = {asked.first.id1, *set.union(*hidden), *(set.union(*excluded) if excluded else ())}
    for each in found:
        if each.id in certainly_hidden or not least[each.id] <= each.mutual <= most[each.id]:
            return f"{each} is no candidate, or has {least[each.id]} to {most[each.id]} neighbours"
    chosen = {each.id for each in found}
    for id2, mutual in least.items():
        is_better = len(found) < asked.limit or (-mutual, id2) < order[-1]
        if is_better and id2 not in chosen and id2 not in possibly_hidden:
            return f"{id2} with {mutual} neighbours is not among {found}"
    return ""


def _moving(windows: Windows) -> set[int]:
    """Return the ids whose edges were not the same in every state of each list."""
    moving: set[int] = set()
    for contents in windows.values():
        states = [{edge.id2: edge for edge in content} for content in contents]
        ids = {id2 for state in states for id2 in state}
        moving.update(id2 for id2 in ids if len({state.get(id2) for state in states}) > 1)
    return moving
