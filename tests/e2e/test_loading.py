"""Loads and exports through a real cluster: repetition, interruption, rejected lines, and exports."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tao.admin.load.key_map import KeyMap
from tao.client import Consistency, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tests.e2e.cluster_access import PATIENT
from tests.rigs.forked_programs import Ended, run_tao

pytestmark = [pytest.mark.database, pytest.mark.e2e]

PAGES = 100
EDGES = 1_000
GUIDE = (Path(__file__).resolve().parents[2] / "docs/how-to/load-a-graph.md").read_text()
BLOCK = re.compile(r'^```(csv|python|sh|text)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """Yield one cluster for all tests here, in the state folder where commands look by default."""
    state_dir = tmp_path_factory.mktemp("load") / ".tao-dev"
    shape = Shape(tiers=1, followers=1, leaders=2, shards=4)
    with asyncio.Runner() as runner:
        found = DevCluster(ClusterSettings(state_dir=state_dir, shape=shape, durability=Durability.RELAXED))
        runner.run(found.start())
        yield found
        runner.run(found.stop())


@pytest.fixture
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(cluster.client_address, settings=PATIENT) as found:
        yield found


@pytest.fixture
def pairs() -> list[tuple[int, int]]:
    chance = random.Random(7)
    found: set[tuple[int, int]] = set()
    while len(found) < EDGES:
        a, b = sorted((chance.randrange(PAGES), chance.randrange(PAGES)))
        found.add((a, b))
    return sorted(found)


@pytest.fixture
def files(tmp_path: Path, pairs: list[tuple[int, int]]) -> tuple[Path, Path]:
    """Write pages, and mutual likes between them, some of them from a page to itself; return both files."""
    pages, likes = tmp_path / "pages.csv", tmp_path / "likes.csv"
    with pages.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "facebook_id", "page_name", "kind"])
        writer.writerows([n, 10**14 + n, f'Page "{n}", 中国\n', "tvshow" if n % 2 else ""] for n in range(PAGES))
    with likes.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id_1", "id_2"])
        writer.writerows(pairs)
    return pages, likes


def objects_command(pages: Path) -> list[str]:
    names = ["--map", "page_name=name", "--map", "facebook_id=external_id"]
    return ["load", "objects", str(pages), "--otype", "page", "--key", "id", *names, "--json"]


def edges_command(likes: Path, pages: Path, *more: str) -> list[str]:
    keys = f"{pages}.keys.sqlite"
    ends = ["--from", "id_1", "--to", "id_2"]
    return ["load", "edges", str(likes), "--atype", "page_likes", *ends, "--keys", keys, "--json", *more]


def start(cluster: DevCluster, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    folder = cluster.topology_path.parent.parent
    command = [sys.executable, "-P", "-m", "tao.cli", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


async def communicated(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Return the output and errors of a process. Wait in a thread: a client in this process would stall with the event
    loop, and would suspect its server."""
    return await asyncio.to_thread(process.communicate)


async def tao(cluster: DevCluster, *arguments: str) -> Ended:
    return await run_tao(*arguments, folder=cluster.topology_path.parent.parent)


async def tao_json(cluster: DevCluster, *arguments: str, status: int = 0) -> dict[str, Any]:
    code, out, err = await tao(cluster, *arguments)
    assert code == status, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def ids_of(pages: Path) -> dict[str, int]:
    with KeyMap(Path(f"{pages}.keys.sqlite")) as keys:
        return keys.ids_of("page", map(str, range(PAGES)))


def rejected_lines(file: Path) -> dict[bytes, bytes]:
    """Return the rejected lines by their number."""
    lines = Path(f"{file}.rejected.csv").read_bytes().splitlines()
    return {line.split(b",")[0]: line for line in lines[1:]}


async def assert_graph_equals_file(graph: Graph, pages: Path, pairs: list[tuple[int, int]]) -> dict[str, int]:
    ids = ids_of(pages)
    assert len(ids) == PAGES
    found = await graph.obj_get_many(list(ids.values()))
    for key, page in zip(ids, found, strict=True):
        assert page is not None
        number = int(key)
        assert dict(page.fields) == {
            "name": f'Page "{number}", 中国\n',
            "kind": "tvshow" if number % 2 else "",
            "external_id": 10**14 + number,
        }
    expected: dict[int, set[int]] = defaultdict(set)
    for a, b in pairs:
        expected[a].add(ids[str(b)])
        expected[b].add(ids[str(a)])
    for number in range(PAGES):
        edges = await graph.assoc_range(ids[str(number)], "page_likes", 0, 6000)
        assert set(edges.id2s) == expected[number]
        assert await graph.assoc_count(ids[str(number)], "page_likes") == len(expected[number])
    return ids


