"""How long a promotion waits for the lease of a lost master, and what the others have done by then."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tao.model.ports import TopologyStore
from tao.replication.accounts import Account
from tao.replication.lease import LeaseTerms
from tao.replication.locks import FileLocks
from tao.replication.promotion import Promoter, PromotionSettings, PromotionStep
from tao.replication.promotion_plan import PromotionRequest
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tests.unit.replication.members import master, replica
from tests.unit.replication.test_replication_set import replication_set_of


@pytest.mark.parametrize(
    ("can_be_away", "semi_sync", "asked"),
    [
        (True, True, ["before", "after"]),
        (True, False, ["before"]),
        (False, True, ["before"]),
    ],
)
async def test_it_asks_for_renewals_again_when_the_others_have_stopped_receiving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_be_away: bool, semi_sync: bool, asked: list[str]
) -> None:
    members = [master(None), replica("west", "1-1-1", receiving=True, acknowledges=True)]
    when, steps, stopped = list[str](), list[PromotionStep](), list[str]()

    async def last_renewal() -> float:
        when.append("after" if stopped else "before")
        return -100.0

    async def lease_terms(_: ReplicationSet, region: str) -> LeaseTerms:
        return LeaseTerms(5.0)

    async def stop_receiving(_: ReplicationSet, region: str) -> None:
        stopped.append(region)

    async def all_members(_: ReplicationSet) -> object:
        return members

    async def on_step(step: PromotionStep) -> None:
        steps.append(step)

    monkeypatch.setattr(ReplicationSet, "lease_terms", lease_terms)
    monkeypatch.setattr(ReplicationSet, "stop_receiving", stop_receiving)
    monkeypatch.setattr(ReplicationSet, "members", all_members)
    locks = FileLocks(tmp_path / "topology.json")
    monkeypatch.setattr(locks, "can_be_away", can_be_away)
    account = Account("tao_admin", "secret")
    accounts = SetAccounts(account, account)
    promoter = Promoter(cast("TopologyStore", None), locks, accounts, PromotionSettings(), on_step=on_step)
    replicas = replication_set_of("east", "west", semi_sync=semi_sync)
    chosen = await promoter._choose(replicas, members, PromotionRequest(master_lost=True), last_renewal, fenced=False)
    assert chosen.region == "west"
    assert when == asked
    assert steps == [PromotionStep.FENCE, PromotionStep.STOP_RECEIVING, PromotionStep.COMPARE]
