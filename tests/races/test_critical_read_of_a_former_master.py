"""A critical read reaches a server that was the master, over the statements of a real database server.

    reader (its topology is old)      server "one", the master until now        its successor
    reads the rows           →        rows at version 1
                                      (stands still, or is closed)
                                      its lease ends                            promoted, opened
                                                                                writes version 2
    the check, behind the rows  →     closed, or the lease has ended
    refused: not version 1

A check before the rows would have passed. The second table, of a leader that was held up:

    leader, by topology 1             server "one"                              operator
                                      closed, and follows "two"            ←    promotes "two": topology 2
    (held up for a second)
    reads "one" critically   →        MASTER_READ_ONLY
    reads topology 2, asks "two"
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from tao.model.errors import MasterReadOnly, TaoError
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import FillRead, ObjectQuery, Query
from tao.observability.logs import logger
from tao.replication.lease import LeaseTerms, install_lease, remove_lease
from tao.serving.configuration import Configuration
from tao.serving.sources import DatabaseReadSettings, DatabaseSource, fetch_and_wait
from tests.rigs.former_master import LEASE_SECONDS, A, B, FormerMaster
from tests.rigs.leader_rig import SCHEMA, make_id, make_topology
from tests.rigs.pacing import PATIENT_SECONDS, Tasks, until
from tests.rigs.server_context import SilentTopology


def refused(found: list[int | TaoError]) -> list[bool]:
    return [isinstance(each, MasterReadOnly) for each in found]


@pytest.mark.database
async def test_the_master_answers_critical_reads(former: FormerMaster) -> None:
    assert await former.read(A, B) == [1, 1]


@pytest.mark.database
async def test_a_server_that_was_replaced_between_the_rows_and_the_check_is_refused(former: FormerMaster) -> None:
    """The lock on the lease holds the check up, as a server that stands still between two statements does."""
    await former.run("LOCK TABLES tao.lease WRITE", session=former.locker)
    reading = asyncio.ensure_future(former.read(A))
    await former.hold_check(reading)
    await former.end_lease(former.locker)
    assert refused(await reading) == [True], "its rows may be older than what a successor has"


@pytest.mark.database
async def test_a_master_whose_lease_has_ended_is_refused_before_it_has_closed_itself(former: FormerMaster) -> None:
    await former.end_lease()
    assert refused(await former.read(A, B)) == [True, True]
    assert await former.read(A, B, critical=False) == [1, 1], "other reads may be old"
    await remove_lease(former.administrator, deadline=asyncio.get_running_loop().time() + 10)
    assert await former.read(A, B) == [1, 1], "no lease is kept any more"


@pytest.mark.database
async def test_a_closed_server_is_refused(former: FormerMaster) -> None:
    await former.run("SET GLOBAL read_only = 1")
    assert refused(await former.read(A, B)) == [True, True]
    assert await former.read(A, B, critical=False) == [1, 1]


@pytest.mark.database
async def test_a_server_whose_rows_name_another_master_is_refused(former: FormerMaster) -> None:
    await former.name_master("two", 2)
    assert refused(await former.read(A, B, A)) == [True, True, True]
    assert await former.read(A, B, critical=False) == [1, 1]


@pytest.mark.database
async def test_a_server_without_a_lease_or_without_the_right_to_read_it_is_checked_by_the_rest(
    former: FormerMaster,
) -> None:
    await former.run("DROP DATABASE tao")
    await remove_lease(former.administrator, deadline=asyncio.get_running_loop().time() + 10)
    try:
        assert await former.read(A, B) == [1, 1]
        await former.run("SET GLOBAL read_only = 1")
        assert refused(await former.read(A, B)) == [True, True]
    finally:
        deadline = asyncio.get_running_loop().time() + 10
        await install_lease(former.administrator, LeaseTerms(LEASE_SECONDS), deadline=deadline)


class Masters(ReadStore):
    """Servers "one", which is closed, and "two"; ``master`` is the one that the reader's topology names. ``refusals``:
    how many reads "one" refuses until it is opened."""

    def __init__(self, refusals: float = math.inf) -> None:
        self.master = "one"
        self.asked: list[str] = []
        self.refusals = refusals

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        self.asked.append(self.master)
        if self.master == "one" and len(self.asked) <= self.refusals:
            on_read(range(len(queries)), MasterReadOnly("closed"))
        else:
            on_read(range(len(queries)), FillRead([b"\x02" + bytes(9)] * len(queries), {0: 2}))


async def test_a_reader_that_was_refused_reads_the_topology_and_asks_the_new_master() -> None:
    masters, tasks = Masters(), Tasks()

    async def refresh(_: float) -> None:
        masters.master = "two"

    source = DatabaseSource(masters, lambda _: "db", tasks, DatabaseReadSettings(), refresh)
    query = ObjectQuery(make_id(64))
    found = await fetch_and_wait(source, query, 0, critical=True, timeout_seconds=5)
    assert masters.asked == ["one", "two"]
    assert found.version_epoch == 2
    await tasks.close()


async def test_a_reader_that_finds_no_new_master_says_so_after_a_bounded_number_of_reads() -> None:
    masters, tasks = Masters(), Tasks()
    refreshed = 0

    async def refresh(_: float) -> None:
        nonlocal refreshed
        refreshed += 1

    settings = DatabaseReadSettings(max_rereads=3, first_pause_seconds=0.0)
    source = DatabaseSource(masters, lambda _: "db", tasks, settings, refresh)
    with pytest.raises(MasterReadOnly):
        await fetch_and_wait(source, ObjectQuery(make_id(64)), 0, critical=True, timeout_seconds=5)
    assert masters.asked == ["one"] * 3
    assert refreshed == 2
    await until(lambda: not tasks.errors)
    await tasks.close()


async def test_a_topology_that_cannot_be_read_takes_no_read_its_time() -> None:
    """A silent etcd must not keep a reader from a master that is opened meanwhile, and is not asked again and again."""
    masters, tasks, silent = Masters(refusals=2), Tasks(), SilentTopology()
    refresh = Configuration(make_topology(), SCHEMA, logger("test"), silent).refresh
    source = DatabaseSource(masters, lambda _: "db", tasks, DatabaseReadSettings(), refresh)
    async with asyncio.timeout(PATIENT_SECONDS):
        found = await fetch_and_wait(source, ObjectQuery(make_id(64)), 0, critical=True, timeout_seconds=math.inf)
    assert found.version_epoch == 2
    assert (masters.asked, silent.reads) == (["one"] * 3, 1)
    await tasks.close()
