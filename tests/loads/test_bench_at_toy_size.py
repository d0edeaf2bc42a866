"""The benchmarks run at toy size, so that they never rot. Nothing here looks at how fast anything is."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from loadtest.peers.scenario import PeersOptions, without_absent
from loadtest.published.workload import workload_names
from loadtest.results import Report, ScenarioResult
from tests.rigs.forked_programs import ROOT
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.toy_runs import ToyRun

needs_peers = pytest.mark.skipif(
    shutil.which("redis-server") is None or shutil.which("memcached") is None,
    reason="no redis-server or no memcached: make bench, and make test CI=1, get them",
)
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server: make test gets one")
scenario = pytest.mark.scenario
# Scenarios of one process, which imports what servers need once for all of them.
CACHES = ("bench", "--only", "memory", "--only", "spool", "--only", "stream", "--only", "rights")
SERVERS = ("bench", "--only", "misses", "--only", "hot_key", "--only", "tailing")
DATABASES = ("bench", "--only", "writes", "--only", "journal", "--only", "load", "--only", "master_lost")
# The first waits while its module's scenarios share the machine.
pytestmark = [pytest.mark.e2e, pytest.mark.database, pytest.mark.timeout(1200)]


def of_bench(ran: ToyRun, name: str) -> ScenarioResult:
    return msgspec.json.decode(ran.json, type=Report).scenarios[name]


def check_figures(result: ScenarioResult, *, own_aims: int = 0) -> None:
    """``own_aims``: how many aims the scenario has that are not those of its figures."""
    assert len(result.aims) == sum(len(figure.verdicts) for figure in result.figures) + own_aims
    for figure in result.figures:
        assert figure.operations > 0
        assert len(figure.rounds_per_second) == 3
        assert figure.per_second in figure.rounds_per_second
        assert 0 < figure.p50_us <= figure.p99_us
        assert figure.client_cpu_us > 0


@scenario(*CACHES)
def test_memory_is_measured_by_kind_of_entry_and_hits_by_operation(ran: ToyRun) -> None:
    result = of_bench(ran, "memory")
    assert {"count", "nothing there", "object of 673 bytes"} <= {each.name for each in result.quantities}
    assert all(each.value > 0 for each in result.quantities)
    assert {"hits, packed", "hits, dictionary", "hits, python"} <= set(result.measured)
    assert all(figure > 0 for figure in result.measured["hits, python"].values())


@scenario(*CACHES)
def test_the_spool_is_measured_beside_a_plain_file(ran: ToyRun) -> None:
    result = of_bench(ran, "spool")
    assert [figure.contestant for figure in result.figures] == ["file", "sqlite"] * 3
    check_figures(result)


@scenario(*CACHES)
def test_queries_on_the_stream_are_measured_by_operation_and_at_a_constant_rate(ran: ToyRun) -> None:
    result = of_bench(ran, "stream")
    check_figures(result)
    shapes = [figure.shape.partition(",")[0] for figure in result.figures if figure.contestant == "frames"]
    operations = ("obj_get", "assoc_count", "assoc_range", "assoc_time_range", "assoc_get")
    assert {f"{operation} of the mix" for operation in operations} < set(shapes)
    aims = [verdict.aim for figure in result.figures for verdict in figure.verdicts]
    assert [(aim.measure, aim.bound) for aim in aims] == [("server_cpu_us", 3), ("p99_us", 1_000)]


@scenario(*SERVERS)
def test_misses_are_measured_by_operation_and_in_batches(ran: ToyRun) -> None:
    result = of_bench(ran, "misses")
    assert result.faults == []
    operations = {shape.partition(",")[0] for shape in result.measured}
    assert operations == {"obj_get", "assoc_count", "assoc_range"}
    assert any("batches of 100" in shape for shape in result.measured)
    for found in result.measured.values():
        assert found["queries"] > 0
        assert found["leader_missed"] >= 0.95
    assert len(result.aims) == 2 * len(result.measured)


@scenario(*SERVERS)
def test_a_hot_key_is_measured_with_and_without_clones_and_a_cache_in_the_client(ran: ToyRun) -> None:
    result = of_bench(ran, "hot_key")
    assert list(result.measured) == ["neither", "client cache", "clones", "clones and client cache"]
    for found in result.measured.values():
        assert found["reads_per_second"] > 0
        assert 0 < found["busiest_queries_per_read"] <= found["queries_per_read"]
    assert result.measured["clones"]["busiest_share"] < result.measured["neither"]["busiest_share"]


@scenario(*CACHES)
def test_the_cost_of_rights_is_measured_in_pairs_with_an_interval(ran: ToyRun) -> None:
    result = of_bench(ran, "rights")
    assert [aim.bound for aim in result.aims] == [2, 2]
    for aim, (name, found) in zip(result.aims, list(result.measured.items())[:2], strict=True):
        assert aim.shape.startswith(name)
        assert aim.met == (found["follower_percent"] <= 2)
        assert found["cost_percent_low"] <= found["cost_percent"] <= found["cost_percent_high"]
        assert found["ratio_low"] <= found["ratio"] <= found["ratio_high"]
        assert [len(result.measured["pairs"][name][half]) for half in ("before", "after")] == [3, 3]


HOSTILE = ("headers", "compressed", "critical", "ungreeted", "half-open", "replayed", "forged")


@scenario("hostile", *(option for attack in HOSTILE for option in ("--attack", attack)))
def test_honest_clients_are_measured_beside_each_attack_and_without_it(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    beside = [name for name in found if name.endswith(": attacked")]
    assert len(beside) == len(HOSTILE)
    for name in beside:
        for turns in ("attacked", "undisturbed", "burnt"):
            figures = found[name.replace("attacked", turns)]
            assert figures["miss p99_ms"] >= figures["miss p50_ms"] > 0
            assert figures["server_cores"] > 0
    elsewhere = [name for name in found if name.endswith(": elsewhere")]
    assert elsewhere == ["600 ungreeted connections: elsewhere", "600 half-open TLS connections: elsewhere"]
    assert found[elsewhere[0]]["new connection p99_ms"] > 0
    assert len(found["aims"]) == len(HOSTILE) * (2 * 4 + 1)
    overview = found["tables"][0]
    assert overview["columns"][:2] == ["attack", "formerly"]
    assert [row[0] for row in overview["rows"]] == [name.removesuffix(": attacked") for name in beside]
    assert all(all(row) for row in overview["rows"])


@scenario("whale")
def test_a_list_too_long_for_caches_is_asked_with_and_without_its_filter(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert found["wrong_answers"] == 0
    assert found["before_without_database:ratio"] < 0.1
    assert found["after_without_database:ratio"] > 0.9
    assert 1 < found["filter:bytes_per_edge"] < 3
    assert found["there_direct_without_database:ratio"] < 0.1
    assert found["there_turned_without_database:ratio"] > 0.9


@needs_redis
@scenario("bench", "--only", "follow_check")
def test_follow_checks_are_measured_beside_redis_and_sql_with_and_without_filters(ran: ToyRun) -> None:
    result = of_bench(ran, "follow_check")
    assert {figure.contestant for figure in result.figures} == {"frames", "redis", "sql"}
    assert {"one check, 1 awaiter, 99.5% hits", "one check, 64 awaiters, 90.0% hits"} <= {
        each.shape for each in result.figures
    }
    assert len(result.figures) % 3 == 0, "all three in every shape"
    gate = result.measured["gate"]
    assert gate["filters_would_pay"] == (gate["share_that_filters_would_save"] > 0.1)
    assert 0.9 < result.measured["filtered"]["share"] <= 1, "one of few pairs may be a false positive"
    assert result.measured["celebrity"]["busiest_by_mean"] >= 1
    cached = [300, 1000, 1, 1, 2.5, 1, 2.5, 1, 1, 1, 1, 1]
    bounds = [*cached, 300, 1000, 1, 300, 1000, 1, 1, 1, 1, 1, 1.2, 0.99, 1_000_000, 0.01]
    assert [aim.bound for aim in result.aims] == bounds


@needs_redis
@scenario("bench", "--only", "cached_reads")
def test_cached_reads_are_measured_over_every_transport_beside_redis(ran: ToyRun) -> None:
    report = msgspec.json.decode(ran.json, type=Report)
    result = report.scenarios["cached_reads"]
    check_figures(result)
    contestants = {figure.contestant for figure in result.figures}
    assert contestants == {"frames", "gRPC stream", "gRPC unary", "redis", "redis pipeline"}
    aims = [(verdict.aim.measure, verdict.aim.bound) for figure in result.figures for verdict in figure.verdicts]
    assert sorted(aims) == [
        ("p50_us", 1),
        ("per_second", 0.8),
        ("per_second", 1),
        ("per_second", 3),
        ("per_second", 4),
        ("per_second", 80_000),
    ]
    assert "redis-server" in report.machine.versions


@needs_redis
@scenario("bench", "--only", "sets", "--only", "two_hops", "--only", "feed")
def test_sets_two_hops_and_feeds_are_measured_beside_redis_and_sql(ran: ToyRun) -> None:
    result = of_bench(ran, "sets")
    assert len({figure.shape for figure in result.figures}) == 6
    assert sum(figure.contestant == "redis page" for figure in result.figures) == 6
    assert {figure.contestant for figure in result.figures} == {"tao", "redis page", "redis SINTER", "sql"}
    (asked,) = (figure for figure in result.figures if "asked for" in figure.shape and figure.contestant == "tao")
    aims = [(verdict.aim.measure, verdict.aim.bound) for verdict in asked.verdicts]
    assert aims == [("server_cpu_us", 150), ("p50_us", 1)]
    assert all(figure.operations > 0 for figure in result.figures)
    assert all(value >= 0 for value in result.measured["statements"].values())
    hops = of_bench(ran, "two_hops")
    assert {figure.contestant for figure in hops.figures} == {"tao", "redis page", "sql"}
    assert hops.measured["messages"] == 2
    assert hops.measured["peak_mb"] > 0
    feed = of_bench(ran, "feed")
    pages = [figure for figure in feed.figures if "cached" in figure.shape]
    assert {figure.contestant for figure in pages} == {"tao", "redis page", "sql"}
    assert len({figure.shape for figure in pages}) == 4
    assert {figure.contestant for figure in feed.figures} >= {"pull, cached", "pull, missed", "push"}
    assert all(looks > 0 for looks in feed.measured["break_even"].values())
    assert [each.met for each in feed.aims if "full" in each.aim] == [True]


def peers_here() -> list[str]:
    """The contestants whose server is on this machine."""
    return list(without_absent(PeersOptions())[0].contestants)


@needs_peers
@scenario("peers", "--workload", "linkbench", "--seconds", "0.05", "--plot", "{folder}/plot.png")
def test_a_published_workload_is_measured_beside_what_a_user_would_pick_instead(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    names = peers_here()
    for name in names:
        assert found[name]["throughput_qps"] > 0
        assert found[name]["server_cpu_us_per_query"] >= 0
        assert found[name]["failed"] == 0
        assert all(each["reads"] > 0 for each in found[name]["stale"])
        assert found[name]["stale_reads"] == sum(each["stale"] for each in found[name]["stale"])
        assert all(each["cached"] > 0 for each in found[name]["memory"])
        assert {"throughput", "p50", "p99", "server_cpu", "client_cpu", "total_cpu"} == set(found[name]["ratio"])
    assert (found["tao"]["stale"][0]["within"], found["tao"]["stale"][0]["stale"]) == ("one tier", 0)
    assert len(found["tao"]["stale"]) == 2
    assert 0 < found["tao"]["follower_hit_rate"] <= found["tao"]["hit_rate"] <= 1
    assert 0 < found["redis_lookaside"]["hit_rate"] <= 1
    shapes = {figure["shape"] for figure in found["figures"]}
    assert len(found["figures"]) == len(names) * len(shapes) == len(names) * 5
    assert all(figure["operations"] > 0 for figure in found["figures"])
    for figure in found["figures"]:
        assert sum(figure["cpu_us_by_server"].values()) == pytest.approx(figure["server_cpu_us"])
    # Everybody is asked the same and looks at what was answered: nobody can have seen nothing.
    assert all(figure["touched_bytes"] > 0 for figure in found["figures"])
    throughput, tails, alone, nothing_wrong = 1 + ("postgres" in names), 2 * (len(names) - 1), 1, 2
    assert len(found["aims"]) == throughput + tails + alone + nothing_wrong
    caches = {"tao", "redis_lookaside", "valkey_lookaside", "memcached_lookaside", "memcached_memcachio"}
    assert set(found["cache_programs"]) == caches - {"tao"}
    assert all(each["limits"] is None and each["data_mb"] > 0 for each in found["databases"].values())
    assert set(found["warming"]["hit_rates"]) == caches
    assert {len(rates) for rates in found["warming"]["hit_rates"].values()} == {1}
    assert all(0 <= found[name]["first_read_share"] <= 1 for name in caches)
    assert all(figure["quantiles_ms"]["50"] > 0 for figure in found["figures"])
    # Hits of tao's follower are reported for a sample of requests, in turns that were long enough for one.
    assert any(figure["hit_ms"] for figure in found["figures"] if figure["contestant"] == "tao")
    assert (ran.folder / "plot.png").read_bytes().startswith(b"\x89PNG")


OTHER_WORKLOADS = [
    pytest.param(
        marks=scenario("peers", "--workload", name, "--shape", "many", "--no-stale", "--seconds", "0.05"), id=name
    )
    for name in workload_names()
    if name != "linkbench"
]


@needs_peers
@pytest.mark.parametrize((), OTHER_WORKLOADS)
def test_every_contestant_is_asked_for_the_other_published_workloads(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    names = peers_here()
    assert [(each["contestant"], each["failed"]) for each in found["figures"]] == [(name, {}) for name in names]
    assert all(each["touched_bytes"] > 0 for each in found["figures"])


@scenario("peers", "--only", "mysql_asyncmy", "--only", "mysql", "--only", "tao", "--shape", "one", "--no-stale")
def test_some_contestants_are_measured_in_some_shapes(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    names = ("tao", "mysql", "mysql_asyncmy")
    assert [(each["kind"], each["contestant"]) for each in found["figures"]] == [("one", name) for name in names]
    assert all(each["failed"] == {} for each in found["figures"])
    assert "redis_lookaside" not in found
    assert found["mysql"]["stale_reads"] is None
    assert [each["aim"] for each in found["aims"]] == ["no failed request of tao"]


@scenario("peers", "--only", "tao", "--only", "mysql", "--shape", "many", "--no-stale", "--data-per-pool", "10")
def test_data_that_exceeds_the_buffer_pools_is_measured_under_limits(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert set(found["databases"]) == {"tao", "mysql"}
    for each in found["databases"].values():
        limits = each["limits"]
        # A machine whose control groups cannot be written says so, limit by limit.
        for what, limited in (("memory", limits["memory_mb"]), ("disk", limits["operations_per_second"])):
            assert limited or any(what in reason or "io" in reason for reason in limits["unlimited"])
    assert found["aims"][0]["aim"] == "tao: per_second ≥ 5 × mysql"
    assert all(each["failed"] == {} for each in found["figures"])


@scenario("run", "--workload", "taobench_a", "--rate", "300", "--plot", "{folder}/plot.png")
def test_a_published_workload_says_what_was_asked_and_what_was_generated(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert found["throughput_qps"] > 0
    assert 0 < found["hit_rate"] <= 1
    assert found["wrong_answers"] == 0
    assert found["operations"]["obj_get"]["hit_ms"]["p50"] > 0
    assert found["operations"]["assoc_overwrite"]["all_ms"]["count"] > 0
    assert {"name", "asked", "generated", "sample"} == set(found["generated"][0])
    assert sum(each["hits"] for each in found["by_second"]) > 0
    assert sum(found["misses"].values()) == pytest.approx(1 - found["hit_rate"])
    assert found["cache_bytes"] == int(found["data_bytes"] * 0.2)
    assert sum(found["throughput_by_second"]) > 0
    assert (ran.folder / "plot.png").read_bytes().startswith(b"\x89PNG")


@scenario("herd")
def test_a_herd_is_counted_by_the_database(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    for herd in found["herds"]:
        assert (herd["answered"], herd["failed"], herd["wrong"]) == (found["clients"], {}, 0)
        assert 1 <= herd["database_queries"] <= found["followers"]
        assert herd["leader_fetches"] >= 1
        assert herd["client_cpu_us"] > 0
        assert herd["latency_ms"]["p99"] > 0
    assert set(found["database_queries"]) == {"object", "list"}


@scenario("storm", "--plot", "{folder}/plot.png")
def test_a_tier_restarts_cold_under_load_without_a_failed_request(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert (found["failed"], found["wrong_answers"]) == ({}, 0)
    assert found["tier_away_seconds"] > 0
    assert any(each["at"] > 0 for each in found["timeline"])
    assert found["database_selects_before"] > 0
    assert (ran.folder / "plot.png").read_bytes().startswith(b"\x89PNG")


@scenario("capacity")
def test_capacity_is_measured_and_put_into_the_model(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert {each["batch"] for each in found["by_hit_rate"]} == {1, 20}
    assert all(each["throughput_qps"] > 0 for each in found["by_hit_rate"])
    assert [each["followers"] for each in found["by_followers"]] == [1]
    assert found["by_growth"][0]["growth"] == 1
    assert len({round(each["hit_rate"], 2) for each in found["by_mix"]}) > 1
    assert "the published mix" in found["costs"]
    for each in found["billion_reads"].values():
        assert all(each[role]["servers"] > 0 for role in ("follower", "leader"))


@scenario("locality")
def test_hit_rates_by_assumption_need_no_server(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert all(0 < each["hit_rate"] < 1 for each in found["surface"])


@scenario(*DATABASES)
def test_durable_writes_are_measured_beside_single_transactions(ran: ToyRun) -> None:
    result = of_bench(ran, "writes")
    check_figures(result, own_aims=1)
    assert {figure.contestant for figure in result.figures} == {"tao", "one by one"}


@scenario(*SERVERS)
def test_a_tailers_catching_up_is_measured(ran: ToyRun) -> None:
    result = of_bench(ran, "tailing")
    by_name = {quantity.name: quantity for quantity in result.quantities}
    assert by_name["writes, 64 a transaction"].value > 0
    assert by_name["writes, 1 a transaction, of CPU time"].value > 0
    assert by_name["writes, 64 a transaction, by reference"].value > 0


@scenario("geo", "--rtt-ms", "10")
def test_two_regions_are_measured_a_round_trip_apart(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    latencies = [*found["write_ms"].values(), found["visible_ms"], *found["read_ms"].values()]
    assert all(0 < each["p50"] <= each["p99"] <= each["max"] for each in latencies)
    assert all(each["count"] > 0 for each in latencies)
    assert found["failed"] == {}
    # Whatever the machine: what comes sooner has not crossed the line.
    assert found["write_ms"]["remote_region"]["p50"] >= found["rtt_ms"] == 10
    assert {aim["aim"].split("`")[1] for aim in found["aims"]} >= {"write_ms.remote_region.avg", "visible_ms.p99"}


# Without the parts that start many servers: the tests of e2e lose leaders and masters, too, and they take a minute.
@scenario("scale", "--part", "parse", "--part", "cold start", "--part", "follower")
def test_a_large_installation_is_modelled(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert found["follower"][""]["changes"]["a follower of another region"]["moved"] == 0
    assert 0 < found["follower"][""]["changes"]["a promotion"]["moved"] < found["shape"]["shards"]
    assert {"parsing, CPU s", "cold start of a follower, CPU s"} <= set(found["growth"])
    assert len(found["client"]) == 2


@scenario("converge", "--tailer-kills", "1", "--link-cuts", "1")
def test_writes_in_two_regions_with_a_crash_and_a_cut_leave_no_difference(ran: ToyRun) -> None:
    found = msgspec.json.decode(ran.json)
    assert found["writes"]["issued"] == found["writes"]["acknowledged"] + sum(found["failed"].values()) > 0
    assert (found["tailer_kills"], found["link_cuts"]) == (1, 1)
    assert found["compared"]["cached entries"] > 0
    assert (found["differences"], found["missing_objects"]) == ({}, 0)


@scenario(*DATABASES)
def test_a_graph_is_loaded_and_its_memory_is_reported(ran: ToyRun) -> None:
    result = of_bench(ran, "load")
    by_name = {quantity.name: quantity for quantity in result.quantities}
    assert by_name["undirected edges"].value > 0
    assert any(name.startswith("memory of follower") for name in by_name)


def processes_of(folder: Path) -> list[str]:
    """Command lines that name it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [each for each in found if str(folder) in each and "loadtest" not in each.partition(" -m ")[2].split()[:1]]


