"""A journal: what it accepts, the path of an entry, failures of shards and disks, priorities, receipts."""

from __future__ import annotations

import shutil
import sqlite3
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tao import __version__
from tao.delivery import synced_file
from tao.journal import store
from tao.journal.entries import Entry, decode_body
from tao.journal.store import now_unix_ms
from tao.model.edge_states import State
from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    InvalidArgument,
    ListFull,
    NotCommutative,
    OperationAhead,
    OutcomeUnknown,
    Overloaded,
    TaoError,
    Unavailable,
    UnknownType,
)
from tao.model.receipts import Receipt
from tao.model.topology import CacheServer, DatabaseServer, Region, Tier, Topology
from tao.wire.session import Reply, RequestHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.journal_rig import SUBSCRIBES, JournalRig, ScriptedWrites, edge, ends, id_on
from tests.rigs.pacing import until

FRIEND = 1


async def test_each_item_of_a_batch_is_accepted_or_refused_by_itself(tmp_path: Path) -> None:
    user = id_on(0)
    refused = {
        "friend": pb.Write(assoc_add=pb.AssocAdd(id1=user, atype=FRIEND, id2=2, time=1)),
        "update": pb.Write(obj_update=pb.ObjUpdate(id=user, otype=1)),
        "delete": pb.Write(obj_delete=pb.ObjDelete(id=user)),
        "allocated": pb.Write(obj_add=pb.ObjAdd(shard=1, otype=1)),
        "state": pb.Write(read_state=pb.ReadState(id1=user, atype=SUBSCRIBES, id2=2)),
        "deleted friend": pb.Write(assoc_delete=pb.AssocDelete(id1=user, atype=FRIEND, id2=2)),
    }
    async with JournalRig(tmp_path) as rig:
        found = await rig.accept(edge(0, 2), *refused.values(), pb.Write(obj_add=pb.ObjAdd(id=user, otype=1)))
        assert isinstance(found[0], bytes)
        assert isinstance(found[-1], bytes)
        for name, each in zip(refused, found[1:-1], strict=True):
            assert isinstance(each, NotCommutative), name
        ahead = pb.AssocMerge(id1=user, atype=SUBSCRIBES, id2=2, state_us=9_000_000_000_000_000)
        (too_far,) = await rig.accept(pb.Write(assoc_merge=ahead))
        assert isinstance(too_far, OperationAhead)
        (unknown,) = await rig.accept(pb.Write(assoc_add=pb.AssocAdd(id1=user, atype=999, id2=2, time=1)))
        assert isinstance(unknown, UnknownType)
        with pytest.raises(InvalidArgument, match="priority 7"):
            await rig.accept(edge(0, 2), priority=7)


