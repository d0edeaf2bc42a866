"""The demonstration from its first line to its last: what is done, and what is said about it.

All sentences stand here; the modules beside it do and measure. Numbers in sentences are those measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from tao.cli.checking.caches import Sample, verify_caches
from tao.cli.demonstration.checkin_page import Cast, RenderedPage, build_figure, render
from tao.cli.demonstration.figures import (
    CheckFigures,
    DemonstrationFailed,
    Figures,
    LoadFigures,
    PassFigures,
    RegionFigures,
    ServerFigures,
    SpreadFigures,
)
from tao.cli.demonstration.generated_graph import GraphFiles, write_graph
from tao.cli.demonstration.narration import chapter, ms, page, say, table
from tao.cli.demonstration.page_graph import ids_given, load_graph, read_files
from tao.cli.demonstration.read_back import read_everything
from tao.cli.demonstration.stage import SHAPE, Stage, open_stage
from tao.cli.demonstration.two_regions import measure_regions
from tao.cli.demonstration.two_tiers import befriend, measure_spread
from tao.cli.loading.pipeline import PipelineSettings
from tao.cli.waiting import Counting, WaitDisplay
from tao.client import MEMORY

_NEAR, _FAR = SHAPE.tier_names
_CHECKED_PER_SHARD: Final = 1_000  # entries of each shard at each server: some 50,000, which take ten seconds
_PLACES: Final = {MEMORY: "follower", "leader": "leader", "database": "database"}
"""Who answered, in a table: each of the first two from its memory."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The graph to generate when no files are given."""

    nodes: int
    edges: int
    seed: int = 1


async def tell(source: GraphFiles | Generated) -> Figures:
    """The whole demonstration; returns what it measured when everything was as it should be.

    Raises `DemonstrationFailed` when something was not, `OperatorError` for files that cannot be used or a cluster that
    cannot be started, and what the SDK raises."""
    began = time.monotonic()
    say(
        """This is a cache for a social graph: people, pages and comments (objects) and the connections between them
        (edges). A database keeps the truth. In front of it stand leaders, which read and write the database, and in
        front of those stand followers, in groups called tiers. Applications ask only followers. What a follower does
        not have in memory it asks of a leader, and what the leader does not have it asks of the database."""
    )
    async with open_stage() as stage:
        say(
            f"""Running now on this machine, started in {stage.start_seconds:.1f} s: {SHAPE.databases} database,
            {SHAPE.leaders} leaders, {SHAPE.tiers} tiers of {SHAPE.followers} followers. The graph is cut into
            {SHAPE.shards} shards, and every server looks after some of them."""
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
        """Alice checks in at the Golden Gate Bridge together with Bob. Cathy comments, David likes the comment. Alice,
        Bob and Cathy are friends of each other, and so are Cathy and David. Erin knows nobody. The rule for comments
        here: anyone may see how many there are, only friends of its writer may read one."""
    )
    async with stage.graph(_NEAR) as near:
        cast = await build_figure(near)
    await stage.forget_everything()
    say(
        f"""All that is written now, and leaders and followers were restarted, so that only the database knows of it.
        Bob opens the page, then Erin, both through {_FAR}; then Bob again through {_NEAR}. Nothing of a page is stored
        ready-made: it is put together for each viewer from small questions."""
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
        """Its questions and the calls that ask them; then for each of the three who had the answer, with the
        milliseconds that it took. (Asked one after the other, to be timed; an application asks side by side.)"""
    )
    table(("question", "call"), [(asked.question, asked.call) for asked in bob.asked])
    _table_of_queries({f"Bob, {_FAR}": bob, f"Erin, {_FAR}": erin, f"Bob, {_NEAR}": again})
    by_follower = sum(asked.answered_by == MEMORY for asked in erin.asked)
    say(
        f"""Bob's page had to come from the database, and stayed in the memory of leaders and followers on its way. Of
        Erin's {len(erin.asked)} questions the followers answered {by_follower} by themselves, even "is Cathy a friend
        of Erin?", which nobody had asked before: they know Cathy's whole list of friends, and Erin is not in it. The
        followers of {_NEAR} had nothing, but the leaders remembered: the database was asked only once for each."""
    )
    return cast


