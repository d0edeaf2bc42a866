"""The clock of a leader, and that of another region's leader, which one of the own region asks for it."""

from __future__ import annotations

import pytest

from tao.model.errors import InvalidArgument, TopologyError
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import LeaderRig
from tests.rigs.links_rig import MemoryLinks, MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until


async def test_leader_asks_another_one_for_its_clock_and_passes_no_question_on_twice() -> None:
    store = MemoryStore(4)
    links = MemoryLinks("leader-1")
    one = LeaderRig(store, store, name="leader-1", links=links.as_links())
    two = LeaderRig(store, store, name="leader-2")
    links["leader-2"].handler = two.service
    answers: list[pb.Answer] = []

    def ask(leader: str, peer: str = "near-1") -> None:
        request = pb.Request(get_clock=pb.GetClock(leader=leader), deadline_ms=60_000)
        one.service.handle(request, MemoryReply(answers.append, peer=peer))

    for asked in ("", "leader-1", "leader-2"):
        answers.clear()
        ask(asked)
        await until(lambda: answers)
        assert answers[0].clock.leader == asked
        assert answers[0].clock.unix_us > 0
    with pytest.raises(InvalidArgument):
        ask("near-2")
    with pytest.raises(InvalidArgument):
        ask("leader-2", peer="leader-3")
    with pytest.raises(TopologyError):
        ask("nobody")
