"""The options of the scenarios' commands: flag, type, unit, bounds and help, each stated once.

A scenario lists the options that it takes as the fields of a frozen dataclass, with its own defaults:

    @dataclass(frozen=True, kw_only=True)
    class StormOptions(Options):
        nodes: int = NODES.default(10_000)

The command line is made of these fields (`click_options`), and values out of bounds are refused wherever the dataclass
is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import click

from tao.model.errors import OperatorError

_METADATA: Final = "option"
_EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """One option of a command. Numbers lie from ``low`` to ``high``, both included."""

    flag: str
    help: str
    type: Any = float
    """A type of Python or of click."""
    low: float | None = None
    high: float | None = None
    multiple: bool = False
    choices: Sequence[str] = ()
    """The only values allowed."""
    toy: Any = None
    """The most, or for texts the default, at toy size."""

    def default(self, value: Any, **narrower: Any) -> Any:
        """Make the field of a scenario that takes this option; ``narrower`` are attributes of the option that the
        scenario states itself: ``choices``, ``toy``, and a ``help`` where it means something narrower."""
        # Any: the type of the field is the scenario's to declare.
        return field(default=value, metadata={_METADATA: replace(self, **narrower)})

    def check(self, value: Any) -> None:
        """Raise `OperatorError` for a value out of bounds."""
        for each in value if self.multiple else (value,):
            if each is None:
                continue
            if self.low is not None and self.high is not None and not self.low <= each <= self.high:
                raise OperatorError(f"{self.flag} {each:,}: give a number from {self.low:,} to {self.high:,}")
            if self.choices and each not in self.choices:
                raise OperatorError(f"{self.flag} {each}: there is no such value; there are {', '.join(self.choices)}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a scenario's command. Raises `OperatorError` for a value out of its option's bounds."""

    def __post_init__(self) -> None:
        for name, option in self.taken().items():
            option.check(getattr(self, name))

    @classmethod
    def taken(cls) -> dict[str, Option]:
        """Return the option of each field that takes one."""
        return {each.name: each.metadata[_METADATA] for each in fields(cls) if _METADATA in each.metadata}

    def at_toy_size(self) -> Self:
        """Return the same options with little data and short runs."""
        small = {}
        for name, option in self.taken().items():
            if option.toy is not None:
                value = getattr(self, name)
                small[name] = min(value, option.toy) if isinstance(value, int | float) else value or option.toy
        return replace(self, **small)


def click_options(options: type[Options]) -> Callable[[Command], Command]:
    """Return the decorator that gives a command an option for each field that takes one."""

    def decorate(command: Command) -> Command:
        for name, option in reversed(options.taken().items()):
            default, flag = getattr(options, name), option.flag
            if option.type is bool and default is True:
                flag = f"{flag}/{flag.replace('--', '--no-', 1)}"
            command = click.option(
                flag,
                name,
                type=click.Choice(option.choices) if option.choices else option.type,
                is_flag=option.type is bool,
                default=default,
                show_default=default not in (None, "", ()),
                multiple=option.multiple,
                help=option.help,
            )(command)
        return command

    return decorate


