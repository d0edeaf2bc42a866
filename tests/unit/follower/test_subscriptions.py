"""Nothing is cached unconfirmed, nothing is kept that messages do not correct, and a lost leader costs no hits."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tao.cache import GraphCache
from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery
from tao.model.errors import Unavailable
from tao.model.topology import RecordedChange
from tao.model.writes import AssocAdd
from tao.serving.forward_path import WriteThrough
from tao.wire.convert import delivery_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, make_id, make_topology
from tests.rigs.pacing import SetTimers, quiet, until
from tests.rigs.region_rig import FollowerRig, RegionRig, subscribed

A, B, FAR = make_id(64), make_id(128), make_id(64, 1)


async def test_nothing_is_cached_of_a_shard_before_its_leader_has_confirmed_it(region: RegionRig) -> None:
    near = FollowerRig("near-1", region.topology)
    link = near.links["leader-1"]
    link.handler = region.leader.service
    link.hold_answers.add("subscribe")
    near.subscriptions.follow_routes(near.configuration.routes)
    await until(lambda: link.held)
    for _ in range(2):
        assert await near.times(A, COMMENT) == []
    assert near.single_flight.started == 2
    assert near.subscriptions.unsubscribed == 3
    link.let_go()
    await subscribed(near)
    for _ in range(2):
        await near.times(A, COMMENT)
    assert near.single_flight.started == 3
    await near.tasks.close()


async def test_a_shard_is_subscribed_again_until_its_leader_owns_it(region: RegionRig) -> None:
    near = region.near
    region.leader.ownership.want((2, 3))
    await until(lambda: near.subscriptions.unsubscribed)
    await region.leader.take(0, 2, 3)
    await subscribed(near)
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert await near.times(A, COMMENT) == [1]


async def test_a_follower_whose_leader_is_down_serves_what_it_has_cached(region: RegionRig) -> None:
    near = region.near
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    near.links["leader-1"].break_off()
    await until(lambda: near.subscriptions.unsubscribed == 3)
    assert await near.times(A, COMMENT) == [1]
    with pytest.raises(Unavailable):
        await near.times(B, COMMENT)


async def test_a_missing_delivery_drops_the_shard_and_is_repeated(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    assert await near.times(A, COMMENT) == []
    link.hold_answers.add("subscribe")
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    await until(lambda: link.held)
    link.held.clear()  # lost on the way
    link.hold_answers.clear()
    await region.leader.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    await until(lambda: near.subscriptions.gaps == 1)
    await subscribed(near)
    assert await near.times(A, COMMENT) == [2, 1]


async def test_a_delivery_that_cannot_be_applied_drops_the_shards_of_its_stream(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = region.near
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    assert await near.times(A, COMMENT) == []
    apply = type(near.cache).apply_all

    def fail_at_near(cache: GraphCache, *arguments: Any, **options: Any) -> object:
        return 1 / 0 if cache is near.cache else apply(cache, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(near.cache), "apply_all", fail_at_near)
        await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
        await until(lambda: errors)
    resets = near.subscriptions.resets
    await until(lambda: near.subscriptions.resets > resets)
    assert await near.times(A, COMMENT) == [1]
    assert [type(each) for each in errors] == [ZeroDivisionError]


async def test_a_removed_shard_is_dropped_and_an_added_one_is_subscribed(region: RegionRig) -> None:
    near = region.near
    changed = make_topology(2, near={0: ("near-2",)}, leaders={1: ("leader-2",)})
    near.configuration.use_topology(changed)
    assert not near.cache.is_open(0)
    await subscribed(near)
    assert near.subscriptions.hosted == {1, 2, 3}
    assert near.cache.is_open(1)
    await region.leaders["leader-2"].write(AssocAdd(FAR, COMMENT, B, 1, b""))
    await until(lambda: near.cache.floor_of_list(FAR, COMMENT))


class PromptLeader:
    """Confirms shard 2 to every subscriber, within the call."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        if request.HasField("subscribe"):
            confirmed = ShardDelivery(Position(2, "run/1"), True, ShardMessages(2, 0, ()))
            reply.send(pb.Answer(delivery=delivery_to_pb(Delivery(1, (confirmed,))), more=True))


