"""Two disks have what is accepted: copies at another follower, and the writes that it makes for a lost acceptor."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from tao.journal.applier import Applier
from tao.journal.copies import Copies
from tao.journal.schedule import Batch, LoadPage
from tao.model.errors import InvalidArgument, NoCopy, OutcomeUnknown, Unavailable
from tao.model.receipts import Receipt
from tao.wire.session import Reply, RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.journal_rig import JournalRig, ScriptedWrites, edge, ends
from tests.rigs.leader_rig import make_topology
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import until

LOST_SECONDS = 0.06
"""Time after which an acceptor counts as lost, where a test waits for that."""


def pair(folder: Path, writes: ScriptedWrites | None = None, **settings: float) -> tuple[JournalRig, JournalRig]:
    """Return an acceptor that makes nothing, and its sibling."""
    one = JournalRig(folder / "one", writes, databases=1, name="near-1", copies=2, **{"normal_tasks": 0, **settings})
    two = JournalRig(folder / "two", writes, databases=1, name="near-2", **settings)
    one.connect(two)
    return one, two


async def test_accepted_write_is_on_two_disks_until_it_is_made(tmp_path: Path) -> None:
    one, two = pair(tmp_path, normal_tasks=1)
    async with one, two:
        one.writes.holds.clear()
        receipts = await one.accept(edge(0, 2), edge(0, 3))
        assert all(isinstance(each, bytes) for each in receipts)
        assert two.figures["held_copies"] == 2
        assert two.figures["held_copy_bytes"] > 0
        await until(lambda: one.writes.requests)
        one.writes.holds.set()
        await one.idle()
        await until(lambda: two.figures["held_copies"] == 0)
        assert two.figures["held_copy_bytes"] == 0
        assert (one.figures["copied_total"], two.figures["adopted_total"]) == (2, 0)
        assert one.figures["sibling"] == "near-2"


async def test_write_is_refused_when_no_other_follower_can_be_reached(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    async with one, two:
        one.links["near-2"].down = True
        (refused,) = await one.accept(edge(0, 2))
        assert isinstance(refused, NoCopy)
        assert one.figures["uncopied_total"] == 1
        assert one.figures["sibling_trouble"]
        assert one.figures["bytes"] == 0
    async with JournalRig(tmp_path / "one") as again:
        await again.idle()
        assert ends(again.writes) == set()


async def test_trouble_ends_when_the_sibling_is_back_although_nothing_more_is_accepted(tmp_path: Path) -> None:
    one, two = pair(tmp_path, takeover_seconds=0.6)
    async with one, two:
        one.links["near-2"].down = True
        assert isinstance((await one.accept(edge(0, 2)))[0], NoCopy)
        assert "can be reached" in one.figures["sibling_trouble"]
        one.links["near-2"].down = False
        await until(lambda: not one.figures["sibling_trouble"])
        one.links["near-2"].faults["keep_copies"] = [Unavailable("the connection broke")]
        await one.accept(edge(0, 3))
        await until(lambda: one.figures["sibling_agrees"])
        assert not one.figures["sibling_trouble"]
        assert one.figures["copied_total"] == 0


async def test_trouble_lasts_while_the_sibling_answers_and_takes_no_copies(tmp_path: Path) -> None:
    one, two = pair(tmp_path, takeover_seconds=0.6, max_copy_bytes=10)
    async with one, two:
        await one.accept(edge(0, 2))
        await until(lambda: one.figures["sibling_agrees"])
        assert "max_copy_bytes" in one.figures["sibling_trouble"]


async def test_write_whose_copy_is_refused_is_not_accepted(tmp_path: Path) -> None:
    one, two = pair(tmp_path, max_copy_bytes=10)
    async with one, two:
        (refused,) = await one.accept(edge(0, 2))
        assert isinstance(refused, NoCopy)
        assert "max_copy_bytes" in refused.message
        assert two.figures["held_copies"] == 0


class LosesAnswers:
    """A follower that does what it is asked, and whose next answers are lost."""

    def __init__(self, rig: JournalRig, lost: int) -> None:
        self._rig = rig
        self._lost = lost

    def handle(self, request: pb.Request, reply: Reply) -> None:
        if request.keep_copies.copies and self._lost:
            self._lost -= 1
            self._rig.handle(request, MemoryReply(lambda _: None, peer="near-1"))
            reply.send(failure(OutcomeUnknown("the connection broke")))
        else:
            self._rig.handle(request, reply)


async def test_copy_of_a_refused_write_is_deleted_and_the_write_is_not_made(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    async with one, two:
        one.links["near-2"].handler = cast(RequestHandler, LosesAnswers(two, 1))
        (refused,) = await one.accept(edge(0, 2))
        assert isinstance(refused, OutcomeUnknown)
        await until(lambda: two.figures["held_copies"] == 0 and one.figures["sibling_agrees"])
        assert isinstance((await one.accept(edge(0, 3)))[0], bytes)
        assert two.figures["held_copies"] == 1
    async with JournalRig(tmp_path / "one") as again:
        await again.idle()
        assert ends(again.writes) == {3}


async def test_sibling_makes_the_writes_of_a_lost_acceptor_once_and_as_they_were_accepted(tmp_path: Path) -> None:
    writes = ScriptedWrites()
    one, two = pair(tmp_path, writes, takeover_seconds=LOST_SECONDS)
    async with two:
        async with one:
            receipts = await one.accept(*(edge(0, id2) for id2 in (2, 3, 4)))
        await until(lambda: ends(writes) == {2, 3, 4})
        await two.idle()
        made = dict(writes.registers)
        assert two.figures["adopted_total"] == 3
        assert two.figures["held_copies"] == 0
        for receipt in receipts:
            moved = await two.applied(receipt)
            assert isinstance(moved, pb.WriteResult)
            assert Receipt.decoded(moved.accepted).server == "near-2"
            result = await two.applied(moved.accepted)
            assert isinstance(result, pb.WriteResult)
            assert not result.HasField("error")
        async with JournalRig(tmp_path / "one", writes) as back:
            await back.idle()
        assert len(writes.made) == 6, "both have made them"
        assert writes.registers == made, "and they took effect once"


async def test_receipt_leads_to_the_copy_and_is_not_guessed(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    async with one, two:
        (receipt,) = await one.accept(edge(0, 2))
        waits = await two.applied(receipt)
        assert isinstance(waits, pb.WriteResult)
        assert waits.accepted == receipt, "ask again"
        assert isinstance(receipt, bytes)
        guessed = msgspec.structs.replace(Receipt.decoded(receipt), proof=b"?")
        assert isinstance(await two.applied(guessed.encoded()), NoCopy)


async def test_sign_of_an_acceptor_keeps_its_writes_with_it(tmp_path: Path) -> None:
    one, two = pair(tmp_path, takeover_seconds=0.6)
    async with one, two:
        await one.accept(edge(0, 2))
        link = one.links["near-2"]
        signs = len(link.sent)
        await until(lambda: len(link.sent) >= signs + 12)
        assert two.figures["adopted_total"] == 0
        assert two.figures["held_copies"] == 1


async def test_both_agree_again_after_either_has_missed_something(tmp_path: Path) -> None:
    one, two = pair(tmp_path, retry_seconds=0.01)
    async with one, two:
        one.writes.refuse = lambda write: InvalidArgument("never") if write.assoc_merge.id2 & 0xFF == 4 else None
        await one.accept(*(edge(0, id2) for id2 in (2, 3, 4)))
    # Made while the sibling is away: a parked write is kept there, too.
    alone = JournalRig(tmp_path / "one", one.writes, copies=2, retry_seconds=0.01)
    async with alone:
        alone.links["near-2"].down = True
        await until(lambda: alone.figures["parked"]["normal"] == 1)
        await alone.idle()
        async with JournalRig(tmp_path / "two", name="near-2") as back:
            assert back.figures["held_copies"] == 3
            alone.connect(back)
            alone.links["near-2"].down = False
            await until(lambda: alone.figures["sibling_agrees"])
            assert back.figures["held_copies"] == 1
        # The sibling comes back without its disk.
        async with JournalRig(tmp_path / "new", name="near-2") as empty:
            alone.connect(empty)
            await until(lambda: empty.figures["held_copies"] == 0)
            assert isinstance((await alone.accept(edge(0, 5)))[0], bytes)
            await until(lambda: empty.figures["held_copies"] == 1 and alone.figures["sibling_agrees"])
            await alone.control(discard=next(iter(await parked_numbers(alone))))
            await until(lambda: empty.figures["held_copies"] == 0)


async def parked_numbers(rig: JournalRig) -> list[int]:
    found: list[int] = []
    rig.journal._store.read_parked(0, 10, lambda parked: found.extend(each.entry.number for each in parked or ()))
    await until(lambda: found)
    return found


async def test_write_that_the_acceptors_disk_has_damaged_is_made_by_the_sibling(tmp_path: Path) -> None:
    writes = ScriptedWrites()
    one, two = pair(tmp_path, writes)
    async with two:
        async with one:
            await one.accept(edge(0, 2), edge(0, 3))
        with sqlite3.connect(tmp_path / "one" / "journal.sqlite") as connection:
            connection.execute("UPDATE entries SET body = x'00' WHERE number = (SELECT min(number) FROM entries)")
        connection.close()
        again = JournalRig(tmp_path / "one", writes, copies=2)
        again.connect(two)
        async with again:
            await until(lambda: ends(writes) == {2, 3})
            assert two.figures["adopted_total"] == 1
            assert again.figures["torn_rows"] == 1


async def test_damaged_copy_is_set_aside_and_the_others_are_made(tmp_path: Path) -> None:
    one, two = pair(tmp_path, takeover_seconds=LOST_SECONDS)
    async with one, two:
        await one.accept(edge(0, 2), edge(0, 3))
    with sqlite3.connect(tmp_path / "two" / "journal.sqlite") as connection:
        connection.execute("UPDATE copies SET shard = 'x' WHERE number = (SELECT min(number) FROM copies)")
    connection.close()
    async with JournalRig(tmp_path / "two", name="near-2", takeover_seconds=LOST_SECONDS) as again:
        await until(lambda: ends(again.writes) == {3})
        assert again.figures["torn_rows"] == 1
        assert again.figures["held_copies"] == 0


async def test_number_of_a_write_that_was_copied_and_not_stored_is_not_used_again(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    async with two:
        numbers = set[int]()
        for _ in range(3):  # crashes after the copy: each leaves one behind
            async with one:
                numbers.add(one.journal._store.take_number())
            one = JournalRig(tmp_path / "one", copies=2, normal_tasks=0)
            one.connect(two)
        assert len(numbers) == 3


async def test_writes_are_stored_in_the_order_of_their_numbers_beside_those_of_a_lost_acceptor(tmp_path: Path) -> None:
    one, _ = pair(tmp_path, takeover_seconds=LOST_SECONDS, max_loaded_entries=0)
    other = JournalRig(tmp_path / "two", name="near-2", copies=2, takeover_seconds=LOST_SECONDS, max_loaded_entries=0)
    one.connect(other)
    async with other:
        async with one:
            await one.accept(*(edge(0, id2) for id2 in range(2, 12)))
        async with JournalRig(tmp_path / "new", normal_tasks=0, takeover_seconds=3_600.0) as back:
            other.connect(back)
            for id2 in range(12, 40):
                assert isinstance((await other.accept(edge(0, id2)))[0], bytes)
            await until(lambda: ends(other.writes) == set(range(2, 40)))
            await other.idle()


async def made_after_the_acceptor_is_lost(folder: Path) -> set[int]:
    """Accept edges, lose the acceptor and its disk, and return the ends of the edges that were accepted and not made,
    or made and not accepted."""
    writes = ScriptedWrites()
    one, two = pair(folder, writes, normal_tasks=1, takeover_seconds=LOST_SECONDS)
    async with two:
        async with one:
            await until(lambda: one.figures["sibling_agrees"])
            writes.holds.clear()
            accepted = await one.accept(edge(0, 2))
            await until(lambda: writes.requests)
            # Its copy brings along whatever the acceptor has to say of the one before.
            accepted += await one.accept(edge(0, 3))
            one.links["near-2"].down = True
            accepted += await one.accept(edge(0, 4))
            writes.lose()
            await one.tasks.close()
        writes.holds.set()
        await until(lambda: not two.figures["held_copies"])
        await two.idle()
    return {2 + slot for slot, each in enumerate(accepted) if isinstance(each, bytes)} ^ ends(writes)


async def test_loss_of_an_acceptor_and_its_disk_loses_nothing_accepted(tmp_path: Path) -> None:
    assert await made_after_the_acceptor_is_lost(tmp_path) == set()


async def test_losses_notice_a_refused_write_that_counts_as_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Copies._copy

    async def accept_all(self: Copies, *entries: object) -> None:
        await copy(self, *entries)  # type: ignore[arg-type]

    monkeypatch.setattr(Copies, "_copy", accept_all)
    assert await made_after_the_acceptor_is_lost(tmp_path) == {4}


async def test_losses_notice_a_copy_that_is_deleted_before_its_write_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: Callable[[Applier, Batch | LoadPage], None] = Applier._begin

    def forget_first(self: Applier, found: Batch | LoadPage) -> None:
        if isinstance(found, Batch):
            self._store.on_gone([entry.number for entry in found.entries])
        begin(self, found)

    monkeypatch.setattr(Applier, "_begin", forget_first)
    assert await made_after_the_acceptor_is_lost(tmp_path) == {2}


async def test_unanswered_accepts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.journal.copies.MAX_UNSETTLED", 2)
    one, two = pair(tmp_path)
    async with one, two:
        one.links["near-2"].hold_answers.add("keep_copies")
        waiting = [asyncio.ensure_future(one.accept(edge(0, id2))) for id2 in (2, 3)]
        await until(lambda: one.links["near-2"].held)
        (refused,) = await one.accept(edge(0, 4))
        assert "wait for their copies" in getattr(refused, "message", "")
        one.links["near-2"].let_go()
        assert all(isinstance(each[0], bytes) for each in await asyncio.gather(*waiting))


async def test_accept_is_answered_when_the_sibling_leaves_the_topology_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tao.journal.copies.MAX_BATCH_BYTES", 1)  # each write goes in a message of its own
    one, two = pair(tmp_path)
    async with one, two:
        one.links["near-2"].hold_answers.add("keep_copies")
        waiting = asyncio.ensure_future(one.accept(edge(0, 2), edge(0, 3)))
        await until(lambda: one.links["near-2"].held)
        topology = make_topology(2, servers=("near-1", "near-3"))
        one.context.configuration.use_topology(topology)
        one.journal.copies.others()
        one.links["near-2"].let_go()
        assert all(isinstance(each, bytes) for each in await waiting)
        (refused,) = await one.accept(edge(0, 4))
        assert isinstance(refused, NoCopy)
