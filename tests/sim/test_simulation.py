"""The simulated cluster keeps its invariants, replays exactly, and its failures can be made small."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tao.model.ids import MAX_RESERVED_IDS, LostTimes
from tao.model.rows import ObjectRow
from tao.model.topology import Topology
from tao.replication.shard_move_plan import MoveStep
from tao.topology.edits import shards_of
from tao.watcher.server import WatcherServer
from tests.rigs.effort import examples
from tests.sim import __main__ as command
from tests.sim.bounds import EXPECTED
from tests.sim.checks import Checks, Violation
from tests.sim.database import SimDatabase, unix_ms
from tests.sim.loop import Process, SimLoop, SimulationStuck
from tests.sim.moves import STEPS
from tests.sim.plans import (
    ADD_JOB,
    ADD_SHARDS,
    COMPOUND,
    COUNTER_KINDS,
    EPISODE_SECONDS,
    EPISODES,
    FAULT_WEIGHTS,
    KILL_WORKER,
    LATER_SET_STATE,
    MANY_READS,
    MANY_WRITES,
    MEMBERS,
    OF_ETCD,
    PLANNED,
    READS,
    RESTORE,
    RESTORE_AGAIN,
    RESTORE_UNPROMOTED,
    SEQUENCES,
    SET_READ,
    STATE_KINDS,
    TEMPOS,
    TWO_HOP,
    WRITES,
    Fault,
    Op,
    Plan,
    Shape,
    Tempo,
    make_plan,
)
from tests.sim.promotion import enthrone
from tests.sim.runs import run
from tests.sim.shrinking import shrink
from tests.sim.single_failures import AFTERMATH_SECONDS
from tests.sim.variants import MOVES, ONE_TIER, VARIANTS, find
from tests.sim.world import SCHEMA, World

SWEEP_SEEDS = examples(70)
"""Seeds of two acts each, some 21 simulated minutes a seed. `python -m tests.sim` runs any number."""
FIRST_SEED = 40
"""The next few reach every bound today, so that one sweep is enough."""
MOST_SWEEPS = 10
"""The sweep goes on with the next seeds while no plan has come near a bound that plans must reach."""
_ROOT = Path(__file__).parents[2]
_DIGESTS = (
    "from tests.sim.plans import make_plan\n"
    "from tests.sim.runs import run\n"
    "print([run(make_plan(seed, 1)).digest for seed in (0, 16)])"
)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None
    return match[1]


@pytest.mark.timeout(1800)
def test_no_seed_breaks_an_invariant(tmp_path: Path) -> None:
    sweep = [sys.executable, "-m", "tests.sim", "--seeds", str(SWEEP_SEEDS), "--minutes", "20", "--keep", str(tmp_path)]
    reached, judged = Counter[str](), Counter[str]()
    for start in range(FIRST_SEED, FIRST_SEED + MOST_SWEEPS * SWEEP_SEEDS, SWEEP_SEEDS):
        done = subprocess.run([*sweep, "--start", str(start)], cwd=_ROOT, capture_output=True, text=True, check=False)
        sys.stdout.write(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        _, _, counts = done.stdout.partition("bounds reached: ")
        for name, _, count in (each.rpartition(" ") for each in counts.strip().split(", ")):
            reached[name] += int(count)
        for name in ("single_failure_reads", "excused_reads"):
            judged[name] += int(_found(rf"{name} (\d+)", done.stdout))
        if all(reached[name] for name in EXPECTED):
            break
    # The check of a bound that nothing ever comes near proves nothing.
    assert not [name for name in EXPECTED if not reached[name]], reached
    assert judged["single_failure_reads"] > 0
    assert judged["excused_reads"] < judged["single_failure_reads"] / 50, "what excuses reads excuses too many"


def test_the_same_seed_gives_the_same_trace_whatever_hashes_are_salted_with() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            cwd=_ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "77")
    }
    assert len(found) == 1


def test_a_run_does_not_depend_on_the_runs_before_it() -> None:
    first = run(make_plan(5, 1))
    run(make_plan(6, 1))
    again = run(make_plan(5, 1))
    assert (again.digest, again.events, again.results) == (first.digest, first.events, first.results)


def test_different_seeds_give_different_traces() -> None:
    assert run(make_plan(1, 1)).digest != run(make_plan(2, 1)).digest


# This is the fault that finds the broken rule soonest.
_BROKEN = next(each for each in VARIANTS if each.name == "leader alone asked for misses")


def test_a_failing_plan_is_made_small_and_fails_in_the_same_way() -> None:
    failed, _ = find(_BROKEN)
    assert failed is not None
    assert failed.violation is not None
    small = shrink(failed, lambda plan: run(plan, _BROKEN.broken), most_runs=40)
    assert small.violation is not None
    assert small.violation.invariant == failed.violation.invariant
    assert len(small.plan.ops) < len(failed.plan.ops) / 4
    again = run(small.plan, _BROKEN.broken)
    assert (str(again.violation), again.digest) == (str(small.violation), small.digest)


def test_a_failing_seed_is_printed_kept_and_played_again_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, seeds = find(_BROKEN)
    assert failed is not None
    monkeypatch.setattr(command, "make_plan", lambda *_, **__: failed.plan)
    monkeypatch.setattr(command, "shrink", partial(shrink, most_runs=10))
    with _BROKEN.broken():
        assert command.main(["--start", str(seeds - 1), "--seeds", "1", "--keep", str(tmp_path)]) == 1
        printed = capsys.readouterr().out
        (kept,) = tmp_path.iterdir()
        assert command.main(["--plan", str(kept)]) == 1
    again = capsys.readouterr().out
    assert printed.startswith(f"seed {seeds - 1}: {failed.violation}")
    assert f"--plan {kept}" in printed
    # Operations, last events, the violation and the whole trace's digest.
    assert again in printed


def test_a_plan_that_breaks_nothing_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="only a plan that fails"):
        shrink(run(make_plan(1, 1, kinds={})), run)


def test_every_operation_succeeds_where_nothing_fails() -> None:
    plan = make_plan(3, 2, kinds={})
    outcome = run(plan)
    assert outcome.violation is None
    assert outcome.results["done"]
    assert outcome.simulated_seconds > 2 * plan.tempo.act_seconds
    assert all(outcome.looked_at[what] for what in ("entries", "answers", "writes", "commits", "left_out"))


def test_a_full_list_and_the_id_of_a_deleted_object_are_mistakes_of_the_plan() -> None:
    plan = make_plan(3, 2, kinds={})
    at = plan.tempo.act_seconds + 20.0  # where nothing has failed since the act before
    objects = [
        Op(at + step, 0, kind, 0, 1, "friend", 2) for step, kind in enumerate(("obj_put", "obj_delete", "obj_put"))
    ]
    edges = [Op(at + 5.0 + two, 0, "assoc_add", 0, two, "note", 1) for two in (1, 2, 3)]
    outcome = run(msgspec.structs.replace(plan, ops=(*objects, *edges)))
    assert outcome.violation is None
    assert outcome.results == {"done": 4, "OBJECT_DELETED": 1, "LIST_FULL": 1}


def test_no_request_fails_for_what_operators_plan() -> None:
    shape = Shape(leaders=2, followers=2)
    for seed in range(6):
        outcome = run(make_plan(seed, 1, shape, dict.fromkeys(PLANNED, 1)))
        assert outcome.violation is None, f"seed {seed}"
        assert outcome.results["done"], f"seed {seed}"


@pytest.mark.timeout(900)
def test_no_read_fails_because_a_client_and_a_follower_have_different_topologies() -> None:
    """Shards move between the followers of the only tier, of which each learns at another moment."""
    for seed in range(examples(8)):
        outcome = run(make_plan(seed, 1, ONE_TIER, MOVES, single_share=1.0))
        assert outcome.violation is None, outcome.violation


def test_an_operator_clones_and_restarts_to_the_end() -> None:
    shape = Shape(leaders=2, followers=2)
    faults = (Fault(20.0, "clone", 1, 0, 30.0), Fault(25.0, "planned restart", 1, 0, 0.0))
    plan = make_plan(1, 1, shape, kinds={}, with_counters=False)
    # Few operations and no counters: their events would push those of the operator out of the last ones that are kept.
    outcome = run(msgspec.structs.replace(plan, ops=plan.ops[:20], faults=faults))
    assert outcome.violation is None
    results = [" ".join(map(str, event[2:])) for event in outcome.recent if event[1] == "operator"]
    assert [each.partition(" ")[0] for each in results] == ["clone", "restart", "unclone"], results
    assert not any("ERROR" in each or "waiting" in each for each in results), results


@pytest.mark.parametrize("place", range(len(STEPS)), ids=lambda place: STEPS[place].name)
def test_a_move_that_died_at_a_step_is_repeated_to_its_end(place: int) -> None:
    plan = make_plan(1, 1, Shape(leaders=2), kinds={})
    dies = Fault(20.0, "move dies", 1 + 4, 2 * place + 1, 0.0)
    outcome = run(msgspec.structs.replace(plan, ops=plan.ops[:20], faults=(dies,)))
    assert outcome.violation is None
    commands = [str(event[3]) for event in outcome.recent if event[1] == "command"]
    assert commands[0] == "died"
    assert commands[-1].startswith("MoveResult(shard=1, source='db1', target='db2'"), commands


def test_a_move_that_died_is_undone() -> None:
    plan = make_plan(1, 1, Shape(leaders=2), kinds={})
    dies = Fault(20.0, "move dies", 1, 2 * STEPS.index(MoveStep.SWITCH) + 1, 0.0)
    outcome = run(msgspec.structs.replace(plan, ops=plan.ops[:20], faults=(dies,)))
    assert outcome.violation is None
    commands = [str(event[3]) for event in outcome.recent if event[1] == "command"]
    assert commands == ["died", f"{MoveStep.UNFENCE}; {MoveStep.RENAME_BACK}; {MoveStep.DROP_COPY}"]


def test_added_shards_are_used_at_once_also_after_a_run_that_died() -> None:
    plan = make_plan(1, 1, Shape(leaders=2), kinds={})
    adds = [Op(20.0 + 30.0 * dies, 0, ADD_SHARDS, 201 * dies, 2, "friend", 1) for dies in (0, 1)]
    outcome = run(msgspec.structs.replace(plan, ops=adds))
    assert outcome.violation is None
    commands = [str(event[3]) for event in outcome.recent if event[1] == "command"]
    assert commands == ["6 shards", "died", "7 shards"]
    added = [event for event in outcome.recent if event[1] == "added anywhere"]
    assert len(added) == 2 * Shape().all_clients
    assert {event[3] for event in added} == {"done"}


@pytest.mark.timeout(900)
def test_a_restored_cluster_gives_nothing_out_again_and_has_whole_pairs() -> None:
    restores = pairs = 0
    for seed in range(examples(3)):
        plan = make_plan(seed, 1, Shape(leaders=2), {RESTORE: 1}, single_share=0.0, with_journals=False)
        outcome = run(plan)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        restores += outcome.looked_at["restores"]
        pairs += outcome.looked_at["repaired_pairs"]
    assert restores
    assert pairs, "no backup has cut a pair in two"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [RESTORE_UNPROMOTED, RESTORE_AGAIN])
def test_a_restore_gives_no_id_out_again_although_the_backup_lacks_a_promotion_or_a_restore(kind: str) -> None:
    looked_at: Counter[str] = Counter()
    for seed in range(1, 1 + examples(2)):
        plan = make_plan(seed, 1, Shape(leaders=2), {kind: 1}, single_share=0.0, with_journals=False)
        outcome = run(plan)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        looked_at.update(outcome.looked_at)
    assert looked_at["ids"] > MAX_RESERVED_IDS
    assert looked_at["restores_of_promoted"] if kind == RESTORE_UNPROMOTED else looked_at["restores"] > 1


def test_a_promoted_server_begins_above_the_ids_of_a_shard_that_was_being_moved() -> None:
    found: list[Violation] = []
    with closing(SimLoop()) as loop:
        world = World(loop, make_plan(1, 1, Shape()), found.append)
        database = world.topology.databases[0]
        fenced = min(shards_of(database))
        old = world.master_of(fenced)
        new = next(world.databases[each.name] for each in database.servers.values() if each.name != old.name)
        row = new.rows.shards[fenced]
        new.rows.shards[fenced] = msgspec.structs.replace(row, master_server="elsewhere")
        enthrone(world, database, old, new, lacks_commits=True)
        begin = LostTimes.at(unix_ms(loop.now)).begin(0, lacks_epoch=True)
    assert new.truth.reserved_times[fenced] == begin
    assert new.truth.shards[fenced].master_server == "elsewhere"
    assert not found


def test_an_object_that_was_changed_by_hand_exists_until_it_is_deleted() -> None:
    with closing(SimLoop()) as loop:
        master, violations = SimDatabase("master", "east", loop, random.Random(0), 1), list[Violation]()
    checks = Checks(lambda _: master, SCHEMA, lambda: 0.0, violations.append)
    for now, row in ((1.0, ObjectRow(1, 1, 1, False, b"")), (2.0, ObjectRow(1, 1, 2, True, b""))):
        master.truth.objects[1] = row
        master.past.keep(master.truth, [1], [], now)
    master.past.foreign.add(1)
    assert checks.may_exist(1, 1.5)
    assert not checks.may_exist(1, 2.5)


def test_a_watcher_counts_the_registered_servers_that_it_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[WatcherServer, str]] = []
    log_removed = WatcherServer._log_removed

    def log(watcher: WatcherServer, before: Topology, names: Iterable[str]) -> None:
        log_removed(watcher, before, names)
        logged.extend((watcher, name) for name in names)

    monkeypatch.setattr(WatcherServer, "_log_removed", log)
    shape = Shape(regions=1, leaders=2, followers=2, watchers=1)
    plan = msgspec.structs.replace(make_plan(1, 1, shape, kinds={}), faults=(Fault(20.0, "kill", 3, 0, 30.0),))
    assert run(plan).violation is None
    ((watcher, name),) = logged
    assert name == "follower-east-a2"
    assert watcher._servers_removed == 1


def test_seeds_are_played_side_by_side_with_the_same_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seeds", "3", "--start", "3", "--minutes", "1", "--keep", str(tmp_path)]
    assert command.main(arguments) == 0
    first, *alone = capsys.readouterr().out.splitlines()
    assert command.main([*arguments, "--jobs", "2"]) == 0
    again, *side_by_side = capsys.readouterr().out.splitlines()
    assert side_by_side == alone
    # Everything except the CPU time.
    assert again.rpartition(",")[0] == first.rpartition(",")[0]


def test_plans_bring_every_operation_every_option_and_every_fault() -> None:
    plans = [make_plan(seed, 2) for seed in range(150)]
    ops = [op for plan in plans for op in plan.ops]
    of_clients = {*READS, *WRITES, *MANY_READS, *MANY_WRITES, SET_READ, TWO_HOP, MEMBERS, *STATE_KINDS, *COUNTER_KINDS}
    assert {op.kind for op in ops} == {*of_clients, ADD_JOB, ADD_SHARDS, KILL_WORKER, LATER_SET_STATE}
    assert {op.how for op in ops} == {"", "critical", "stale", "token", "tokens"}
    assert {fault.kind for plan in plans for fault in plan.faults} == {*FAULT_WEIGHTS, *OF_ETCD, *SEQUENCES}
    befall = [{fault.kind for fault in plan.faults} & {*OF_ETCD} for plan in plans if not plan.shape.etcd]
    assert len(plans) / 2 < len(befall) < len(plans)
    assert not any(befall)


def test_where_one_fault_comes_at_a_time_the_aftermath_of_the_one_before_is_over() -> None:
    for seed in range(30):
        for tempo in {*TEMPOS}:
            plan = make_plan(seed, 2, tempo=tempo, single_share=1.0)
            assert len(plan.faults) == 2 * EPISODES
            assert not {fault.kind for fault in plan.faults} & {*COMPOUND}
            for before, after in itertools.pairwise(plan.faults):
                assert before.at + before.seconds + AFTERMATH_SECONDS < after.at
            for fault in plan.faults:
                assert (fault.at + fault.seconds) % tempo.act_seconds <= tempo.busy_seconds


def test_what_befalls_etcd_alone_makes_no_read_fail_and_needs_no_excuse() -> None:
    judged = 0
    for seed in range(2):
        shape = Shape(leaders=2, followers=2, etcd=True)
        outcome = run(make_plan(seed, 1, shape, dict.fromkeys(OF_ETCD, 1), single_share=1.0))
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        assert not outcome.looked_at["excused_reads"]
        judged += outcome.looked_at["single_failure_reads"]
    assert judged


@pytest.mark.parametrize("accounts", [False, True])
def test_a_miss_is_excused_while_its_new_leader_has_not_heard_of_the_shard_but_not_past_leaders(accounts: bool) -> None:
    # The former leader reaches etcd and gives shard 3 up. All others are cut off, its successor among them.
    compacted, read = Fault(20.0, "etcd compacted", 3, 0, 30.0), Op(22.0, 1, "assoc_range", 3, 7, "follows", 25)
    shape = Shape(leaders=2, etcd=True, reads_databases=accounts)
    outcome = run(msgspec.structs.replace(make_plan(1, 1, shape, kinds={}), faults=(compacted,), ops=(read,)))
    assert outcome.violation is None
    assert outcome.results == ({"done": 1} if accounts else {"DEADLINE_EXCEEDED": 1})
    assert outcome.looked_at["single_failure_reads"] == accounts
    assert outcome.looked_at["excused_reads"] == (not accounts)


def test_a_miss_is_not_excused_while_its_follower_and_its_former_leader_have_not_heard_of_the_successor() -> None:
    # Everyone is cut off, and uses the topology that gives shard 2 to the former leader.
    compacted, read = Fault(20.0, "etcd compacted", 2, 0, 30.0), Op(22.0, 1, "assoc_range", 2, 7, "follows", 25)
    shape = Shape(leaders=2, etcd=True)
    outcome = run(msgspec.structs.replace(make_plan(1, 1, shape, kinds={}), faults=(compacted,), ops=(read,)))
    assert outcome.violation is None
    assert outcome.results == {"done": 1}
    assert (outcome.looked_at["single_failure_reads"], outcome.looked_at["excused_reads"]) == (1, 0)


def test_a_region_that_is_cut_off_reads_its_own_database_although_it_is_marked_down() -> None:
    """A watcher across the cut has promoted the database there and marked this region's server down."""
    shape = Shape(leaders=2, reads_databases=True, watchers=1, etcd=True)
    tempo = Tempo(quiet_seconds=120.0, calm_seconds=180.0, pace=3.0)
    read = Op(28.7, 0, "assoc_range_of_state", 9, 6, "subscribers", 39)
    cut = Fault(9.3, "cut regions", 258, 484, 114.0)
    outcome = run(Plan(2600365, 1, shape, (read,), (cut,), tempo))
    assert outcome.violation is None, outcome.violation
    assert outcome.results == {"done": 1}
    assert outcome.looked_at["single_failure_reads"] == 1


