"""The chapters of the demonstration: what each does, and the text that it prints.

All text is here; the other modules act and measure. Numbers in the text are measured in the same run. Lines are plain,
so that they read the same on a terminal and in a CI log; only tables use colours, where there are any.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from tao.admin.cache_verification import Sample, verify_caches
from tao.admin.load.pipeline import PipelineSettings
from tao.client import MEMORY
from tao.demonstration.checkin_page import Cast, RenderedPage, build_figure, render
from tao.demonstration.figures import (
    CheckFigures,
    DemonstrationFailed,
    Figures,
    LoadFigures,
    PassFigures,
    RegionFigures,
    ServerFigures,
    SpreadFigures,
)
from tao.demonstration.graph_files import GraphFiles, PageGraph, ids_given, load_graph, read_files, write_graph
from tao.demonstration.measurements import befriend, measure_regions, measure_spread, read_everything
from tao.demonstration.stage import SHAPE, Stage, open_stage
from tao.terminal import Counting, WaitDisplay, print_table

_WIDTH: Final = 100
"""The width of paragraphs: easy to read, and not folded in a CI log."""


def chapter(number: int, title: str) -> None:
    """Print a heading."""
    heading = f"Chapter {number}: {title}"
    _write(f"\n{heading}\n{'-' * len(heading)}\n\n")


def say(text: str) -> None:
    """Print a paragraph and an empty line."""
    _write(textwrap.fill(" ".join(text.split()), _WIDTH) + "\n\n")


def page(title: str, lines: Iterable[str]) -> None:
    """Print a page as an application would show it."""
    _write(f"  +-- {title}\n" + "".join(f"  |   {line}\n" for line in lines) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table and an empty line. The columns named in ``right`` hold numbers."""
    sys.stdout.flush()
    print_table(columns, rows, right=right)
    _write("\n")


def ms(value: float) -> str:
    """Return milliseconds as text for tables."""
    return f"{value:.2f} ms"


def _write(text: str) -> None:
    sys.stdout.write(text)
    # Progress goes to standard error: flushing keeps the order in a log that holds both.
    sys.stdout.flush()


_NEAR, _FAR = SHAPE.tier_names
_CHECKED_PER_SHARD: Final = 1_000  # entries of each shard at each server: some 50,000, which take ten seconds
_PLACES: Final = {MEMORY: "follower", "leader": "leader", "database": "database"}
"""The text in tables for the server that answered: follower and leader answered from memory."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The size of the graph that is generated when no files are given."""

    nodes: int
    edges: int
    seed: int = 1


async def demonstrate(source: GraphFiles | Generated) -> Figures:
    """Run the whole demonstration and return what it measured.

    Raises `DemonstrationFailed` when a check fails, `OperatorError` for files that cannot be used or a cluster that
    cannot be started, and what the SDK raises."""
    began = time.monotonic()
    say(
        """A cache for a social graph of objects and edges. Applications talk to followers, which are grouped in tiers
        and cache what they read from leaders; leaders cache what they read from the database, and write to it."""
    )
    async with open_stage() as stage:
        say(
            f"""Running now on this machine, started in {stage.start_seconds:.1f} s: {SHAPE.databases} database,
            {SHAPE.leaders} leaders, {SHAPE.tiers} tiers of {SHAPE.followers} followers, {SHAPE.shards} shards."""
        )
        cast = await _chapter_page(stage)
        load, passes, servers = await _chapter_graph(stage, source)
        spread = await _chapter_writes(stage, cast)
        check = await _chapter_check(stage)
    regions = await _chapter_regions()
    return Figures(
        start_seconds=stage.start_seconds,
        load=load,
        passes=passes,
        servers=servers,
        spread=spread,
        check=check,
        regions=regions,
        seconds=time.monotonic() - began,
    )


async def _chapter_page(stage: Stage) -> Cast:
    chapter(1, "one page, two viewers")
    say(
        """Alice checks in at the Golden Gate Bridge with Bob. Cathy comments, David likes the comment. Bob is a friend
        of Cathy, Erin has no friends yet. Anyone may count comments, only friends of the writer may read one."""
    )
    async with stage.graph(_NEAR) as near:
        cast = await build_figure(near)
    await stage.restart_caches()
    say(
        f"""Leaders and followers were restarted, so only the database has this. Bob opens the page, then Erin, both
        through {_FAR}; then Bob again through {_NEAR}. Each page is put together from small queries."""
    )
    async with stage.graph(_NEAR) as near, stage.graph(_FAR) as far:
        bob = await render(far, cast, cast.bob)
        erin = await render(far, cast, cast.erin)
        again = await render(near, cast, cast.bob)
    page("the page, as Bob sees it", bob.lines)
    page("the page, as Erin sees it", erin.lines)
    if not (bob.shows_comment and again.shows_comment) or erin.shows_comment:
        raise DemonstrationFailed("the comment is for Cathy's friends: Bob must see it and Erin must not")
    say(
        """The queries of the page, then the server that answered each and the latency. (They were made one after the
        other, to be timed; an application makes them concurrently.)"""
    )
    table(("question", "call"), [(query.question, query.call) for query in bob.queries])
    _table_of_queries({f"Bob, {_FAR}": bob, f"Erin, {_FAR}": erin, f"Bob, {_NEAR}": again})
    by_follower = sum(query.answered_by == MEMORY for query in erin.queries)
    say(
        f"""Followers answered {by_follower} of Erin's {len(erin.queries)} queries from memory, even "is Cathy a friend
        of Erin?", which is new: they hold Cathy's whole list of friends. The followers of {_NEAR} were empty, and got
        everything from the leaders: the database was asked only once for each answer."""
    )
    return cast


