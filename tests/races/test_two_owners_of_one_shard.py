"""Two leaders both take themselves for the owner of one shard, over the real locks of a database server.

    leader 1                       shard row                    leader 2
    owns it, generation 1
    (paused, or cut off)
                                   generation 2, leader 2    ←  takes it over
                                                                writes
    resumes, writes:
      locks the row, reads 2  →    rejected, nothing written
    gives the shard up

A takeover waits for the transactions that hold the row in share mode: afterwards either such a transaction is
committed and seen by the new owner, or it never will be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.leader.inverse_path import InverseSettings
from tao.leader.write_path import WritePath
from tao.model.delivery import Delivery, Position
from tao.model.edge_block import decode_block
from tao.model.errors import Fenced, OutcomeUnknown
from tao.model.graph import decode_count
from tao.model.ports import Transaction
from tao.model.queries import CountQuery, RangeQuery
from tao.model.rows import ShardRow
from tao.model.versions import counter_of
from tao.model.writes import AssocAdd
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.session import ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tests.rigs.leader_rig import COMMENT, FRIEND, LeaderRig, OtherRigs, make_id
from tests.rigs.pacing import Gate, until

pytestmark = pytest.mark.database

SERVER = "one"
SHARD, OTHER = 41_000, 41_001
A, B, FAR = make_id(64, SHARD), make_id(128, SHARD), make_id(64, OTHER)


def account(server: DatabaseInstance, role: str) -> ServerAccount:
    found = getattr(server.accounts, role)
    return ServerAccount("127.0.0.1", server.port, found.user, found.password, socket="", tls=None)


async def as_administrator(server: DatabaseInstance, *statements: str) -> None:
    pools = Pools(lambda _: account(server, "administrator"), WRITE_SETUP)
    deadline = asyncio.get_running_loop().time() + 10
    async with pools.of(SERVER).session(deadline=deadline) as session:
        for statement in statements:
            await session.run(statement, deadline=deadline)
    await pools.close()


@pytest.fixture(scope="module")
def migrated(database_server: DatabaseInstance) -> Iterator[DatabaseInstance]:
    asyncio.run(migrate(account(database_server, "administrator"), (SHARD, OTHER), {}, SERVER))
    yield database_server
    drops = [f"DROP DATABASE {schema_name(shard)}" for shard in (SHARD, OTHER)]
    asyncio.run(as_administrator(database_server, *drops))


@dataclass
class Owners:
    """Two leaders, each with its own connections."""

    one: LeaderRig
    two: LeaderRig
    reads: MySqlReadStore

    async def times(self, id1: int = A, atype: int = COMMENT) -> list[int]:
        """Return the stored edges."""
        read = await self.reads.read([RangeQuery(id1, atype, 0, 10)], critical=True, timeout_seconds=5)
        return [edge.time for edge in decode_block(read.values[0])]


@pytest.fixture
async def owners(migrated: DatabaseInstance) -> AsyncIterator[Owners]:
    pools = [Pools(lambda _: account(migrated, "leader"), WRITE_SETUP) for _ in range(2)]
    read_pools = Pools(lambda _: account(migrated, "reader"), READ_SETUP)
    reads = MySqlReadStore(lambda _: SERVER, lambda _: SERVER, read_pools, lambda _: "assocs")
    others = OtherRigs()
    one, two = [
        LeaderRig(
            MySqlWriteStore(lambda _: SERVER, each, lambda _: "assocs"),
            reads,
            name=f"leader-{number}",
            others=others,
            inverses=InverseSettings(settle_linger_seconds=0.0),
        )
        for number, each in enumerate(pools, 1)
    ]
    others.rigs = {SHARD: one, OTHER: two}
    yield Owners(one, two, reads)
    await one.close()
    await two.close()
    for each in (*pools, read_pools):
        await each.close()
    tables = ("assocs", "assoc_lists", "inverse_intents")
    empty = [f"DELETE FROM {schema_name(shard)}.{table}" for shard in (SHARD, OTHER) for table in tables]
    await as_administrator(migrated, *empty, "COMMIT")


def add(time: int, id2: int = B, atype: int = COMMENT) -> AssocAdd:
    return AssocAdd(A, atype, id2, time, b"")


async def test_a_deposed_leader_writes_nothing_and_gives_the_shard_up(owners: Owners) -> None:
    await owners.one.take(SHARD)
    await owners.one.write(add(1))
    await owners.two.take(SHARD)
    await owners.two.write(add(2))
    with pytest.raises(Fenced):
        await owners.one.write(add(3))
    assert await owners.times() == [2]
    assert SHARD not in owners.one.ownership.owned
    assert owners.one.cache.peek_list(A, COMMENT) is None
    await owners.two.write(add(4))
    assert await owners.times() == [4]


async def test_a_leader_that_wakes_up_in_the_middle_of_a_write_is_refused(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader pauses after it has chosen what to write, before it has locked anything."""
    await owners.one.take(SHARD)
    gate = Gate()
    transact = owners.one.writes._transact

    async def paused(*arguments):  # type: ignore[no-untyped-def]
        await gate.pass_through()
        return await transact(*arguments)

    monkeypatch.setattr(owners.one.writes, "_transact", paused)
    writing = asyncio.ensure_future(owners.one.write(add(1)))
    await gate.arrived.wait()
    await owners.two.take(SHARD)
    await owners.two.write(add(2))
    gate.open()
    with pytest.raises(Fenced):
        await writing
    assert await owners.times() == [2]


