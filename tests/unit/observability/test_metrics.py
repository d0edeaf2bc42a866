"""Plain attributes in, Prometheus text out."""

from __future__ import annotations

import gc
import json
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tao.observability.metrics import Histogram, Metrics


def made() -> Metrics:
    return Metrics(role="follower", server="f-1", process=False)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (
            sample.name,
            tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("role", "server"))),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_counter_is_an_attribute_that_the_scrape_reads() -> None:
    metrics = made()
    gets = metrics.counter("requests_total", "Requests.", op="obj_get")
    metrics.counter("requests_total", "Requests.", op="assoc_range").value += 2
    gets.value += 1
    gets.value += 1
    text = metrics.render().decode()
    assert 'tao_requests_total{op="obj_get",role="follower",server="f-1"} 2.0' in text
    assert "# TYPE tao_requests_total counter" in text
    assert samples(metrics)["tao_requests_total", (("op", "assoc_range"),)] == 2


def test_a_gauge_is_read_when_scraped_and_a_family_splits_by_one_label() -> None:
    metrics = made()
    depth = [1.0]
    metrics.gauge("queue_requests", "Waiting.", lambda: depth[0])
    metrics.gauge_family("arena_bytes", "Held.", "arena", lambda: {"small": 5, "large": 7}, kind="lists")
    metrics.gauge_family("evicted_total", "Evicted.", "arena", lambda: {"small": 1})
    depth[0] = 9
    found = samples(metrics)
    assert found["tao_queue_requests", ()] == 9
    assert found["tao_arena_bytes", (("arena", "large"), ("kind", "lists"))] == 7
    assert found["tao_evicted_total", (("arena", "small"),)] == 1
    assert "# TYPE tao_evicted_total counter" in metrics.render().decode()


def test_a_histogram_counts_by_upper_bound_cumulatively() -> None:
    metrics = made()
    waits = metrics.histogram("wait_seconds", "Waited.", (0.1, 1.0), op="x")
    for value in (0.05, 0.1, 0.5, 3.0):
        waits.observe(value)
    found = samples(metrics)
    buckets = [found["tao_wait_seconds_bucket", (("le", le), ("op", "x"))] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert found["tao_wait_seconds_count", (("op", "x"),)] == 4
    assert found["tao_wait_seconds_sum", (("op", "x"),)] == pytest.approx(3.65)


def test_quantiles_are_bucket_bounds() -> None:
    waits = Histogram((0.1, 1.0))
    assert waits.quantile(0.5) == 0
    for value in (0.05, 0.06, 0.5, 3.0):
        waits.observe(value)
    assert [waits.quantile(part) for part in (0.5, 0.75, 0.99)] == [0.1, 1.0, 1.0]


def test_the_snapshot_is_plain_data_without_constant_labels() -> None:
    metrics = made()
    metrics.counter("requests_total", "Requests.", op="obj_get").value += 3
    metrics.histogram("wait_seconds", "Waited.", (0.1, 1.0)).observe(0.05)
    found = json.loads(json.dumps(metrics.snapshot()))
    assert found["tao_requests_total"] == [{"labels": {"op": "obj_get"}, "value": 3}]
    (wait,) = found["tao_wait_seconds"]
    assert (wait["count"], wait["p50"], wait["p99"]) == (1, 0.1, 0.1)


@pytest.mark.parametrize("name", ["requests", "requests_count", "wait"])
def test_a_name_without_its_unit_is_refused(name: str) -> None:
    metrics = made()
    with pytest.raises(ValueError, match=name):
        metrics.counter(name, "")
    with pytest.raises(ValueError, match=name):
        metrics.gauge(name, "", lambda: 0)
    with pytest.raises(ValueError, match=name):
        metrics.histogram(name, "")


def test_a_second_instrument_of_one_name_must_differ_in_labels_and_agree_in_kind() -> None:
    metrics = made()
    metrics.counter("requests_total", "", op="a")
    metrics.gauge_family("arena_bytes", "", "arena", dict)
    with pytest.raises(ValueError, match="there already"):
        metrics.counter("requests_total", "", op="a")
    with pytest.raises(ValueError, match="labels"):
        metrics.counter("requests_total", "", tier="a")
    with pytest.raises(ValueError, match="there already"):
        metrics.gauge_family("arena_bytes", "", "arena", dict)
    with pytest.raises(ValueError, match="grow"):
        metrics.histogram("wait_seconds", "", (1.0, 0.5))


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    one, other = made(), made()
    one.counter("requests_total", "").value += 1
    assert b"requests" not in other.render()


def test_the_process_itself_is_measured_when_asked_for() -> None:
    assert b"process_resident_memory_bytes" in Metrics(role="leader", server="l").render()


def test_the_pauses_of_the_garbage_collector_are_recorded_as_long_as_the_metrics_live() -> None:
    gc.collect()  # metrics of other tests
    callbacks = len(gc.callbacks)
    metrics = Metrics(role="follower", server="f-1")
    gc.collect()
    (pauses,) = metrics.snapshot()["tao_gc_pause_seconds"]
    assert pauses["count"] == 1
    assert cast(float, pauses["sum"]) > 0
    del metrics
    gc.collect()
    assert len(gc.callbacks) == callbacks
