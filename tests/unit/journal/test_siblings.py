"""Which follower keeps the copies of accepted writes, and what it knows of a write that its acceptor has lost."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from tao.model.errors import DeadlineExceeded, NoCopy, NoJournal, OutcomeUnknown, TaoError, Unavailable
from tao.model.receipts import Receipt
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.journal_rig import JournalRig, ScriptedWrites, edge, ends
from tests.rigs.pacing import until

SERVERS = ("near-1", "near-2", "near-3")
LOST_SECONDS = 0.06
"""Time after which an acceptor counts as lost, where a test waits for that."""


def trio(
    folder: Path, *, first_bytes: int = 1 << 20, second_bytes: int = 1 << 20, takeover_seconds: float = 60.0
) -> tuple[JournalRig, JournalRig, JournalRig]:
    """Return an acceptor that makes nothing, and the others of its tier, the first along the ring first.
    ``first_bytes``, ``second_bytes``: room for copies there."""
    acceptor = JournalRig(folder / "near-1", copies=2, normal_tasks=0).use_followers(*SERVERS)
    names = [server.name for server in acceptor.journal.copies.others()]
    first, second = (
        JournalRig(folder / name, name=name, max_copy_bytes=room, takeover_seconds=takeover_seconds).use_followers(
            *SERVERS
        )
        for name, room in zip(names, (first_bytes, second_bytes), strict=True)
    )
    acceptor.connect(first)
    acceptor.connect(second)
    return acceptor, first, second


def copies_sent(acceptor: JournalRig, sibling: JournalRig) -> list[pb.Request]:
    """Return the messages with copies that the acceptor has sent to a sibling."""
    return [each for each in acceptor.links[sibling.name].sent if each.keep_copies.copies]


async def test_next_follower_takes_the_copy_when_the_first_has_no_room(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path, first_bytes=10)
    async with acceptor, first, second:
        for number in (2, 3):
            assert isinstance((await acceptor.accept(edge(0, number)))[0], bytes)
        assert (first.figures["held_copies"], second.figures["held_copies"]) == (0, 2)
        assert acceptor.figures["sibling"] == second.name
        assert not acceptor.figures["sibling_trouble"]
        assert len(copies_sent(acceptor, first)) == 1, "it is left alone for a while"


@pytest.mark.parametrize("failure", [OutcomeUnknown("no answer in time"), NoCopy("the connection broke")])
async def test_next_follower_takes_the_copy_when_the_first_does_not_answer(tmp_path: Path, failure: TaoError) -> None:
    acceptor, first, second = trio(tmp_path)
    async with acceptor, first, second:
        await acceptor.accept(edge(0, 2))
        await until(lambda: acceptor.figures["sibling_agrees"])
        acceptor.links[first.name].faults["keep_copies"] = [failure]
        assert isinstance((await acceptor.accept(edge(0, 3)))[0], bytes)
        assert acceptor.figures["sibling"] == second.name
        await until(lambda: acceptor.figures["sibling_agrees"])
        assert second.figures["held_copies"] == 2, "it has a copy of what was held before, too"
        assert acceptor.figures["uncopied_total"] == 0


async def test_follower_that_has_failed_once_is_asked_again_when_all_have_failed(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path, second_bytes=10)
    async with acceptor, first, second:
        await until(lambda: acceptor.figures["sibling_agrees"])
        acceptor.links[first.name].faults["keep_copies"] = [OutcomeUnknown("no answer in time")]
        (refused,) = await acceptor.accept(edge(0, 2))
        assert isinstance(refused, OutcomeUnknown)
        assert isinstance((await acceptor.accept(edge(0, 3)))[0], bytes)
        assert acceptor.figures["sibling"] == first.name
        attempts = len(copies_sent(acceptor, second))
        assert isinstance((await acceptor.accept(edge(0, 4)))[0], bytes)
        assert len(copies_sent(acceptor, second)) == attempts, "the first counts as well since it has taken a copy"


async def test_follower_that_has_failed_once_stays_the_sibling_when_another_one_is_back(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path)
    async with acceptor, first, second:
        await until(lambda: acceptor.figures["sibling_agrees"])
        acceptor.links[second.name].down = True
        acceptor.links[first.name].faults["keep_copies"] = [OutcomeUnknown("no answer in time")]
        assert isinstance((await acceptor.accept(edge(0, 2)))[0], OutcomeUnknown)
        assert isinstance((await acceptor.accept(edge(0, 3)))[0], bytes)
        acceptor.links[second.name].down = False
        assert isinstance((await acceptor.accept(edge(0, 4)))[0], bytes)
        assert acceptor.figures["sibling"] == first.name, "it is well again since it has taken a copy"
        assert not copies_sent(acceptor, second)


async def test_each_follower_is_asked_once_for_a_write_that_none_has_room_for(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path, first_bytes=10, second_bytes=10)
    async with acceptor, first, second:
        (refused,) = await acceptor.accept(edge(0, 2))
        assert isinstance(refused, NoCopy)
        assert [len(copies_sent(acceptor, each)) for each in (first, second)] == [1, 1]
        await until(lambda: acceptor.figures["sibling"] == first.name and acceptor.figures["sibling_agrees"])
        assert acceptor.figures["sibling_trouble"], "that one answers, and has no room either"


async def test_write_is_refused_when_no_follower_has_room(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path, first_bytes=10)
    async with acceptor, first:
        acceptor.links[second.name].down = True
        (refused,) = await acceptor.accept(edge(0, 2))
        assert isinstance(refused, NoCopy)
        assert "max_copy_bytes" in refused.message


async def test_follower_that_hangs_delays_no_message_to_another_one(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path)
    acceptor.links[second.name].hold_requests.add("keep_copies")
    async with acceptor, first, second:
        await until(lambda: acceptor.links[second.name].held)
        (receipt,) = await acceptor.accept(edge(0, 2))
        assert isinstance(receipt, bytes)
        await until(lambda: acceptor.figures["sibling_agrees"])
        assert first.figures["held_copies"] == 1
        acceptor.journal.copies.forget([Receipt.decoded(receipt).number])
        await until(lambda: first.figures["held_copies"] == 0)


async def test_nothing_is_gathered_for_a_follower_that_is_down(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path)
    async with acceptor, first, second:
        copies = acceptor.journal.copies
        await until(lambda: copies._siblings[second.name].agrees)
        acceptor.links[second.name].down = True
        copies.forget([1, 2])
        await until(lambda: not copies._siblings[second.name].agrees)
        copies.forget([3])
        assert not copies._siblings[second.name].gone
        acceptor.links[second.name].down = False
        copies.forget([4])
        await until(lambda: copies._siblings[second.name].agrees)


async def test_receipt_of_an_acceptor_without_its_disk_leads_to_the_copy(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path)
    async with first, second:
        async with acceptor:
            (receipt,) = await acceptor.accept(edge(0, 2))
        shutil.rmtree(tmp_path / "near-1")
        async with JournalRig(tmp_path / "near-1", copies=2).use_followers(*SERVERS) as back:
            back.connect(first)
            back.connect(second)
            waits = await back.applied(receipt)
            assert isinstance(waits, pb.WriteResult)
            assert waits.accepted == receipt, "ask again"


async def test_receipt_of_an_acceptor_without_its_disk_leads_to_the_write_that_the_sibling_has_made(
    tmp_path: Path,
) -> None:
    acceptor, first, second = trio(tmp_path, takeover_seconds=LOST_SECONDS)
    async with first, second:
        async with acceptor:
            (receipt,) = await acceptor.accept(edge(0, 2))
        await until(lambda: ends(first.writes) == {2})
        shutil.rmtree(tmp_path / "near-1")
        async with JournalRig(tmp_path / "near-1", copies=2).use_followers(*SERVERS) as back:
            back.connect(first)
            back.connect(second)
            moved = await back.applied(receipt)
            assert isinstance(moved, pb.WriteResult)
            assert Receipt.decoded(moved.accepted).server == first.name
            made = await first.applied(moved.accepted)
            assert isinstance(made, pb.WriteResult)
            assert not made.HasField("error")


async def test_receipt_of_a_lost_write_of_which_nobody_has_a_copy_has_an_unknown_outcome(tmp_path: Path) -> None:
    acceptor, first, second = trio(tmp_path)
    async with second:
        async with acceptor, first:
            (receipt,) = await acceptor.accept(edge(0, 2))
        shutil.rmtree(tmp_path / "near-1")
        shutil.rmtree(tmp_path / first.name)
        async with (
            JournalRig(tmp_path / "near-1", copies=2).use_followers(*SERVERS) as back,
            JournalRig(tmp_path / first.name, name=first.name) as empty,
        ):
            back.connect(empty)
            back.connect(second)
            assert isinstance(await back.applied(receipt), OutcomeUnknown)
            back.links[second.name].faults["await_applied"] = [NoJournal("it keeps no journal")]
            assert isinstance(await back.applied(receipt), OutcomeUnknown)


@pytest.mark.parametrize("failure", [Unavailable("it is down"), DeadlineExceeded("it has not answered in time")])
async def test_receipt_of_a_lost_write_is_asked_for_again_while_the_holder_of_its_copy_does_not_answer(
    tmp_path: Path, failure: TaoError
) -> None:
    acceptor, first, second = trio(tmp_path)
    async with first, second:
        async with acceptor:
            (receipt,) = await acceptor.accept(edge(0, 2))
        shutil.rmtree(tmp_path / "near-1")
        async with JournalRig(tmp_path / "near-1", copies=2).use_followers(*SERVERS) as back:
            back.connect(first)
            back.connect(second)
            back.links[first.name].faults["await_applied"] = [failure]
            unanswered = await back.applied(receipt)
            assert isinstance(unanswered, Unavailable)
            assert f"{first.name} may have a copy" in unanswered.message
            assert second.name not in unanswered.message
            waits = await back.applied(receipt)
            assert isinstance(waits, pb.WriteResult)
            assert waits.accepted == receipt


async def test_receipt_of_a_torn_row_leads_to_the_write_that_the_sibling_has_made(tmp_path: Path) -> None:
    writes = ScriptedWrites()
    acceptor, first, second = trio(tmp_path)
    async with first, second:
        async with acceptor:
            (receipt,) = await acceptor.accept(edge(0, 2))
        with sqlite3.connect(tmp_path / "near-1" / "journal.sqlite") as connection:
            connection.execute("UPDATE entries SET body = x'00'")
        connection.close()
        async with JournalRig(tmp_path / "near-1", writes, copies=2).use_followers(*SERVERS) as back:
            back.connect(first)
            back.connect(second)
            await until(lambda: first.figures["adopted_total"] == 1)
            moved = await back.applied(receipt)
            assert isinstance(moved, pb.WriteResult)
            assert Receipt.decoded(moved.accepted).server == first.name
