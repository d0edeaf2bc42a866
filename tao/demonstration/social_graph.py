"""The chapter of a whole social graph: load it, and read everything cold, through the other tier, and warm.

Everything is compared with the files, with the server that answered and the latency. Many readers send single queries
concurrently, as requests of a web server do; the SDK puts queries of one moment into one message.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tao.client import Graph
from tao.demonstration.graph_files import ATYPE, GraphFiles, PageGraph, expected_graph, load_graph, write_graph
from tao.demonstration.narration import Figures, chapter, check, ms, percentiles, say, table
from tao.demonstration.stage import Stage, timed
from tao.devcluster.inspection import ProcessStatus
from tao.devcluster.layout import Role
from tao.feeds import Feeds
from tao.terminal import Counting, WaitDisplay

_READERS: Final = 32
_SEED: Final = 1
_PAIRS: Final = 200
_MUTUAL_PAGE: Final = 1_000
_FEED_PAGE: Final = 50
_FEED_PAGES: Final = 20


@dataclass(frozen=True, slots=True)
class Generated:
    """The size of the graph that is generated when no files are given."""

    nodes: int
    edges: int
    seed: int = 1


async def show_social_graph(stage: Stage, source: GraphFiles | Generated) -> Figures:
    """Load the graph, restart the caches and read everything three times. Raises what the load and the reads raise."""
    chapter(2, "a whole social graph")
    if isinstance(source, Generated):
        files = write_graph(stage.folder, source.nodes, source.edges, source.seed)
        say("Its pages and their mutual likes are generated: few pages have very many likes, most have few.")
    else:
        files = source
        say(f"Its pages come from {files.objects}, their mutual likes from {files.edges}.")
    load, expected = await _load(stage, files)
    await stage.restart_caches()
    say(
        """Leaders and followers are restarted with empty memory. Everything is read three times, and every answer
        (fields of the page, list of likes, number of likes) is compared with the file."""
    )
    near, far = stage.shape.tier_names
    passes = [
        await _read_everything(stage, name, tier, expected)
        for name, tier in (("cold", near), ("other tier", far), ("warm", near))
    ]
    _show_passes(passes)
    cold, _, warm = passes
    say(
        f"""Cold counts come from memory because a follower that holds a whole list can count it. The other tier asks
        the leaders, not the database. Warm reads are {_per_second(warm) / _per_second(cold):.1f} times as fast as
        cold. All {sum(each["queries"] for each in passes):,} answers equal the file."""
    )
    mutual = await _show_mutual(stage, near, expected)
    feed = await _show_feed(stage, near, expected)
    return {"load": load, "passes": passes, "mutual": mutual, "feed": feed, "servers": await _show_servers(stage)}


async def _load(stage: Stage, files: GraphFiles) -> tuple[Figures, PageGraph]:
    """Load the files; return the figures of the load, and the graph that must be read back."""
    pages, edges = await load_graph(stage.target, files, stage.folder)
    with WaitDisplay() as display:
        display.show("waiting until every edge has its inverse")
        settled_seconds = await stage.settle()
    expected = expected_graph(files, stage.folder)
    lengths = [len(neighbours) for neighbours in expected.neighbours.values()]
    seconds = pages.seconds + edges.seconds
    say(
        f"""Loaded in {seconds:.1f} s: {pages.loaded:,} pages ({pages.per_second:,.0f}/s), and {edges.loaded:,} likes
        ({edges.per_second:,.0f}/s), each stored at both of its ends: {sum(lengths):,} edges, at most {max(lengths):,}
        of one page. Every edge had its inverse {settled_seconds:.1f} s after the last write. Every write was on disk
        before it was acknowledged."""
    )
    load = {
        "objects": pages.loaded,
        "edges": edges.loaded,  # lines of the file
        "directed_edges": sum(lengths),  # what they became, one at each end
        "longest_list": max(lengths),
        "seconds": seconds,
        "objects_per_second": pages.per_second,
        "edges_per_second": edges.per_second,
        "settled_seconds": settled_seconds,  # from the last acknowledgement until no edge lacked its inverse
    }
    return load, expected


async def _read_everything(stage: Stage, name: str, tier: str, expected: PageGraph) -> Figures:
    """Read objects, then lists, then counts of all pages through a tier, in the same shuffled order in each pass.

    Raises `DemonstrationFailed` at the first answer that differs from the files."""
    followers, leaders = stage.names(Role.FOLLOWER, tier), stage.names(Role.LEADER)
    order = list(expected.pages)
    random.Random(_SEED).shuffle(order)
    async with stage.graph(tier) as graph:
        hits, misses = await stage.hits_and_misses(followers)
        _, leaders_misses = await stage.hits_and_misses(leaders)
        began, latencies = time.perf_counter(), Figures()
        with Counting(f"answers compared ({name})") as counting:
            for kind, read in _READS.items():
                seconds_each = await _read(order, partial(read, graph, expected), partial(counting.show, kind))
                latencies[kind] = percentiles(seconds_each)
        seconds = time.perf_counter() - began
        hits_after, misses_after = await stage.hits_and_misses(followers)
        _, leaders_misses_after = await stage.hits_and_misses(leaders)
    by_follower, missed = hits_after - hits, misses_after - misses
    # A miss that joins another fetch reaches no leader, so the leaders' share is computed from their own misses.
    by_database = leaders_misses_after - leaders_misses
    return {
        "name": name,
        "tier": tier,
        "queries": by_follower + missed,
        "by_follower": by_follower,
        "by_leader": missed - by_database,
        "by_database": by_database,
        "seconds": seconds,
        **latencies,
    }


def _per_second(figures: Figures) -> float:
    return float(figures["queries"] / figures["seconds"])


async def _read(
    order: Iterable[int], read: Callable[[int], Awaitable[None]], on_progress: Callable[[int], None]
) -> list[float]:
    """Read every page with many concurrent readers, and return the latencies in seconds."""
    waiting = iter(order)
    latencies: list[float] = []

    async def reader() -> None:
        for page in waiting:
            latencies.append((await timed(read(page)))[0])
            if not len(latencies) % 1000:
                on_progress(len(latencies))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_READERS):
                group.create_task(reader())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return latencies


async def _read_object(graph: Graph, expected: PageGraph, page: int) -> None:
    found, fields = await graph.obj_get(page), expected.pages[page]
    check(found is not None and dict(found.fields) == fields, f"page {page} is {found}, the file says {fields}")


async def _read_list(graph: Graph, expected: PageGraph, page: int) -> None:
    neighbours, limit = expected.neighbours[page], graph.schema.atype(ATYPE).limit
    found: list[int] = []
    # One edge more than expected is asked for, so that one too many is found; in parts, for the type's limit.
    while len(found) <= len(neighbours):
        wanted = min(limit, len(neighbours) + 1 - len(found))
        part = await graph.assoc_range(page, ATYPE, len(found), wanted)
        found += part.id2s
        if len(part) < wanted:
            break
    check(
        len(found) == len(neighbours) and set(found) == neighbours,
        f"the list of page {page} has {len(found):,} edges, the file {len(neighbours):,}; "
        f"{len(neighbours.symmetric_difference(found)):,} differ",
    )


async def _read_count(graph: Graph, expected: PageGraph, page: int) -> None:
    found, known = await graph.assoc_count(page, ATYPE), len(expected.neighbours[page])
    check(found == known, f"the count of page {page} is {found:,}, the file has {known:,} edges")


_READS: Final = {"objects": _read_object, "lists": _read_list, "counts": _read_count}


async def _show_mutual(stage: Stage, tier: str, expected: PageGraph) -> Figures:
    """Ask for the mutual likes of pages, which the file must confirm, and for the candidates of the one with most
    likes."""
    chance = random.Random(_SEED)
    pages = [page for page, neighbours in expected.neighbours.items() if neighbours]
    pairs = [
        (page, chance.choice(sorted(expected.neighbours[page])))
        for page in chance.sample(pages, min(_PAIRS, len(pages)))
    ]
    seconds, most = [], 0
    async with stage.graph(tier) as graph:
        for one, other in pairs:
            both = graph.edge_set(one, ATYPE) & graph.edge_set(other, ATYPE)
            took, page = await timed(both.page(_MUTUAL_PAGE))
            found, known = {edge.id2 for edge in page.edges}, expected.neighbours[one] & expected.neighbours[other]
            check(
                found == known or (page.cursor is not None and found < known),
                f"pages {one} and {other} have {len(known):,} mutual likes in the file, and {len(found):,} were found",
            )
            seconds.append(took)
            most = max(most, len(known))
        busiest = max(pages, key=lambda each: len(expected.neighbours[each]))
        hops_seconds, hops = await timed(graph.two_hop(busiest, ATYPE, limit=5))
    mutual = percentiles(seconds)
    best = f", the best of them by {hops.candidates[0].mutual:,} of its own likes" if hops.candidates else ""
    say(
        f"""Which pages do two pages both like? Asked for {len(pairs):,} pairs, with at most {most:,} mutual likes: half
        were answered within {ms(mutual["p50_ms"])}, 99 of 100 within {ms(mutual["p99_ms"])}; all equal the file. The
        page with most likes could be shown to {len(hops.candidates)} others{best}: two hops over {hops.visited:,} edges
        took {ms(1000 * hops_seconds)}."""
    )
    return {"pairs": len(pairs), "most": most, **mutual, "visited": hops.visited, "two_hops_ms": 1000 * hops_seconds}


async def _show_feed(stage: Stage, tier: str, expected: PageGraph) -> Figures:
    """Read the feed of the page with most likes: what those that it likes have liked. The file must confirm it."""
    busiest = max(expected.pages, key=lambda each: len(expected.neighbours[each]))
    authors = expected.neighbours[busiest]
    known = {liked for author in authors for liked in expected.neighbours[author]}
    seconds: list[float] = []
    found: list[int] = []
    cursor: str | None = None
    async with stage.graph(tier) as graph:
        feeds = Feeds(graph, follows=ATYPE, posted=ATYPE, own_posts=False)
        for _ in range(_FEED_PAGES):
            took, page = await timed(feeds.page(busiest, _FEED_PAGE, cursor))
            seconds.append(took)
            found += [post.id for post in page.posts]
            cursor = page.cursor
            if cursor is None:
                break
    check(
        len(found) == len(set(found)) and known.issuperset(found) and (cursor is not None or len(found) == len(known)),
        f"the feed of page {busiest} has {len(known):,} posts in the file, and not the {len(found):,} that were found",
    )
    feed = percentiles(seconds)
    say(
        f"""What have the pages liked lately that the page with most likes likes? Its feed merges {len(authors):,} lists
        when it is read: {len(seconds)} pages, {len(found):,} likes, none of them twice; half of the pages came within
        {ms(feed["p50_ms"])}."""
    )
    return {"authors": len(authors), "pages": len(seconds), "posts": len(found), **feed}


def _show_passes(passes: list[Figures]) -> None:
    def share(figures: Figures, key: str) -> str:
        return f"{100 * figures[key] / figures['queries']:.1f} %"

    labels = [
        *("read through", "answers compared", "from follower memory (hit rate)", "from leader memory"),
        *("from the database", "answers a second"),
        *(f"{part} {kind} within" for part in ("half of all", "99 of 100") for kind in _READS),
    ]
    columns = [
        [
            each["tier"],
            f"{each['queries']:,}",
            *(share(each, key) for key in ("by_follower", "by_leader", "by_database")),
            f"{_per_second(each):,.0f}",
            *(ms(each[kind][percentile]) for percentile in ("p50_ms", "p99_ms") for kind in _READS),
        ]
        for each in passes
    ]
    names = [each["name"] for each in passes]
    table(("", *names), zip(labels, *columns, strict=True), right=names)


async def _show_servers(stage: Stage) -> list[Figures]:
    figures = [await _memory_of(stage, process) for process in (await stage.cluster.status()).processes]
    say("What the servers hold now, and the memory that it takes:")
    rows = [
        (
            each["name"],
            None if each["entries"] is None else f"{each['entries']:,}",
            None if each["cache_bytes"] is None else each["cache_bytes"] / 1e6,
            each["resident_bytes"] / 1e6,
        )
        for each in figures
    ]
    columns = ("server", "entries", "cache MB", "process MB")
    table(columns, rows, right=columns[1:])
    return figures


async def _memory_of(stage: Stage, process: ProcessStatus) -> Figures:
    stats = await stage.stats(process.name) if process.role in (Role.LEADER, Role.FOLLOWER) else None
    return {
        "name": process.name,
        "role": process.role,
        "entries": sum(stats["entries"].values()) if stats else None,
        "cache_bytes": stats["bytes"] if stats else None,
        "resident_bytes": _resident_bytes(process.pid),
    }


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