async def test_states_of_nodes_are_stamped_where_they_are_accepted(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        node = pb.NodeSetState(id=id_on(0), atypes=[SUBSCRIBES], state=State.ARCHIVED)
        (receipt,) = await rig.accept(pb.Write(node_set_state=node))
        assert isinstance(await rig.applied(receipt), pb.WriteResult)
        node.state_us = 999_999_999_000_000
        (receipt,) = await rig.accept(pb.Write(node_set_state=node))
        assert isinstance(await rig.applied(receipt), pb.WriteResult)
        stamped, own = (request.write.writes[0].node_set_state.state_us for request in rig.writes.requests)
        assert 0 < stamped - 1_000_000_000_000_000 < 60_000_000
        assert own == node.state_us, "an operation keeps its own time"
        node.state_us = 9_000_000_000_000_000
        (ahead,) = await rig.accept(pb.Write(node_set_state=node))
        assert isinstance(ahead, OperationAhead)


async def test_jobs_are_accepted_under_reserved_ids_only(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        found = await rig.accept(
            pb.Write(add_job=pb.AddJob(shard=0, kind="walk")),
            pb.Write(add_job=pb.AddJob(id=id_on(0), kind="walk", body=b"x")),
            pb.Write(cancel_job=pb.CancelJob(id=id_on(0))),
        )
        assert isinstance(found[0], NotCommutative)
        assert isinstance(found[1], bytes)
        assert isinstance(found[2], NotCommutative)
        await rig.idle()
        assert [each.write.writes[0].add_job.id for each in rig.writes.requests] == [id_on(0)]


async def test_hundredth_attempt_takes_the_path_of_the_first(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        left = 99

        def fail_99_times(_: pb.Write) -> TaoError | None:
            nonlocal left
            left -= 1
            return Unavailable("not now") if left >= 0 else None

        rig.writes.refuse = fail_99_times
        (receipt,) = await rig.accept(edge(0, 2))
        assert isinstance(await rig.applied(receipt), pb.WriteResult)
        first, *_, hundredth = rig.writes.requests
        assert len(rig.writes.requests) == 100
        assert hundredth == first
        assert rig.figures["errors_total"]["normal"] == 99


async def test_write_is_parked_after_a_hundred_attempts_and_made_when_it_is_put_back(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        rig.writes.refuse = lambda _: OutcomeUnknown("the answer was lost")
        (receipt,) = await rig.accept(edge(0, 2))
        assert isinstance(await rig.applied(receipt), OutcomeUnknown)
        assert len(rig.writes.requests) == 100
        await until(lambda: rig.figures["parked"]["normal"] == 1)
        rig.writes.refuse = lambda _: None
        answer = await rig.control(inject=1)
        assert msgspec.json.decode(answer.journal.json)["write"]["attempts"] == 100
        moved = await rig.applied(receipt)
        assert isinstance(moved, pb.WriteResult)
        assert moved.accepted, "the receipt names the new entry"
        assert not (await rig.applied(moved.accepted)).HasField("error")  # type: ignore[union-attr]
        assert rig.figures["parked"]["normal"] == 0


async def test_rejected_operation_is_parked_and_not_repeated(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        rig.writes.refuse = lambda write: ListFull("full") if write.assoc_merge.id2 == 2 else None
        bad, good = await rig.accept(edge(0, 2), edge(0, 3))
        assert isinstance(await rig.applied(bad), ListFull)
        assert isinstance(await rig.applied(good), pb.WriteResult)
        await rig.idle()
        assert len(rig.writes.requests) == 1
        assert rig.figures["parked"]["normal"] == 1
    async with JournalRig(tmp_path, rig.writes).use_followers("near-1") as again:
        assert again.figures["parked"]["normal"] == 1
        assert isinstance(await again.applied(bad), ListFull), "a restart knows it too"
        assert len(rig.writes.requests) == 1
        for number in (2, 77):
            answer = await again.control(discard=number)
            assert answer.error.reason == "INVALID_ARGUMENT", "only what is parked is discarded"
        assert not (await again.control(discard=1)).HasField("error")
        assert again.figures["parked"]["normal"] == 0
        assert isinstance(await again.applied(bad), OutcomeUnknown), "it is not reported as made"


async def test_unavailable_shard_delays_only_its_own_entries(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, first_delay_seconds=3_600.0, max_delay_seconds=3_600.0, normal_tasks=1) as rig:
        rig.writes.refuse = lambda write: Unavailable("gone") if write.assoc_merge.id1 == id_on(1) else None
        await rig.accept(edge(1, 2))
        await until(lambda: rig.figures["paused_shards"] == 1)
        receipts = await rig.accept(edge(1, 3), edge(2, 3), edge(3, 3))
        for receipt in receipts[1:]:
            assert isinstance(await rig.applied(receipt), pb.WriteResult)
        assert rig.figures["waiting"]["normal"] == 2


async def test_numbers_are_not_used_again(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        (first,) = await rig.accept(edge(0, 2))
        await rig.idle()
    async with JournalRig(tmp_path) as again:
        (second,) = await again.accept(edge(0, 3))
        assert isinstance(first, bytes)
        assert isinstance(second, bytes)
        assert Receipt.decoded(second).number > Receipt.decoded(first).number, "a receipt names one write for ever"


async def test_entries_are_due_at_once_when_their_database_answers_again(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, first_delay_seconds=3_600.0, max_delay_seconds=3_600.0, probe_seconds=0.001) as rig:
        rig.writes.refuse = lambda _: DatabaseDown("away")
        await rig.accept(*(edge(shard, 2) for shard in range(4) for _ in range(3)))
        await until(lambda: rig.figures["paused_shards"] == 4)
        tried = len(rig.writes.requests)
        await until(lambda: len(rig.writes.requests) > tried + 120)
        assert rig.figures["parked"]["normal"] == 0, "probes are no attempts"
        rig.writes.refuse = lambda _: None
        await rig.idle()
        assert len(rig.writes.made) == 12


async def test_low_priority_waits_for_high_and_is_not_starved(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, high_tasks=2, low_tasks=1, batch_writes=1) as rig:
        rig.writes.holds.clear()
        for shard in range(4):
            await rig.accept(*(edge(shard, 2, number=10) for _ in range(20)), priority=1)
            await rig.accept(edge(shard, 2, number=30), edge(shard, 3, number=30), priority=3)
        await until(lambda: len(rig.writes.requests) == 3)
        rig.writes.holds.set()
        await rig.idle()
        numbers = [made & 0xFF for made in rig.writes.made]
        assert len(numbers) == 88
        assert numbers.index(30) < 10, "low priority has a task of its own"
        assert numbers[-1] == 10 or numbers.count(10) == 80


async def test_full_journal_rejects_and_drops_nothing(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, max_bytes=1_000, normal_tasks=0) as rig:
        found: list[bytes | TaoError] = []
        while not found or isinstance(found[-1], bytes):
            found += await rig.accept(edge(0, len(found) + 2))
        assert isinstance(found[-1], Overloaded)
        assert rig.figures["waiting"]["normal"] == len(found) - 1 > 3
    async with JournalRig(tmp_path, max_bytes=1_000) as again:
        await again.idle()
        assert len(again.writes.made) == len(found) - 1
        assert isinstance((await again.accept(edge(0, 2)))[0], bytes), "there is room again"


async def test_replaying_yesterdays_journal_changes_nothing(tmp_path: Path) -> None:
    today, yesterday = tmp_path / "today", tmp_path / "yesterday"
    async with JournalRig(today, normal_tasks=0) as rig:
        for time in range(1, 6):
            await rig.accept(edge(0, 2, time), edge(1, 2, time))
            await rig.accept(pb.Write(assoc_delete=pb.AssocDelete(id1=id_on(0), atype=SUBSCRIBES, id2=2)))
    shutil.copytree(today, yesterday)
    async with JournalRig(today) as rig:
        await rig.idle()
        rig.set_clock(2_000_000_000_000_000)
        await rig.accept(edge(0, 2, 77))
        await rig.idle()
    before = dict(rig.writes.registers)
    assert before[id_on(0), SUBSCRIBES, 2].time == 77
    async with JournalRig(yesterday, rig.writes) as again:
        await again.idle()
    assert rig.writes.registers == before
    assert len(rig.writes.made) == 31


async def test_clock_of_a_fast_acceptor_does_not_let_an_older_write_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = ScriptedWrites()
    async with JournalRig(tmp_path / "fast", writes) as fast, JournalRig(tmp_path / "right", writes) as right:
        monkeypatch.setattr(type(fast.context.clock), "unix_ms", lambda _: 9_000_000_000_000)
        (older,) = await fast.accept(edge(0, 2, time=1))
        monkeypatch.undo()
        right.set_clock(1_000_000_000_000_000 + 5_000_000)
        delete = pb.Write(assoc_delete=pb.AssocDelete(id1=id_on(0), atype=SUBSCRIBES, id2=2))
        (newer,) = await right.accept(delete)
        assert isinstance(await right.applied(newer), pb.WriteResult)
        assert isinstance(await fast.applied(older), pb.WriteResult)
    assert writes.registers[id_on(0), SUBSCRIBES, 2].own_state == State.REMOVED


async def test_writes_are_refused_while_the_leaders_clock_is_not_known(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, clock_age_seconds=0.0) as rig:
        (refused,) = await rig.accept(edge(0, 2))
        assert isinstance(refused, Unavailable)
        (accepted,) = await rig.accept(pb.Write(obj_add=pb.ObjAdd(id=id_on(0), otype=1)))
        assert isinstance(accepted, bytes), "an object needs no time"


async def test_torn_rows_are_set_aside_and_counted(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        await rig.accept(*(edge(0, id2) for id2 in (2, 3, 4)))
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("UPDATE entries SET body = x'00' || substr(body, 2) WHERE number = 2")
    connection.close()
    async with JournalRig(tmp_path) as again:
        await again.idle()
        assert {id2 for _, _, id2 in again.writes.registers} == {2, 4}
        assert again.figures["torn_rows"] == 1
    async with JournalRig(tmp_path) as last:
        assert last.figures["torn_rows"] == 1, "the row is kept"


async def test_unreadable_file_is_set_aside_and_a_new_one_is_begun(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        (receipt,) = await rig.accept(edge(0, 2))
    file = tmp_path / "journal.sqlite"
    file.write_bytes(b"garbage" * 1_000)
    async with JournalRig(tmp_path).use_followers("near-1") as again:
        assert again.figures["set_aside_total"] == 1
        assert isinstance((await again.accept(edge(0, 2)))[0], bytes)
        assert isinstance(await again.applied(receipt), OutcomeUnknown)
    assert [each.name for each in tmp_path.iterdir() if "unreadable" in each.name]  # noqa: ASYNC240 - of the test


async def test_accepted_writes_of_an_earlier_format_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        (receipt,) = await rig.accept(edge(0, 2))
    later = "ALTER TABLE entries ADD COLUMN reason TEXT NOT NULL DEFAULT 'none';"
    monkeypatch.setattr(store, "_FORMATS", (*store._FORMATS, later))
    async with JournalRig(tmp_path) as upgraded:
        assert isinstance(await upgraded.applied(receipt), pb.WriteResult)
        (second,) = await upgraded.accept(edge(0, 3))
        assert isinstance(await upgraded.applied(second), pb.WriteResult)
        assert ends(upgraded.writes) == {2, 3}
        assert upgraded.figures["set_aside_total"] == 0
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        connection.execute("SELECT reason FROM entries")
    connection.close()


async def test_change_to_the_next_format_that_is_interrupted_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        (receipt,) = await rig.accept(edge(0, 2))
    formats = store._FORMATS
    interrupted = "ALTER TABLE entries RENAME TO renamed; SELECT * FROM no_table;"
    monkeypatch.setattr(store, "_FORMATS", (*formats, interrupted))
    async with JournalRig(tmp_path) as rig:
        assert "no_table" in rig.figures["trouble"]
    monkeypatch.setattr(store, "_FORMATS", formats)
    async with JournalRig(tmp_path) as rig:
        assert not rig.figures["trouble"]
        assert isinstance(await rig.applied(receipt), pb.WriteResult)


async def test_file_of_a_later_format_is_left_for_the_version_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = "CREATE TABLE notes (note TEXT NOT NULL);"
    formats = store._FORMATS
    monkeypatch.setattr(store, "_FORMATS", (*formats, later))
    monkeypatch.setattr(synced_file, "_WRITTEN_BY", synced_file._WRITTEN_BY.replace(__version__, "7.1.0"))
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        (receipt,) = await rig.accept(edge(0, 2))
    monkeypatch.setattr(store, "_FORMATS", formats)
    async with JournalRig(tmp_path).use_followers("near-1") as earlier:
        assert "start version 7.1.0" in earlier.figures["trouble"]
        assert isinstance((await earlier.accept(edge(0, 3)))[0], Overloaded)
        with pytest.raises(Unavailable, match=r"7\.1\.0"):
            await earlier.applied(receipt)
        assert earlier.figures["set_aside_total"] == 0
    assert not [each.name for each in tmp_path.iterdir() if "unreadable" in each.name]  # noqa: ASYNC240 - of the test
    monkeypatch.setattr(store, "_FORMATS", (*formats, later))
    async with JournalRig(tmp_path) as rig:
        assert isinstance(await rig.applied(receipt), pb.WriteResult), "nothing accepted is lost"


async def test_receipts_cannot_be_guessed(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        first, second = await rig.accept(edge(0, 2), edge(0, 3))
        assert isinstance(first, bytes)
        for guessed in (first[:-1] + bytes([first[-1] ^ 1]), b"nonsense", b""):
            with pytest.raises(InvalidArgument):
                await rig.applied(guessed)
        assert isinstance(await rig.applied(second), pb.WriteResult)


async def test_results_that_are_no_longer_kept_are_reported_as_forgotten(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, kept_results=1) as rig:
        first, second = await rig.accept(edge(0, 2), edge(0, 3))
        await rig.idle()
        forgotten, kept = await rig.applied(first), await rig.applied(second)
        assert forgotten.forgotten  # type: ignore[union-attr]
        assert not kept.forgotten  # type: ignore[union-attr]


async def test_receipts_of_moved_writes_and_torn_rows_are_forgotten_at_the_horizon(tmp_path: Path) -> None:
    async with JournalRig(tmp_path) as rig:
        rig.writes.refuse = lambda _: InvalidArgument("never")
        (receipt,) = await rig.accept(edge(0, 2))
        await rig.applied(receipt)
        await rig.control(discard=1)
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("INSERT INTO torn_rows VALUES (7, 1, 1, 'x', 1, x'00', ?)", (now_unix_ms(),))
    connection.close()
    for days, is_kept in ((-1, True), (1, False)):
        async with JournalRig(tmp_path).use_followers("near-1") as rig:
            assert rig.figures["torn_rows"] == 1
            rig.journal._store.purge(now_unix_ms() + days * 86_400_000)
            found = await rig.applied(receipt)
            assert isinstance(found, OutcomeUnknown) == is_kept
            assert rig.figures["torn_rows"] == is_kept


async def test_caller_whose_time_is_up_learns_why_the_write_still_waits(tmp_path: Path) -> None:
    long = 3_600.0
    async with JournalRig(tmp_path, first_delay_seconds=long, max_delay_seconds=long) as rig:
        rig.writes.refuse = lambda _: DatabaseDown("db-0 does not answer")
        (receipt,) = await rig.accept(edge(0, 2))
        await until(lambda: rig.figures["paused_shards"])
        found = await rig.applied(receipt, deadline_ms=100)
        assert isinstance(found, DeadlineExceeded)
        assert "attempted 1 times" in found.message
        assert "DATABASE_DOWN: db-0 does not answer" in found.message
        assert "pauses for" in found.message


async def test_write_to_a_shard_whose_master_is_in_another_region_has_the_time_of_a_leader_there(
    tmp_path: Path,
) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        rig.context.configuration.use_topology(with_master_in_west(rig.context.configuration.routes.topology))
        (refused,) = await rig.accept(edge(0, 2))
        assert isinstance(refused, Unavailable)
        assert "west-leader" in refused.message
        asked: list[str] = []

        def answer(request: pb.Request, reply: Reply) -> None:
            asked.append(request.get_clock.leader)
            clock = pb.ServerClock(unix_us=2_000_000_000_000_000, leader=request.get_clock.leader)
            reply.send(pb.Answer(clock=clock))

        rig.links["leader-1"].handler = cast(RequestHandler, SimpleNamespace(handle=answer))
        await rig.journal.clocks.measure()
        assert sorted(asked) == ["", "west-leader"]
        (receipt,) = await rig.accept(edge(0, 2))
        assert isinstance(receipt, bytes)
        found: list[Entry] = []
        rig.journal._store.read_waiting(0, 1, lambda entries: found.extend(entries or ()))
        await until(lambda: found)
        merge = pb.Write.FromString(decode_body(found[0].body).write).assoc_merge
        assert merge.state_us >= 2_000_000_000_000_000


async def test_writes_are_accepted_at_once_after_masters_have_moved_to_another_region(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        in_west = with_master_in_west(rig.context.configuration.routes.topology)
        databases = tuple(msgspec.structs.replace(each, master_region="east") for each in in_west.databases)
        rig.context.configuration.use_topology(msgspec.structs.replace(in_west, databases=databases))

        def answer(request: pb.Request, reply: Reply) -> None:
            clock = pb.ServerClock(unix_us=2_000_000_000_000_000, leader=request.get_clock.leader)
            reply.send(pb.Answer(clock=clock))

        rig.links["leader-1"].handler = cast(RequestHandler, SimpleNamespace(handle=answer))
        await rig.journal.clocks.measure()
        promoted = msgspec.structs.replace(in_west, version=in_west.version + 1)
        rig.context.configuration.use_topology(promoted)
        assert isinstance((await rig.accept(edge(0, 2)))[0], bytes)


@pytest.mark.parametrize("measured_before", [False, True])
async def test_clock_of_a_leader_that_comes_back_is_measured_at_once(tmp_path: Path, measured_before: bool) -> None:
    async with JournalRig(tmp_path, normal_tasks=0, clock_seconds=3_600.0) as rig:
        configuration = rig.context.configuration
        in_west = with_master_in_west(configuration.routes.topology)

        def answer(request: pb.Request, reply: Reply) -> None:
            clock = pb.ServerClock(unix_us=2_000_000_000_000_000, leader=request.get_clock.leader)
            reply.send(pb.Answer(clock=clock))

        for leader in ("leader-1", "leader-2"):
            rig.links[leader].handler = cast(RequestHandler, SimpleNamespace(handle=answer))
        configuration.use_topology(with_another_leader(in_west, down=True))
        rig.tasks(rig.journal.clocks.keep())
        ages = rig.journal.clocks.ages
        await until(lambda: "west-leader" in ages())
        assert "west-other" not in ages()
        if measured_before:
            too_long_ago = rig.context.clock.monotonic() - rig.settings.clock_age_seconds - 1.0
            rig.journal.clocks.note("west-other", too_long_ago, 1_000_000_000_000_000)
        waiters = cast(Any, rig.journal.clocks._lacking)._waiters
        await until(lambda: waiters)  # the round is over, and the next one is an hour away
        configuration.use_topology(with_another_leader(in_west, down=False))
        await until(lambda: ages().get("west-other", inf) < rig.settings.clock_age_seconds)


async def test_clock_of_a_leader_of_an_earlier_version_is_not_taken_for_that_of_another_region(tmp_path: Path) -> None:
    async with JournalRig(tmp_path, normal_tasks=0) as rig:
        rig.context.configuration.use_topology(with_master_in_west(rig.context.configuration.routes.topology))
        answer = pb.Answer(clock=pb.ServerClock(unix_us=2_000_000_000_000_000))
        handler = SimpleNamespace(handle=lambda _, reply: reply.send(answer))
        rig.links["leader-1"].handler = cast(RequestHandler, handler)
        await rig.journal.clocks.measure()
        (refused,) = await rig.accept(edge(0, 2))
        assert isinstance(refused, Unavailable)


def with_another_leader(in_west: Topology, *, down: bool) -> Topology:
    """Return the next version of the topology of `with_master_in_west`, with a second leader there."""
    east, west = in_west.regions
    other = CacheServer(name="west-other", grpc="west-other:7000", down=down)
    leaders = msgspec.structs.replace(west.leaders, servers=(*west.leaders.servers, other))
    regions = east, msgspec.structs.replace(west, leaders=leaders)
    return msgspec.structs.replace(in_west, version=in_west.version + 1 + (not down), regions=regions)


def with_master_in_west(topology: Topology) -> Topology:
    """Return the topology with a second region, which has all masters and a leader."""
    leader = CacheServer(name="west-leader", grpc="west-leader:7000")
    west = Region(
        name="west", leaders=Tier(name="leaders", servers=(leader,)), followers=topology.regions[0].followers[:0]
    )
    databases = tuple(
        msgspec.structs.replace(each, master_region="west", servers={**each.servers, "west": DatabaseServer(name="w")})
        for each in topology.databases
    )
    version = topology.version + 1
    return msgspec.structs.replace(topology, version=version, regions=(*topology.regions, west), databases=databases)
