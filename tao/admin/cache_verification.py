"""Compares every entry of every cache with the database that it came from (`tao verify`).

A page of a server's entries is compared with one read of the database. An entry that differs is compared again after a
pause, because messages may be on their way. It is wrong when it differs then and has not reached the version that the
database had at first, or differs at the same version.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.admin.comparison import Report, ServerReport
from tao.model.errors import TaoError
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import ReadStore
from tao.model.queries import CountQuery, ObjectQuery, Query, RangeQuery
from tao.model.topology import Database
from tao.observability.consistency import MeasuredConsistency
from tao.routing.routes import Routes
from tao.serving.inspection import Verdict, compare_list, compare_value
from tao.wire.links import Link, Links
from tao.wire.v1 import session_pb2 as pb

PAGE_ENTRIES: Final = 500
CALL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The entries of a shard to compare: about this number, or this share (0 to 1); zeros mean all."""

    entries: int = 0
    share: float = 0.0

    def stride(self, total: int) -> int:
        """Return n, when every n-th of ``total`` entries is to be compared."""
        if self.entries:
            return max(1, total // self.entries)
        return max(1, round(1 / self.share)) if self.share else 1


ALL: Final = Sample()


@dataclass(frozen=True, slots=True)
class Finding:
    """One wrong entry."""

    server: str
    kind: str
    id: int
    atype: int
    verdict: str
    cached_version: int
    stored_version: int


@dataclass(slots=True, kw_only=True)
class CacheReport(ServerReport):
    """The result at one cache server."""

    role: str
    entries: int = 0


@dataclass(slots=True, kw_only=True)
class DatabaseReport:
    """What was compared with one database. ``server``: its master; ``error``: why it could not be read."""

    database: str
    server: str
    entries: int = 0
    error: str = ""


@dataclass(slots=True)
class CachesReport(Report[CacheReport, Finding]):
    """The result of `verify_caches`."""

    databases: list[DatabaseReport] = field(default_factory=list)

    @property
    def unchecked_databases(self) -> list[str]:
        """The databases that could not be read: no cache was compared with them, or only in part."""
        return [each.database for each in self.databases if each.error]

    @property
    def clean(self) -> bool:
        """True when no compared entry is wrong, and every server and every database could be asked."""
        return not self.wrong and not self.unchecked and not self.unchecked_databases

    @property
    def consistency(self) -> MeasuredConsistency:
        """The consistency over all entries that were compared."""
        return MeasuredConsistency(sum(server.entries for server in self.servers), self.wrong)


async def verify_caches(
    routes: Routes,
    links: Links,
    store: ReadStore,
    *,
    sample: Sample = ALL,
    recheck_seconds: float = 2.0,
    on_progress: Callable[[str, int], None] = lambda _server, _entries: None,
) -> CachesReport:
    """Compare all caches, or a sample of their entries, with the master databases.

    ``on_progress`` receives a server's name and how many of its entries have been compared."""
    report = CachesReport()
    databases = await _read_databases(routes, store)
    report.databases = list(databases.values())
    for place, server in routes.topology.cache_servers:
        line = CacheReport(server=server.name, role=place.role)
        with report.checking(line):
            checker = _ServerCheck(links.to(server), line, store, report, recheck_seconds)
            unread: dict[str, None] = {}
            for shard in routes.shards_of(server.name):
                database, before = databases[routes.database_of(shard).name], line.entries
                if database.error:
                    unread[database.database] = None
                    continue
                await checker.check_shard(shard, sample)
                database.entries += line.entries - before
                on_progress(server.name, line.entries)
            if unread:
                line.error = f"its entries of {', '.join(unread)} could not be compared"
    return report


async def _read_databases(routes: Routes, store: ReadStore) -> dict[str, DatabaseReport]:
    """Read a row of each master database that holds shards. One that does not answer is reported even if no cache has
    an entry of it, and it is asked once, instead of once for each server."""

    async def read(database: Database) -> DatabaseReport:
        report = DatabaseReport(database=database.name, server=database.servers[database.master_region].name)
        first_shard = database.shards[0][0]
        try:
            await store.read([ObjectQuery(first_shard << SHARD_SHIFT)], critical=True, timeout_seconds=CALL_SECONDS)
        except TaoError as error:
            report.error = error.message
        return report

    reports = await asyncio.gather(*(read(each) for each in routes.topology.databases if each.shards))
    return {report.database: report for report in reports}


class _ServerCheck:
    """Compares the entries of one server."""

    def __init__(
        self, link: Link, line: CacheReport, store: ReadStore, report: CachesReport, recheck_seconds: float
    ) -> None:
        self._link: Final = link
        self._line: Final = line
        self._store: Final = store
        self._report: Final = report
        self._recheck_seconds: Final = recheck_seconds

    async def check_shard(self, shard: int, sample: Sample) -> None:
        stride = 1
        if sample != ALL:
            asked = pb.Inspect(sample_shard=shard, sample_limit=1)
            answer = await self._link.ask(pb.Request(inspect=asked), CALL_SECONDS)
            stride = sample.stride(answer.inspection.shard_entries)
        cursor = str(random.randrange(stride))
        while True:
            asked = pb.Inspect(sample_shard=shard, sample_limit=PAGE_ENTRIES, sample_after=cursor, sample_stride=stride)
            answer = await self._link.ask(pb.Request(inspect=asked), CALL_SECONDS)
            entries = list(answer.inspection.entries)
            await self._check(entries)
            self._line.entries += len(entries)
            cursor = answer.inspection.next_cursor
            if not cursor:
                return

    async def _check(self, entries: Sequence[pb.CachedEntry]) -> None:
        doubtful = [each for each in await self._compare(entries) if each[1] is not Verdict.EQUAL]
        if not doubtful:
            return
        # An entry must have reached this version by the second look. Newer messages may be in flight by then.
        due = {_key(entry): _version_due(entry, verdict, stored) for entry, verdict, stored in doubtful}
        await asyncio.sleep(self._recheck_seconds)
        again = await self._held_now([entry for entry, _, _ in doubtful])
        for entry, verdict, stored in await self._compare(again):
            if verdict is Verdict.EQUAL or (verdict is Verdict.BEHIND and version_of(entry.value) >= due[_key(entry)]):
                self._line.in_flight += 1
                continue
            versions = version_of(entry.value), version_of(stored)
            finding = Finding(self._line.server, entry.kind, entry.id, entry.atype, verdict.value, *versions)
            self._report.add(self._line, finding)

    async def _held_now(self, entries: Sequence[pb.CachedEntry]) -> list[pb.CachedEntry]:
        """Return the entries of the same keys as the server holds them now. A key that it has dropped is not wrong."""
        asked = pb.Inspect(
            obj_ids=[entry.id for entry in entries if entry.kind == "object"],
            list_id1s=[entry.id for entry in entries if entry.kind != "object"],
            list_atypes=[entry.atype for entry in entries if entry.kind != "object"],
        )
        answer = await self._link.ask(pb.Request(inspect=asked), CALL_SECONDS)
        wanted = {_key(entry) for entry in entries}
        held = {_key(entry): entry for entry in answer.inspection.entries if entry.value and _key(entry) in wanted}
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


def _key(entry: pb.CachedEntry) -> tuple[str, int, int]:
    return entry.kind, entry.id, entry.atype


def _version_due(entry: pb.CachedEntry, verdict: Verdict, stored: bytes) -> int:
    """Return the lowest version that is right at the second look, unless the entry equals the database then.

    That is the stored version; for an entry with the same version and other content it is the next version."""
    return max(version_of(stored), version_of(entry.value) + (verdict is Verdict.DIFFERENT))


def _query_for(entry: pb.CachedEntry) -> Query:
    match entry.kind:
        case "object":
            return ObjectQuery(entry.id)
        case "count":
            return CountQuery(entry.id, entry.atype)
        case _:
            n = int.from_bytes(entry.value[16:20], "little")
            return RangeQuery(entry.id, entry.atype, 0, n + 1)
