"""All scenarios. A new one is a module with a `SCENARIO`, and a line here."""

from __future__ import annotations

from loadtest import (
    cached_reads,
    counters,
    feed,
    follow_check,
    geo,
    grow,
    hot_key,
    journal,
    load,
    memory,
    misses,
    move,
    replay,
    rights,
    sets,
    spool,
    states,
    stream,
    tailer_throughput,
    two_hops,
    whale,
    writes,
)
from loadtest.capacity import scenario as capacity
from loadtest.cold import herd, storm
from loadtest.compare import scenario as compare
from loadtest.faults import chaos, converge, cut_journals, etcd_faults, master_lost, recovery, rolling_restart, rotation
from loadtest.hostile import scenario as hostile
from loadtest.peers import scenario as peers
from loadtest.published import run as published
from loadtest.research import locality
from loadtest.scale import scenario as scale
from loadtest.scenario import Scenario

_MODULES = (
    *(cached_reads, follow_check, stream, rights, misses, hot_key, memory, writes, states, counters, journal, spool),
    *(
        tailer_throughput,
        geo,
        converge,
        replay,
        cut_journals,
        master_lost,
        whale,
        sets,
        two_hops,
        feed,
        load,
        published,
        peers,
        herd,
        storm,
    ),
    *(capacity, locality, chaos, etcd_faults, rolling_restart, recovery, rotation, move, scale, hostile, grow, compare),
)


def every_scenario() -> dict[str, Scenario]:
    """Return the scenarios by name, in the order in which they run."""
    return {module.SCENARIO.name: module.SCENARIO for module in _MODULES}


def bench_scenarios() -> dict[str, Scenario]:
    """Return the scenarios that `bench` runs."""
    return {name: each for name, each in every_scenario().items() if each.in_bench}
