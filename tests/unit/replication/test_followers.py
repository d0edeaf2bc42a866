"""A promotion that is undone and whose master does not answer its process has the replicas receive again."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tao.model.errors import Unavailable
from tao.replication import followers, promotion
from tao.replication.followers import give_back
from tao.replication.promotion_plan import PromotionRefused, SetMember
from tao.replication.replication_set import ReplicationSet
from tests.unit.replication.members import master, replica
from tests.unit.replication.test_promotion import promoter_of
from tests.unit.replication.test_replication_set import replication_set_of

REFUSING = dataclasses.replace(master(None), refuses=True)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to servers, by name. ``MEMBERS`` says how they are then."""
    noted = list[str]()

    @asynccontextmanager
    async def session(_: ReplicationSet, region: str) -> AsyncIterator[str]:
        yield region

    async def receive_again(region: str, *, deadline: float) -> None:
        if region == "south":
            raise Unavailable("its connection broke")
        noted.append(f"{region} receives again")

    async def follow(_: ReplicationSet, region: str, master_region: str) -> None:
        noted.append(f"{region} follows {master_region}")

    monkeypatch.setattr(followers, "receive_again", receive_again)
    monkeypatch.setattr(ReplicationSet, "session", session)
    monkeypatch.setattr(ReplicationSet, "follow", follow)
    return noted


def they_are(monkeypatch: pytest.MonkeyPatch, *members: SetMember) -> list[SetMember]:
    by_region = {each.region: each for each in members}

    async def member(_: ReplicationSet, region: str, seconds: float | None = None) -> SetMember:
        return by_region[region]

    monkeypatch.setattr(ReplicationSet, "member", member)
    return [*members]


async def test_replicas_get_a_master_back_that_cannot_be_compared_if_this_run_has_stopped_or_detached_them(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [
        REFUSING,
        replica("west", "1-1-1", receiving=True),
        replica("north", "1-1-1", receiving=True),
        replica("south", "1-1-1", receiving=True),
        replica("middle", "1-1-1", alone=True),
        replica("upper", "1-1-1", receiving=True),
        replica("lower", "1-1-1", stopped=True),
    ]
    they_are(
        monkeypatch,
        REFUSING,
        replica("west", "1-1-1", alone=True),
        replica("north", "1-1-1", stopped=True),
        replica("south", "1-1-1", stopped=True),
        replica("middle", "1-1-1,2-2-2", alone=True),  # an old master, perhaps
        replica("upper", "1-1-1", receiving=True),
        replica("lower", "1-1-1", stopped=True),  # by an operator, who has marked it
    )
    regions = ["east", "west", "north", "south", "middle", "upper", "lower"]
    left = await give_back(replication_set_of(*regions, marked="lower", semi_sync=True), before)
    assert done == ["west follows east", "north receives again"]
    assert left == {"south-db": "its connection broke"}, "the others are not left for that"


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_promotion_that_is_undone_gives_its_replicas_back_to_a_master_out_of_the_reach_of_its_process(
    done: list[str], monkeypatch: pytest.MonkeyPatch, refuses: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The master may be well for all others; then they hear from it, and the next run finds that out."""
    members = they_are(monkeypatch, REFUSING if refuses else master(None), replica("west", "1-1-1", stopped=True))

    async def epochs_as_masters(*_: object) -> object:
        return {}, {}

    monkeypatch.setattr(ReplicationSet, "epochs_as_masters", epochs_as_masters)
    replicas = replication_set_of("east", "west", semi_sync=True)
    with pytest.raises(PromotionRefused, match="refuses this process" if refuses else "does not answer"):
        await promoter_of(tmp_path_factory.mktemp("locks"))._restore(replicas, None, members)
    assert done == ["west receives again"]


async def test_replicas_are_given_back_while_another_server_is_silent_whose_promotion_cannot_succeed_any_more(
    done: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The silent one may be dead for good, and until then commits of the master would wait for a replica."""
    stopped, silent = replica("west", "1-1-1", stopped=True), replica("north", None)
    members = they_are(monkeypatch, master(None), stopped, silent)

    async def epochs_as_masters(*_: object) -> object:
        return {"west-db": 0}, {}

    async def reject_late_promotion(*_: object) -> None:
        done.append("late promotions are rejected")

    monkeypatch.setattr(ReplicationSet, "epochs_as_masters", epochs_as_masters)
    monkeypatch.setattr(promotion, "reject_late_promotion", reject_late_promotion)
    replicas = replication_set_of("east", "west", "north", semi_sync=True)
    with pytest.raises(PromotionRefused, match="does not answer"):
        await promoter_of(tmp_path_factory.mktemp("locks"))._restore(replicas, None, members)
    assert done == ["late promotions are rejected", "west receives again"]
