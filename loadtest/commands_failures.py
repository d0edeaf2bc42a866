"""The commands whose scenarios break things, or restart them: `chaos`, `rolling`, `recovery`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import click

from loadtest import recovery, rolling
from loadtest.chaos import scenario as chaos
from loadtest.chaos.load import Rates
from loadtest.chaos.scenario import ChaosSettings
from loadtest.chaos.striking import all_faults
from loadtest.commands_capacity import plot_option
from loadtest.plotted import plotted
from loadtest.recovery import RecoverySettings
from loadtest.rolling import RollingSettings
from loadtest.scenario import Scenario
from tao.model.errors import OperatorError

DEFAULT_CHAOS: Final = ChaosSettings()
_AROUND_SECONDS: Final = 600.0
"""For what comes before the load and after it: the cluster's start, the last fault's healing, the comparison."""
_ROLLING_SECONDS: Final = 1_800.0
"""Twenty-two servers, each within the minute that it may take to be well again on a busy machine, and some."""
RunAlone = Callable[[Scenario, bool, Path | None], None]
"""Run one scenario, at toy size or not, and write its figures into a file."""

_json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here, too."
)
_toy_option = click.option("--toy", is_flag=True, help="Few servers, few faults: does everything still work?")
_logs_option = click.option(
    "--logs", type=click.Path(file_okay=False, path_type=Path), help="Leave the servers' logs there."
)


def failure_commands(run_alone: RunAlone) -> list[click.Command]:
    """To be added to the group of commands."""

    @click.command("chaos")
    @click.option("--seconds", type=float, default=DEFAULT_CHAOS.seconds, show_default=True, help="Of load.")
    @click.option("--seed", type=int, default=1, show_default=True, help="Of load, faults and their moments.")
    @click.option("--fault", "kinds", type=click.Choice(sorted(all_faults())), multiple=True, help="Only these.")
    @click.option("--overlapping", is_flag=True, help="Two faults at a time.")
    @click.option("--reads", type=float, default=DEFAULT_CHAOS.rates.reads, show_default=True, help="A second.")
    @click.option("--writes", type=float, default=DEFAULT_CHAOS.rates.writes, show_default=True, help="A second.")
    @_logs_option
    @_toy_option
    @_json_option
    def chaos_command(
        seconds: float,
        seed: int,
        kinds: tuple[str, ...],
        overlapping: bool,
        reads: float,
        writes: float,
        logs: Path | None,
        toy: bool,
        json_file: Path | None,
    ) -> None:
        """Two regions under load while one thing after the other fails; nothing acknowledged may be lost, no read
        wrong, and nothing differ afterwards.

        The exit status is 1 when something is, or when reads fail that no fault explains."""
        try:
            wanted = ChaosSettings(seconds, seed, overlapping, kinds, Rates(reads, writes), logs)
        except OperatorError as error:
            raise click.UsageError(error.message) from error
        job, most_seconds = partial(chaos.run, wanted=wanted), seconds + _AROUND_SECONDS
        run_alone(Scenario("chaos", chaos.SUMMARY, job, most_seconds), toy, json_file)

    @click.command("rolling")
    @click.option("--seed", type=int, default=1, show_default=True, help="Of the load.")
    @click.option("--reads", type=float, default=DEFAULT_CHAOS.rates.reads, show_default=True, help="A second.")
    @click.option("--writes", type=float, default=DEFAULT_CHAOS.rates.writes, show_default=True, help="A second.")
    @click.option("--role", "roles", type=click.Choice(rolling.ROLES), multiple=True, help="Only these servers.")
    @_logs_option
    @_toy_option
    @_json_option
    def rolling_command(
        seed: int,
        reads: float,
        writes: float,
        roles: tuple[str, ...],
        logs: Path | None,
        toy: bool,
        json_file: Path | None,
    ) -> None:
        """Every server of two regions is drained, restarted and put back in turn, under load.

        The exit status is 1 when any request fails, or anything is lost or stale."""
        wanted = RollingSettings(seed, Rates(reads, writes), roles, logs)
        job = partial(rolling.run, wanted=wanted)
        run_alone(Scenario("rolling", rolling.SUMMARY, job, _ROLLING_SECONDS), toy, json_file)

    @click.command("recovery")
    @click.option("--repetitions", type=int, default=5, show_default=True, help="Crashes of each kind.")
    @click.option("--seed", type=int, default=1, show_default=True, help="Of the victims.")
    @_toy_option
    @_json_option
    @plot_option
    def recovery_command(
        repetitions: int, seed: int, toy: bool, json_file: Path | None, plot_file: Path | None
    ) -> None:
        """Seconds from the crash of a follower, leader, replica, tailer or master to what clients had before it."""
        try:
            wanted = RecoverySettings(repetitions, seed)
        except OperatorError as error:
            raise click.UsageError(error.message) from error
        job = plotted(partial(recovery.run, wanted=wanted), "recovery", plot_file)
        run_alone(Scenario("recovery", recovery.SUMMARY, job), toy, json_file)

    return [chaos_command, rolling_command, recovery_command]