async def test_what_was_loaded_twice_is_there_once_and_equals_the_file(
    cluster: DevCluster, graph: Graph, files: tuple[Path, Path], pairs: list[tuple[int, int]]
) -> None:
    pages, likes = files
    for _ in range(2):
        loaded = await tao_json(cluster, *objects_command(pages))
        assert (loaded["loaded"], loaded["rejected"], loaded["rejects"]) == (PAGES, 0, None)
        loaded = await tao_json(cluster, *edges_command(likes, pages))
        assert (loaded["loaded"], loaded["rejected"], loaded["inverse_pending"]) == (EDGES, 0, 0)
    await assert_graph_equals_file(graph, pages, pairs)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_a_load_that_was_cut_off_goes_on_where_it_was(
    cluster: DevCluster,
    graph: Graph,
    files: tuple[Path, Path],
    pairs: list[tuple[int, int]],
    number: signal.Signals,
    tmp_path: Path,
) -> None:
    pages, likes = files
    await tao_json(cluster, *objects_command(pages))
    # The first half comes through a pipe that stays open, so that the load is under way whenever it is cut.
    half = EDGES // 2
    ids = ids_of(pages)
    command = edges_command(Path("-"), pages, "--name", str(tmp_path / "stream"), "--batch", "50", "--time", "5")
    process = start(cluster, *command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"id_1,id_2\n" + b"".join(b"%d,%d\n" % pair for pair in pairs[:half]))
    process.stdin.flush()
    first = pairs[0]
    while not await graph.assoc_get(ids[str(first[0])], "page_likes", [ids[str(first[1])]]):
        assert process.poll() is None
        await asyncio.sleep(0.01)
    process.send_signal(number)
    await communicated(process)
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    loaded = await tao_json(cluster, *edges_command(likes, pages, "--time", "5"))
    assert loaded["loaded"] == EDGES
    await assert_graph_equals_file(graph, pages, pairs)


