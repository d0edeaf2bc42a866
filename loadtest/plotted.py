"""A scenario whose figures are drawn as well, once it is over: the picture that the note of results has of it."""

from __future__ import annotations

from pathlib import Path

from loadtest.results import ScenarioResult
from loadtest.scenario import BenchSettings, Progress, Run


def plotted(run: Run, name: str, plot_file: Path | None) -> Run:
    """The same, drawn into a PNG when there is to be one. ``name``: `geo`, `herd`, `whale` or
    `recovery`."""
    if plot_file is None:
        return run

    async def drawn(settings: BenchSettings, progress: Progress) -> ScenarioResult:
        result = await run(settings, progress)
        # Loaded here: it takes a second, which a run without a plot need not wait for.
        from loadtest.report import plots

        draw = {
            "geo": plots.draw_geo,
            "herd": plots.draw_herd,
            "whale": plots.draw_whale,
            "recovery": plots.draw_recovery,
        }[name]
        draw(result.measured, plot_file)
        return result

    return drawn