@pytest.mark.parametrize("turns", range(1, 6))
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_shard_confirmed_by_its_new_leader_stays_confirmed_when_the_old_stream_ends(
    region: RegionRig, turns: int, is_refused: bool
) -> None:
    """Request and answer may both come between two turns of a loop that has little of its processor."""
    near, former, successor = region.near, region.near.links["leader-1"], region.near.links["leader-2"]
    successor.handler = PromptLeader()
    successor.hold_requests.add("subscribe")
    successor.hold_answers.add("subscribe")
    asked = [former.replies[sent.number] for sent in former.sent if sent.HasField("subscribe")]
    (series,) = [reply for reply in asked if not reply.closed]
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",)}, leaders={2: ("leader-2",)}))
    for _ in range(turns):
        await asyncio.sleep(0)
    while successor.held:
        successor.held.pop(0)()
    if is_refused:
        series.send(pb.Answer(delivery=delivery_to_pb(Delivery(9, (), (2,))), more=True))
    await quiet()
    assert near.subscriptions.unsubscribed == 0


def subscribes(near: FollowerRig, leader: str) -> list[list[int]]:
    """Return the shards of each request that asked a leader for its changes."""
    sent = [each.subscribe for each in near.links[leader].sent if each.HasField("subscribe")]
    return [[position.shard for position in each.positions] for each in sent]


async def test_a_change_of_the_topology_disturbs_only_the_shards_of_which_the_leader_changed(region: RegionRig) -> None:
    """It ended every stream, and the follower was not ready until every shard was confirmed again."""
    near = region.near
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    asked = subscribes(near, "leader-1")
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",)}, leaders={2: ("leader-2",)}))
    assert near.subscriptions.unsubscribed == 1
    assert [near.subscriptions.is_subscribed(shard) for shard in (0, 2, 3)] == [True, False, True]
    await region.leaders["leader-2"].take(1, 2)
    await subscribed(near)
    assert subscribes(near, "leader-1") == asked
    await region.leader.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    await until(lambda: near.subscriptions.messages >= 2)
    assert await near.times(A, COMMENT) == [2, 1]
    assert near.subscriptions.resets == 4, "three at the start, and the shard that another leader has begun anew"


async def test_a_shard_that_comes_to_a_leader_is_added_to_its_stream(region: RegionRig) -> None:
    near = region.near
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",)}, leaders={2: ("leader-2",)}))
    await region.leaders["leader-2"].take(1, 2)
    await subscribed(near)
    near.configuration.use_topology(make_topology(3, near={1: ("near-2",)}, leaders={3: ("leader-2",)}))
    await region.leader.take(0, 2)
    await region.leaders["leader-2"].take(1, 3)
    await subscribed(near)
    assert subscribes(near, "leader-1")[0] == [0, 2, 3]
    assert subscribes(near, "leader-2")[0] == [2]
    assert {tuple(each) for each in subscribes(near, "leader-1")[1:]} == {(2,)}
    assert {tuple(each) for each in subscribes(near, "leader-2")[1:]} == {(3,)}, "its stream ended with its last shard"


async def test_a_change_that_affects_no_shard_leaves_everything_subscribed(region: RegionRig) -> None:
    near = region.near
    asked = subscribes(near, "leader-1")
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",)}, servers=("near-1", "near-2", "near-3")))
    await quiet()
    assert near.subscriptions.unsubscribed == 0
    assert subscribes(near, "leader-1") == asked


async def test_a_skipped_version_affects_every_shard_if_nothing_says_what_it_changed(region: RegionRig) -> None:
    near = region.near
    near.configuration.use_topology(make_topology(3, near={1: ("near-2",)}))
    assert near.subscriptions.unsubscribed == 3
    await subscribed(near)


async def test_a_shard_that_another_leader_had_between_two_polls_is_subscribed_again(region: RegionRig) -> None:
    near = region.near
    recorded = (RecordedChange(version=2, leaders={"east": "2"}), RecordedChange(version=3, leaders={"east": "2"}))
    changed = msgspec.structs.replace(make_topology(3, near={1: ("near-2",)}), changes=recorded)
    near.configuration.use_topology(changed)
    assert [near.subscriptions.is_subscribed(shard) for shard in (0, 2, 3)] == [True, False, True]
    await subscribed(near)
    assert subscribes(near, "leader-1")[-1] == [2]


