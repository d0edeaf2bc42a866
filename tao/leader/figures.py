"""A leader's own metrics; what followers and leaders have alike is `tao.serving.figures`' affair."""

from __future__ import annotations

from collections.abc import Sized
from functools import partial

from tao.leader.inverse_path import InversePath
from tao.leader.ownership import Ownership
from tao.leader.publishing import Publishing
from tao.leader.relay_path import RelayPath
from tao.leader.touch_path import TouchPath
from tao.leader.write_path import WritePath
from tao.observability.metrics import Metrics
from tao.peers.links import Links


def register_figures(
    metrics: Metrics,
    ownership: Ownership,
    writes: WritePath,
    inverses: InversePath,
    relays: RelayPath,
    touches: TouchPath,
    publishing: Publishing,
    links: Links,
    tasks: Sized,
) -> None:
    """Have them collected with each scrape."""
    publishing.register(metrics)
    metrics.gauge_family(
        "writes_total",
        "Writes of this leader's shards, by outcome.",
        "outcome",
        lambda: {
            "committed": writes.committed_writes,
            "failed": writes.failed_writes,
            "unknown": writes.unknown_outcomes,
        },
    )
    metrics.gauge_family(
        "inverses_total",
        "Inverse edges that could not be written at once, and those settled later.",
        "event",
        lambda: {"left_pending": inverses.left_pending, "settled_later": inverses.settled_later},
    )
    metrics.gauge_family(
        "transactions_total",
        "Write transactions committed.",
        "outcome",
        lambda: {"committed": writes.committed_transactions},
    )
    metrics.gauge_family(
        "foreign_keys_total",
        "Keys that someone else changed: dropped from the caches, given a new version, told again for want of one.",
        "event",
        lambda: {"dropped": relays.dropped, "touched": touches.keys, "failed": touches.failed},
    )
    metrics.gauge("waiting_writes", "Writes queued or in a transaction.", lambda: writes.waiting)
    metrics.gauge("owned_shards", "Shards that this leader owns.", lambda: len(ownership.owned))
    for name, help_text in (
        ("log_messages", "Messages kept for subscribers that come back."),
        ("log_bytes", "Estimated memory of those."),
        ("owed_shards", "Subscribed shards with messages not delivered yet."),
        ("unacknowledged_bytes", "Sent to subscribers and not acknowledged."),
    ):
        metrics.gauge(f"delivery_{name}", help_text, partial(publishing.figure, name))
    metrics.gauge("inverse_pairs", "Pairs whose edges are being written at both ends.", lambda: inverses.pairs_held)
    metrics.gauge_family(
        "link_failures",
        "Failed attempts to reach a server since it answered last, by server.",
        "peer",
        links.failures,
    )
    metrics.gauge("running_tasks", "Tasks under way.", lambda: len(tasks))


def summary_of_writes(writes: WritePath, inverses: InversePath) -> dict[str, float]:
    """For `/stats`."""
    return {
        "committed": writes.committed_writes,
        "transactions": writes.committed_transactions,
        "failed": writes.failed_writes,
        "unknown": writes.unknown_outcomes,
        "waiting": writes.waiting,
        "inverses_left_pending": inverses.left_pending,
        "inverses_settled_later": inverses.settled_later,
    }
