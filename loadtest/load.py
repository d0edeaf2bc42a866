"""Scenario `load`: a whole social graph through `tao load`, as an operator would load it; rate and memory.

Without files a graph is generated (`tao.demonstration.graph_files`): pages that like each other, few of them much
liked. Its columns are those of the public page graph that `load` accepts as well.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec

from loadtest.commands import TAO, run_command
from loadtest.results import Quantity, ScenarioResult, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.demonstration.graph_files import ATYPE, FIELDS, OTYPE, write_graph
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings
from tao.model.errors import OperatorError

_OBJECTS: Final = 20_000
_EDGES_PER_OBJECT: Final = 8
_TOY_OBJECTS: Final = 200
_COLUMNS: Final = [part for column, field in FIELDS.items() for part in ("--map", f"{column}={field}")]
_SEED: Final = 1
_KIB_PER_MIB: Final = 1024


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Load a graph through `tao load`, and read the servers' memory. Raises `OperatorError`."""
    folder = settings.work_dir / "load"
    folder.mkdir(parents=True, exist_ok=True)
    progress.step("writing the files", 0.0)
    if settings.objects_file is not None and settings.edges_file is not None:
        # The loader writes its notes beside its input, where this process may not be allowed to write.
        objects_file, edges_file = folder / "objects.csv", folder / "edges.csv"
        objects_file.symlink_to(settings.objects_file.resolve(strict=True))
        edges_file.symlink_to(settings.edges_file.resolve(strict=True))
    else:
        nodes = _TOY_OBJECTS if settings.toy else _OBJECTS
        files = write_graph(folder, nodes, _EDGES_PER_OBJECT * nodes, _SEED)
        objects_file, edges_file = files.objects, files.edges
    objects, edges = _lines(objects_file), _lines(edges_file)
    async with DevCluster(ClusterSettings(state_dir=folder / "cluster"), progress.step) as cluster:
        progress.step(f"loading {objects:,} objects", 0.1)
        keys = ("--keys", str(folder / "keys.sqlite"), "--connect", cluster.client_address)
        load_objects = ("objects", str(objects_file), "--otype", OTYPE, "--key", "id", *_COLUMNS, *keys)
        object_seconds = await _load(load_objects, folder)
        progress.step(f"loading {edges:,} edges and their inverses", 0.3)
        load_edges = ("edges", str(edges_file), "--atype", ATYPE, "--from", "id_1", "--to", "id_2", *keys)
        edge_seconds = await _load((*load_edges, "--time", "1"), folder)
        memory = {process.name: _resident_mb(process.pid) for process in (await cluster.status()).processes}
    return ScenarioResult(
        conditions={"objects": objects, "undirected_edges": edges, "stored_edges": 2 * edges},
        quantities=[
            Quantity(name="objects", value=objects / object_seconds, unit="per_second"),
            Quantity(name="undirected edges", value=edges / edge_seconds, unit="per_second"),
            Quantity(name="everything", value=object_seconds + edge_seconds, unit="seconds"),
            *(Quantity(name=f"memory of {name}", value=size, unit="resident_mb") for name, size in memory.items()),
        ],
        aims=[at_most("no line rejected", 0, 0)],
    )


SCENARIO: Final = Scenario(
    name="load",
    summary="a social graph loaded from CSV files into the default development cluster",
    run=run,
)


async def _load(arguments: tuple[str, ...], folder: Path) -> float:
    """Run `tao load`; returns its seconds. Raises `OperatorError` with its output when it fails or rejects a line."""
    started = perf_counter()
    ended = await run_command(*TAO, "load", *arguments, "--json", folder=folder)
    if ended.status:
        raise OperatorError(f"tao load ended with status {ended.status}: {ended.errors[-500:]}")
    if msgspec.json.decode(ended.output, type=dict[str, object]).get("rejected"):
        raise OperatorError(f"tao load rejected lines: {ended.output[:500]}")
    return perf_counter() - started


def _lines(path: Path) -> int:
    """Count the lines after the header; the files here have no line breaks within a field."""
    with path.open("rb") as file:
        return sum(1 for _ in file) - 1


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / _KIB_PER_MIB