async def test_a_load_that_gets_sigterm_says_where_it_stopped_wrote_nothing_after_it_and_goes_on_there(
    cluster: DevCluster, graph: Graph, files: tuple[Path, Path], pairs: list[tuple[int, int]]
) -> None:
    pages, likes = files
    await tao_json(cluster, *objects_command(pages))
    small = edges_command(likes, pages, "--batch", "5", "--in-flight", "1")
    process = start(cluster, *small)
    ids = ids_of(pages)
    early = pairs[EDGES // 8]
    while not await graph.assoc_get(ids[str(early[0])], "page_likes", [ids[str(early[1])]]):
        assert process.poll() is None
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = await communicated(process)
    assert process.returncode == 130
    last_line = err.splitlines()[-1]
    said = re.fullmatch(
        rb"tao: interrupted after line ([\d,]+) \(([\d,]+) loaded\): repeat the same command to continue from there",
        last_line,
    )
    assert said is not None, err
    line, count = (int(number.replace(b",", b"")) for number in said.groups())
    assert count == line - 1 > EDGES // 8
    numbers = {page_id: int(key) for key, page_id in ids.items()}
    queries = [(page_id, "page_likes", 0, 6000) for page_id in numbers]
    lists = await graph.assoc_range_many(queries, consistency=Consistency.master())
    found = {(numbers[edge.id1], numbers[edge.id2]) for edges in lists for edge in edges}
    assert found == {pair for a, b in pairs[:count] for pair in ((a, b), (b, a))}
    loaded = await tao_json(cluster, *small)
    assert (loaded["resumed_after_line"], loaded["loaded"], loaded["inverse_pending"]) == (line, EDGES, 0)
    await assert_graph_equals_file(graph, pages, pairs)


async def test_bad_lines_are_set_aside_with_reasons_and_the_others_are_loaded(
    cluster: DevCluster, graph: Graph, tmp_path: Path
) -> None:
    pages = tmp_path / "mixed.csv"
    pages.write_bytes(
        b"id,name,external_id\n1,one,1\n2,two,x\n3\n4,\xff,4\n5,five,5\n,none,6\n5,other five,5\n7,'; DROP TABLE,7\n"
    )
    command = ["load", "objects", str(pages), "--otype", "page", "--key", "id", "--json"]
    loaded = await tao_json(cluster, *command, status=1)
    assert (loaded["loaded"], loaded["rejected"]) == (3, 5)
    reasons = rejected_lines(pages)
    assert set(reasons) == {b"3", b"4", b"5", b"7", b"8"}
    assert b"external_id" in reasons[b"3"]
    assert b"1 cell, the header 3" in reasons[b"4"]
    assert b"not UTF-8" in reasons[b"5"]
    with KeyMap(Path(f"{pages}.keys.sqlite")) as keys:
        ids = keys.ids_of("page", ["1", "5", "7"])
    names = [page.fields["name"] for page in await graph.obj_get_many(list(ids.values())) if page is not None]
    assert sorted(map(str, names)) == ["'; DROP TABLE", "five", "one"]

    edges = tmp_path / "edges.csv"
    edges.write_text("a,b,at\n1,5,100\n1,99,100\n5,7,-1\n7,1,9223372036854775807\n")
    more = ["--from", "a", "--to", "b", "--time", "at", "--keys", f"{pages}.keys.sqlite", "--json"]
    loaded = await tao_json(cluster, "load", "edges", str(edges), "--atype", "page_likes", *more, status=1)
    assert (loaded["loaded"], loaded["rejected"]) == (2, 2)
    found = await graph.assoc_range(ids["1"], "page_likes", 0, 10)
    assert [(edge.id2, edge.time) for edge in found] == [(ids["7"], (1 << 63) - 1), (ids["5"], 100)]


async def test_an_export_is_what_was_loaded(
    cluster: DevCluster, graph: Graph, files: tuple[Path, Path], tmp_path: Path
) -> None:
    pages, likes = files
    await tao_json(cluster, *objects_command(pages))
    await tao_json(cluster, *edges_command(likes, pages, "--time", "77"))
    out = tmp_path / "out.csv"
    # The export has all pages of the shared cluster with their ids, so select those loaded here.
    code, _, err = await tao(cluster, "export", "objects", "--otype", "page", "--out", str(out))
    assert code == 0, err
    by_id = {int(row["id"]): row for row in csv.DictReader(out.read_text().splitlines(keepends=True))}
    for key, page_id in ids_of(pages).items():
        row = by_id[page_id]
        assert row["name"] == f'Page "{key}", 中国\n'
        assert int(row["external_id"]) == 10**14 + int(key)
    code, content, err = await tao(cluster, "export", "edges", "--atype", "page_likes")
    assert code == 0, err
    numbers = {page_id: int(key) for key, page_id in ids_of(pages).items()}
    found = {
        tuple(sorted((numbers[int(row["id1"])], numbers[int(row["id2"])])))
        for row in csv.DictReader(content.splitlines())
        if int(row["id1"]) in numbers and row["time"] == "77"
    }
    assert found == {tuple(map(int, line.split(","))) for line in likes.read_text().splitlines()[1:]}


async def test_wrong_columns_fields_and_types_are_reported_before_anything_is_written(
    cluster: DevCluster, files: tuple[Path, Path]
) -> None:
    pages, likes = files
    for command, named in (
        (["load", "objects", str(pages), "--otype", "page", "--key", "nope"], "no column 'nope'"),
        (["load", "objects", str(pages), "--otype", "page", "--key", "id", "--map", "kind=nope"], "no field 'nope'"),
        (edges_command(likes, Path("other.csv")), "load the objects first"),
    ):
        code, _, err = await tao(cluster, *command)
        assert code == 2
        assert named in err
        assert err.count("\n") == 1
    code, _, err = await tao(cluster, "load", "objects", str(pages), "--otype", "pgae", "--key", "id")
    assert code == 2
    assert "did you mean 'page'" in err


async def test_the_guide_runs_from_its_first_line_to_its_last_and_prints_what_it_says(cluster: DevCluster) -> None:
    folder = cluster.topology_path.parent.parent
    commands: list[str] = ["set -eu"]
    printed: list[str] = []
    for language, name, text in BLOCK.findall(GUIDE):
        if name:
            (folder / name).write_text(text)
        else:
            (printed if language == "text" else commands).append(text)
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", "\n".join(commands), cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert (len(commands), len(printed)) == (6, 2)
    assert [text for text in printed if text not in out.decode()] == []
    back = csv.DictReader((folder / "back.csv").read_text().splitlines())
    assert {frozenset((row["id1"], row["id2"])) for row in back} == {
        frozenset(pair) for pair in (("a1", "b2"), ("c3", "a1"), ("b2", "d4"))
    }