async def test_a_takeover_waits_for_an_open_transaction_and_then_sees_it(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader pauses while it holds the row: its commit is there when the new owner starts."""
    await owners.one.take(SHARD)
    gate = Gate()
    hold_commits(owners.one.writes, gate, monkeypatch)
    writing = asyncio.ensure_future(owners.one.write(add(1)))
    await gate.arrived.wait()
    taking = asyncio.ensure_future(take_patiently(owners.two))
    await asyncio.sleep(0)
    gate.open()
    await writing
    await taking
    await owners.two.write(add(2, B + 1))
    assert await owners.times() == [2, 1]
    read = await owners.reads.read([CountQuery(A, COMMENT)], critical=True, timeout_seconds=5)
    version, count = decode_count(read.values[0])
    assert (counter_of(version), count) == (2, 2)


async def take_patiently(rig: LeaderRig) -> None:
    """Retry a lock that was not granted within its bound, as `Ownership.take` does."""
    rig.ownership.want((SHARD,))
    running = asyncio.ensure_future(rig.ownership.take())
    await until(lambda: rig.ownership.complete)
    running.cancel()


def hold_commits(writes: WritePath, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    make = writes._store.transaction

    def transaction(server: str, *, timeout_seconds: float) -> Transaction:
        made = make(server, timeout_seconds=timeout_seconds)
        commit = made.commit

        async def held() -> str:
            await gate.pass_through()
            return await commit()

        made.commit = held  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(writes._store, "transaction", transaction)


async def test_after_a_connection_lost_in_commit_the_shard_is_retaken_and_all_of_it_invalidated(
    owners: Owners, migrated: DatabaseInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = owners.one
    deliveries: list[Delivery] = []
    rig.publisher.subscribe("follower", [Position(SHARD)], deliveries.append)
    await rig.take(SHARD)
    await rig.write(add(1))
    rig.publisher.subscribe("follower", [Position(SHARD)], deliveries.append)
    generation = rig.ownership.row(SHARD).generation
    make = rig.store.transaction

    def transaction(server: str, *, timeout_seconds: float) -> Transaction:
        made = make(server, timeout_seconds=timeout_seconds)
        commit = made.commit

        async def cut() -> str:
            session = made._session  # type: ignore[attr-defined]  # a MySqlTransaction
            asyncio.get_running_loop().call_soon(session.abort)
            return await commit()

        made.commit = cut  # type: ignore[method-assign]
        return made

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "transaction", transaction)
        with pytest.raises(OutcomeUnknown):
            await rig.write(add(2))
    assert rig.cache.peek_list(A, COMMENT) is None
    assert SHARD not in rig.ownership.owned
    assert deliveries[-1].refused == (SHARD,), "subscribers are notified at once"
    await take_patiently(rig)
    row: ShardRow = rig.ownership.row(SHARD)
    assert row.generation > generation
    # Now the outcome is known, and stays so.
    known = await owners.times()
    assert known in ([1], [2])
    again: list[Delivery] = []
    rig.publisher.subscribe("follower", [Position(SHARD, "the stream before", 1)], again.append)
    assert [part.reset for part in again[0].shards] == [True]
    await rig.write(add(3))
    assert await owners.times() == [3]


async def test_a_deposed_coordinator_cannot_write_its_side_of_a_pair(owners: Owners) -> None:
    await owners.one.take(SHARD)
    await owners.two.take(SHARD, OTHER)
    with pytest.raises(Fenced):
        await owners.one.write(add(1, FAR, FRIEND))
    assert await owners.times(A, FRIEND) == await owners.times(FAR, FRIEND) == []
    await owners.two.write(add(2, FAR, FRIEND))
    assert await owners.times(A, FRIEND) == await owners.times(FAR, FRIEND) == [2]
