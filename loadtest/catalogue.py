"""All scenarios there are. A new one is a module with a summary and a `run`, and a line here."""

from __future__ import annotations

from loadtest import (
    cached_reads,
    converge,
    geo,
    hot_key,
    load,
    locality,
    master_lost,
    memory,
    spooling,
    stream,
    tailing,
    whale,
    writes,
)
from loadtest.capacity import scenario as capacity
from loadtest.cold import herd, storm
from loadtest.peers import scenario as peers
from loadtest.published import run as published
from loadtest.scenario import Registry, Scenario


def all_scenarios() -> Registry:
    """In the order in which they run."""
    return Registry(
        [
            Scenario("cached_reads", cached_reads.SUMMARY, cached_reads.run),
            Scenario("stream", stream.SUMMARY, stream.run),
            Scenario("hot_key", hot_key.SUMMARY, hot_key.run),
            Scenario("memory", memory.SUMMARY, memory.run),
            Scenario("writes", writes.SUMMARY, writes.run),
            Scenario("spool", spooling.SUMMARY, spooling.run),
            Scenario("tailing", tailing.SUMMARY, tailing.run),
            Scenario("geo", geo.SUMMARY, geo.run),
            Scenario("converge", converge.SUMMARY, converge.run),
            Scenario("master_lost", master_lost.SUMMARY, master_lost.run),
            Scenario("whale", whale.SUMMARY, whale.run),
            Scenario("load", load.SUMMARY, load.run),
            Scenario("run", published.SUMMARY, published.run),
            Scenario("peers", peers.SUMMARY, peers.run, peers.MOST_SECONDS),
            Scenario("herd", herd.SUMMARY, herd.run),
            Scenario("storm", storm.SUMMARY, storm.run),
            Scenario("capacity", capacity.SUMMARY, capacity.run),
            Scenario("locality", locality.SUMMARY, locality.run),
        ]
    )
