"""Who may become master: ties, servers behind, diverged and missing, and what nobody has everything of."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.replication.promotion_plan import (
    SILENT_SECONDS,
    Heard,
    MasterAnswers,
    PromotionRefused,
    PromotionRequest,
    ServerDiverged,
    ServerSeeding,
    SetMember,
    check_before,
    check_goes_on,
    check_has_all,
    check_kept,
    check_rejoin,
    choose,
    is_fenced_by_replicas,
    overtaking,
    promoted_only_in_rows,
    unfinished,
)
from tests.unit.replication.members import master, replica

LOST = PromotionRequest(master_lost=True)


def test_a_lost_master_is_replaced_by_the_replica_that_has_received_most() -> None:
    members = [master(None), replica("north", "1-1-7"), replica("west", "1-1-5", received="1-1-9")]
    check_before(members, LOST)
    assert choose(members, LOST).region == "west"


def test_a_replica_that_takes_itself_for_connected_hears_nothing_from_a_master_that_hangs() -> None:
    def connected(heard: str | None, seen_at: float) -> list[SetMember]:
        return [master(None), replica("west", "1-1-1", receiving=True, heard=heard, seen_at=seen_at)]

    request = PromotionRequest(master_lost=True, heard={"west-db": Heard("7 b.1:500", 100.0)})
    check_before(connected("7 b.1:500", 100.1 + SILENT_SECONDS), request)
    still = (
        connected("7 b.1:500", 99.9 + SILENT_SECONDS),
        connected("8 b.1:500", 200.0),
        connected("7 b.1:501", 200.0),
        connected(None, 200.0),
    )
    for members in still:
        with pytest.raises(PromotionRefused, match="still receives from"):
            check_before(members, request)
    with pytest.raises(PromotionRefused, match="still receives from"):
        check_before(connected("7 b.1:500", 200.0), LOST)


def test_among_equals_the_wish_decides_and_else_the_name() -> None:
    members = [master(None), replica("west", "1-1-9"), replica("north", "1-1-3", received="1-1-9")]
    assert choose(members, LOST).region == "north"
    assert choose(members, PromotionRequest("west", master_lost=True)).region == "west"


def test_among_equals_the_standby_of_the_masters_region_is_promoted_and_else_the_one_that_has_most() -> None:
    members = [master(None), replica("a-region", "1-1-9"), replica("east/standby", "1-1-3", received="1-1-9")]
    assert choose(members, LOST).region == "east/standby"
    ahead = [master(None), replica("a-region", "1-1-9"), replica("east/standby", "1-1-8")]
    assert choose(ahead, LOST).region == "a-region"


def test_a_server_that_lacks_something_is_not_promoted_on_wish() -> None:
    members = [master(None), replica("west", "1-1-8"), replica("north", "1-1-9")]
    with pytest.raises(PromotionRefused, match=r"west-db lacks 1-1-9 of north-db"):
        choose(members, PromotionRequest("west", master_lost=True))


def test_no_replica_is_promoted_when_each_lacks_transactions_of_another() -> None:
    members = [master(None), replica("west", "1-1-8,1-2-9"), replica("north", "1-1-9")]
    with pytest.raises(PromotionRefused, match="no server has everything"):
        choose(members, LOST)


def test_a_planned_switch_waits_for_everything_of_the_old_master() -> None:
    with pytest.raises(PromotionRefused, match=r"west-db lacks 1-1-10 of the master east-db"):
        choose([master("1-1-10", closed=True), replica("west", "1-1-9")], PromotionRequest("west"))
    caught_up = [master("1-1-10", closed=True), replica("west", "1-1-9", received="1-1-10")]
    assert choose(caught_up, PromotionRequest("west")).region == "west"


def test_a_planned_switch_to_a_server_that_follows_nobody_is_refused_before_writes_wait_for_it() -> None:
    alone = replica("west", "1-1-9", alone=True)
    for member in (alone, replace(alone, is_outdated=True)):
        with pytest.raises(PromotionRefused, match=r"lacks 1-1-10 of the master east-db: tao rejoin west-db first"):
            check_before([master("1-1-10"), member], PromotionRequest("west"))
    with pytest.raises(PromotionRefused, match="tao reseed west-db"):
        check_before([master("1-1-10"), replica("west", "1-1-9", alone=True, seeding=True)], PromotionRequest("west"))
    check_before([master("1-1-10"), replica("west", "1-1-9")], PromotionRequest("west"))
    interrupted = [master("1-1-10", closed=True), replica("west", "1-1-10", alone=True)]
    check_before(interrupted, PromotionRequest("west"))


def test_a_server_that_does_not_answer_may_have_more_unless_the_request_says_otherwise() -> None:
    members = [master(None), replica("west", "1-1-9"), replica("north", None)]
    with pytest.raises(PromotionRefused, match="--without north-db"):
        check_before(members, LOST)
    check_before(members, PromotionRequest(master_lost=True, without=frozenset({"north-db"})))
    with pytest.raises(PromotionRefused, match="does not answer"):
        check_before(members, PromotionRequest("north", master_lost=True, without=frozenset({"north-db"})))


def test_a_master_that_does_not_answer_is_lost_only_when_said_so_and_no_replica_receives_from_it() -> None:
    with pytest.raises(PromotionRefused, match="--master-lost"):
        check_before([master(None), replica("west", "1-1-9")], PromotionRequest("west"))
    with pytest.raises(PromotionRefused, match="still receives"):
        check_before([master(None), replica("west", "1-1-9", receiving=True)], LOST)


def test_a_master_that_answers_is_not_lost_whatever_was_said_of_it() -> None:
    for closed in (True, False):
        members = [master("1-1-10", closed=closed), replica("west", "1-1-9")]
        with pytest.raises(MasterAnswers, match="stop it first"):
            check_before(members, LOST)
        with pytest.raises(MasterAnswers, match="without --master-lost"):
            choose(members, LOST)  # it has come back meanwhile


def test_no_replica_is_promoted_when_none_answers() -> None:
    for members in ([master(None)], [master(None), replica("west", None)]):
        with pytest.raises(PromotionRefused, match="nobody to promote"):
            check_before(members, LOST)
    with pytest.raises(PromotionRefused, match="'moon'"):
        check_before([master("1-1-1"), replica("west", "1-1-1")], PromotionRequest("moon"))


def test_a_former_master_follows_unless_it_has_something_of_its_own() -> None:
    new = master("1-1-9,1-2-20", region="west")
    check_rejoin(replica("east", "1-1-9", alone=True), new)
    with pytest.raises(ServerDiverged, match=r"1-1-\(10…12\)"):
        check_rejoin(replica("east", "1-1-12", alone=True), new)
    with pytest.raises(PromotionRefused, match="does not answer"):
        check_rejoin(replica("east", None), new)


def test_a_server_with_a_part_of_the_data_is_neither_promoted_nor_attached() -> None:
    whole, part = replica("north", "1-1-5"), replica("west", "1-1-9", alone=True, seeding=True)
    assert choose([master(None), whole, part], LOST).region == "north"
    with pytest.raises(PromotionRefused, match="tao reseed west-db"):
        check_before([master("1-1-9"), whole, part], PromotionRequest("west"))
    with pytest.raises(PromotionRefused, match=r"nobody to promote .*tao reseed west-db"):
        check_before([master(None), part], LOST)
    with pytest.raises(ServerSeeding, match="tao reseed west-db"):
        check_rejoin(part, master("1-1-9"))


def test_a_former_master_that_has_not_rejoined_is_not_promoted() -> None:
    former = replace(replica("west", "1-1-1,2-2-9", alone=True), is_outdated=True)
    for region in (None, "west"):
        with pytest.raises(PromotionRefused, match=r"west-db was master earlier.*--without"):
            check_before([master(None), former], PromotionRequest(region, master_lost=True))
    fit = replica("north", "1-1-1", stopped=True)
    check_before([master(None), former, fit], LOST)
    assert choose([master(None), former, fit], LOST).name == "north-db", "whatever else the former one has"


def test_a_promotion_that_has_raised_the_epoch_can_only_be_finished() -> None:
    members = [master("1-1-9", closed=True), replica("west", "1-1-9,1-2-10", alone=True)]
    assert unfinished(members, {"east-db": 3, "west-db": 4}, 3) == "west"
    assert unfinished(members, {"east-db": 3, "west-db": 3}, 3) is None


def test_a_former_master_that_is_back_is_no_unfinished_promotion() -> None:
    members = [master("1-1-9,1-2-20", region="west"), replica("east", "1-1-9", alone=True)]
    assert unfinished(members, {"west-db": 4, "east-db": 3}, 4) is None


def test_a_document_that_has_forgotten_its_epoch_makes_no_promotion_of_a_healthy_set() -> None:
    members = [master("1-1-9"), replica("west", "1-1-9", alone=True)]
    assert unfinished(members, {"east-db": 5, "west-db": 5}, 1) is None


def test_the_newest_of_several_promotions_that_a_document_has_forgotten_counts() -> None:
    """The other one was interrupted earlier, and its server has nothing of what was written since."""
    members = [master("1-1-5"), replica("north", "1-1-5,1-3-9", alone=True), replica("west", "1-1-8,1-2-9", alone=True)]
    assert unfinished(members, {"north-db": 2, "west-db": 4}, 1) == "west"


WEST = replica("west", "1-1-5,1-2-9", alone=True)
"""A server whose epoch was raised, which is its own transaction, before its promotion was interrupted."""


@pytest.mark.parametrize(
    ("old_master", "third", "semi_sync", "opened", "why"),
    [
        (master("1-1-5"), replica("north", "1-1-5"), True, False, ""),
        (master("1-1-6"), replica("north", "1-1-5"), True, False, "east-db has 1-1-6, which west-db lacks"),
        (master("1-1-6"), replica("north", "1-1-5"), False, False, "east-db has 1-1-6, which west-db lacks"),
        (master("1-1-5"), replica("north", None), True, False, ""),  # what it has, the old master has
        (master(None), replica("north", "1-1-5"), True, False, ""),
        (master(None), replica("north", "1-1-6"), True, False, "north-db has 1-1-6, which west-db lacks"),
        (master(None), replica("north", "1-1-6"), False, False, ""),  # lost with its master anyway
        (master(None), replica("north", "1-1-6", seeding=True), True, False, ""),
        (master(None), replace(replica("north", "1-1-6", alone=True), is_outdated=True), True, False, ""),
        (master(None), replica("north", None), True, False, "--without north-db"),
        (master(None), replica("north", None), False, False, ""),
        (master("1-1-6"), replica("north", "1-1-5"), True, True, ""),  # the topology has forgotten its promotion
        (master("1-1-6"), replica("north", "1-1-6"), True, True, "north-db has 1-1-6, which west-db lacks"),
    ],
)
def test_an_interrupted_promotion_is_not_finished_when_its_old_master_may_have_gone_on(
    old_master: SetMember, third: SetMember, semi_sync: bool, opened: bool, why: str
) -> None:
    members = [old_master, WEST, third]
    found = overtaking("west", members, ["west-db"] if opened else [], semi_sync=semi_sync)
    assert why in found if why else found == ""


@pytest.mark.parametrize(
    ("old_master", "third", "opened", "why"),
    [
        (master("1-1-6"), replica("north", "1-1-6"), False, ""),
        (master("1-1-6"), replica("north", None), False, ""),
        (master("1-1-6"), replace(replica("north", "1-3-1"), is_outdated=True), False, ""),
        (master("1-1-6"), replica("north", "1-1-7"), False, "lacks 1-1-7 of north-db"),
        (master(None), replica("north", "1-1-6"), False, "tao reseed west-db"),
        (replace(replica("east", "1-1-6"), is_master=True), replica("north", "1-1-6"), False, "follows another server"),
        (master("1-1-6"), replica("north", "1-1-6"), True, "west-db was open to writes, too"),
    ],
)
def test_an_old_master_goes_on_in_place_of_a_server_that_was_never_opened_if_it_has_all_that_others_have(
    old_master: SetMember, third: SetMember, opened: bool, why: str
) -> None:
    members = [old_master, WEST, third]
    promoted = promoted_only_in_rows(members, {"east-db": 1, "west-db": 2, "north-db": 1}, 1)
    assert promoted == [WEST]
    with pytest.raises(PromotionRefused, match=why) if why else nullcontext():
        check_goes_on(members, promoted, ["west-db"] if opened else [], "somebody has more")


histories = st.lists(
    st.tuples(st.sampled_from(["north", "south", "west"]), st.integers(1, 30), st.integers(0, 30), st.booleans()),
    min_size=1,
    max_size=3,
    unique_by=lambda each: each[0],
)


@given(histories, st.sampled_from([None, "north", "south", "west"]))
def test_the_chosen_replica_lacks_nothing_that_another_has_received(
    servers: list[tuple[str, int, int, bool]], requested: str | None
) -> None:
    members: list[SetMember] = [master(None)]
    for region, executed, more, astray in servers:
        own = f",1-{len(region)}-{executed}" if astray else ""
        members.append(replica(region, f"1-1-{executed}{own}", received=f"1-1-{executed + more}"))
    if requested is not None and requested not in {each.region for each in members}:
        requested = None
    try:
        chosen = choose(members, PromotionRequest(requested, master_lost=True))
    except PromotionRefused:
        return
    assert chosen.state is not None
    assert all(chosen.state.received >= each.state.received for each in members if each.state is not None)


def test_a_lost_master_whose_commits_wait_for_replicas_that_all_can_be_stopped_is_fenced_by_stopping_them() -> None:
    lost = PromotionRequest(master_lost=True, waited_for_replica=True)

    def fenced(
        *others: SetMember, request: PromotionRequest = lost, semi_sync: bool = True, marked: tuple[str, ...] = ()
    ) -> bool:
        return is_fenced_by_replicas([master(None), *others], request, semi_sync=semi_sync, marked=marked)

    west, north = replica("west", "1-1-1"), replica("north", "1-1-1")
    assert fenced(west)
    assert fenced(west, north)
    assert not fenced(west, request=PromotionRequest(master_lost=True)), "nobody has seen that it waits"
    assert not fenced(west, semi_sync=False), "it does not go on waiting"
    assert not fenced(west, replica("north", None)), "that one may acknowledge"
    assert not fenced(west, replica("north", "", seeding=True)), "that one may acknowledge"
    assert not fenced(west, north, marked=("north-db",)), "the master may have been let go for its sake"
    assert not fenced(west, request=PromotionRequest(waited_for_replica=True)), "a master that answers is closed"


def test_a_server_that_has_received_more_than_the_one_that_was_chosen_ends_the_promotion() -> None:
    chosen = replica("west", "1-1-5")
    check_has_all(chosen, replica("north", "1-1-4", received="1-1-5"))
    with pytest.raises(PromotionRefused, match="west-db lacks 1-1-6, which north-db has received"):
        check_has_all(chosen, replica("north", "1-1-4", received="1-1-6"))


def test_a_server_that_has_lost_its_relay_log_since_it_was_chosen_is_not_promoted() -> None:
    chosen = replica("west", "1-1-5", received="1-1-7")
    for now in ("1-1-7", "1-1-8"):
        kept = replica("west", now).state
        assert kept is not None
        check_kept(chosen, kept)
    less = replica("west", "1-1-6").state
    assert less is not None
    with pytest.raises(PromotionRefused, match="west-db has lost"):
        check_kept(chosen, less)
