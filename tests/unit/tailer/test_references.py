"""Relays by reference: when a leader is asked, and what is decoded when it does not have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from tao.model.delivery import Span
from tao.model.errors import InvalidArgument, NotMine, TaoError, Unavailable
from tao.model.relay import Reference, Relay, Relayed, Touch
from tao.model.topology import CacheServer
from tao.planning.row_events import Translated
from tao.routing.routes import Routes
from tao.tailer.binlog import BinlogTransaction, UndecodedRows
from tao.tailer.settings import OutboxSettings
from tests.rigs.leader_rig import make_id, make_topology
from tests.unit.tailer.test_delivery_path import BOTH, QUICK, Leaders, Rig, about, change, turns

SOURCE = "db@1:0-1"


class Asked(Leaders):
    """Leaders that have messages of some commits of their own; ``has`` names the transactions by number."""

    def __init__(self) -> None:
        super().__init__()
        self.has: set[int] = set()
        self.takes_references = True
        self.misses_messages = False

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
        if self.misses_messages:
            await asyncio.sleep(0)
            return Relayed(missing=(Reference(0, SOURCE, (1,)),))
        if relay.references and not self.takes_references:
            self.attempts.append((leader.name, relay))
            raise InvalidArgument("a leader does not serve 'nothing' requests")
        fails = self.failures.get(leader.name)
        missing = (
            []
            if fails is not None
            else [
                Reference(each.shard, each.source, numbers)
                for each in relay.references
                if (numbers := tuple(number for number in each.numbers if number not in self.has))
            ]
        )
        if missing:
            self.attempts.append((leader.name, relay))
            return Relayed(missing=tuple(missing), takes_references=True)
        await super().relay(leader, relay, timeout_seconds)
        return Relayed(takes_references=self.takes_references)

    def contents(self, shard: int) -> list[object]:
        """Return everything that was entered of a shard, in order: messages, and the numbers of references."""
        found: list[object] = []
        for _, relay in self.relayed:
            for place, each in enumerate((*relay.changes, None)):
                for reference in relay.references:
                    if reference.place == place and reference.shard == shard:
                        found += reference.numbers
                if each is not None and each.shard == shard:
                    found += each.messages
        return found


class AskingRig(Rig):
    """A tailer whose transactions are undecoded; ``rows`` has what they turn out to be."""

    def __init__(self, settings: OutboxSettings = QUICK) -> None:
        self.asked = Asked()
        super().__init__(settings, self.asked)
        self.path.decode = self.decode
        self.rows: dict[int, Translated] = {}
        self.decoded: list[int] = []
        self.decoded_bytes: list[int] = []
        """Estimated size of the rows that were decoded at once."""
        self.decodes = asyncio.Event()
        self.decodes.set()

    async def decode(self, undecoded: Sequence[UndecodedRows]) -> list[Translated]:
        await asyncio.sleep(0)
        await self.decodes.wait()
        self.decoded_bytes.append(sum(rows.size_bytes for rows in undecoded))
        numbers = [int(rows.decode().gtid) for rows in undecoded]
        self.decoded += numbers
        return [self.rows[number] for number in numbers]

    async def commit(self, number: int, shard: int = 0, translated: Translated | None = None) -> None:
        """Submit a transaction that changes a shard, undecoded."""
        self.rows[number] = about(change(shard, number)) if translated is None else translated
        rows = UndecodedRows(shard, 300, partial(BinlogTransaction, gtid=str(number)))
        await self.path.submit(f"0-1-{number}", Translated(), undecoded=[rows])

    async def first_answers(self) -> None:
        """Have both leaders say that they have committed something."""
        for shard in (0, 1):
            await self.path.submit(f"0-1-{shard + 1}", about(change(shard, 1)))
        await self.path.drained()
        self.leaders.relayed.clear()
        self.leaders.attempts.clear()

    async def close(self) -> None:
        """Check that nothing is left, and end."""
        assert self.path.unacknowledged_bytes == 0
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def rig() -> AsyncIterator[AskingRig]:
    rig = AskingRig()
    yield rig
    await rig.close()


async def test_a_leader_that_has_committed_nothing_is_not_asked(rig: AskingRig) -> None:
    await rig.commit(1)
    await rig.path.drained()
    assert rig.asked.contents(0) == [change(0, 1)]
    assert not any(relay.references for _, relay in rig.leaders.attempts)


async def test_what_the_leader_has_is_not_decoded(rig: AskingRig) -> None:
    await rig.first_answers()
    rig.asked.has = {3, 4}
    await rig.commit(3)
    await rig.commit(4)
    await rig.path.drained()
    assert rig.asked.contents(0) == [3, 4]
    assert rig.decoded == []
    assert rig.acknowledged[-2:] == ["0-1-3", "0-1-4"]
    assert [span for _, relay in rig.leaders.relayed for span in relay.spans][-1].number == 4
    assert rig.path.references == {"entered": 2, "missing": 0}


async def test_what_is_missing_is_decoded_in_its_place(rig: AskingRig) -> None:
    await rig.first_answers()
    rig.asked.has = {3, 5}
    rig.leaders.open.clear()
    await rig.path.submit("0-1-2", about(change(0, 2)))
    await turns()
    for number in (3, 4, 5):
        await rig.commit(number)
    await rig.path.submit("0-1-6", about(change(0, 6)))
    rig.leaders.open.set()
    await rig.path.drained()
    assert rig.asked.contents(0) == [change(0, 2), 3, change(0, 4), 5, change(0, 6)]
    assert rig.decoded == [4]
    assert rig.path.references == {"entered": 2, "missing": 1}
    assert rig.acknowledged[-5:] == [f"0-1-{number}" for number in range(2, 7)]


async def test_the_parts_of_decoded_rows_cover_the_span_of_the_undecoded(rig: AskingRig) -> None:
    await rig.first_answers()
    touches = (Touch(make_id(1), 0, 7), Touch(make_id(2), 0, 7))
    await rig.commit(3, translated=Translated(about(change(0, 3)).messages, touches))
    await rig.path.drained()
    (relay,) = [relay for _, relay in rig.leaders.relayed]
    assert relay.touches == touches
    assert relay.spans == (Span(0, SOURCE, 1, 3),)


async def test_rows_are_left_undecoded_while_a_leader_is_asked(rig: AskingRig) -> None:
    asking: list[bool] = []
    rig.path.on_asking = asking.append
    rig.asked.takes_references = False
    await rig.path.submit("0-1-1", about(change(0, 1)))
    await rig.path.drained()
    assert asking == [False]
    rig.asked.takes_references = True
    await rig.path.submit("0-1-2", about(change(0, 2)))
    await rig.path.drained()
    assert asking == [False, True]
    rig.routes = Routes(msgspec.structs.replace(rig.routes.topology, databases=()))
    await rig.path.submit("0-1-3", about(change(0, 3)))
    await rig.path.drained()
    assert asking == [False, True, False], "the master is in another region now"


async def test_a_leader_that_was_missing_everything_is_not_asked_for_a_moment(
    rig: AskingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.first_answers()
    asking: list[bool] = []
    rig.path.on_asking = asking.append
    for number in (3, 4):
        await rig.commit(number)
        await rig.path.drained()
    assert [bool(relay.references) for _, relay in rig.leaders.attempts] == [True, False, False]
    assert asking[0], "the other leader is asked"
    now = rig.path._time() + 1.0
    monkeypatch.setattr(rig.path, "_time", lambda: now)
    rig.asked.has = {5}
    await rig.commit(5)
    await rig.path.drained()
    assert rig.asked.contents(0) == [change(0, 3), change(0, 4), 5]


async def test_rows_that_change_nothing_advance_the_position(rig: AskingRig) -> None:
    await rig.first_answers()
    await rig.commit(3, translated=Translated())
    await rig.path.drained()
    assert rig.asked.contents(0) == []
    assert rig.leaders.relayed[-1][1].spans == (Span(0, SOURCE, 1, 3),)
    assert rig.acknowledged[-1] == "0-1-3"


async def test_a_leader_of_a_former_version_gets_the_messages(rig: AskingRig) -> None:
    await rig.first_answers()
    rig.asked.takes_references = False
    for number in (3, 4):
        await rig.commit(number)
        await rig.path.drained()
    assert rig.asked.contents(0) == [change(0, 3), change(0, 4)]
    assert rig.path.rejected_relays == 0
    assert sum(bool(relay.references) for _, relay in rig.leaders.attempts) == 1, "it is not asked again"


async def test_a_leader_that_is_missing_messages_that_a_relay_contains_is_not_asked_again_at_once(
    rig: AskingRig,
) -> None:
    rig.asked.misses_messages = True
    await rig.path.submit("0-1-1", about(change(0, 1)))
    await turns()
    assert rig.path.retried_relays > 0
    rig.asked.misses_messages = False
    await rig.path.drained()
    assert rig.acknowledged == ["0-1-1"]


async def test_a_shard_that_has_moved_is_decoded_for_its_new_leader(rig: AskingRig) -> None:
    await rig.first_answers()
    rig.leaders.failures["leader-1"] = lambda _: NotMine("moved", 2)
    rig.asked.has = {3}
    await rig.commit(3)
    await turns()
    rig.asked.has = set()
    rig.next_routes = Routes(make_topology(2, leaders=BOTH | {0: ("leader-2",)}))
    await rig.path.drained()
    assert rig.leaders.relayed[-1][0] == "leader-2"
    assert rig.asked.contents(0) == [change(0, 3)]


@pytest.mark.parametrize("failure", [Unavailable("away"), None])
async def test_touches_survive_when_undecoded_rows_make_room(failure: TaoError | None) -> None:
    rig = AskingRig(replace(QUICK, relay_bytes=600, leader_bytes=2_000, slow_seconds=0.0))
    await rig.first_answers()
    if failure is None:
        rig.leaders.open.clear()  # the leader is slow
        rig.asked.has = {*range(3, 23)} - {7}
    else:
        rig.leaders.failures["leader-1"] = lambda _: failure
    touch = Touch(make_id(9), 0, 7)
    for number in range(3, 23):
        await rig.commit(number, translated=Translated(touches=(touch,)) if number == 7 else None)
    assert rig.path.dropped_parts > 0
    rig.asked.has = set()
    rig.leaders.failures.clear()
    rig.leaders.open.set()
    await rig.path.drained()
    assert [each for _, relay in rig.leaders.relayed for each in relay.touches] == [touch]
    assert any(0 in relay.bulk_shards for _, relay in rig.leaders.relayed)
    assert rig.acknowledged[-1] == "0-1-22"
    await rig.close()


async def test_a_part_that_is_decoded_to_make_room_is_not_sent_or_decoded_by_the_leaders_task_meanwhile() -> None:
    rig = AskingRig(replace(QUICK, relay_bytes=1_000, leader_bytes=2_000, backoff_max_seconds=0.0))
    await rig.first_answers()
    rig.leaders.failures["leader-1"] = lambda _: Unavailable("away")
    rig.decodes.clear()

    async def commit_all() -> None:
        for number in range(3, 15):
            await rig.commit(number)

    committing = asyncio.create_task(commit_all())
    await turns(50)
    assert not committing.done(), "waits for room, and so decodes"
    rig.leaders.failures.clear()
    await turns(50)
    rig.decodes.set()
    await committing
    await rig.path.drained()
    assert rig.decoded
    assert len(rig.decoded) == len(set(rig.decoded))
    assert max(rig.decoded_bytes) <= 1_000, "of an outbox no more than a relay holds is decoded at once"
    assert rig.acknowledged[-1] == "0-1-14"
    await rig.close()