async def test_a_message_ignored_while_another_leader_led_the_shard_becomes_a_gap(region: RegionRig) -> None:
    """The first leader does not know of the changes, and its deliveries are under way across both."""
    near, link = region.near, region.near.links["leader-1"]
    two = make_id(64, 2)
    assert await near.times(two, COMMENT) == []
    link.hold_requests.add("subscribe")
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",)}, leaders={2: ("leader-2",)}))
    ignored = near.subscriptions.messages
    await region.leader.write(AssocAdd(two, COMMENT, B, 1, b""))
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    await until(lambda: near.subscriptions.messages > ignored)
    near.configuration.use_topology(make_topology(3, near={1: ("near-2",)}))
    assert not near.subscriptions.is_subscribed(2)
    await region.leader.write(AssocAdd(two, COMMENT, B + 1, 2, b""))
    await until(lambda: near.subscriptions.gaps == 1)
    assert not near.subscriptions.is_subscribed(2), "a message is missing"
    link.hold_requests.clear()
    link.let_go()
    await subscribed(near)
    assert await near.times(two, COMMENT) == [2, 1]


async def test_a_shard_that_leaves_the_follower_does_not_disturb_the_others(region: RegionRig) -> None:
    """Every stream ended when a follower was added to the tier, so that no follower of it was ready for a moment."""
    near = region.near
    asked = subscribes(near, "leader-1")
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",), 3: ("near-2",)}))
    assert near.subscriptions.hosted == {0, 2}
    assert near.subscriptions.unsubscribed == 0
    await region.leader.write(AssocAdd(make_id(64, 3), COMMENT, B, 1, b""))
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    await until(lambda: near.cache.floor_of_list(A, COMMENT))
    assert near.subscriptions.unsubscribed == 0
    assert not near.cache.is_open(3)
    assert subscribes(near, "leader-1") == asked


async def test_a_shard_that_comes_back_to_the_follower_begins_anew_in_the_same_stream(region: RegionRig) -> None:
    near, asked = region.near, subscribes(region.near, "leader-1")
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",), 3: ("near-2",)}))
    resets = near.subscriptions.resets
    near.configuration.use_topology(make_topology(3, near={1: ("near-2",)}))
    assert not near.subscriptions.is_subscribed(3)
    await subscribed(near)
    assert subscribes(near, "leader-1") == [*asked, [3]]
    assert near.subscriptions.resets == resets + 1


async def test_a_stream_begins_anew_when_most_of_its_shards_have_left_the_follower(region: RegionRig) -> None:
    near = region.near
    near.configuration.use_topology(make_topology(2, near={1: ("near-2",), 2: ("near-2",), 3: ("near-2",)}))
    await until(lambda: subscribes(near, "leader-1")[-1] == [0])
    await subscribed(near)


async def test_writes_through_other_followers_insert_nothing_after_a_pause(region: RegionRig) -> None:
    """Their answers may be older than the version floors that the pause has outlasted."""
    near = region.near
    begun = dict(near.subscriptions._changes._begun_at)
    await near.subscriptions.renew(5)
    assert near.subscriptions.unsubscribed == 0
    assert all(near.subscriptions._changes._begun_at[shard] > at for shard, at in begun.items())


async def test_a_leader_that_left_the_topology_is_not_followed_any_more(region: RegionRig) -> None:
    near = region.near
    near.configuration.use_topology(make_topology(2, leader_servers=("leader-1",)))
    await quiet()
    assert len(near.tasks.running) == 1


async def test_confirmed_shards_without_messages_apply_none(region: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[ShardMessages] = []
    monkeypatch.setattr(WriteThrough, "apply", lambda _, messages: applied.append(messages))
    near = FollowerRig("near-1", region.topology)
    near.links["leader-1"].handler = region.leader.service
    near.subscriptions.follow_routes(near.configuration.routes)
    await subscribed(near)
    assert near.cache.open_shards()
    assert applied == []
    await near.tasks.close()


async def test_streams_that_miss_nothing_do_not_wake_their_follower(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await region.near.tasks.close()  # a leader keeps one subscription of a name, and both would try again for ever
    timers = SetTimers(monkeypatch)
    near = FollowerRig("near-1", region.topology)
    near.links["leader-1"].handler = region.leader.service
    near.subscriptions.follow_routes(near.configuration.routes)
    await subscribed(near)
    await until(lambda: not timers.waiting())
    await near.tasks.close()


async def test_deliveries_are_acknowledged_so_that_the_leader_s_window_stays_open(region: RegionRig) -> None:
    for time in range(1, 30):
        await region.leader.write(AssocAdd(A, COMMENT, B + time, time, b""))
    await until(lambda: region.near.subscriptions.messages >= 29)
    await until(lambda: not region.leader.publisher.figures()["unacknowledged_bytes"])
