"""Servers that are compared while their master goes on committing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tao.model.topology import Database, DatabaseServer
from tao.storage.accounts import Account
from tao.storage.promotion import MemberState
from tao.watcher import replication_set
from tao.watcher.promotion_plan import check_rejoin
from tao.watcher.replication_set import ReplicationSet, SetAccounts
from tests.unit.watcher.members import following, gtids


async def test_a_replica_that_follows_all_along_is_not_taken_for_one_that_has_diverged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked after its master, it has what that has committed in between."""
    committed = 7

    @asynccontextmanager
    async def session(_: ReplicationSet, region: str, *, deadline: float) -> AsyncIterator[str]:
        yield region

    async def member_state(region: str, *, deadline: float) -> MemberState:
        nonlocal committed
        if region == "west":
            await asyncio.sleep(0)  # the master answers first
            committed += 1
        has = gtids(f"1-1-{committed}")
        return MemberState(region == "west", following(receiving=True) if region == "west" else None, has, has)

    monkeypatch.setattr(ReplicationSet, "session", session)
    monkeypatch.setattr(replication_set, "member_state", member_state)
    servers = {region: DatabaseServer(name=f"{region}-db") for region in ("east", "west")}
    database = Database(name="db", master_region="east", servers=servers, shards=((0, 1),))
    account = Account("tao_admin", "secret")
    replicas = ReplicationSet(database, SetAccounts(account, account), seen_from="", statement_seconds=1.0)
    check_rejoin(*await replicas.beside_master("west"))
