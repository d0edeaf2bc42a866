"""Set expressions in the simulation: which ones clients evaluate, and whether the histories of the lists explain the
result.

Each answer of a list is checked as any read is. What is checked here is the whole: an id whose edge was the same in
every list, at every version between those that answered, is in the result just as Python's sets have it, once, and in
order. An id that came or went meanwhile may be in it or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tao.model.graph import Edge, ListKey, version_of
from tao.sets.cursor import Place
from tao.sets.expression import Expression, ListTerm, SetOperator, combine, union_of
from tao.sets.steps import Done, FoundEdge, Steps
from tests.rigs.set_lists import SetLists

SeenVersions = dict[ListKey, list[int]]
"""The versions of each list that answered."""


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


def recorded(steps: Steps[Done], seen: SeenVersions) -> Steps[Done]:
    """Take the same steps, and note the versions in the answers."""
    try:
        batch = next(steps)
        while True:
            answers = yield batch
            for query, answer in zip(batch, answers, strict=True):
                if isinstance(answer, bytes):
                    seen.setdefault(ListKey(query.id1, query.atype), []).append(version_of(answer))
            batch = steps.send(answers)
    except StopIteration as stop:
        done: Done = stop.value
        return done


def unexplained(
    expression: Expression, found: Sequence[FoundEdge], windows: Mapping[ListKey, Sequence[Sequence[Edge]]]
) -> str:
    """Return what no state of the lists explains in the result, or nothing. ``windows`` are the contents that each list
    had between the versions that answered."""
    places = [Place(edge.time, edge.id2) for edge in found]
    if places != sorted(set(places), reverse=True):
        return f"{found} is not in order, or has an edge twice"
    moving: set[int] = set()
    for contents in windows.values():
        states = [{edge.id2: edge for edge in content} for content in contents]
        ids = {id2 for state in states for id2 in state}
        moving.update(id2 for id2 in ids if len({state.get(id2) for state in states}) > 1)
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
