"""A journal among faults: disks, folders and operators that are not as they should be. Nothing accepted is lost, or
reported as made."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tao.journal.entries import Entry, EntryBody, Priority, encode_body
from tao.journal.store import JournalStore
from tao.model.errors import (
    DatabaseDown,
    InvalidArgument,
    OperationAhead,
    OutcomeUnknown,
    Overloaded,
    Unavailable,
)
from tao.wire.session import RequestHandler
from tao.wire.settings import MAX_MESSAGE_BYTES
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.journal_rig import JournalRig, coordinator_of, edge, ends, id_on
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import PATIENT_SECONDS, until


async def test_journal_that_opens_late_makes_what_it_held_and_gives_no_number_twice(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        before, _ = await rig.accept(edge(0, 2), edge(0, 3))
    file = tmp_path / "journal.sqlite"
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    late = JournalRig(tmp_path, retry_seconds=0.01)
    async with asyncio.timeout(PATIENT_SECONDS), late:
        assert late.figures["trouble"]
        (refused,) = await late.accept(edge(0, 4))
        assert isinstance(refused, Overloaded)
        with pytest.raises(Unavailable, match=re.escape(late.figures["trouble"])):
            await late.applied(before)  # it is not lost
        holder.rollback()
        holder.close()
        await until(lambda: ends(late.writes) == {2, 3})
        (receipt,) = await late.accept(edge(0, 4))
        await late.applied(receipt)
        assert ends(late.writes) == {2, 3, 4}
        assert late.figures["set_aside_total"] == 0


async def test_second_follower_with_the_same_folder_accepts_nothing_until_the_first_has_ended(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as first:
        await first.accept(edge(0, 2))
        async with JournalRig(tmp_path, retry_seconds=0.01) as second:
            assert "another process uses" in second.figures["trouble"]
            (refused,) = await second.accept(edge(0, 3))
            assert isinstance(refused, Overloaded)
            assert isinstance((await first.accept(edge(0, 4)))[0], bytes)
            await first.journal.close()
            await until(lambda: ends(second.writes) == {2, 4})
            assert second.figures["set_aside_total"] == 0


async def test_row_whose_lane_is_damaged_does_not_keep_the_others_from_being_made(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        receipts = await rig.accept(*(edge(0, id2) for id2 in (2, 3, 4, 5)))
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("UPDATE entries SET priority = 66 WHERE number = 1")
        connection.execute("UPDATE entries SET shard = 1 << 40 WHERE number = 2")
        connection.execute("UPDATE entries SET accepted_ms = 'x' WHERE number = 3")
    connection.close()
    async with JournalRig(tmp_path).use_followers("near-1") as again:
        await again.idle()
        assert ends(again.writes) == {5}
        assert again.figures["torn_rows"] == 3
        for receipt in receipts[:3]:
            assert isinstance(await again.applied(receipt), OutcomeUnknown), "it is not reported as made"


async def test_write_ahead_of_a_new_leaders_clock_is_repeated_and_not_parked(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        left = 5

        def behind(_: pb.Write) -> OperationAhead | None:
            nonlocal left
            left -= 1
            return OperationAhead("more than 60 s ahead") if left >= 0 else None

        rig.writes.refuse = behind
        (receipt,) = await rig.accept(edge(0, 2))
        assert isinstance(await rig.applied(receipt), pb.WriteResult)
        assert rig.figures["parked"]["normal"] == 0


async def test_journal_is_moved_by_one_operator_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        await rig.accept(edge(0, 2), edge(0, 3))
        goes_on = asyncio.Event()

        async def accept_all(_: object, entries: list[object]) -> tuple[list[tuple[object, bytes]], list[str]]:
            await goes_on.wait()
            return [(entry, b"receipt") for entry in entries], []

        control = rig.journal.control
        monkeypatch.setattr(control, "_target", lambda name: type("Target", (), {"name": name}))
        monkeypatch.setattr(control, "_hand_over", accept_all)
        answers: list[pb.Answer] = []
        request = pb.Request(change_journal=pb.ChangeJournal(move_to="near-2"))
        control.change(request, MemoryReply(answers.append, peer="operator"))
        for change in ({"move_to": "near-2"}, {"inject": 1}, {"discard": 1}):
            with pytest.raises(Overloaded, match="another operator"):
                await rig.control(**change)
        goes_on.set()
        await until(lambda: answers)
        assert msgspec.json.decode(answers[0].journal.json)["moved"] == 2
        await rig.control(move_to="near-2")
        assert rig.figures["bytes"] == 0


async def test_write_that_another_journal_refuses_does_not_keep_the_others_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tao.journal.control._MOVED_AT_A_TIME", 1)
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        await rig.accept(edge(0, 2), edge(0, 3), edge(0, 4))

        async def refuse_first(_: object, entries: list[object]) -> tuple[list[tuple[object, bytes]], list[str]]:
            kept = [(entry, b"receipt") for entry in entries if entry.number != 1]  # type: ignore[attr-defined]
            return kept, [] if kept else ["OVERLOADED: full"]

        control = rig.journal.control
        monkeypatch.setattr(control, "_target", lambda name: type("Target", (), {"name": name}))
        monkeypatch.setattr(control, "_hand_over", refuse_first)
        report = msgspec.json.decode((await rig.control(move_to="near-2")).journal.json)
        assert report["moved"] == 2
        assert "refused 1 writes" in report["trouble"]
        assert "OVERLOADED: full" in report["trouble"]
        await until(lambda: rig.figures["waiting"]["normal"] == 1)


async def test_entry_that_cannot_be_read_stays_while_the_others_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        JournalRig(tmp_path / "from", normal_tasks=0) as rig,
        JournalRig(tmp_path / "to", normal_tasks=0) as other,
    ):
        await rig.accept(edge(0, 2), edge(0, 3), edge(0, 4))
        target = rig.links["near-2"]
        target.handler = cast(RequestHandler, SimpleNamespace(handle=other.journal.acceptor.accept))
        read_waiting = rig.journal.control._store.read_waiting

        def with_poison(after: int, limit: int, done: Callable[[Sequence[Entry] | None], None]) -> None:
            def poisoned(found: Sequence[Entry] | None) -> None:
                done(found and [msgspec.structs.replace(found[0], body=b"poison"), *found[1:]])

            read_waiting(after, limit, poisoned)

        monkeypatch.setattr(rig.journal.control._store, "read_waiting", with_poison)
        report = msgspec.json.decode((await rig.control(move_to="near-2")).journal.json)
        assert report["moved"] == 2
        assert "refused 1 writes" in report["trouble"]
        assert other.figures["waiting"]["normal"] == 2


async def test_number_that_no_entry_can_have_does_not_end_the_journal(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        answer = await rig.control(discard=2**64 - 1)
        assert answer.error.reason == InvalidArgument.reason
        (receipt,) = await rig.accept(edge(0, 2))
        assert isinstance(await rig.applied(receipt), pb.WriteResult)


async def test_answer_that_fails_does_not_keep_the_others_of_its_commit_from_being_made(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:

        def fail(_: object) -> None:
            raise RuntimeError("a bug of who asked")

        rig.journal._store.read_waiting(0, 1, fail)
        (receipt,) = await rig.accept(edge(0, 2))
        assert isinstance(await rig.applied(receipt), pb.WriteResult)


async def test_each_new_folder_of_a_journal_is_synced_into_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    async with JournalRig(tmp_path / "new" / "journal"):
        assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "journal")} <= synced


async def test_writes_of_many_shards_are_not_all_in_memory_while_their_database_is_away(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        for shard in range(4):
            await rig.accept(*(edge(shard, id2) for id2 in range(2, 62)))
    long = 3_600.0
    async with JournalRig(
        tmp_path, max_loaded_entries=50, normal_tasks=1, first_delay_seconds=long, max_delay_seconds=long
    ) as again:
        most = 0

        def refuse(_: pb.Write) -> Overloaded:
            nonlocal most
            most = max(most, again.journal._applier._schedule.loaded)
            return Overloaded("away")

        again.writes.refuse = refuse
        await until(lambda: again.figures["paused_shards"] == 4)
        assert most <= 110
        assert again.journal._applier._schedule.loaded <= 110
        assert again.figures["waiting"]["normal"] == 240
    async with JournalRig(tmp_path, max_loaded_entries=50, probe_seconds=0.001) as last:
        last.writes.refuse = lambda write: Overloaded("once") if len(last.writes.requests) < 9 else None
        await last.idle()
        assert len(last.writes.registers) == 240


async def test_database_that_is_away_parks_no_write_while_another_one_answers(tmp_path: Path) -> None:
    away = 1  # the shards 1 and 3, whichever end of an edge is in them
    pairs = [(shard, other) for shard in range(4) for other in range(4) if shard != other]
    kept = [edge(shard, 2, other=other) for shard, other in pairs]
    left = sum(coordinator_of(each) % 2 == away for each in kept)
    assert 0 < left < len(kept)
    async with JournalRig(
        tmp_path, databases=2, first_delay_seconds=3_600.0, max_delay_seconds=3_600.0, max_attempts=3
    ) as rig:
        rig.writes.refuse = lambda write: DatabaseDown("away") if coordinator_of(write) % 2 == away else None
        await rig.accept(*kept)
        # One after the other: each shows that the other database answers, which is no reason to try the first one.
        for number in range(2, 12):
            (receipt,) = await rig.accept(edge(1, 3, other=0, number=number))
            assert isinstance(await rig.applied(receipt), pb.WriteResult)
        assert rig.figures["waiting"]["normal"] == left
        assert rig.figures["parked"]["normal"] == 0
        assert rig.figures["errors_total"]["normal"] == left, "each was tried once"


class FailsAfterCommit:
    """A connection whose next commit is reported as failed although it is on disk."""

    def __init__(self, store: JournalStore) -> None:
        self._connection = store._connection
        store._connection = cast(sqlite3.Connection, self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def execute(self, statement: str, *arguments: object) -> object:
        found = cast(sqlite3.Connection, self._connection).execute(statement, *arguments)  # type: ignore[arg-type]
        if statement == "COMMIT":
            raise sqlite3.OperationalError("disk I/O error")
        return found


async def test_write_of_a_failed_commit_strands_no_other_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tao.journal.store._PAGE_ENTRIES", 2)
    async with JournalRig(tmp_path, max_loaded_entries=0, retry_seconds=0.01) as rig:
        rig.writes.holds.clear()
        await rig.accept(edge(0, 2))
        await until(lambda: rig.writes.requests)
        FailsAfterCommit(rig.journal._store)
        (unknown,) = await rig.accept(edge(0, 9))
        assert isinstance(unknown, OutcomeUnknown)
        for id2 in (3, 4):
            while not isinstance((await rig.accept(edge(0, id2)))[0], bytes):
                pass  # until the file is open again
        rig.writes.holds.set()
        await rig.idle()
        assert ends(rig.writes) == {2, 3, 4}


async def test_large_writes_are_handed_over_in_several_messages(tmp_path: Path) -> None:
    data = msgspec.msgpack.encode({1: "x" * 300_000})
    writes = [pb.Write(obj_add=pb.ObjAdd(id=id_on(0, number), otype=1, data=data)) for number in range(1, 61)]
    async with (
        JournalRig(tmp_path / "from", normal_tasks=0) as rig,
        JournalRig(tmp_path / "to", normal_tasks=0) as other,
    ):
        for write in writes:
            assert isinstance((await rig.accept(write))[0], bytes)
        target = rig.links["near-2"]
        target.handler = cast(RequestHandler, SimpleNamespace(handle=other.journal.acceptor.accept))
        report = msgspec.json.decode((await rig.control(move_to="near-2")).journal.json)
        assert (report["moved"], report["trouble"]) == (60, "")
        assert other.figures["waiting"]["normal"] == 60
        assert max(each.ByteSize() for each in target.sent) < MAX_MESSAGE_BYTES // 2


async def test_journal_is_not_moved_while_an_operator_puts_a_write_back(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        rig.writes.refuse = lambda _: InvalidArgument("never")
        (receipt,) = await rig.accept(edge(0, 2))
        await rig.applied(receipt)
        answers: list[pb.Answer] = []
        for change in (pb.ChangeJournal(inject=1), pb.ChangeJournal(discard=2)):
            answers.clear()
            rig.journal.control.change(pb.Request(change_journal=change), MemoryReply(answers.append, peer="operator"))
            with pytest.raises(Overloaded, match="another operator"):
                await rig.control(move_to="near-2")
            await until(lambda: answers)


async def test_journal_that_is_stopped_begins_nothing_when_a_move_ends(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        await rig.accept(edge(0, 2))
    async with JournalRig(tmp_path) as rig:
        rig.journal.stop()
        rig.journal.control.restart_applier()
        counted: list[object] = []
        rig.journal._store.count_waiting(counted.append)
        await until(lambda: counted)
        assert rig.journal._applier._holds


async def test_write_that_cannot_be_decoded_is_parked_alone_and_shown(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        rig.writes.holds.clear()
        await rig.accept(edge(0, 2))
        await until(lambda: rig.writes.requests)
        store, applier = rig.journal._store, rig.journal._applier
        bodies = (b"\xc1", encode_body(EntryBody(b"\xff", None)))
        broken = [Entry(store.take_number(), Priority.NORMAL, 0, 1, body) for body in bodies]
        store.append(broken, lambda _: applier.add(broken))
        await rig.accept(edge(0, 3))
        rig.writes.holds.set()
        await rig.idle()
        assert ends(rig.writes) == {2, 3}
        answers: list[pb.Answer] = []
        request = pb.Request(inspect_journal=pb.InspectJournal(parked_limit=10))
        rig.journal.control.inspect(request, MemoryReply(answers.append, peer="operator"))
        await until(lambda: answers)
        assert [each["number"] for each in msgspec.json.decode(answers[0].journal.json)["writes"]] == [2, 3]