def test_new_shards_may_fail_where_a_leader_is_cut_off_from_the_topology_that_names_them() -> None:
    shape = Shape(leaders=2, etcd=True, workers=2)
    adds = Op(14.0, 0, ADD_SHARDS, 602, 2, "liked_by", 27)
    cut = Fault(12.0, "etcd cut off", 0, 883, 34.0)
    outcome = run(Plan(2700056, 1, shape, (adds,), (cut,)))
    assert outcome.violation is None, outcome.violation
    added = Counter(event[3] for event in outcome.recent if event[1] == "added anywhere")
    assert added == {"done": 3, "DEADLINE_EXCEEDED": 1}, added


def test_new_shards_are_served_where_a_follower_is_cut_off_from_the_topology_that_names_them() -> None:
    shape = Shape(leaders=2, etcd=True)
    adds = Op(14.0, 0, ADD_SHARDS, 602, 2, "liked_by", 27)
    cut = Fault(12.0, "etcd cut off", 1, 883, 34.0)
    outcome = run(Plan(2700056, 1, shape, (adds,), (cut,)))
    assert outcome.violation is None, outcome.violation
    added = Counter(event[3] for event in outcome.recent if event[1] == "added anywhere")
    assert added == {"done": 4}, added


def test_a_server_that_reads_an_old_copy_of_the_topology_starts_again_until_it_can_register() -> None:
    shape = Shape(regions=2, leaders=2, tiers=2, shards=4, reads_databases=True, workers=2)
    tempo = Tempo(quiet_seconds=240.0, calm_seconds=300.0, pace=5.0)
    restart = Fault(16.99135958895013, "planned restart", 707, 8, 0.42462392828022744)
    late = Fault(17.196453210386128, "topology late", 200, 197, 3.2570363409778826)
    kill = Fault(20.695663253832397, "kill", 275, 781, 0.49099572140630254)
    outcome = run(Plan(18000194, 1, shape, (), (restart, late, kill), tempo))
    assert outcome.violation is None, outcome.violation
    ends = [event[1] for event in outcome.recent if event[1] in {"ends", "start"} and event[2] == "leader-west-2"]
    assert ends[-2:] == ["ends", "start"], ends


