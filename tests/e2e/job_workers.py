"""Worker processes of a cluster, with an installed package that has functions for jobs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from tao.devcluster.cluster import DevCluster


def install(folder: Path, module: str, text: str, points: Mapping[str, str]) -> None:
    """Install a package with entry points into a folder, as pip does."""
    (folder / f"{module}.py").write_text(text)
    installed = folder / f"{module}-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    lines = "".join(f"{name} = {place}\n" for name, place in points.items())
    (installed / "entry_points.txt").write_text(f"[tao.jobs]\n{lines}")


class Workers:
    """Worker processes, one after the other or side by side."""

    def __init__(self, cluster: DevCluster, package: Path, page_edges: int, lease_seconds: float) -> None:
        self._cluster = cluster
        self._package = package
        self._page_edges = page_edges
        self._lease_seconds = lease_seconds
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, region: str = "local") -> asyncio.subprocess.Process:
        name = f"worker-{len(self.processes) + 1}"
        settings = {
            "name": name,
            "region": region,
            "topology_file": str(self._cluster.topology_path),
            "admin": "127.0.0.1:0",
            "runner": {
                "lease_seconds": self._lease_seconds,
                "poll_seconds": 0.1,
                "page_edges": self._page_edges,
                "edges_per_second": 1e6,
            },
        }
        file = self._package / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings))
        with (self._package / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tao.cli", "worker", "--settings", str(file)),
                env={**os.environ, "PYTHONPATH": str(self._package)},
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    async def stop(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.terminate()
        for process in self.processes:
            await process.wait()


@asynccontextmanager
async def workers_of(
    cluster: DevCluster, package: Path, page_edges: int, lease_seconds: float = 2.0
) -> AsyncIterator[Workers]:
    """Yield the workers, none at first, and stop them at the end. A page has to be done in half a lease."""
    workers = Workers(cluster, package, page_edges, lease_seconds)
    try:
        yield workers
    finally:
        await workers.stop()
