"""The running example of the paper (figure 1): Alice checks in at the Golden Gate Bridge, and two people look at it.

The page is *pulled* for each viewer (paper §2): no part of it is stored ready-made, because each viewer may see another
part of it. The graph decides what a viewer may see, like everything else on the page.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Final

from tao.client import Graph, Object
from tao.demonstration.stage import Answer, timed
from tao.model.errors import InternalError

COMMENT: Final = "What a view! Next time take me along."
_LISTED: Final = 10  # people, comments or likes on one page; an application would offer more with "show all"


@dataclass(frozen=True, slots=True)
class Cast:
    """The ids of the example's objects."""

    alice: int
    bob: int
    cathy: int
    david: int
    erin: int
    checkin: int
    bridge: int
    comment: int


@dataclass(frozen=True, slots=True)
class PageQuery:
    """One query of a page: the question in plain words, the call, the server that answered, and the latency."""

    question: str
    call: str
    answered_by: str
    seconds: float


@dataclass(slots=True)
class RenderedPage:
    """The page as one viewer sees it, and the queries that were made for it, one at a time."""

    graph: Graph
    lines: list[str] = field(default_factory=list)
    queries: list[PageQuery] = field(default_factory=list)
    shows_comment: bool = False

    async def ask(self, question: str, call: str, query: Awaitable[Answer]) -> Answer:
        """Make one query, and note its latency and which server answered."""
        with self.graph.trace() as trace:
            seconds, answer = await timed(query)
        self.queries.append(PageQuery(question, call, trace[-1].answered_by, seconds))
        return answer

    async def one(self, question: str, call: str, query: Awaitable[Object | None]) -> dict[str, object]:
        """Return the fields of an object that must exist."""
        found = await self.ask(question, call, query)
        if found is None:
            raise InternalError(f"{call} found nothing, though it was written a moment ago")
        return dict(found.fields)

    async def ids(self, question: str, name: str, id1: int, atype: str) -> list[int]:
        """Return the other ends of an association list that must not be empty."""
        call = f'assoc_range({name}, "{atype}", 0, {_LISTED})'
        found = await self.ask(question, call, self.graph.assoc_range(id1, atype, 0, _LISTED))
        if not found:
            raise InternalError(f"{call} found nothing, though it was written a moment ago")
        return found.id2s


async def build_figure(graph: Graph) -> Cast:
    """Write the people, places, actions and relationships of the figure, and Erin, who has no friends yet."""
    alice, bob, cathy, david, erin = await graph.obj_add_many(
        [("user", {"name": name}) for name in ("Alice", "Bob", "Cathy", "David", "Erin")]
    )
    bridge = await graph.obj_add("location", {"name": "Golden Gate Bridge", "lat": 37.8199, "lon": -122.4783})
    checkin = await graph.obj_add("checkin", {"text": "Wish you were here!"})
    comment = await graph.obj_add("comment", {"text": COMMENT})
    await graph.assoc_add_many(
        [
            (alice, "friend", bob),
            (alice, "friend", cathy),
            (bob, "friend", cathy),
            (cathy, "friend", david),
            (alice, "authored", checkin),
            (checkin, "checkin_at", bridge),
            (checkin, "tagged", bob),
            (checkin, "comment", comment),
            (cathy, "authored", comment),
            (david, "likes", comment),
        ]
    )
    return Cast(alice, bob, cathy, david, erin, checkin, bridge, comment)


async def render(graph: Graph, cast: Cast, viewer: int) -> RenderedPage:
    """Render the page of the check-in for a viewer.

    The queries are made one after the other, so that each has a latency of its own. An application makes the queries of
    a page concurrently, and those of one moment travel in one message."""
    page = RenderedPage(graph)
    checkin = await page.one("what is posted?", "obj_get(checkin)", graph.obj_get(cast.checkin))
    authors = await page.ids("who posted it?", "checkin", cast.checkin, "authored_by")
    author = await page.one("… called what?", "obj_get(Alice)", graph.obj_get(authors[0]))
    places = await page.ids("where was it?", "checkin", cast.checkin, "checkin_at")
    place = await page.one("… called what?", "obj_get(bridge)", graph.obj_get(places[0]))
    tagged = await page.ids("who was there too?", "checkin", cast.checkin, "tagged")
    company = await page.one("… called what?", "obj_get(Bob)", graph.obj_get(tagged[0]))
    comments = await page.ids("which comments has it?", "checkin", cast.checkin, "comment")
    count = await page.ask("how many?", 'assoc_count(checkin, "comment")', graph.assoc_count(cast.checkin, "comment"))
    likes = await page.ask(
        "likes of the comment?", 'assoc_count(comment, "liked_by")', graph.assoc_count(comments[0], "liked_by")
    )
    writers = await page.ids("who wrote the comment?", "comment", comments[0], "authored_by")
    friends = await page.ask(
        "is that the viewer's friend?",
        'assoc_get(Cathy, "friend", [viewer])',
        graph.assoc_get(writers[0], "friend", [viewer]),
    )
    page.shows_comment = bool(friends)
    page.lines.append(f"{author['name']} is at {place['name']} with {company['name']}.")
    page.lines.append(f"“{checkin['text']}”")
    plural = "s" * (count != 1)
    page.lines.append(f"{count} comment{plural}, liked {likes} time{'s' * (likes != 1)}")
    if friends:
        text = await page.one("what does it say?", "obj_get(comment)", graph.obj_get(comments[0]))
        writer = await page.one("… and who wrote it?", "obj_get(Cathy)", graph.obj_get(writers[0]))
        page.lines.append(f"    {writer['name']}: “{text['text']}”")
    else:
        page.lines.append("    (this comment is for friends of its writer)")
    return page