def test_an_operation_on_a_node_without_edges_is_lost_with_its_master() -> None:
    shape = Shape(regions=2, followers=2, reads_databases=True, workers=2)
    tempo = Tempo(quiet_seconds=240.0, calm_seconds=300.0, pace=5.0)
    sets = Op(573.4466214964916, 0, "node_set_state", 3, 11, "subscribes", 27)
    lost = Fault(573.3500854755165, "master lost", 939, 256, 46.86297904870311)
    outcome = run(Plan(18000306, 2, shape, (sets,), (lost,), tempo))
    assert outcome.violation is None, outcome.violation
    assert outcome.results == {"done": 1}


def test_what_a_follower_counted_is_lost_when_it_is_killed_while_it_stops() -> None:
    cut_off = Fault(245.47490117998228, "spool needed", 428, 989, 30.453902605113868)
    killed = Fault(263.98503626547745, "drain", 212, 455, 2.859696705857177)
    adds = Op(263.0771564296346, 0, "counter_add", 2, 2, "friend", 3)
    outcome = run(Plan(19000023, 2, Shape(etcd=True), (adds,), (cut_off, killed), Tempo(0.0, 90.0, 0.5)))
    assert outcome.violation is None, outcome.violation
    assert outcome.results == {"done": 1}


def test_only_reads_that_no_server_could_answer_are_excused() -> None:
    excused = {}
    for accounts in (False, True):
        shape = Shape(leaders=2, reads_databases=accounts)
        outcomes = [run(make_plan(seed, 1, shape, {"kill": 1}, single_share=1.0)) for seed in range(3)]
        assert [each.violation for each in outcomes] == [None] * 3
        assert all(each.looked_at["single_failure_reads"] for each in outcomes)
        excused[accounts] = sum(each.looked_at["excused_reads"] for each in outcomes)
    # A follower without a database account has only its leader to ask, which was killed.
    assert excused[False]
    assert not excused[True]


