"""The story of a key: what happened to it, in order, with causes, and never more than its bound."""

from __future__ import annotations

from tao.cache import CacheSettings, GraphCache
from tao.cache.key_recorder import KeyHistory
from tao.model.changes import ObjectChange, ObjectInvalidation, ShardInvalidation
from tao.model.graph import encode_object
from tao.model.ids import SHARD_SHIFT
from tao.observability.key_history import KeyHistoryRecorder, KeyHistorySettings
from tests.rigs.pacing import ManualClock
from tests.rigs.versions import make_version

A, B, ELSEWHERE = 1, 2, 1 << SHARD_SHIFT


def v(counter: int) -> int:
    return make_version(1, counter)


class Types:
    def object_arena(self, otype: int) -> str:
        return "default"

    def list_arena(self, atype: int) -> str:
        return "default"

    def list_limit(self, atype: int) -> int:
        return 6000


class Rig:
    """A cache with a story, and a clock that the test moves."""

    def __init__(self, settings: KeyHistorySettings | None = None) -> None:
        self.clock = ManualClock()
        self.story = KeyHistoryRecorder(settings or KeyHistorySettings(), self.clock)
        self.cache = GraphCache(CacheSettings(arena_bytes={"default": 1 << 16}, credit_slots=1009), Types(), self.story)
        self.shard = A >> SHARD_SHIFT
        self.cache.open_shard(self.shard, 1)

    def fill(self, key: int, version: int, data: bytes = b"") -> None:
        self.cache.store_object(self.cache.object_ticket(key, 0.0), encode_object(version, 1, data), 1, 0.0)

    def events(self, key: int = A) -> list[tuple[str, int]]:
        return [(event.event, event.version) for event in self.story.history_of(key, 0).events]


def test_a_stale_answer_is_explained_by_what_came_and_what_did_not() -> None:
    rig = Rig()
    rig.fill(A, v(1))
    with rig.story.caused_by("delivery 7 of leader-1"):
        rig.cache.apply(ObjectChange(A, v(1), v(2), 1, b"new"), 1, 0.0)
    rig.cache.apply(ObjectChange(A, v(1), v(2), 1, b"new"), 1, 0.0)
    rig.cache.apply(ObjectInvalidation(A, v(3)), 1, 0.0)
    rig.fill(A, v(2))
    assert rig.events() == [
        ("opened", 1),
        ("fill_begun", 0),
        ("stored", v(1)),
        ("applied", v(2)),
        ("ignored", v(2)),
        ("dropped", v(3)),
        ("fill_begun", v(3)),
        ("below_floor", v(2)),
    ]
    causes = [event.cause for event in rig.story.history_of(A, 0).events]
    assert causes == ["", "", "", "delivery 7 of leader-1", "", "", "", ""]


def test_hits_are_not_recorded() -> None:
    rig = Rig()
    rig.fill(A, v(1))
    before = rig.events()
    for _ in range(3):
        assert rig.cache.object(A) is not None
        assert rig.cache.objects([A]) != [None]
    assert rig.events() == before


def test_what_happens_to_the_shard_is_in_the_story_of_each_of_its_keys_and_of_no_other_s() -> None:
    rig = Rig()
    rig.fill(A, v(1))
    rig.cache.bump_shard(rig.shard)
    rig.cache.apply(ShardInvalidation(rig.shard, (), (5,)), 1, 0.0)
    rig.cache.open_shard(rig.shard, 2)
    rig.cache.close_shard(rig.shard)
    assert [event for event, _ in rig.events()][3:] == ["voided", "types_voided", "epoch_raised", "closed"]
    assert [event for event, _ in rig.events(B)] == ["opened", "voided", "types_voided", "epoch_raised", "closed"]
    assert rig.events(ELSEWHERE) == []


def test_an_eviction_is_recorded() -> None:
    rig = Rig()
    for place in range(100):
        rig.fill(10 + place, v(1), b"x" * 1_000)
    assert rig.events(10)[-1] == ("evicted", v(1))


def test_causes_nest_and_end_with_their_work_even_when_it_fails() -> None:
    rig = Rig()
    try:
        with rig.story.caused_by("outer"), rig.story.caused_by("inner"):
            raise KeyError
    except KeyError:
        assert rig.story.cause == ""


def test_it_forgets_the_oldest_and_says_since_when_it_remembers() -> None:
    rig = Rig(KeyHistorySettings(key_events=4, shard_events=1))
    began_unix_ms = rig.clock.unix_ms()
    assert rig.story.history_of(A, 0).since_unix_ms == began_unix_ms
    for _ in range(3):
        rig.clock.now += 1.0
        rig.fill(A, v(1))
        rig.cache.bump_shard(rig.shard)
    story = rig.story.history_of(A, 0)
    assert story.since_unix_ms == began_unix_ms + 2_000
    assert [event.unix_ms - began_unix_ms for event in story.events] == [2_000, 2_000, 3_000, 3_000, 3_000]
    assert [event.event for event in story.events] == ["fill_begun", "stored", "fill_begun", "stored", "voided"]


def test_nothing_is_kept_when_nothing_shall_be() -> None:
    rig = Rig(KeyHistorySettings(key_events=0, shard_events=0))
    rig.fill(A, v(1))
    assert rig.story.history_of(A, 0) == KeyHistory((), rig.clock.unix_ms())