def _table_of_queries(viewed: Mapping[str, RenderedPage]) -> None:
    pages = list(viewed.values())
    rows: list[tuple[object, ...]] = []
    # All views make the same queries, up to the comment that not every viewer may read.
    for number, query in enumerate(pages[0].queries):
        row: list[object] = [query.question]
        for each in pages:
            found = each.queries[number] if number < len(each.queries) else None
            row += ("not asked", "") if found is None else (_place(found.answered_by), f"{1000 * found.seconds:.2f}")
        rows.append(tuple(row))
    total: list[object] = ["the whole page"]
    for each in pages:
        total += ("", f"{1000 * sum(query.seconds for query in each.queries):.2f}")
    # Columns of a table need different names, so the three "ms" differ in trailing blanks.
    numbers = ["ms" + " " * number for number in range(len(pages))]
    columns = [column for pair in zip(viewed, numbers, strict=True) for column in pair]
    table(("question", *columns), [*rows, total], right=numbers)


async def _chapter_graph(
    stage: Stage, source: GraphFiles | Generated
) -> tuple[LoadFigures, list[PassFigures], list[ServerFigures]]:
    chapter(2, "a whole social graph")
    if isinstance(source, Generated):
        files = write_graph(stage.folder, source.nodes, source.edges, source.seed)
        say("Its pages and their mutual likes are generated: few pages have very many likes, most have few.")
    else:
        files = source
        say(f"Its pages come from {files.objects}, their mutual likes from {files.edges}.")
    load, expected = await _load_graph(stage, files)
    await stage.restart_caches()
    say(
        """Leaders and followers are restarted with empty memory. Everything is read three times, and every answer
        (fields of the page, list of likes, number of likes) is compared with the file."""
    )
    passes = [
        await read_everything(stage, "cold", _NEAR, expected),
        await read_everything(stage, "other tier", _FAR, expected),
        await read_everything(stage, "warm", _NEAR, expected),
    ]
    _table_of_passes(passes)
    cold, _, warm = passes
    say(
        f"""Cold counts come from memory because a follower that holds a whole list can count it. The other tier asks
        the leaders, not the database. Warm reads are {warm.per_second / cold.per_second:.1f} times as fast as cold.
        All {sum(each.queries for each in passes):,} answers equal the file."""
    )
    servers = await stage.servers()
    say("What the servers hold now, and the memory that it takes:")
    table(
        ("server", "entries", "cache MB", "process MB"),
        [
            (
                server.name,
                None if server.entries is None else f"{server.entries:,}",
                None if server.cache_bytes is None else server.cache_bytes / 1e6,
                server.resident_bytes / 1e6,
            )
            for server in servers
        ],
        right=("entries", "cache MB", "process MB"),
    )
    return load, passes, servers


async def _load_graph(stage: Stage, files: GraphFiles) -> tuple[LoadFigures, PageGraph]:
    """Load the files; return the figures of the load, and the graph that must be read back."""
    given = read_files(files)
    pages, edges = await load_graph(stage.target, files, stage.folder, PipelineSettings())
    with WaitDisplay() as display:
        display.show("waiting until every edge has its inverse")
        settled_seconds = await stage.settle()
    expected = given.by_id(ids_given(stage.folder, given))
    load = LoadFigures(
        objects=pages.loaded,
        edges=edges.loaded,
        directed_edges=sum(map(len, expected.neighbours.values())),
        longest_list=max(map(len, expected.neighbours.values())),
        seconds=pages.seconds + edges.seconds,
        objects_per_second=pages.per_second,
        edges_per_second=edges.per_second,
        settled_seconds=settled_seconds,
    )
    say(
        f"""Loaded in {load.seconds:.1f} s: {load.objects:,} pages ({load.objects_per_second:,.0f}/s), and
        {load.edges:,} likes ({load.edges_per_second:,.0f}/s), each stored at both of its ends: {load.directed_edges:,}
        edges, at most {load.longest_list:,} of one page. Every edge had its inverse {load.settled_seconds:.1f} s after
        the last write. Every write was on disk before it was acknowledged."""
    )
    return load, expected


