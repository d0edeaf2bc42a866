"""Set expressions on the wire: the terms of a `pb.SelectRequest`, the reads that an evaluation asks for, its reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tao.model.errors import InternalError, InvalidArgument
from tao.model.graph import MAX_TIME
from tao.model.ids import SHARD_SHIFT
from tao.sets.evaluation import MAX_PAGE, FoundCount, FoundPage
from tao.sets.expression import MAX_LEAVES, Expression, ListTerm, SetOperator, Term, from_terms, union_of
from tao.sets.steps import DEFAULT_LIMITS, Answer, ListQuery, SetLimits
from tao.wire.convert import error_from_pb
from tao.wire.read_batch import encode_queries
from tao.wire.unary import checked_id, checked_time, read_request
from tao.wire.v1 import session_pb2 as pb

MAX_COUNT: Final = 1_000_000
"""The largest limit of a count."""

_OPERATORS: Final = {
    pb.SET_AND: SetOperator.AND,
    pb.SET_OR: SetOperator.OR,
    pb.SET_WITHOUT: SetOperator.WITHOUT,
}


def expression_of(asked: pb.SelectRequest) -> Expression:
    """Return the expression of a request. Raises `InvalidArgument` and `TooLarge`, also for its limit, and for a cursor
    of a count."""
    most = MAX_COUNT if asked.count_only else MAX_PAGE
    if not 1 <= asked.limit <= most:
        raise InvalidArgument(f"limit is {asked.limit}; it must be 1 to {most}")
    if asked.count_only and asked.cursor:
        raise InvalidArgument("a count begins at the first edge: leave cursor out with count_only")
    if len(asked.terms) > 2 * MAX_LEAVES:
        raise InvalidArgument(f"a set expression has at most {MAX_LEAVES} sets, this one has {len(asked.terms)} terms")
    return from_terms(map(_term, asked.terms))


def _term(term: pb.SelectTerm) -> Term:
    match term.WhichOneof("term"):
        case "list":
            found = term.list
            high = checked_time(found.high) if found.HasField("high") else MAX_TIME
            return ListTerm(checked_id(found.id1), found.atype, high, checked_time(found.low))
        case "union":
            return union_of(map(checked_id, term.union.id1s), term.union.atype)
        case _:
            operator = _OPERATORS.get(term.operator)
            if operator is None:
                raise InvalidArgument(f"a term is a list, a union, or one of the operators {sorted(_OPERATORS)}")
            return operator


def limits_of(asked: pb.SelectRequest) -> SetLimits:
    """Return the budget of a request: what it asks for, and no more than the default."""
    most = DEFAULT_LIMITS
    return SetLimits(
        materialize_edges=most.materialize_edges,
        max_examined=min(asked.budget_edges or most.max_examined, most.max_examined),
        max_ms=min(asked.budget_ms or most.max_ms, most.max_ms),
    )


class ListReads(NamedTuple):
    """A request for some queries of a batch: the place of each in the batch, in the order of the request's slots."""

    request: pb.Request
    places: Sequence[int]


def reads_of(batch: Sequence[ListQuery], asked: pb.SelectRequest) -> list[ListReads]:
    """Return requests for the queries of a batch, each on one shard, as fresh as ``asked`` says. With a token each list
    has a request of its own, because a token may demand something else of each. Raises `InvalidArgument` for a text
    that is no token."""
    groups: dict[int, list[int]] = {}
    for place, query in enumerate(batch):
        groups.setdefault(place if asked.after else query.id1 >> SHARD_SHIFT, []).append(place)
    reads: list[ListReads] = []
    for places in groups.values():
        read = pb.ReadBatch()
        order = encode_queries([(batch[place], 0) for place in places], read)
        read.for_fill = False
        first = batch[places[0]]
        request = read_request(read, asked, first.id1, first.atype)
        reads.append(ListReads(request, [places[index] for index in order]))
    return reads


def answers_of(answer: pb.Answer, queries: int) -> list[Answer]:
    """Return the answers in the order of the slots. Raises `InternalError` when the answer does not have them all."""
    if answer.HasField("error"):
        return [error_from_pb(answer.error)] * queries
    read = answer.read
    slots = read.slots or range(len(read.values))
    by_slot: dict[int, Answer] = dict(zip(slots, read.values, strict=True))
    by_slot.update(zip(read.failed_slots, map(error_from_pb, read.errors), strict=True))
    if sorted(by_slot) != list(range(queries)):
        raise InternalError(f"{queries} queries of a set were answered at the slots {sorted(by_slot)}")
    return [by_slot[slot] for slot in range(queries)]


def page_to_pb(page: FoundPage) -> pb.SelectReply:
    """Return the reply of a page."""
    return pb.SelectReply(
        edges=[
            pb.SelectedEdge(id1=each.id1, atype=each.atype, id2=each.id2, time=each.time, data=each.data)
            for each in page.edges
        ],
        cursor=page.cursor or "",
        examined=page.examined,
        cut_short=page.cut_short,
        plan=page.plan,
    )


def count_to_pb(count: FoundCount) -> pb.SelectReply:
    """Return the reply of a count."""
    return pb.SelectReply(count=count.value, exact=count.exact)
