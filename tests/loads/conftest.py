"""Fixtures of the tests that look at what the load tests' scenarios find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.toy_runs import ToyRun, ToyRuns


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "scenario(arguments): of the load test whose outcome the test looks at")


def _scenario_of(item: pytest.Item) -> tuple[str, ...] | None:
    mark = item.get_closest_marker("scenario")
    return None if mark is None else tuple(mark.args)


@pytest.fixture(scope="module")
def toy_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyRuns]:
    """Start the runs that the selected tests of the module need."""
    runs = ToyRuns(tmp_path_factory.mktemp("toy"))
    for item in request.session.items:
        arguments = _scenario_of(item)
        skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
        if arguments is not None and not skipped and item.path == request.path:
            runs.start(arguments)
    yield runs
    runs.close()


@pytest.fixture
def ran(request: pytest.FixtureRequest, toy_runs: ToyRuns) -> ToyRun:
    """The outcome of the test's scenario."""
    arguments = _scenario_of(request.node)
    assert arguments is not None, "say by the mark `scenario` which it is"
    return toy_runs.outcome(arguments)