@pytest.mark.parametrize(
    ("command", "signals"),
    [
        (("bench", "--only", "writes"), (signal.SIGINT,)),
        (("run",), (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)),
    ],
    ids=["bench", "impatiently"],
)
def test_an_interrupted_run_stops_its_servers_and_says_so(
    command: tuple[str, ...], signals: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    json_file = tmp_path / "found.json"
    with subprocess.Popen(
        [sys.executable, "-m", "loadtest", *command, "--json", str(json_file)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while process.poll() is None and not list(tmp_path.glob("tao-bench-*/*/cluster.json")):
            time.sleep(0.02)
        for number in signals:
            # Each has been heard before the next comes: they are not one.
            process.send_signal(number)
            time.sleep(0.1)
        output, errors = process.communicate(timeout=PATIENT_SECONDS)
    assert process.returncode == 130, errors
    assert "interrupted" in output
    assert list(tmp_path.glob("tao-bench-*")) == []
    assert processes_of(tmp_path) == []
    if command[0] == "bench":
        assert msgspec.json.decode(json_file.read_bytes(), type=Report).interrupted
    else:
        assert "run: interrupted before it had figures" in errors
        assert not json_file.exists()


@scenario(*DATABASES)
def test_journal_accepts_while_the_database_is_away_and_loses_nothing(ran: ToyRun) -> None:
    result = of_bench(ran, "journal")
    assert result.faults == []
    assert len(result.aims) == 14
    for found in (result.measured["copies_1"], result.measured["copies_2"]):
        assert found["accepted_in_outage"] > 0
        assert all(rate > 0 for rate in found["accepts_per_second"].values())


@scenario(*DATABASES)
def test_a_lost_master_is_timed_and_nothing_acknowledged_is_lost(ran: ToyRun) -> None:
    result = of_bench(ran, "master_lost")
    assert result.faults == []
    rounds = result.measured["rounds"]
    assert len({round_["shape"] for round_ in rounds}) == len(rounds) == 2
    for round_ in rounds:
        assert (round_["semi_sync"], round_["lost"]) == (True, 0)
        assert round_["acknowledged"] > 0


@scenario("bench", "--only", "counters")
def test_a_counter_under_load_is_written_once_a_flush_and_ends_as_one_row(ran: ToyRun) -> None:
    result = of_bench(ran, "counters")
    assert result.faults == []
    assert [aim.bound for aim in result.aims] == [2, 0, 2, 2_000, 1]
    hot, seen, rest = (result.measured[name] for name in ("hot", "seen", "rest"))
    assert hot["value"] > 0
    assert hot["writes_per_second"] > 0
    assert (hot["error"], rest["rows"]) == (0, 1)
    assert 0 < seen["p50_ms"] <= seen["p99_ms"]


@scenario("bench", "--only", "states")
def test_a_node_is_archived_and_restored_by_a_worker_and_reads_go_on(ran: ToyRun) -> None:
    result = of_bench(ran, "states")
    assert result.faults == []
    assert [aim.bound for aim in result.aims] == [0.8, 5_000, 5_000, 1.5, 1.5, 1.5, 1.5]
    merges, node, apart = (result.measured[name] for name in ("merges", "node", "node_apart"))
    assert merges["plain_per_second"] > 0
    assert merges["merges_per_second"] > 0
    for name in ("archive", "restore"):
        assert node[f"{name}_per_second"] > 0
        for found in (node, apart):
            assert found[f"{name}_reads_p99_before_us"] > 0
            assert found[f"{name}_reads_p99_during_us"] > 0