def _table_of_passes(passes: list[PassFigures]) -> None:
    def share(part: int, whole: int) -> str:
        return f"{100 * part / whole:.1f} %"

    rows: list[tuple[str, ...]] = [
        ("read through", *(each.tier for each in passes)),
        ("answers compared", *(f"{each.queries:,}" for each in passes)),
        ("from follower memory (hit rate)", *(share(each.by_follower, each.queries) for each in passes)),
        ("from leader memory", *(share(each.by_leader, each.queries) for each in passes)),
        ("from the database", *(share(each.by_database, each.queries) for each in passes)),
        ("answers a second", *(f"{each.per_second:,.0f}" for each in passes)),
    ]
    for label, percentile in (("half of all", "p50_ms"), ("99 of 100", "p99_ms")):
        rows.extend(
            (f"{label} {kind} within", *(ms(getattr(getattr(each, kind), percentile)) for each in passes))
            for kind in ("objects", "lists", "counts")
        )
    names = [each.name for each in passes]
    table(("", *names), rows, right=names)


async def _chapter_writes(stage: Stage, cast: Cast) -> SpreadFigures:
    chapter(3, "a write in one tier is seen in the other")
    say(f"Erin becomes a friend of Cathy. The write goes through {_NEAR}; we look for it in {_FAR}.")
    async with AsyncExitStack() as stack:
        near, far = [await stack.enter_async_context(stage.graph(tier)) for tier in (_NEAR, _FAR)]
        access = await stack.enter_async_context(stage.access())
        first = await befriend(near, far, access, cast, _FAR)
        opened = await render(far, cast, cast.erin)
        spread = await measure_spread(near, far, cast, first)
    say(
        f"""Acknowledged after {1000 * first.acknowledged_seconds:.1f} ms, and seen in {_FAR}
        {1000 * first.seen_seconds:.1f} ms after that. The one write made the edges of both directions."""
    )
    table(
        ("edge", "looked for in", "found", "answered by"),
        [(side.edge, side.tier, "yes" if side.found else "NO", _place(side.answered_by)) for side in first.sides],
    )
    how = "changed it in place" if first.changed_in_place else "dropped it and read it again"
    say(
        f"""{first.after.server} in {_FAR} held version {first.before.writes_seen} of Cathy's list, with
        {first.before.count} friends. It got the difference to version {first.after.writes_seen} (a changeset),
        with {first.after.count} friends, and {how}. Versions make it harmless when messages are lost, late, repeated
        or reordered."""
    )
    page("the page, as Erin sees it now", opened.lines)
    if not opened.shows_comment:
        raise DemonstrationFailed("Erin is a friend of Cathy now and must see the comment")
    say(
        f"""{spread.writes} such writes: half were acknowledged within {ms(spread.acknowledged.p50_ms)} and were then
        seen in the other tier within {ms(spread.seen_p50_ms)}, the slowest within {ms(spread.seen_max_ms)}."""
    )
    return spread


async def _chapter_check(stage: Stage) -> CheckFigures:
    chapter(4, "are the caches right?")
    say(
        f"""Version, content and order of about {_CHECKED_PER_SHARD:,} entries of each shard at each server are compared
        with the database, as `tao verify` does for all entries of any cluster."""
    )
    began = time.monotonic()
    with Counting("entries compared") as counting:
        async with stage.access() as access:
            report = await verify_caches(
                access.routes,
                access.links,
                access.store,
                sample=Sample(_CHECKED_PER_SHARD),
                on_progress=counting.show,
            )
    table(
        ("server", "role", "compared", "different"),
        [(line.server, line.role, f"{line.entries:,}", line.error or line.wrong) for line in report.servers],
        right=("compared", "different"),
    )
    check = CheckFigures(
        compared=sum(line.entries for line in report.servers),
        wrong=sum(line.wrong for line in report.servers),
        seconds=time.monotonic() - began,
    )
    if not report.clean or not check.compared:
        raise DemonstrationFailed(
            f"{check.wrong:,} of {check.compared:,} cache entries differ from the database, the first: "
            f"{report.findings[:1] or [line.error for line in report.servers if line.error]}"
        )
    say(f"{check.compared:,} entries compared, zero differences.")
    return check


async def _chapter_regions() -> RegionFigures:
    chapter(5, "two regions")
    say(
        """A second cluster has two regions with databases, leaders and followers of their own. East has the master
        database, west a replica; west's leaders pass writes on to east. The round trip is that of the paper."""
    )
    found = await measure_regions()
    rows = [
        ("round trip between the regions", ms(found.rtt_ms)),
        ("half of the writes in east, acknowledged within", ms(found.acknowledged_in_master_region.p50_ms)),
        ("and then seen in west within", ms(found.seen_p50_ms)),
        ("half of the writes in west, acknowledged within", ms(found.acknowledged_elsewhere.p50_ms)),
        ("a read in west while replication stands still (behind)", ms(found.behind_ms)),
        ("one with the token of the write (up to date)", ms(found.by_token_ms)),
        ("a critical read at the same time (up to date)", ms(found.critical_ms)),
        ("replication goes on: west knows within", ms(found.caught_up_ms)),
    ]
    table(("", "time"), rows, right=("time",))
    say(
        f"""A write in west pays for one round trip, and its writer sees it at once. A critical read always pays for the
        round trip, one with the token of a write only while west has not got that write; neither is ever behind.
        {found.compared:,} cache entries and rows of both regions compared: zero differences."""
    )
    return found


def _place(answered_by: str) -> str:
    return _PLACES.get(answered_by, answered_by)
