"""A leader's jobs: whom it gives them to, what it looks after, and the pages of rows that it reads for workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest

from tao.leader.jobs import JobPath, JobSettings, fold_job_id, purge_job_id
from tao.model.counters import (
    FOLDED_SLOT,
    LIFE_HORIZON_SECONDS,
    LIFE_MARGIN_SECONDS,
    SlotTotals,
    decode_totals,
    slot_of_life,
)
from tao.model.edge_states import State
from tao.model.errors import DeadlineExceeded, InvalidArgument, OutcomeUnknown, Unavailable
from tao.model.graph import EdgeKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobCount, JobPriority, JobQuery, JobRow, JobState, NewJob, PausedKind
from tao.model.writes import AddJob, AssocMerge, CancelJob, FlushCounter, ReportJob
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FRIEND, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import ManualClock, until

LOW, HIGH = make_id(64, 0), make_id(65, 1)
SUBSCRIBES, SUBSCRIBERS, VIEWS = 15, 16, 401
LEASE_MS = 30_000
ONE_OF_EACH = (1, 1, 1)


@pytest.fixture
async def rig() -> AsyncIterator[LeaderRig]:
    store = MemoryStore(4)
    found = LeaderRig(store, store)
    await found.take(0, 1)
    yield found
    await found.close()
    assert found.tasks.errors == []


ROUTINE_JOBS = {id_of(shard) for id_of in (purge_job_id, fold_job_id) for shard in (0, 1)}


def store_of(rig: LeaderRig) -> MemoryStore:
    assert isinstance(rig.store, MemoryStore)
    return rig.store


async def add(rig: LeaderRig, number: int, priority: int = JobPriority.NORMAL, kind: str = "walk") -> int:
    job_id = make_id(100 + number)
    await rig.write(AddJob(NewJob(job_id, kind, priority)))
    return job_id


async def asked(rig: LeaderRig, request: pb.Request, role: str) -> pb.Answer:
    answers: list[pb.Answer] = []
    request.deadline_ms = 5_000
    rig.service.handle(request, MemoryReply(answers.append, peer=role))
    await until(lambda: answers)
    return answers[0]


async def test_jobs_are_leased_by_priority_to_a_worker_that_knows_their_kind(rig: LeaderRig) -> None:
    low, high = await add(rig, 1, JobPriority.LOW), await add(rig, 2, JobPriority.HIGH)
    await add(rig, 3, JobPriority.HIGH, kind="other")
    leased = await rig.jobs.lease("worker-1", ["walk"], ONE_OF_EACH, LEASE_MS)
    assert [(row.id, row.worker) for row in leased] == [(high, "worker-1"), (low, "worker-1")]
    assert await rig.jobs.lease("worker-2", ["walk"], ONE_OF_EACH, LEASE_MS) == []
    assert await rig.jobs.lease("worker-2", ["other"], (0, 0, 9), LEASE_MS) == []


@pytest.mark.parametrize(
    ("kinds", "limits"),
    [(["walk"], (1, 1)), (["walk"], (1, 1, 65)), ([f"kind-{number}" for number in range(257)], (1, 1, 1))],
)
async def test_a_request_for_jobs_beyond_the_bounds_is_refused(
    rig: LeaderRig, kinds: list[str], limits: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidArgument):
        await rig.jobs.lease("worker-1", kinds, limits, LEASE_MS)


async def test_of_two_workers_that_ask_at_once_one_gets_the_job(rig: LeaderRig) -> None:
    await add(rig, 1)
    both = await asyncio.gather(*(rig.jobs.lease(name, ["walk"], ONE_OF_EACH, LEASE_MS) for name in ("a", "b")))
    assert sorted(map(len, both)) == [0, 1]


async def test_workers_are_known_while_they_ask(rig: LeaderRig) -> None:
    assert isinstance(rig.clock, ManualClock)
    await rig.jobs.lease("gone", ["walk"], ONE_OF_EACH, LEASE_MS)
    rig.clock.now += 50.0
    await rig.jobs.lease("busy", ["walk"], ONE_OF_EACH, LEASE_MS)
    assert rig.jobs.summary() == {"workers": {"busy": 0.0, "gone": 50.0}}
    rig.clock.now += 20.0
    assert rig.jobs.summary() == {"workers": {"busy": 20.0}}


async def test_worker_that_reports_and_asks_for_nothing_is_known(rig: LeaderRig) -> None:
    assert isinstance(rig.clock, ManualClock)
    await add(rig, 1)
    (job,) = await rig.jobs.lease("worker", ["walk"], ONE_OF_EACH, LEASE_MS)
    rig.clock.now += 61.0
    assert rig.jobs.summary() == {"workers": {}}
    report = pb.JobReport(id=job.id, kind=job.kind, lease=job.leases, lease_ms=LEASE_MS)
    await asked(rig, pb.Request(report_jobs=pb.ReportJobs(reports=[report])), "worker")
    assert rig.jobs.summary() == {"workers": {"worker": 0.0}}


async def test_a_lease_that_may_have_been_given_is_not_given_again_before_its_end(rig: LeaderRig) -> None:
    job = await add(rig, 1)
    store_of(rig).commit_fault = OutcomeUnknown("the answer was lost")
    assert await rig.jobs.lease("worker-1", ["walk"], ONE_OF_EACH, LEASE_MS) == []
    await rig.take(0)  # an unknown outcome has the shard taken again
    assert store_of(rig).rows.jobs[job].worker == "worker-1"
    assert await rig.jobs.lease("worker-2", ["walk"], ONE_OF_EACH, LEASE_MS) == []
    assert isinstance(rig.clock, ManualClock)
    rig.clock.now += LEASE_MS / 1000
    (leased,) = await rig.jobs.lease("worker-2", ["walk"], ONE_OF_EACH, LEASE_MS)
    assert leased.leases == 2


async def test_jobs_of_shards_that_another_leader_owns_are_not_handed_out(rig: LeaderRig) -> None:
    other = LeaderRig(rig.store, store_of(rig), name="leader-2", clock=rig.clock)
    job = await add(rig, 1)
    (leased,) = await rig.jobs.lease("worker-1", ["walk"], ONE_OF_EACH, LEASE_MS)
    await other.take(0)
    report = ReportJob(job, "walk", leased.leases, b"1", 1, lease_ms=LEASE_MS)
    outcome = await other.jobs.report(report, "worker-1")  # the lease holds at the next owner
    assert outcome.job is not None
    assert outcome.job.cursor == b"1"
    await other.close()


async def test_the_care_adds_routine_jobs_to_each_shard_once_and_forgets_jobs_that_ended(rig: LeaderRig) -> None:
    ended = await add(rig, 1)
    await rig.write(CancelJob(ended))
    await rig.jobs.care_once()
    rows = store_of(rig).rows.jobs
    assert rows.keys() == {ended, *ROUTINE_JOBS}
    assert msgspec.msgpack.decode(rows[purge_job_id(1)].body) == {"shard": 1}
    before = dict(rows)
    seconds = JobSettings().keep_ended_seconds
    impatient = JobPath(rig.context, JobSettings(keep_ended_seconds=-1.0), rig.ownership, rig.store, rig.writes)
    await rig.jobs.care_once()
    assert dict(rows) == before, f"{seconds} s have not passed"
    await impatient.care_once()
    assert rows.keys() == ROUTINE_JOBS
    assert impatient.counts == {"waiting": 4, "leased": 0, "failing": 0, "parked": 0}


async def test_one_round_of_the_care_forgets_all_jobs_that_ended_and_counts_the_others(rig: LeaderRig) -> None:
    rows = store_of(rig).rows.jobs
    limit = JobSettings().search_limit
    for number in range(3 * limit + 1):
        await rig.write(CancelJob(await add(rig, number)))
    waiting = [await add(rig, 1_000 + number, kind="other") for number in range(2 * limit)]
    await rig.jobs.lease("worker-1", ["other"], (0, 3, 0), LEASE_MS)
    rows[waiting[-1]] = msgspec.structs.replace(rows[waiting[-1]], attempts=1)
    rows[waiting[-2]] = msgspec.structs.replace(rows[waiting[-2]], state=JobState.PARKED)
    impatient = JobPath(rig.context, JobSettings(keep_ended_seconds=-1.0), rig.ownership, rig.store, rig.writes)
    await impatient.care_once()
    assert rows.keys() == {*waiting, *ROUTINE_JOBS}
    await impatient.care_once()
    assert impatient.counts == {"waiting": 2 * limit + 4 - 4, "leased": 3, "failing": 1, "parked": 1}


async def test_operators_list_pause_and_resume(rig: LeaderRig) -> None:
    job = await add(rig, 1)
    changed = await asked(rig, pb.Request(change_jobs=pb.ChangeJobs(pause_kind="walk")), "operator")
    assert changed.changed_jobs.shards == 2
    assert await rig.jobs.lease("worker-1", ["walk"], ONE_OF_EACH, LEASE_MS) == []
    listed = (await asked(rig, pb.Request(list_jobs=pb.ListJobs(kind="walk")), "operator")).jobs
    assert ([each.id for each in listed.jobs], [each.shard for each in listed.paused]) == ([job], [0, 1])
    row = store_of(rig).rows.jobs[job]
    store_of(rig).rows.jobs[job] = msgspec.structs.replace(row, state=JobState.PARKED, attempts=100)
    changed = await asked(rig, pb.Request(change_jobs=pb.ChangeJobs(resume_kind="walk")), "operator")
    assert (changed.changed_jobs.shards, changed.changed_jobs.resumed) == (2, 1)
    row = store_of(rig).rows.jobs[job]
    store_of(rig).rows.jobs[job] = msgspec.structs.replace(row, attempts=9, due_unix_ms=row.due_unix_ms + 100_000)
    changed = await asked(rig, pb.Request(change_jobs=pb.ChangeJobs(resume_kind="walk")), "operator")
    assert changed.changed_jobs.resumed == 1
    assert len(await rig.jobs.lease("worker-1", ["walk"], ONE_OF_EACH, LEASE_MS)) == 1
    listed = (await asked(rig, pb.Request(list_jobs=pb.ListJobs()), "operator")).jobs
    assert listed.kinds == ["walk"], "a worker has asked for it"
    routine = pb.Request(list_jobs=pb.ListJobs(routine_kinds=["walk"]))
    row = store_of(rig).rows.jobs[job]
    for state, attempts, shown in ((row.state, 0, []), (row.state, 1, [job]), (JobState.PARKED, 100, [job])):
        store_of(rig).rows.jobs[job] = msgspec.structs.replace(row, state=state, attempts=attempts)
        assert [each.id for each in (await asked(rig, routine, "operator")).jobs.jobs] == shown
    wrong = await asked(rig, pb.Request(change_jobs=pb.ChangeJobs(pause_kind="No Kind")), "operator")
    assert wrong.error.reason == InvalidArgument.reason


async def test_a_worker_scans_a_shard_in_bounded_pages(rig: LeaderRig) -> None:
    for other in range(5):
        await rig.write(AssocMerge(LOW, SUBSCRIBES, HIGH + other, State.NORMAL, has_payload=True, time=other))
    found: list[int] = []
    after, done = pb.RowKey(), False
    while not done:
        scan = pb.ScanShard(shard=0, atype=SUBSCRIBES, after=after, limit=2)
        page = (await asked(rig, pb.Request(scan_shard=scan), "worker")).shard_scan
        assert len(page.id2s) <= 2
        found += page.id2s
        after, done = page.last, page.done
    assert found == sorted(found)
    assert len(found) == 5
    refused = pb.Request(scan_shard=pb.ScanShard(shard=0, atype=FRIEND, limit=2_001), deadline_ms=5_000)
    with pytest.raises(InvalidArgument, match="2001 rows"):
        rig.service.handle(refused, MemoryReply(lambda _: None, peer="worker"))


async def test_only_edges_that_were_removed_long_ago_are_purged(rig: LeaderRig) -> None:
    store = store_of(rig)
    for other, state in enumerate((State.REMOVED, State.REMOVED, State.ARCHIVED)):
        await rig.write(AssocMerge(LOW, SUBSCRIBES, HIGH + other, State.NORMAL, has_payload=True, time=1))
        await rig.write(AssocMerge(LOW, SUBSCRIBES, HIGH + other, state))
    removed = rig.configuration.schema.atype(SUBSCRIBES).states[State.REMOVED]
    for key in store.changed_unix_s:
        if key != EdgeKey(LOW, removed, HIGH + 1):
            store.changed_unix_s[key] = 1
    purged = (await asked(rig, pb.Request(purge_removed=pb.PurgeRemoved(shard=0, limit=100)), "worker")).purged_edges
    assert (purged.purged, purged.done) == (1, True)
    here = sorted(key for key in store.rows.registers if key.id1 >> SHARD_SHIFT == 0)
    assert [key.id2 for key in here] == [HIGH + 2, HIGH + 1]
    assert len(store.rows.registers) == 5  # the other end is purged by the job of its own shard


class HalfStore(MemoryStore):
    """A database server for each of the shards 0 and 1; those in ``down`` do not answer."""

    def __init__(self) -> None:
        super().__init__(2, lambda shard: f"db-{shard}")
        self.down: set[str] = set()
        self.before_jobs: Callable[[], None] = lambda: None

    def check(self, shards: Sequence[int]) -> None:
        self.before_jobs()
        for name in {self.server_of(shard) for shard in shards} & self.down:
            raise Unavailable(f"{name} is down")

    async def read_jobs(self, shards: Sequence[int], query: JobQuery, *, timeout_seconds: float) -> list[JobRow]:
        self.check(shards)
        return await super().read_jobs(shards, query, timeout_seconds=timeout_seconds)

    async def count_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[JobCount]:
        self.check(shards)
        return await super().count_jobs(shards, timeout_seconds=timeout_seconds)

    async def paused_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[PausedKind]:
        self.check(shards)
        return await super().paused_jobs(shards, timeout_seconds=timeout_seconds)


@pytest.fixture
async def halves() -> AsyncIterator[tuple[LeaderRig, HalfStore]]:
    store = HalfStore()
    found = LeaderRig(store, store)
    await found.take(0, 1)
    yield found, store
    await found.close()
    assert found.tasks.errors == []


async def test_a_database_that_is_down_hides_the_jobs_of_its_own_shards_alone(
    halves: tuple[LeaderRig, HalfStore],
) -> None:
    rig, store = halves
    here, there = make_id(100), make_id(100, 1)
    for job in (here, there):
        await rig.write(AddJob(NewJob(job, "walk", JobPriority.NORMAL)))
    store.down = {"db-0"}
    (leased,) = await rig.jobs.lease("worker-1", ["walk"], (1, 9, 1), LEASE_MS)
    assert leased.id == there
    listed = (await asked(rig, pb.Request(list_jobs=pb.ListJobs()), "operator")).jobs
    assert ([each.id for each in listed.jobs], list(listed.missing_shards)) == ([there], [0])
    store.down = set()
    (leased,) = await rig.jobs.lease("worker-1", ["walk"], (1, 9, 1), LEASE_MS)
    assert leased.id == here
    assert not (await asked(rig, pb.Request(list_jobs=pb.ListJobs()), "operator")).jobs.missing_shards


async def test_the_care_goes_on_for_the_databases_that_are_up(halves: tuple[LeaderRig, HalfStore]) -> None:
    rig, store = halves
    ended = make_id(100, 1)
    await rig.write(AddJob(NewJob(ended, "walk", JobPriority.NORMAL)))
    await rig.write(CancelJob(ended))
    store.down = {"db-0"}
    impatient = JobPath(rig.context, JobSettings(keep_ended_seconds=-1.0), rig.ownership, rig.store, rig.writes)
    await impatient.care_once()
    assert store.rows.jobs.keys() == {purge_job_id(1), fold_job_id(1)}
    await impatient.care_once()
    assert impatient.counts["waiting"] == len((purge_job_id, fold_job_id))


async def test_a_worker_learns_that_no_database_answers(halves: tuple[LeaderRig, HalfStore]) -> None:
    rig, store = halves
    store.down = {"db-0", "db-1"}
    with pytest.raises(Unavailable, match="is down"):
        await rig.jobs.lease("worker-1", ["walk"], ONE_OF_EACH, LEASE_MS)


async def test_nothing_is_leased_to_a_worker_that_has_gone_or_no_longer_waits(
    halves: tuple[LeaderRig, HalfStore],
) -> None:
    rig, store = halves
    job = make_id(100)
    await rig.write(AddJob(NewJob(job, "walk", JobPriority.NORMAL)))
    gone = MemoryReply(lambda _: None, peer="worker")
    searched: list[int] = []

    def close() -> None:
        searched.append(1)
        gone.close()

    store.before_jobs = close
    before = set(rig.tasks.running)
    lease = pb.LeaseJobs(kinds=["walk"], limits=ONE_OF_EACH, lease_ms=LEASE_MS)
    rig.service.handle(pb.Request(lease_jobs=lease, deadline_ms=5_000), gone)
    await until(lambda: searched and not rig.tasks.running - before)
    assert store.rows.jobs[job].worker == ""
    assert isinstance(rig.clock, ManualClock)
    clock = rig.clock

    def spend() -> None:
        clock.now += 5.0

    store.before_jobs = spend
    answer = await asked(rig, pb.Request(lease_jobs=lease), "worker")
    assert answer.error.reason == DeadlineExceeded.reason
    store.before_jobs = lambda: None
    answer = await asked(rig, pb.Request(lease_jobs=lease), "worker")
    assert [each.id for each in answer.jobs.jobs] == [job]


async def test_slots_that_have_not_changed_for_long_are_folded_and_forgotten_when_their_lives_are_over(
    rig: LeaderRig,
) -> None:
    store, now_s = store_of(rig), rig.clock.unix_ms() // 1000
    idle, used, old = (slot_of_life(now_s - age, 1) for age in (0, 1, LIFE_HORIZON_SECONDS - 60))
    for slot, plus in ((idle, 5), (used, 7), (old, 11)):
        await rig.write(FlushCounter(LOW, VIEWS, slot, 1, plus, 0))
    for slot in (idle, old):
        store.changed_unix_s[EdgeKey(LOW, VIEWS, slot)] = now_s - 601
    request = pb.Request(fold_counters=pb.FoldCounters(shard=0, limit=100))
    folded = (await asked(rig, request, "worker")).folded_counters
    assert (folded.folded, folded.done) == (2, True)

    def totals() -> dict[int, SlotTotals]:
        return {edge.id2: decode_totals(edge.data) for edge in store.edges(LOW, VIEWS)}

    tombstones = {idle: SlotTotals(5, 0, 5), old: SlotTotals(11, 0, 11)}
    assert totals() == {FOLDED_SLOT: SlotTotals(16), used: SlotTotals(7), **tombstones}
    assert (await asked(rig, request, "worker")).folded_counters.folded == 0
    assert isinstance(rig.clock, ManualClock)
    rig.clock.now += LIFE_MARGIN_SECONDS + 61
    assert (await asked(rig, request, "worker")).folded_counters.folded == 2  # `used` is idle now, and `old` is over
    assert totals() == {FOLDED_SLOT: SlotTotals(23), used: SlotTotals(7, 0, 7), idle: SlotTotals(5, 0, 5)}
