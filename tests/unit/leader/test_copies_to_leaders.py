"""Copies of edges on their way to other leaders: which share a message, and what each writer gets of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest

from tao.leader.copies_to_leaders import CopyResults, CopySender
from tao.model.changes import ListChange, ListInvalidation, Message, ShardMessages
from tao.model.edge_states import NO_OPERATION
from tao.model.errors import InternalError, NotMine, OutcomeUnknown, Overloaded, ProtocolError, ShardBlocked, TaoError
from tao.model.graph import Edge
from tao.model.topology import CacheServer
from tao.model.writes import Coordinator, SettleEdge
from tao.serving.configuration import Configuration
from tao.wire.convert import error_from_pb, error_to_pb, shard_messages_to_pb
from tao.wire.links import LinksPort
from tao.wire.session import failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FRIEND, make_id
from tests.rigs.pacing import Tasks
from tests.rigs.server_context import make_context

FAR, OTHER_FAR, NEAR = make_id(64, 1), make_id(65, 1), make_id(64, 0)
COORDINATOR = Coordinator(0, 1)


class Leader(NamedTuple):
    """What a request needs to know of the leader that it is sent to."""

    name: str


class SentTo:
    """The links to all leaders: keep each message and what takes its answers. ``refusals``: by the leader's name, what
    is raised instead."""

    def __init__(self) -> None:
        self.sent: list[tuple[pb.Request, float]] = []
        self.take: list[Callable[[pb.Answer], None]] = []
        self.refusals: dict[str, Exception] = {}

    def to(self, leader: Leader) -> SentTo:
        if leader.name in self.refusals:
            raise self.refusals[leader.name]
        return self

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: Callable[[pb.Answer], None]) -> None:
        self.sent.append((request, timeout_seconds))
        self.take.append(on_answer)


class Rig:
    """A sender of copies, and the messages that it has sent."""

    def __init__(self) -> None:
        self.links = SentTo()
        configuration = cast(Configuration, SimpleNamespace(routes=SimpleNamespace(version=1)))
        self.sender = CopySender(make_context(configuration, cast(LinksPort, self.links), Tasks()))

    def copy(
        self,
        *settles: SettleEdge,
        to: str = "leader-2",
        timeout_seconds: float = 2.0,
        coordinator: Coordinator = COORDINATOR,
        background: bool = False,
    ) -> asyncio.Task[CopyResults]:
        leader = cast(CacheServer, Leader(to))
        sending = self.sender.send(leader, settles, coordinator, timeout_seconds, background=background)
        return asyncio.ensure_future(sending)

    async def messages(self) -> list[list[int]]:
        """Return, for each message sent, the ends of its copies whose lists it changes."""
        for _ in range(4):
            await asyncio.sleep(0)
        return [[write.settle_edge.id1 for write in request.write.writes] for request, _ in self.links.sent]


def settle(far: int = FAR, near: int = NEAR) -> SettleEdge:
    return SettleEdge(far, FRIEND, near, present=True, time=7)


def change(far: int, version: int) -> ListChange:
    return ListChange(far, FRIEND, version - 1, version, 1, (), (Edge(NEAR, 7, b""),))


def answer(slots: Sequence[int], *changes: Message, more: bool = False) -> pb.Answer:
    results = [pb.WriteResult(found=True) for _ in slots]
    messages = [shard_messages_to_pb(ShardMessages(1, 1, changes))] if changes else []
    return pb.Answer(more=more, write=pb.WriteAnswer(slots=slots, results=results, changes=messages))


async def test_copies_of_one_turn_share_a_message_with_the_earliest_deadline() -> None:
    rig = Rig()
    tasks = [rig.copy(settle(FAR), timeout_seconds=2.04), rig.copy(settle(OTHER_FAR), timeout_seconds=2.01)]
    assert await rig.messages() == [[FAR, OTHER_FAR]]
    (sent,) = rig.links.sent
    assert sent[1] == 2.01
    assert (sent[0].write.coordinator.shard, sent[0].write.coordinator.generation) == (0, 1)
    rig.links.take[0](answer([0, 1]))
    await asyncio.gather(*tasks)


async def test_copies_of_other_leaders_coordinators_and_deadlines_have_messages_of_their_own() -> None:
    rig = Rig()
    tasks = [
        rig.copy(settle()),
        rig.copy(settle(), to="leader-3"),
        rig.copy(settle(), coordinator=Coordinator(0, 2)),
        rig.copy(settle(), coordinator=Coordinator(2, 1)),
        rig.copy(settle(), background=True),
        rig.copy(settle(), timeout_seconds=0.5),
    ]
    assert await rig.messages() == [[FAR]] * 6
    assert [request.write.background for request, _ in rig.links.sent].count(True) == 1
    for take in rig.links.take:
        take(answer([0]))
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("other_seconds", [0.07, 0.001, -0.05])
async def test_a_copy_whose_time_is_short_does_not_share_an_earlier_deadline(other_seconds: float) -> None:
    """A tenth of a second is all of its time, and a copy that has none left would fail it at once."""
    rig = Rig()
    tasks = [rig.copy(settle(FAR), timeout_seconds=0.09), rig.copy(settle(OTHER_FAR), timeout_seconds=other_seconds)]
    await rig.messages()
    assert sorted(seconds for _, seconds in rig.links.sent) == [other_seconds, 0.09]
    for take in rig.links.take:
        take(answer([0]))
    await asyncio.gather(*tasks)


async def test_a_message_has_a_bounded_number_of_copies() -> None:
    rig = Rig()
    tasks = [rig.copy(settle(FAR, NEAR + number)) for number in range(65)]
    assert [len(message) for message in await rig.messages()] == [64, 1]
    for take, (request, _) in zip(rig.links.take, rig.links.sent, strict=True):
        take(answer(range(len(request.write.writes))))
    await asyncio.gather(*tasks)


async def test_no_copies_need_no_answer() -> None:
    """An intent whose types have all left the schema is settled by no copy, and its pair must not stay held."""
    rig = Rig()
    none = rig.copy()
    assert await rig.messages() == []
    assert none.done(), "nothing would end its wait"
    assert (none.result().results, none.result().changes) == ([], [])


async def test_a_copy_that_cannot_be_encoded_fails_alone() -> None:
    rig = Rig()
    broken, kept = rig.copy(settle(-1)), rig.copy(settle(OTHER_FAR))
    assert await rig.messages() == [[OTHER_FAR]]
    rig.links.take[0](answer([0]))
    await kept
    with pytest.raises(ValueError, match="-1"):
        await broken


async def test_copies_that_the_other_leader_would_join_are_sent_alone() -> None:
    """Joined copies fail together, so the copy of one writer must not be joined with that of another one."""
    rig = Rig()
    with_states = SettleEdge(FAR, FRIEND, NEAR, present=True, registers=NO_OPERATION)
    tasks = [rig.copy(with_states), rig.copy(with_states), rig.copy(settle(FAR), settle(OTHER_FAR))]
    assert sorted(await rig.messages()) == sorted([[FAR], [FAR], [FAR, OTHER_FAR]])
    for take, (request, _) in zip(rig.links.take, rig.links.sent, strict=True):
        take(answer(range(len(request.write.writes))))
    assert [len((await task).results) for task in tasks] == [1, 1, 2]


async def test_each_writer_gets_its_own_result_and_the_changes_of_its_list() -> None:
    rig = Rig()
    tasks = [rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR)), rig.copy(settle(FAR, NEAR + 1))]
    await rig.messages()
    both, unchanged = change(FAR, 9), ListInvalidation(OTHER_FAR, FRIEND, 4)
    sent = answer([0, 1, 2], both, unchanged)
    sent.write.results[1].CopyFrom(pb.WriteResult(error=error_to_pb(ShardBlocked("locked", 1))))
    rig.links.take[0](sent)
    first, second, third = await asyncio.gather(*tasks)
    assert first.changes == third.changes == [ShardMessages(1, 1, (both,))]
    assert first.changes[0] is third.changes[0], "changes that writers share are sent to their caches once"
    assert second.changes == [ShardMessages(1, 1, (unchanged,))]
    assert isinstance(error_from_pb(second.results[0].error), ShardBlocked)
    assert first.results[0].found


async def test_a_writer_goes_on_with_the_part_of_the_answer_that_has_its_results() -> None:
    rig = Rig()
    early, late = rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR))
    await rig.messages()
    rig.links.take[0](answer([0], change(FAR, 9), more=True))
    assert (await early).changes == [ShardMessages(1, 1, (change(FAR, 9),))]
    assert not late.done()
    rig.links.take[0](answer([1], change(OTHER_FAR, 3)))
    assert (await late).changes == [ShardMessages(1, 1, (change(OTHER_FAR, 3),))]


async def test_the_error_of_a_message_is_that_of_each_copy_in_it() -> None:
    rig = Rig()
    tasks = [rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR))]
    await rig.messages()
    rig.links.take[0](failure(Overloaded("busy")))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [Overloaded, Overloaded]
    assert errors[0] is not errors[1], "each raise adds a traceback"


async def test_a_copy_without_a_result_fails() -> None:
    rig = Rig()
    tasks = [rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR))]
    await rig.messages()
    rig.links.take[0](answer([1]))
    answered, missing = tasks[1], tasks[0]
    assert (await answered).results[0].found
    with pytest.raises(InternalError):
        await missing


async def test_a_broken_connection_fails_the_copies_that_have_no_result_yet() -> None:
    rig = Rig()
    early, late = rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR))
    await rig.messages()
    rig.links.take[0](answer([0], more=True))
    rig.links.take[0](failure(OutcomeUnknown("the connection broke")))
    assert (await early).results[0].found
    with pytest.raises(OutcomeUnknown):
        await late


async def test_a_malformed_answer_fails_the_copies() -> None:
    """A leader of a newer version may send changes of a kind that is unknown here. Nothing else ends the wait."""
    rig = Rig()
    tasks = [rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR))]
    await rig.messages()
    malformed = answer([0, 1])
    malformed.write.changes.add(shard=1).messages.add()
    rig.links.take[0](malformed)
    await rig.messages()
    assert [task.done() for task in tasks] == [True, True], "nothing would end their wait"
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [ProtocolError, ProtocolError]


@pytest.mark.parametrize("error", [Overloaded("too many requests"), NotMine("moving", 7), ValueError("a bug")])
async def test_a_message_that_cannot_be_sent_fails_its_copies_and_no_others(error: Exception) -> None:
    rig = Rig()
    rig.links.refusals["leader-2"] = error
    tasks = [rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR)), rig.copy(settle(FAR), to="leader-3")]
    assert await rig.messages() == [[FAR]]
    assert [task.done() for task in tasks] == [True, True, False], "nothing else would end their wait"
    rig.links.take[0](answer([0]))
    *errors, kept = await asyncio.gather(*tasks, return_exceptions=True)
    kind = type(error) if isinstance(error, TaoError) else InternalError
    assert [type(each) for each in errors] == [kind, kind]
    assert errors[0] is not errors[1], "each raise adds a traceback"
    assert isinstance(kept, CopyResults)


async def test_the_copy_of_a_writer_that_has_gone_is_not_sent() -> None:
    rig = Rig()
    gone, kept = rig.copy(settle(FAR)), rig.copy(settle(OTHER_FAR))
    await asyncio.sleep(0)
    gone.cancel()
    assert await rig.messages() == [[OTHER_FAR]]
    rig.links.take[0](answer([0]))
    await kept
    assert gone.cancelled()