def test_a_tempo_leaves_nothing_out_and_has_its_quiet_stretches() -> None:
    for seed in range(30):
        dense = make_plan(seed, 2, single_share=0.0)
        for tempo in {*TEMPOS}:
            plan = make_plan(seed, 2, tempo=tempo, single_share=0.0)
            assert Counter(op.kind for op in plan.ops) == Counter(op.kind for op in dense.ops)
            assert Counter(fault.kind for fault in plan.faults) == Counter(fault.kind for fault in dense.faults)
            for at in (*(op.at for op in plan.ops), *(fault.at for fault in plan.faults)):
                in_act = at % tempo.act_seconds
                # The operations of a fault go on for a few seconds after its episode, and additions to counters for
                # three more.
                assert in_act % (EPISODE_SECONDS + tempo.quiet_seconds) < EPISODE_SECONDS + 18.0
                assert in_act < tempo.busy_seconds + 18.0


# ---- the loop ------------------------------------------------------------------------------------------------------


def _loop_of(loop: SimLoop) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=lambda: loop)


def test_an_hour_of_waiting_takes_no_time_and_few_steps() -> None:
    loop = SimLoop()
    with _loop_of(loop) as runner:
        runner.run(asyncio.sleep(3600.0))
    assert loop.now == 3600.0
    assert loop.steps < 10