ATTACK: Final = Option("--attack", "Make only attacks whose name has this in it; may be repeated.", str, multiple=True)
AWAITERS: Final = Option("--awaiters", "Concurrent requests of each load process.", int, 1, 10_000)
BASE: Final = Option("--base", "Commit to compare with.", str)
CACHE_SHARE: Final = Option("--cache-share", "Size of each cache, as a share of all payload bytes.", float, 0.001, 10)
CLIENTS: Final = Option("--clients", "Clients that ask for the key at once.", int, 10, 200_000)
CONTESTANT: Final = Option("--only", "Measure only this contestant; may be repeated.", str, multiple=True)
CUT_SECONDS: Final = Option("--seconds", "Seconds for which the regions are cut off from each other.", float, 1, 3_600)
DATA_PER_POOL: Final = Option(
    "--data-per-pool",
    "Data on disk, as a multiple of the buffer pool that every database gets, with limits of memory and disk "
    "operations; 0: everything fits, and nothing is limited.",
    float,
    0,
    1_000,
)
DISK_OPERATIONS: Final = Option(
    "--disk-operations", "Reads, and writes, a second of each limited database.", int, 10, 10_000_000
)
EDGES: Final = Option("--edges", "Edges of the list.", int, 25_000, 20_000_000)
EDGES_FILE: Final = Option("--edges", "Edges for `load`.", _EXISTING_FILE)
FAULT: Final = Option("--fault", "Inject only this kind of fault; may be repeated.", str, multiple=True)
FOLLOWERS: Final = Option("--followers", "Followers of the tier that is asked.", int, 1, 16)
FOLLOWERS_PER_LEADER: Final = Option("--followers-per-leader", "Followers of the model for each leader.", int, 1, 100)
FOLLOWER_COUNTS: Final = Option("--followers", "Followers of a tier; may be repeated.", int, 1, 16, multiple=True)
GROWTHS: Final = Option(
    "--growths", "Multiple of the data; may be repeated, in ascending order.", int, 1, 1_000, multiple=True
)
LINK_CUTS: Final = Option("--link-cuts", "Times that the link between the regions is cut and healed.", int, 0, 1_000)
LOGS: Final = Option("--logs", "Copy the servers' logs to this folder.", click.Path(file_okay=False, path_type=Path))
MODEL_PART: Final = Option("--part", "Measure only this part of the model; may be repeated.", str, multiple=True)
NODES: Final = Option("--nodes", "Objects of the graph.", int, 100, 5_000_000)
OBJECTS: Final = Option("--objects", "Objects before the data grows.", int, 100, 1_000_000)
OBJECTS_FILE: Final = Option("--objects", "Objects for `load`.", _EXISTING_FILE)
OPERATIONS: Final = Option(
    "--operations", "Operations per second on edges with states, nodes and jobs, of all clients.", float, 0.001, 2_000
)
OPERATION_COUNT: Final = Option("--operations", "Operations on edges with states.", int, 10, 10_000_000)
OVERLAPPING: Final = Option("--overlapping", "Inject two faults at a time.", bool)
PAIRS: Final = Option("--pairs", "Pairs of turns of each shape of load.", int, 3, 1_000)
PROCESSES: Final = Option("--processes", "Load processes.", int, 1, 64)
RATE: Final = Option("--rate", "Requests per second of an open loop.", float, 0, 10_000_000)
MEGABYTES: Final = Option("--megabytes", "Megabytes of data in the large shard.", int, 1, 100_000)
MOVED_SHARDS: Final = Option("--moved-shards", "Small shards that move under faults.", int, 1, 512)
READS: Final = Option("--reads", "Reads per second of all clients together.", float, 0.001, 50_000)
REGIONS: Final = Option("--regions", "Regions of the cluster.", int, 1, 2)
REPETITIONS: Final = Option("--repetitions", "Crashes of each kind.", int, 1, 100)
REQUESTS: Final = Option("--requests", "Requests of each point.", int, 2, 100_000_000)
RESTART_COMMAND: Final = Option(
    "--restart-command", "With --topology: the command that restarts every follower of the tier that is asked.", str
)
ROLE: Final = Option("--role", "Restart only servers of this role; may be repeated.", str, multiple=True)
ROUNDS: Final = Option("--rounds", "Rounds for objects, and as many for lists.", int, 1, 50)
RTT_MS: Final = Option("--rtt-ms", "Round trip between the regions, in milliseconds.", float, 0.001, 1_000)
SCENARIO: Final = Option("--only", "Compare only this scenario of `bench`; may be repeated.", str, multiple=True)
SECONDS: Final = Option("--seconds", "Measured time in seconds.", float, 0.001, 3_600)
SEED: Final = Option("--seed", "Seed of everything that is drawn at random.", int)
SESSIONS: Final = Option("--sessions", "SDK clients of each load process.", int, 1, 1_000)
SHARED_CORES: Final = Option("--shared-cores", "Let the attacker use the cores of servers and clients, too.", bool)
SHAPE: Final = Option("--shape", "Measure only this shape of load; may be repeated.", str, multiple=True)
SHARDS: Final = Option("--shards", "Shards of the scenario's own cluster.", int, 1, 1024)
STALE: Final = Option("--stale", "Look for stale reads after the measurement.", bool)
TAILER_KILLS: Final = Option("--tailer-kills", "Tailers that are killed and started again.", int, 0, 1_000)
TOPOLOGY: Final = Option(
    "--topology",
    "Topology file of a running cluster with the types of loadtest/schema.yaml, to be asked.",
    _EXISTING_FILE,
)
PUBLISHED_TOPOLOGY: Final = Option(
    "--topology",
    "Topology file of a running cluster with the types of loadtest/published/schema.yaml, to be asked.",
    _EXISTING_FILE,
)
WARM_REQUESTS: Final = Option("--warm-requests", "Most requests that warm each cache.", int, 0, 100_000_000)
WARM_SECONDS: Final = Option("--warm-seconds", "Seconds of warming before the measurement.", float, 0, 3_600)
BEFORE_SECONDS: Final = Option("--before-seconds", "Measured seconds before the restart.", float, 1, 3_600)
AFTER_SECONDS: Final = Option("--after-seconds", "Measured seconds after the restart begins.", float, 1, 3_600)
WORKLOAD: Final = Option("--workload", "Published workload to ask.", str)
WRITES: Final = Option("--writes", "Writes per second of all clients together.", float, 0.001, 5_000)
WRITE_COUNT: Final = Option("--writes", "Random writes in all.", int, 0, 10_000_000)
