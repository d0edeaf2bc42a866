"""What a write transaction reports of a lost connection: to its caller, and to the pool that has lent it."""

from __future__ import annotations

from typing import cast

import pytest

from tao.model.errors import DeadlineExceeded, OutcomeUnknown, ShardBlocked, TaoError
from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import RowChanges, WriteKeys
from tao.storage.dialect import Dialect
from tao.storage.disk_space import DiskSpace, DiskSpaceSettings
from tao.storage.failures import ConnectionLost
from tao.storage.pools import Pool
from tao.storage.result_packets import Row
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
        self.last_gtid = ""
        self.commits: list[list[list[Row]]] = []
        """What the next COMMITs are answered with; the session is lost after an answer that lacks the GTID."""

    async def run(
        self, sql: str, arguments: object = (), *, deadline: float, results: list[list[Row]] | None = None
    ) -> list[list[Row]]:
        self.ran.append(sql)
        self.committed_gtid = None
        if "COMMIT" in sql and results is not None:
            results += self.commits.pop(0)
            if len(results) < 2:
                self.abort()
                raise ConnectionLost("closed")
            self.last_gtid = str(results[-1][0][0]) if results[-1] else ""
            return results
        if self.blocks and self.blocks in sql:
            raise ShardBlocked("locked")
        failure, self.failure = self.failure, None
        if failure is not None:
            if not isinstance(failure, ShardBlocked):
                self.abort()
            raise failure
        return [[], [(self.last_gtid,)]]


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
        await transaction.lock_and_read([], WriteKeys())
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


async def commit(pool: Lender) -> str:
    async with pool.transaction() as transaction:
        await transaction.lock_and_read([], WriteKeys())
        await transaction.apply(RowChanges())
        return await transaction.commit()


async def test_a_commit_returns_its_gtid_and_never_that_of_an_earlier_one() -> None:
    pool = Lender(None)
    session = pool.sessions[0]
    pool.lent = iter([session] * 4)
    session.commits = [[[], [("0-1-7",)]], [[], [("0-1-7",)]], [[], [("0-1-9",)]], [[], []]]
    assert [await commit(pool) for _ in range(4)] == ["0-1-7", "", "0-1-9", ""]
    assert session.ran[:2] == ["START TRANSACTION; SELECT @@last_gtid", "COMMIT; SELECT @@last_gtid"]


async def test_a_commit_without_effect_does_not_return_the_gtid_of_a_heartbeat_before_it() -> None:
    pool = Lender(None)
    session = pool.sessions[0]
    session.last_gtid = "0-1-8"
    session.commits = [[[], [("0-1-8",)]]]
    assert await commit(pool) == ""


async def test_the_gtid_before_a_transaction_is_asked_for_only_after_other_statements() -> None:
    pool = Lender(None)
    session = pool.sessions[0]
    pool.lent = iter([session] * 3)
    session.commits = [[[], [("0-1-7",)]], [[], [("0-1-7",)]], [[], [("0-1-8",)]]]
    assert [await commit(pool), await commit(pool)] == ["0-1-7", ""]
    assert session.ran[2] == "START TRANSACTION"
    session.last_gtid = "0-1-8"
    await session.run("START TRANSACTION; INSERT INTO heartbeat; COMMIT", deadline=0)
    assert await commit(pool) == ""
    assert session.ran[-2] == "START TRANSACTION; SELECT @@last_gtid"


async def test_a_connection_lost_after_the_answer_to_commit_leaves_only_the_gtid_unknown() -> None:
    pool = Lender(None)
    pool.sessions[0].commits = [[[]]]
    assert await commit(pool) == ""
    assert not pool.sessions[0].is_open


async def test_a_connection_lost_in_commit_leaves_the_outcome_unknown() -> None:
    pool = Lender(None)
    pool.sessions[0].commits = [[]]
    with pytest.raises(OutcomeUnknown):
        await commit(pool)


def test_mysql_has_no_last_gtid() -> None:
    assert Dialect.MYSQL.last_gtid == ()
