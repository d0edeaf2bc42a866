"""What a write transaction reports of a lost connection: to its caller, and to the pool that has lent it."""

from __future__ import annotations

from typing import cast

import pytest

from tao.model.errors import DeadlineExceeded, OutcomeUnknown, ShardBlocked, TaoError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import ListRow, RowChanges, WriteKeys
from tao.storage.disk_space import DiskSpace, DiskSpaceSettings
from tao.storage.failures import ConnectionLost
from tao.storage.pools import Pool
from tao.storage.result_packets import Columns, Row
from tao.storage.session import DatabaseSession
from tao.storage.writes import MySqlTransaction
from tests.unit.storage.test_session_faults import FailingConnection


class NextSession(DatabaseSession):
    """Fails with what it is given, and is closed by it unless that is a refusal."""

    def __init__(self, failure: TaoError | None) -> None:
        super().__init__(FailingConnection(), "db-1", locking=True)
        self.failure = failure
        self.ran: list[str] = []
        self.blocks = ""
        """What statements that wait for a lock have in them."""
        self.is_lost_in_commit = False

    @property
    def committed_gtid(self) -> str:
        return "0-1-1"

    async def run(
        self,
        sql: str,
        arguments: object = (),
        *,
        deadline: float,
        results: list[list[Row]] | None = None,
        columns: Columns | None = None,
    ) -> list[list[Row]]:
        self.ran.append(sql)
        if "COMMIT" in sql and self.is_lost_in_commit:
            self.abort()
            raise ConnectionLost("closed")
        if self.blocks and self.blocks in sql:
            raise ShardBlocked("locked")
        failure, self.failure = self.failure, None
        if failure is not None:
            if not isinstance(failure, ShardBlocked):
                self.abort()
            raise failure
        return [[] for _ in sql.split("; ")]


class Lender:
    """A pool: what its loans have ended with."""

    def __init__(self, *failures: TaoError | None) -> None:
        self.sessions = [NextSession(failure) for failure in failures]
        self.lent = iter(self.sessions)
        self.ended: list[BaseException | None] = []
        self.space = DiskSpace("db-1", DiskSpaceSettings(), self.look)

    async def look(self, deadline: float) -> bool:
        return False

    def session(self, *, deadline: float, fresh: bool = False) -> Lender:
        return self

    async def __aenter__(self) -> DatabaseSession:
        return next(self.lent)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.ended.append(error)

    def transaction(self) -> MySqlTransaction:
        return MySqlTransaction(cast("Pool", self), lambda _: "assocs", timeout_seconds=30)


async def test_a_transaction_is_two_messages_to_the_database() -> None:
    pool = Lender(None)
    pairs = [(shard << SHARD_SHIFT, (3 - shard) << SHARD_SHIFT) for shard in (1, 2)]
    changes = RowChanges()
    for id1, id2 in pairs:
        changes.put_lists[ListKey(id1, 1)] = ListRow(1, 1)
        changes.put_edges[EdgeKey(id1, 1, id2)] = Edge(1, 1)
    async with pool.transaction() as transaction:
        await transaction.lock_and_read([1, 2], WriteKeys(edges=set(changes.put_edges)))
        await transaction.apply(changes)
        assert await transaction.commit() == "0-1-1"
    read, written = pool.sessions[0].ran
    assert "FOR UPDATE" in read
    assert "; " not in read, "the server would answer each statement by itself"
    assert "INSERT" in written
    assert written.endswith("; COMMIT")


@pytest.mark.parametrize(("shards", "seconds"), [(1, "0.300"), (400, "0.500")])
async def test_locking_rows_of_many_shards_has_more_time(shards: int, seconds: str) -> None:
    pool = Lender(None)
    async with pool.transaction() as transaction:
        await transaction.lock_and_read(range(shards), WriteKeys())
    assert pool.sessions[0].ran[0].startswith(f"SET STATEMENT max_statement_time = {seconds} FOR ")


async def test_a_loan_without_an_answer_ends_with_what_was_found() -> None:
    silence = DeadlineExceeded("no answer")
    pool = Lender(silence)
    with pytest.raises(DeadlineExceeded):
        async with pool.transaction() as transaction:
            await transaction.lock_and_read([1], WriteKeys())
    assert pool.ended == [silence]


async def test_a_connection_that_died_idle_is_no_answer_and_the_fresh_one_may_be() -> None:
    lost = ConnectionLost("closed")
    pool = Lender(lost, None)
    async with pool.transaction() as transaction:
        await transaction.lock_and_read([1], WriteKeys())
    assert pool.ended == [lost, None]


async def test_a_refusal_leaves_the_connection_to_the_next() -> None:
    pool = Lender(ShardBlocked("locked"))
    with pytest.raises(ShardBlocked):
        async with pool.transaction() as transaction:
            await transaction.lock_and_read([1], WriteKeys())
    assert pool.ended == [None]
    assert pool.sessions[0].is_open


async def test_one_shard_whose_oldest_edges_are_locked_is_named() -> None:
    pool = Lender(None)
    session = pool.sessions[0]
    lists = {ListKey(shard << SHARD_SHIFT, 1): 3 for shard in (1, 2, 3)}
    async with pool.transaction() as transaction:
        await transaction.lock_and_read([], WriteKeys())
        session.blocks = "FROM tao_00002.assocs FORCE INDEX (by_time)"
        with pytest.raises(ShardBlocked) as caught:
            await transaction.lock_oldest(lists)
    assert caught.value.shard == 2
    assert session.ran[-1] == "ROLLBACK"
    assert pool.ended == [None]


async def test_a_connection_lost_before_commit_is_sent_leaves_nothing_unknown() -> None:
    pool = Lender(None)
    async with pool.transaction() as transaction:
        await transaction.lock_and_read([], WriteKeys())
        await transaction.apply(RowChanges())
        pool.sessions[0].abort()
        with pytest.raises(ConnectionLost, match="nothing was written"):
            await transaction.commit()
    assert not any("COMMIT" in sql for sql in pool.sessions[0].ran)


async def test_a_connection_lost_in_commit_leaves_the_outcome_unknown() -> None:
    pool = Lender(None)
    pool.sessions[0].is_lost_in_commit = True
    async with pool.transaction() as transaction:
        await transaction.lock_and_read([], WriteKeys())
        await transaction.apply(RowChanges())
        with pytest.raises(OutcomeUnknown):
            await transaction.commit()
