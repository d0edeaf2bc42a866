"""The chapters of the demonstration, in their order, and those of the first cluster but the social graph.

Each chapter acts, measures, checks what it found, prints it, and returns its figures for `tao demo --json`.
Numbers in the text are measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from tao.admin.access import Access
from tao.admin.cache_verification import Sample, verify_caches
from tao.client import MEMORY, Graph
from tao.demonstration.checkin_page import Cast, RenderedPage, build_figure, render
from tao.demonstration.graph_files import GraphFiles
from tao.demonstration.narration import Figures, chapter, check, ms, page, percentiles, place, say, table
from tao.demonstration.social_graph import Generated, show_social_graph
from tao.demonstration.stage import Stage, open_stage, seconds_until, timed
from tao.demonstration.two_regions import show_two_regions
from tao.devcluster.layout import Shape
from tao.model.graph import decode_count
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import counter_of
from tao.terminal import Counting
from tao.wire.v1 import session_pb2 as pb

_SHAPE: Final = Shape(tiers=2, followers=2, leaders=2, databases=1, shards=16)
_NEAR, _FAR = _SHAPE.tier_names
_BUFFER_POOL_MB: Final = 256  # the whole graph fits, as in a well-sized database
_CHECKED_PER_SHARD: Final = 1_000  # entries of each shard at each server: some 50,000, which take ten seconds
_REPEATS: Final = 20
_CALL_SECONDS: Final = 10.0


async def demonstrate(source: GraphFiles | Generated) -> Figures:
    """Run the whole demonstration and return what it measured, by chapter.

    Raises `DemonstrationFailed` when a check fails, `OperatorError` for files that cannot be used or a cluster that
    cannot be started, and what the SDK raises."""
    began = time.monotonic()
    say(
        """A cache for a social graph of objects and edges. Applications talk to followers, which are grouped in tiers
        and cache what they read from leaders; leaders cache what they read from the database, and write to it."""
    )
    async with open_stage(_SHAPE, buffer_pool_mb=_BUFFER_POOL_MB) as stage:
        say(
            f"""Running now on this machine, started in {stage.start_seconds:.1f} s: {_SHAPE.databases} database,
            {_SHAPE.leaders} leaders, {_SHAPE.tiers} tiers of {_SHAPE.followers} followers, {_SHAPE.shards} shards."""
        )
        cast = await _show_page(stage)
        graph = await show_social_graph(stage, source)
        spread = await _show_write(stage, cast)
        compared = await _show_check(stage)
    regions = await show_two_regions()
    return {
        "start_seconds": stage.start_seconds,
        **graph,
        "spread": spread,
        "check": compared,
        "regions": regions,
        "seconds": time.monotonic() - began,
    }


async def _show_page(stage: Stage) -> Cast:
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
    check(
        bob.shows_comment and again.shows_comment and not erin.shows_comment,
        "the comment is for Cathy's friends: Bob must see it and Erin must not",
    )
    say(
        """The queries of the page, then the server that answered each and the latency. (They were made one after the
        other, to be timed; an application makes them concurrently.)"""
    )
    table(("question", "call"), [(query.question, query.call) for query in bob.queries])
    _show_queries({f"Bob, {_FAR}": bob, f"Erin, {_FAR}": erin, f"Bob, {_NEAR}": again})
    by_follower = sum(query.answered_by == MEMORY for query in erin.queries)
    say(
        f"""Followers answered {by_follower} of Erin's {len(erin.queries)} queries from memory, even "is Cathy a friend
        of Erin?", which is new: they hold Cathy's whole list of friends. The followers of {_NEAR} were empty, and got
        everything from the leaders: the database was asked only once for each answer."""
    )
    return cast


def _show_queries(viewed: Mapping[str, RenderedPage]) -> None:
    pages = list(viewed.values())
    rows: list[list[object]] = []
    # All views make the same queries, up to the comment that not every viewer may read.
    for number, query in enumerate(pages[0].queries):
        row: list[object] = [query.question]
        for found in (each.queries[number : number + 1] for each in pages):
            row += (place(found[0].answered_by), f"{1000 * found[0].seconds:.2f}") if found else ("not asked", "")
        rows.append(row)
    total: list[object] = ["the whole page"]
    for each in pages:
        total += ("", f"{1000 * sum(query.seconds for query in each.queries):.2f}")
    # Columns of a table need different names, so the three "ms" differ in trailing blanks.
    numbers = ["ms" + " " * number for number in range(len(pages))]
    columns = [column for pair in zip(viewed, numbers, strict=True) for column in pair]
    table(("question", *columns), [*rows, total], right=numbers)


async def _show_write(stage: Stage, cast: Cast) -> Figures:
    chapter(3, "a write in one tier is seen in the other")
    say(f"Erin becomes a friend of Cathy. The write goes through {_NEAR}; we look for it in {_FAR}.")
    async with stage.graph(_NEAR) as near, stage.graph(_FAR) as far, stage.access() as access:
        await far.assoc_range(cast.cathy, "friend", 0, 10)  # so that its memory holds the list that changes
        server, *before = await _cached_friends(far, access, cast.cathy)
        acknowledged, _ = await timed(near.assoc_add(cast.erin, "friend", cast.cathy))
        with far.trace() as trace:
            found = lambda: far.assoc_get(cast.cathy, "friend", [cast.erin])  # noqa: E731
            seen = await seconds_until(found, "Erin's friendship with Cathy", "tier")
        in_place = all(served.answered_by == MEMORY for served in trace)
        _, *after = await _cached_friends(far, access, cast.cathy)
        check(after == [number + 1 for number in before], f"one write turned version and count {before} into {after}")
        say(
            f"""Acknowledged after {1000 * acknowledged:.1f} ms, and seen in {_FAR} {1000 * seen:.1f} ms after that. The
            one write made the edges of both directions."""
        )
        await _show_edges({_NEAR: near, _FAR: far}, cast)
        how = "changed it in place" if in_place else "dropped it and read it again"
        say(
            f"""{server} in {_FAR} held version {before[0]} of Cathy's list, with {before[1]} friends. It got the
            difference to version {after[0]} (a changeset), with {after[1]} friends, and {how}. Versions make it
            harmless when messages are lost, late, repeated or reordered."""
        )
        opened = await render(far, cast, cast.erin)
        page("the page, as Erin sees it now", opened.lines)
        check(opened.shows_comment, "Erin is a friend of Cathy now and must see the comment")
        likes = [await _like(near, far, cast, wanted=1 - number % 2) for number in range(_REPEATS)]
    all_acknowledged, all_seen = zip((acknowledged, seen), *likes, strict=True)
    to_answer, to_view = percentiles(all_acknowledged), percentiles(all_seen)
    slowest_ms = 1000 * max(all_seen)
    say(
        f"""{len(all_seen)} such writes: half were acknowledged within {ms(to_answer["p50_ms"])} and were then seen in
        the other tier within {ms(to_view["p50_ms"])}, the slowest within {ms(slowest_ms)}."""
    )
    return {
        "writes": len(all_seen),
        "acknowledged": to_answer,
        # From the acknowledgement until the write was seen.
        "seen_p50_ms": to_view["p50_ms"],
        "seen_max_ms": slowest_ms,
        # The versions of a list, which count its writes.
        "version_before": before[0],
        "version_after": after[0],
    }


async def _show_edges(graphs: Mapping[str, Graph], cast: Cast) -> None:
    """Show both ends of the new friendship in both tiers."""
    rows = []
    for tier, graph in graphs.items():
        for edge, id1, id2 in (("Erin -> Cathy", cast.erin, cast.cathy), ("Cathy -> Erin", cast.cathy, cast.erin)):
            with graph.trace() as trace:
                found = await graph.assoc_get(id1, "friend", [id2])
            check(found, f"the new friendship has not the edge {edge} in {tier}")
            rows.append((edge, tier, "yes", place(trace[-1].answered_by)))
    table(("edge", "looked for in", "found", "answered by"), rows)


async def _like(near: Graph, far: Graph, cast: Cast, *, wanted: int) -> tuple[float, float]:
    """Let David like the post, or take it back. Return the seconds until the answer, and then until the far tier shows
    it."""

    async def arrived() -> bool:
        return await far.assoc_count(cast.checkin, "liked_by") == wanted

    await arrived()  # so that its memory holds the count that changes
    change = near.assoc_add if wanted else near.assoc_delete
    acknowledged, _ = await timed(change(cast.david, "likes", cast.checkin))
    return acknowledged, await seconds_until(arrived, "David's like", "tier")


async def _cached_friends(graph: Graph, access: Access, user: int) -> tuple[str, int, int]:
    """Return the far tier's server that holds the friend list of a user, the list's version (which counts its writes)
    and its count."""
    server = access.routes.tier(graph.region, _FAR).home(user >> SHARD_SHIFT)
    friend = graph.schema.atype("friend").number
    request = pb.Request(inspect=pb.Inspect(list_id1s=[user], list_atypes=[friend]))
    answer = await access.links.to(server).ask(request, _CALL_SECONDS)
    value = next((entry.value for entry in answer.inspection.entries if entry.value), b"")
    check(value, f"{server.name} does not hold the friend list that was read from it a moment ago")
    version, count = decode_count(value)
    return server.name, counter_of(version), count


async def _show_check(stage: Stage) -> Figures:
    chapter(4, "are the caches right?")
    say(
        f"""Version, content and order of about {_CHECKED_PER_SHARD:,} entries of each shard at each server are compared
        with the database, as `tao verify` does for all entries of any cluster."""
    )
    with Counting("entries compared") as counting:
        async with stage.access() as access:
            sample = Sample(_CHECKED_PER_SHARD)
            seconds, report = await timed(
                verify_caches(access.routes, access.links, access.store, sample=sample, on_progress=counting.show)
            )
    table(
        ("server", "role", "compared", "different"),
        [(line.server, line.role, f"{line.entries:,}", line.error or line.wrong) for line in report.servers],
        right=("compared", "different"),
    )
    compared = sum(line.entries for line in report.servers)
    check(
        report.clean and compared,
        f"{report.wrong:,} of {compared:,} cache entries differ from the database, the first: "
        f"{report.findings[:1] or [line.error for line in report.servers if line.error]}",
    )
    say(f"{compared:,} entries compared, zero differences.")
    return {"compared": compared, "wrong": report.wrong, "seconds": seconds}
