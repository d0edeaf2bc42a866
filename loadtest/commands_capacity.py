"""Commands about load and size, `herd`, `storm`, `capacity`, `locality`; and `report`, which makes a note of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from loadtest import locality
from loadtest.capacity import scenario as capacity
from loadtest.capacity.scenario import CapacitySettings
from loadtest.cold import herd, storm
from loadtest.cold.herd import HerdSettings
from loadtest.cold.storm import StormSettings
from loadtest.locality import LocalitySettings
from loadtest.plotted import plotted
from loadtest.scenario import Scenario
from tao.model.errors import OperatorError

DEFAULT_HERD: Final = HerdSettings()
DEFAULT_STORM: Final = StormSettings()
DEFAULT_CAPACITY: Final = CapacitySettings()
DEFAULT_LOCALITY: Final = LocalitySettings()
Settings = TypeVar("Settings")
Command = TypeVar("Command", bound=Callable[..., None])
RunAlone = Callable[[Scenario, bool, Path | None], None]
"""Run one scenario, at toy size or not, and write its figures into a file."""

_json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here, too."
)
_toy_option = click.option("--toy", is_flag=True, help="Little data, short rounds: does everything still work?")
plot_option = click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw it into this PNG."
)


def _topology_option(schema: str) -> Callable[[Command], Command]:
    return click.option(
        "--topology",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"Of a running cluster with the types of {schema}: ask that one.",
    )


topology_option = _topology_option("loadtest/published/schema.yaml")
plain_topology_option = _topology_option("loadtest/schema.yaml")


def capacity_commands(run_alone: RunAlone) -> list[click.Command]:
    """To be added to the group of commands."""

    @click.command("herd")
    @click.option("--clients", type=int, default=DEFAULT_HERD.clients, show_default=True, help="That ask at once.")
    @click.option("--processes", type=int, default=DEFAULT_HERD.processes, show_default=True, help="They are in.")
    @click.option("--sessions", type=int, default=DEFAULT_HERD.sessions, show_default=True, help="Of each process.")
    @click.option("--rounds", type=int, default=DEFAULT_HERD.rounds, show_default=True, help="Of objects, of lists.")
    @click.option("--seed", type=int, default=1, show_default=True, help="Of the data.")
    @topology_option
    @_toy_option
    @_json_option
    @plot_option
    def herd_command(toy: bool, json_file: Path | None, plot_file: Path | None, **wanted: Any) -> None:
        """Many clients miss one key at once: what reaches the database, and how long they wait.

        A running cluster is told to drop the types of the test in the shards of the keys. The exit status is 1 when a
        read fails or is wrong."""
        # Any: click's values, which `HerdSettings` checks.
        job = plotted(partial(herd.run, wanted=_checked(HerdSettings, wanted)), "herd", plot_file)
        run_alone(Scenario("herd", herd.SUMMARY, job), toy, json_file)

    @click.command("storm")
    @click.option("--nodes", type=int, default=DEFAULT_STORM.nodes, show_default=True, help="Objects of the graph.")
    @click.option(
        "--cache-share", type=float, default=DEFAULT_STORM.cache_share, show_default=True, help="Of the data."
    )
    @click.option("--rate", type=float, default=DEFAULT_STORM.rate, show_default=True, help="Requests a second.")
    @click.option("--warm-seconds", type=float, default=DEFAULT_STORM.warm_seconds, show_default=True)
    @click.option("--before-seconds", type=float, default=DEFAULT_STORM.before_seconds, show_default=True)
    @click.option("--after-seconds", type=float, default=DEFAULT_STORM.after_seconds, show_default=True)
    @click.option("--seed", type=int, default=1, show_default=True, help="Of the graph and the requests.")
    @topology_option
    @click.option("--restart-command", default="", help="With --topology: restarts every follower of the asked tier.")
    @_toy_option
    @_json_option
    @plot_option
    def storm_command(toy: bool, json_file: Path | None, plot_file: Path | None, **wanted: Any) -> None:
        """A tier restarts cold under a published workload that waits for nobody.

        The first tier of a running cluster is restarted by --restart-command, or by its operator when the run says
        that it is time, within --after-seconds. The exit status is 1 when a request fails."""
        # Any: click's values, which `StormSettings` checks.
        storm_settings = _checked(StormSettings, wanted)
        job = partial(storm.run, wanted=storm_settings, plot_file=plot_file)
        run_alone(Scenario("storm", storm.SUMMARY, job, storm_settings.most_seconds), toy, json_file)

    @click.command("capacity")
    @click.option("--objects", type=int, default=DEFAULT_CAPACITY.objects, show_default=True, help="At ×1.")
    @click.option(
        "--growths", type=int, default=DEFAULT_CAPACITY.growths, show_default=True, multiple=True, help="× so many."
    )
    @click.option(
        "--followers", type=int, default=DEFAULT_CAPACITY.followers, show_default=True, multiple=True, help="Of a tier."
    )
    @click.option("--awaiters", type=int, default=DEFAULT_CAPACITY.awaiters, show_default=True)
    @click.option("--seconds", type=float, default=DEFAULT_CAPACITY.seconds, show_default=True, help="Of each turn.")
    @_toy_option
    @_json_option
    @plot_option
    def capacity_command(toy: bool, json_file: Path | None, plot_file: Path | None, **wanted: Any) -> None:
        """One follower by hit rate, more followers, more data, and a model of a billion reads a second."""
        # Any: click's values, which `CapacitySettings` checks.
        job = partial(capacity.run, wanted=_checked(CapacitySettings, wanted), plot_file=plot_file)
        run_alone(Scenario("capacity", capacity.SUMMARY, job), toy, json_file)

    @click.command("locality")
    @click.option("--nodes", type=int, default=DEFAULT_LOCALITY.nodes, show_default=True, help="Objects of the graph.")
    @click.option("--requests", type=int, default=DEFAULT_LOCALITY.requests, show_default=True, help="Of each point.")
    @_toy_option
    @_json_option
    @plot_option
    def locality_command(toy: bool, json_file: Path | None, plot_file: Path | None, **wanted: int) -> None:
        """The hit rate that an eviction policy can have, by what nobody has published."""
        job = partial(locality.run, wanted=_checked(LocalitySettings, wanted), plot_file=plot_file)
        run_alone(Scenario("locality", locality.SUMMARY, job), toy, json_file)

    return [herd_command, storm_command, capacity_command, locality_command, report_command]


@click.command("report")
@click.option(
    "--from",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Where the scenarios' JSON files lie, each named after its scenario.",
)
@click.option("--out", "file", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Markdown.")
@click.option("--remark", default="", help="On the machine or the occasion, for the head of the note.")
def report_command(folder: Path, file: Path, remark: str) -> None:
    """Make one note, with plots in a folder beside it, of the JSON files that the scenarios have written."""
    # Loaded here: drawing takes a second, which no other command need wait for.
    from loadtest.report.note import write_note

    try:
        missing = write_note(folder, file, remark)
    except OperatorError as error:
        raise click.ClickException(error.message) from error
    print(f"{file}: written" + (f"; not measured: {', '.join(missing)}" if missing else ""))


def _checked(settings: Callable[..., Settings], wanted: dict[str, Any]) -> Settings:
    try:
        return settings(**wanted)
    except OperatorError as error:
        raise click.UsageError(error.message) from error
