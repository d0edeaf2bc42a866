"""The development cluster of a demonstration: in a folder of its own, which goes with it, whatever the end: success,
failure or Ctrl-C."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tao.cli.waiting import WaitDisplay
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.schema_copy import example_schema_file


@asynccontextmanager
async def private_cluster(
    shape: Shape, *, buffer_pool_mb: int = 64, rtt_ms: float | None = None
) -> AsyncIterator[tuple[DevCluster, Path]]:
    """Start a cluster with the example schema; gives it and a folder for other files. Raises `OperatorError` when it
    cannot be started."""
    display = WaitDisplay()
    # Short names: the path of a Unix socket in it may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="tao-") as made:
        settings = ClusterSettings(
            state_dir=Path(made) / "c",
            shape=shape,
            schema_file=example_schema_file(),
            buffer_pool_mb=buffer_pool_mb,
            rtt_ms=rtt_ms,
            log_level="warning",
        )
        cluster = DevCluster(settings, display.show)
        with display:
            await cluster.start()
        try:
            yield cluster, Path(made)
        finally:
            with display:
                await cluster.stop()
