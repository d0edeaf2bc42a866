"""Metrics of a web application's use of the graph, as Prometheus text, without a dependency.

Each worker process counts for itself, and a scrape reaches one of them. So every series has a label ``worker``, the
id of the process: the series of two workers never mix, and a sum over ``rate`` is right for the workers scraped. An
application that needs all workers in one scrape passes ``WebSettings.observe`` on to a library that shares its counters
between processes.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final

from tao.client.diagnostics import ClientStats

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"

_HELP: Final = {
    "tao_web_requests_total": "Requests answered, by status.",
    "tao_web_request_seconds_total": "Seconds from the request to the head of its answer, summed up.",
    "tao_web_errors_total": "Requests answered with an error of the SDK, by its reason.",
    "tao_web_tokens_total": "Write tokens: carried by a request, set by an answer, rejected (forged or too old), lost.",
    "tao_client_servers": "Followers that this process has asked, by health.",
    "tao_client_topology_version": "Version of the topology by which requests are routed.",
    **{
        f"tao_client_{each.name}_total": f"`ClientStats.{each.name}` of this process."
        for each in fields(ClientStats)
        if each.name != "topology_version"
    },
}
METRICS: Final = frozenset(_HELP)
"""The names of all metrics."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One answered request, for `WebSettings.observe`."""

    status: int
    seconds: float
    """Time from the request to the head of its answer."""

    reason: str
    """The reason of the error of the SDK that was answered, or ""."""

    token_carried: bool
    """The request carried a valid write token."""

    token_set: bool
    """The answer sets a write token."""


class WebMetrics:
    """Counters of one process. Any thread may use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._seconds = 0.0

    def count(self, record: RequestRecord) -> None:
        """Count one request."""
        with self._lock:
            self._counts["tao_web_requests_total", "status", str(record.status)] += 1
            self._seconds += record.seconds
            if record.reason:
                self._counts["tao_web_errors_total", "reason", record.reason] += 1

    def count_token(self, event: str) -> None:
        """Count a token: ``carried``, ``set``, ``rejected`` or ``lost``."""
        with self._lock:
            self._counts["tao_web_tokens_total", "event", event] += 1

    def text(self, stats: ClientStats | None, servers: Mapping[str, Mapping[str, object]]) -> str:
        """Return all metrics as Prometheus text. ``stats`` is None while the graph is not open."""
        with self._lock:
            counts, seconds = dict(self._counts), self._seconds
        for health, number in Counter(str(each["health"]) for each in servers.values()).items():
            counts["tao_client_servers", "health", health] = number
        series = [(name, f'{label}="{value}",', str(number)) for (name, label, value), number in counts.items()]
        series.append(("tao_web_request_seconds_total", "", f"{seconds:.6f}"))
        if stats is not None:
            series += [(name, "", str(value)) for name, value in _client_figures(stats)]
        lines, before = [], ""
        for name, labels, value in sorted(series):
            if name != before:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} {kind}"]
            before = name
            lines.append(f'{name}{{{labels}worker="{os.getpid()}"}} {value}')
        return "\n".join(lines) + "\n"


def _client_figures(stats: ClientStats) -> Iterator[tuple[str, int]]:
    for each in fields(stats):
        suffix = "" if each.name == "topology_version" else "_total"
        yield f"tao_client_{each.name}{suffix}", getattr(stats, each.name)