def _table_of_queries(viewed: Mapping[str, RenderedPage]) -> None:
    pages = list(viewed.values())
    rows: list[tuple[object, ...]] = []
    # Everybody asks the same, up to the comment that not everybody may read.
    for number, asked in enumerate(pages[0].asked):
        row: list[object] = [asked.question]
        for each in pages:
            told = each.asked[number] if number < len(each.asked) else None
            row += ("not asked", "") if told is None else (_place(told.answered_by), f"{1000 * told.seconds:.2f}")
        rows.append(tuple(row))
    total: list[object] = ["the whole page"]
    for each in pages:
        total += ("", f"{1000 * sum(asked.seconds for asked in each.asked):.2f}")
    # A column's name is its place in the table, so the three "ms" differ in blanks that nobody sees.
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
    given = read_files(files)
    pages, edges = await load_graph(stage.target, files, stage.folder, PipelineSettings())
    with WaitDisplay() as display:
        display.show("waiting until every edge has its copy at its other end")
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
        {load.edges:,} likes ({load.edges_per_second:,.0f}/s). A like is stored at both of its ends, so that either page
        can list it: {load.directed_edges:,} edges. The most liked page has {load.longest_list:,}. Every write was
        safely on disk before it was acknowledged."""
    )
    if settled_seconds > 1:
        say(
            f"""Where the leader at the other end of an edge was too busy, the copy there was noted as owed, and written
            in the background: {settled_seconds:.1f} s after the last write nothing was owed any more."""
        )
    await stage.forget_everything()
    say(
        """Leaders and followers are restarted now: their memory is empty. Then everything is read three times, and
        every single answer is compared with the file: the fields of each page, its list of likes, their number."""
    )
    passes = [
        await read_everything(stage, "cold", _NEAR, expected),
        await read_everything(stage, "other tier", _FAR, expected),
        await read_everything(stage, "warm", _NEAR, expected),
    ]
    _table_of_passes(passes)
    cold, _, warm = passes
    say(
        f"""Cold: nobody remembers anything, the database answers; only the counts come from memory, because a follower
        that holds a whole list can count it. Other tier: its followers are empty too, but the leaders remember, and
        the database is left in peace. Warm: followers answer by themselves, {warm.per_second / cold.per_second:.1f}
        times as fast as cold. All {sum(each.queries for each in passes):,} answers equal the file."""
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
        {1000 * first.seen_seconds:.1f} ms after that (the time that looking takes is in it). Friendship goes both ways,
        and one write made both edges: in one transaction where one leader has both ends, else with a note in the
        database of what the other leader owes, so that no half is ever forgotten."""
    )
    table(
        ("edge", "looked for in", "found", "answered by"),
        [(side.edge, side.tier, "yes" if side.found else "NO", _place(side.answered_by)) for side in first.sides],
    )
    held = (
        f"""Because {first.before.writes_seen} is what it held, it changed its list in place and did not read it again;
        had it missed a write, it would have dropped the list and read it anew."""
        if first.changed_in_place
        else "This time it dropped its list and read it anew, as it does whenever it cannot tell what it missed."
    )
    say(
        f"""How {first.after.server} in {_FAR} came to know: it held Cathy's list of friends as of its version
        {first.before.writes_seen} (writes that arrive together are one version), {first.before.count} friends. The
        leader that wrote version {first.after.writes_seen} sent it just the difference (a changeset): "from version
        {first.before.writes_seen} to {first.after.writes_seen}: Erin added, nobody removed, {first.after.count} friends
        now". {held} Had it heard of this write already, it would have ignored the message. So it does not matter if
        messages come late, twice or in another order."""
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
        f"""What the servers hold in memory is compared with the database, entry by entry: version, content, order; at
        most about {_CHECKED_PER_SHARD:,} entries of each shard at each server. (`tao verify` does this to any cluster,
        at any time, for all entries.)"""
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
        """A second cluster: two regions, each with databases, leaders and followers of its own, and the distance of the
        paper's two between them. East has the master databases; west's follow them. Applications read and write in
        their own region, wherever that is; west's leaders pass its writes on to east."""
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
        f"""A write in west pays for the round trip once. Its writer finds it in west's memory at once, on both ends of
        the edge, though west's own database has it only later: the change came back with the answer. Two kinds of
        reads pay for the round trip too, and are never behind: one that carries the token of a write, where west does
        not know of that write yet, and a critical one, always. At the end {found.compared:,} cache entries and rows of
        both regions are compared: zero differences."""
    )
    return found


def _place(answered_by: str) -> str:
    return _PLACES.get(answered_by, answered_by)
