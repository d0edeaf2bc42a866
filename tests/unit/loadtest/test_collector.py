"""Load processes collect garbage as the product's servers do."""

import gc
from collections.abc import Iterator

import pytest

from loadtest.collector import settle_collector
from tao.runtime.process import ProcessSettings


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_what_is_there_is_not_looked_at_again_and_what_comes_as_rarely_as_in_a_server() -> None:
    kept: list[object] = []
    settle_collector()
    servers = ProcessSettings()
    assert gc.get_threshold() == (servers.gc_allocations, servers.gc_generation_ratio, servers.gc_generation_ratio)
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())
