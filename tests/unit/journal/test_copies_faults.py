"""Copies of accepted writes among faults: nothing accepted is lost, and nothing that was refused is made unsaid."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import cast

import msgspec

from tao.journal.copies import SIGNS
from tao.journal.copy_rows import Origin
from tao.journal.store import JournalStore
from tao.model.errors import NoCopy, OutcomeUnknown, Overloaded
from tao.model.receipts import Receipt
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.journal_rig import JournalRig, ScriptedWrites, edge, ends
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import until
from tests.unit.journal.test_copies import LOST_SECONDS, pair


async def test_copies_of_all_damaged_rows_are_made(tmp_path: Path) -> None:
    writes = ScriptedWrites()
    one, two = pair(tmp_path, writes)
    ids = range(2, 1_302)
    async with two:
        async with one:
            for first in range(2, 1_302, 100):
                await one.accept(*(edge(0, id2) for id2 in range(first, first + 100)))
        with sqlite3.connect(tmp_path / "one" / "journal.sqlite") as connection:
            connection.execute("UPDATE entries SET shard = 'x'")
        connection.close()
        again = JournalRig(tmp_path / "one", writes, copies=2)
        again.connect(two)
        async with again:
            await until(lambda: again.figures["sibling_agrees"] and two.figures["held_copies"] == 0)
            await two.idle()
            assert ends(writes) == set(ids)


async def test_full_journal_refuses_before_it_has_a_copy_made(tmp_path: Path) -> None:
    one, two = pair(tmp_path, max_bytes=10)
    async with one, two:
        (refused,) = await one.accept(edge(0, 2))
        assert isinstance(refused, Overloaded)
        assert not any(each.keep_copies.copies for each in one.links["near-2"].sent), "it could be made from it"


async def test_write_that_is_copied_and_not_stored_has_an_unknown_outcome(tmp_path: Path) -> None:
    one, two = pair(tmp_path, takeover_seconds=3_600.0)
    async with one, two:
        await until(lambda: one.figures["sibling_agrees"])
        one.links["near-2"].hold_answers.add("keep_copies")
        waiting = asyncio.ensure_future(one.accept(edge(0, 2)))
        await until(lambda: one.links["near-2"].held)
        one.journal._store._connection.close()  # type: ignore[union-attr]  # the disk fails
        one.links["near-2"].let_go()
        one.links["near-2"].down = True
        (refused,) = await waiting
        assert two.figures["held_copies"] == 1, "it is made from the copy if this follower is lost now"
        assert isinstance(refused, OutcomeUnknown)


async def test_write_accepted_while_copies_wait_for_their_adoption_is_made(tmp_path: Path) -> None:
    one, _ = pair(tmp_path, takeover_seconds=3_600.0, max_loaded_entries=0)
    other = JournalRig(tmp_path / "two", name="near-2", copies=2, takeover_seconds=3_600.0, max_loaded_entries=0)
    one.connect(other)
    async with other:
        async with one:
            await one.accept(*(edge(0, id2) for id2 in range(2, 12)))
        async with JournalRig(tmp_path / "new", normal_tasks=0, takeover_seconds=3_600.0) as back:
            other.connect(back)
            link = other.links["near-1"]
            link.hold_answers.add("keep_copies")
            before = asyncio.ensure_future(other.accept(edge(0, 12)))
            await until(lambda: link.held)
            ((origin, copies),) = other.journal.held._held.items()
            copies.silent_ticks = SIGNS + 1
            other.tasks(other.journal.held._take_over(origin, copies))
            await until(lambda: any(callable(item) for item in other.journal.copies._queue))
            after = asyncio.ensure_future(other.accept(edge(0, 13)))
            await until(lambda: any(not callable(item) for item in other.journal.copies._queue))
            other.writes.holds.clear()
            held, link.held = link.held, []
            for each in held:
                each()
            await before
            await until(lambda: sum(len(each.write.writes) for each in other.writes.requests) >= 11)
            link.let_go()
            assert isinstance((await after)[0], bytes)
            other.writes.holds.set()
            await other.idle()
            assert ends(other.writes) == set(range(2, 14))


async def test_copies_that_come_while_they_are_counted_are_counted_once(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    async with one, two:
        held = two.journal.held
        (receipt,) = await one.accept(edge(0, 2))
        counting = asyncio.ensure_future(held.count())
        await asyncio.sleep(0)
        answers: list[pb.Answer] = []
        journal = Receipt.decoded(cast(bytes, receipt)).journal
        message = pb.KeepCopies(journal=journal)
        message.copies.add(number=9_000, priority=2, body=b"body")
        held.keep(pb.Request(keep_copies=message), MemoryReply(answers.append, peer="near-1"))
        await counting
        await until(lambda: answers)
        assert two.figures["held_copies"] == 2
        bytes_before = two.figures["held_copy_bytes"]
        message = pb.KeepCopies(journal=journal, gone=[9_000])
        held.keep(pb.Request(keep_copies=message), MemoryReply(answers.append, peer="near-1"))
        await until(lambda: len(answers) == 2)
        assert two.figures["held_copies"] == 1
        assert 0 < two.figures["held_copy_bytes"] < bytes_before


async def test_repair_of_what_is_repaired_begins_no_comparison(tmp_path: Path) -> None:
    two = JournalRig(tmp_path / "two", name="near-2", copies=2)
    one = JournalRig(tmp_path / "one")
    two.connect(one)
    async with one, two:
        await until(lambda: two.figures["sibling_agrees"])
        await two.journal.held._repair(Origin("near-1", one.journal._store.id), [5])
        assert two.figures["sibling_agrees"]


class FailsAfter:
    """A connection whose next commit with such a statement is reported as failed although it is on disk."""

    def __init__(self, store: JournalStore, statement: str) -> None:
        self._connection = store._connection
        self._statement = statement
        self._is_due = False
        store._connection = cast(sqlite3.Connection, self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def execute(self, statement: str, *arguments: object) -> object:
        found = cast(sqlite3.Connection, self._connection).execute(statement, *arguments)  # type: ignore[arg-type]
        self._is_due = self._is_due or statement.startswith(self._statement)
        if statement == "COMMIT" and self._is_due:
            raise sqlite3.OperationalError("disk I/O error")
        return found


async def test_writes_of_an_adoption_whose_commit_has_failed_are_made(tmp_path: Path) -> None:
    one, two = pair(tmp_path, takeover_seconds=LOST_SECONDS, retry_seconds=0.01)
    async with two:
        async with one:
            receipts = await one.accept(edge(0, 2), edge(0, 3))
            FailsAfter(two.journal._store, "REPLACE INTO adopted")
        await until(lambda: two.figures["failures_total"])
        await until(lambda: ends(two.writes) == {2, 3})
        await two.idle()
        assert len(two.writes.made) == 2
        assert (two.figures["held_copies"], two.figures["held_copy_bytes"]) == (0, 0)
        for receipt in receipts:
            assert isinstance(await two.applied(receipt), pb.WriteResult)


async def test_copies_whose_commit_has_failed_are_counted(tmp_path: Path) -> None:
    one, two = pair(tmp_path, retry_seconds=0.01)
    async with one, two:
        await until(lambda: one.figures["sibling_agrees"])
        FailsAfter(two.journal._store, "INSERT INTO copies")
        (unknown,) = await one.accept(edge(0, 2))
        assert isinstance(unknown, OutcomeUnknown)
        await until(lambda: one.figures["sibling_agrees"])
        assert (two.figures["held_copies"], two.figures["held_copy_bytes"]) == (0, 0)
        assert isinstance((await one.accept(edge(0, 3)))[0], bytes)
        assert two.figures["held_copies"] == 1


async def test_small_copies_do_not_fill_the_file_before_their_bound(tmp_path: Path) -> None:
    bound = 4 << 20
    async with JournalRig(tmp_path, name="near-2", max_bytes=1 << 20, max_copy_bytes=bound) as two:
        answers: list[pb.Answer] = []
        number = 0
        while not (answers and answers[-1].HasField("error")):
            message = pb.KeepCopies(journal="0123456789abcdef")
            for _ in range(1_000):
                number += 1
                message.copies.add(number=number, priority=2, shard=1, body=b"x" * 40, proof=b"12345678")
            came = len(answers)
            two.journal.held.keep(pb.Request(keep_copies=message), MemoryReply(answers.append, peer="near-1"))
            await until(lambda came=came: len(answers) > came)  # type: ignore[misc]
        assert "max_copy_bytes" in answers[-1].error.message
        assert two.figures["failures_total"] == 0
        assert isinstance((await two.accept(edge(0, 2)))[0], bytes), "there is room for what it accepts itself"


async def test_interruptions_do_not_multiply_what_waits(tmp_path: Path) -> None:
    one, _ = pair(tmp_path, takeover_seconds=LOST_SECONDS, retry_seconds=0.01)
    two = JournalRig(
        tmp_path / "two", name="near-2", copies=2, normal_tasks=0, takeover_seconds=LOST_SECONDS, retry_seconds=0.01
    )
    one.connect(two)
    async with one, two:
        await one.accept(edge(0, 2), edge(0, 3))
        await two.accept(edge(0, 4))
        for _ in range(3):
            one.links["near-2"].down = two.links["near-1"].down = True
            await until(lambda: not one.figures["held_copies"] and not two.figures["held_copies"])
            one.links["near-2"].down = two.links["near-1"].down = False
            await until(lambda: one.figures["sibling_agrees"] and two.figures["sibling_agrees"])
            assert one.figures["waiting"]["normal"] == two.figures["waiting"]["normal"] == 3


async def test_accept_is_refused_when_the_followers_own_tier_leaves_the_topology_meanwhile(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    async with one, two:
        link = one.links["near-2"]
        link.hold_answers.add("keep_copies")
        first = asyncio.ensure_future(one.accept(edge(0, 2)))
        await until(lambda: link.held)
        second = asyncio.ensure_future(one.accept(edge(0, 3)))
        await until(lambda: one.journal.copies._queue)
        configuration = one.context.configuration
        topology = configuration.routes.topology
        (region,) = topology.regions
        (tier,) = region.followers
        renamed = msgspec.structs.replace(region, followers=(msgspec.structs.replace(tier, name="other"),))
        configuration.use_topology(msgspec.structs.replace(topology, version=topology.version + 1, regions=(renamed,)))
        link.let_go()
        assert isinstance((await first)[0], bytes)
        assert isinstance((await second)[0], NoCopy)
