"""`tao verify`: every entry of every cache against the database it came from (DESIGN.md §13, §15).

A page of a server's entries is compared with one read of the database. What differs by version is looked at again
after a pause, because messages are on their way; what differs then, or differs at the same version, is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.model.errors import TaoError
from tao.model.graph import version_of
from tao.model.ports import ReadStore
from tao.model.queries import CountQuery, ObjectQuery, Query, RangeQuery
from tao.model.topology import CacheServer
from tao.peers.links import Links
from tao.routing.routes import Routes
from tao.serving.comparison import Verdict, compare_list, compare_value
from tao.wire.v1 import session_pb2 as pb

PAGE_ENTRIES: Final = 500
CALL_SECONDS: Final = 10.0
MAX_FINDINGS: Final = 1_000
"""Differences that are described; beyond that they are only counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry that is wrong."""

    server: str
    kind: str
    id: int
    atype: int
    verdict: str
    cached_version: int
    stored_version: int


@dataclass(slots=True)
class ServerReport:
    """What was found at one server. ``in_flight``: entries that were behind and then were not."""

    server: str
    role: str
    entries: int = 0
    in_flight: int = 0
    wrong: int = 0
    error: str = ""


@dataclass(slots=True)
class Report:
    """What `verify_caches` found."""

    servers: list[ServerReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Entries that are wrong, of all servers."""
        return sum(server.wrong for server in self.servers)

    @property
    def unchecked(self) -> int:
        """Servers that could not be asked, or not to the end."""
        return sum(bool(server.error) for server in self.servers)

    @property
    def clean(self) -> bool:
        """Every entry that was looked at is right, and every server could be asked."""
        return not self.wrong and not self.unchecked


async def verify_caches(
    routes: Routes,
    links: Links,
    store: ReadStore,
    *,
    limit_per_shard: int = 0,
    recheck_seconds: float = 2.0,
    on_progress: Callable[[str, int], None] = lambda _server, _entries: None,
) -> Report:
    """Compare all caches with the master databases. ``limit_per_shard``: at most so many entries of a shard at each
    server, 0 for all. ``on_progress`` hears the server's name and how many entries were looked at."""
    report = Report()
    for region in routes.topology.regions:
        for tier in (region.leaders, *region.followers):
            for server in tier.servers:
                role = routes.locate(server.name).role
                line = ServerReport(server.name, role)
                report.servers.append(line)
                checker = _ServerCheck(server, line, links, store, report.findings, recheck_seconds)
                try:
                    for shard in routes.shards_of(server.name):
                        await checker.check_shard(shard, limit_per_shard)
                        on_progress(server.name, line.entries)
                except TaoError as error:
                    line.error = error.message
    return report


class _ServerCheck:
    def __init__(
        self,
        server: CacheServer,
        line: ServerReport,
        links: Links,
        store: ReadStore,
        findings: list[Finding],
        recheck_seconds: float,
    ) -> None:
        self._link: Final = links.to(server)
        self._line: Final = line
        self._store: Final = store
        self._findings: Final = findings
        self._recheck_seconds: Final = recheck_seconds

    async def check_shard(self, shard: int, limit: int) -> None:
        cursor = ""
        looked_at = 0
        while True:
            asked = pb.Inspect(sample_shard=shard, sample_limit=PAGE_ENTRIES, sample_after=cursor)
            answer = await self._link.ask(pb.Request(inspect=asked), CALL_SECONDS)
            entries = list(answer.inspection.entries)
            await self._check(entries)
            looked_at += len(entries)
            self._line.entries += len(entries)
            cursor = answer.inspection.next_cursor
            if not cursor or (limit and looked_at >= limit):
                return

    async def _check(self, entries: Sequence[pb.CachedEntry]) -> None:
        doubtful = [entry for entry, verdict, _ in await self._compare(entries) if verdict is not Verdict.EQUAL]
        if not doubtful:
            return
        await asyncio.sleep(self._recheck_seconds)
        again = await self._look_again(doubtful)
        for entry, verdict, stored in await self._compare(again):
            if verdict is Verdict.EQUAL:
                self._line.in_flight += 1
                continue
            self._line.wrong += 1
            if len(self._findings) < MAX_FINDINGS:
                self._findings.append(
                    Finding(
                        self._line.server,
                        entry.kind,
                        entry.id,
                        entry.atype,
                        verdict.value,
                        version_of(entry.value),
                        version_of(stored),
                    )
                )

    async def _look_again(self, entries: Sequence[pb.CachedEntry]) -> list[pb.CachedEntry]:
        """The same keys as they are held now; those dropped meanwhile are in order."""
        asked = pb.Inspect(
            obj_ids=[entry.id for entry in entries if entry.kind == "object"],
            list_id1s=[entry.id for entry in entries if entry.kind != "object"],
            list_atypes=[entry.atype for entry in entries if entry.kind != "object"],
        )
        answer = await self._link.ask(pb.Request(inspect=asked), CALL_SECONDS)
        wanted = {(entry.kind, entry.id, entry.atype) for entry in entries}
        held = {
            (entry.kind, entry.id, entry.atype): entry
            for entry in answer.inspection.entries
            if entry.value and (entry.kind, entry.id, entry.atype) in wanted
        }
        self._line.in_flight += len(wanted) - len(held)
        return list(held.values())

    async def _compare(self, entries: Sequence[pb.CachedEntry]) -> list[tuple[pb.CachedEntry, Verdict, bytes]]:
        if not entries:
            return []
        read = await self._store.read(
            [_query_for(entry) for entry in entries], critical=True, timeout_seconds=CALL_SECONDS
        )
        return [
            (
                entry,
                compare_list(entry.value, stored) if entry.kind == "list" else compare_value(entry.value, stored),
                stored,
            )
            for entry, stored in zip(entries, read.values, strict=True)
        ]


def _query_for(entry: pb.CachedEntry) -> Query:
    match entry.kind:
        case "object":
            return ObjectQuery(entry.id)
        case "count":
            return CountQuery(entry.id, entry.atype)
        case _:
            n = int.from_bytes(entry.value[16:20], "little")
            return RangeQuery(entry.id, entry.atype, 0, n + 1)
