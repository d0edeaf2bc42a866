"""The figures of the model, and what follows from them: idle shares, growth, aims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from loadtest.results import Aim, at_least, at_most
from loadtest.scale.cluster import ClusterFigures
from loadtest.scale.in_process import Measured
from loadtest.scale.installation import LOST_LEADER, InstallationShape
from loadtest.scale.roles import RoleFigures
from loadtest.scale.slow_leader import SlowLeaderFigures

DIMENSIONS: Final = ("shards", "servers", "databases")
_LINEAR: Final = 2.3
"""What doubles grows linearly; beyond this factor it does not, whatever the noise."""
_LEAST: Final = 0.01
"""Costs below so many seconds or cores are noise, and grow as noise does."""


@dataclass(slots=True)
class ScaleFigures:
    """What was measured, by the halved dimension where the shape varies; "" is the full shape. A part that was not
    measured is empty."""

    shape: InstallationShape
    parse: dict[str, Measured] = field(default_factory=dict)
    client: list[Measured] = field(default_factory=list)
    """What a client uses to connect, and to take the next topology document."""
    cold_start: dict[str, Measured] = field(default_factory=dict)
    follower: dict[str, RoleFigures] = field(default_factory=dict)
    leader: dict[str, RoleFigures] = field(default_factory=dict)
    slow_leader: SlowLeaderFigures | None = None
    cluster: ClusterFigures | None = None

    def _relays(self, shape: InstallationShape) -> float:
        """Relays a second to one leader of an idle installation."""
        each = self.cluster.relays_per_leader(shape.leaders) if self.cluster else 1.0
        return each * shape.databases

    def _idle_share(self, role: str, dimension: str) -> float:
        shape = self.shape.halved(dimension) if dimension else self.shape
        figures = (self.follower if role == "follower" else self.leader)[dimension]
        proofs = self._relays(shape)
        if role == "follower":
            sent = self.leader[""].deliveries_per_proof if "" in self.leader else 1.0
            proofs *= shape.leaders * sent
        return figures.base_share + proofs * figures.proof_seconds

    def costs(self) -> dict[str, dict[str, float]]:
        """Return each cost by dimension, "" for the full shape, and otherwise with half of it."""
        costs = {
            "parsing, CPU s": {dimension: each.cpu_seconds for dimension, each in self.parse.items()},
            "cold start of a follower, CPU s": {
                dimension: each.cpu_seconds for dimension, each in self.cold_start.items()
            },
        }
        for role, by_dimension in (("follower", self.follower), ("leader", self.leader)):
            costs[f"{role}, idle, cores"] = {each: self._idle_share(role, each) for each in by_dimension}
            costs[f"{role}, memory, MB"] = {each: figures.resident_mb for each, figures in by_dimension.items()}
            costs[f"{role}, {LOST_LEADER.name}, CPU s"] = {
                each: figures.changes[LOST_LEADER.name].cpu_seconds for each, figures in by_dimension.items()
            }
        if self.cluster is not None:
            lost = self.cluster
            scale = lost.shards / 2 / max(1, lost.taken_of_lost_leader)
            halves = {"": lost.takeover_seconds, "shards": scale * lost.taken_of_lost_leader_seconds}
            costs["takeover of a database's shards, s"] = halves
        return {name: each for name, each in costs.items() if "" in each}

    def growth(self) -> dict[str, dict[str, float | None]]:
        """Return by what each cost is multiplied when the dimension doubles."""
        return {
            name: {
                "cost": cost[""],
                **{each: cost[""] / cost[each] if cost.get(each) else None for each in DIMENSIONS},
            }
            for name, cost in self.costs().items()
        }

    def faster_than_linear(self) -> list[str]:
        """Return what grows faster than linearly, and in what."""
        return [
            f"{name.rpartition(',')[0]} grows {ratio:.1f} times when the {dimension} double"
            for name, row in self.growth().items()
            for dimension in DIMENSIONS
            if (ratio := row[dimension]) is not None and ratio > _LINEAR and (row["cost"] or 0) > _LEAST
        ]

    def report(self) -> dict[str, Any]:
        """Return all figures for the JSON. `Any`: nested values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        idle = {
            role: {"idle_cores": self._idle_share(role, ""), "relays_per_second": self._relays(self.shape)}
            for role, figures in (("follower", self.follower), ("leader", self.leader))
            if "" in figures
        }
        return {"growth": self.growth(), "idle": idle, **found, "faster_than_linear": self.faster_than_linear()}

    def aims(self) -> Iterator[Aim]:
        """Yield the aims of the parts that were measured."""
        if self.slow_leader is not None:
            yield at_most("delivery p99 beside a slow leader, as a multiple", self.slow_leader.ratio, 1.2)
        if "shards" in self.follower:
            yield at_most("share of a core of an idle follower", self._idle_share("follower", ""), 0.02)
            half, full = (self.follower[each].proof_seconds for each in ("shards", ""))
            if half:
                yield at_most("cost of a proof with twice the shards, as a multiple", full / half, 1.25)
        if "" in self.cold_start:
            yield at_most("cold start of a follower, seconds of CPU time", self.cold_start[""].cpu_seconds, 0.2)
            yield at_most("cold start of a follower, longest block in ms", 1000 * self.cold_start[""].block_seconds, 20)
        if self.parse:
            yield at_most("parsing, seconds of CPU time", self.parse[""].cpu_seconds, 0.15)
            for what, measured in zip(("connecting", "a newer topology"), self.client, strict=False):
                yield at_most("longest block of a client in ms", 1000 * measured.block_seconds, 10, what)
        for role, figures in (("follower", self.follower), ("leader", self.leader)):
            for name, change in figures[""].changes.items() if "" in figures else ():
                yield at_most(f"shards touched at a {role}, of those that moved", change.touched, change.moved, name)
        if self.cluster is not None:
            yield at_least("statements of an idle leader that were looked at", self.cluster.idle_statements, 1)
            if self.cluster.idle_statements:
                length, slowest = self.cluster.longest_statement_bytes, self.cluster.slowest_statement_ms
                yield at_most("longest statement of an idle leader, bytes", length, 16_384)
                yield at_most("slowest statement of an idle leader, ms", slowest, 20)
            yield at_most("takeover of 1,000 shards at 70 ms a commit, seconds", self.cluster.takeover_seconds, 2)
        yield at_most("costs that grow faster than linearly", len(self.faster_than_linear()), 0)