def test_a_killed_process_does_nothing_more_not_even_clean_up() -> None:
    loop, process, done = SimLoop(), Process("server", "east"), []

    async def serve() -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                done.append(loop.now)
        finally:
            done.append(-1.0)

    async def play() -> None:
        serving = loop.create_task(serve(), context=process.context)
        await asyncio.sleep(2.5)
        loop.kill(process)
        await asyncio.sleep(10.0)
        assert done == [1.0, 2.0]
        assert not serving.done()
        loop.sweep(process)
        await asyncio.sleep(0.1)
        assert serving.cancelled()

    with _loop_of(loop) as runner:
        runner.run(play())


def test_a_paused_process_finds_everything_later_in_its_order() -> None:
    loop, process = SimLoop(), Process("server", "east")
    done: list[int] = []

    async def play() -> None:
        for number in range(3):
            loop.call_later(1.0 + number, done.append, number, context=process.context)
        await asyncio.sleep(1.5)
        loop.pause(process)
        await asyncio.sleep(10.0)
        assert done == [0]
        loop.resume(process)
        await asyncio.sleep(0.0)
        assert done == [0, 1, 2]

    with _loop_of(loop) as runner:
        runner.run(play())


def test_a_wait_that_can_never_end_is_an_error() -> None:
    loop = SimLoop()
    waiting = loop.create_future()
    with pytest.raises(SimulationStuck):
        loop.run_until_complete(waiting)
    loop.close()


def test_an_endless_cycle_in_which_no_time_passes_is_an_error() -> None:
    loop = SimLoop()

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(SimulationStuck):
        loop.run_forever()
    loop.close()


def test_a_violation_names_its_invariant_also_when_it_comes_from_another_process() -> None:
    for violation in (found := Violation("4", "a version fell"), pickle.loads(pickle.dumps(found))):
        assert (violation.invariant, str(violation)) == ("4", "invariant 4: a version fell")
