"""`tao history` says in sentences what happened to a key, and what each server's version means."""

from __future__ import annotations

import re

import pytest

from tao.admin.key_history import SENTENCES, Event, Holding, KeyTimeline, sentence_of
from tao.cli import history as history_module
from tests.rigs.versions import make_version

V4, V5 = make_version(1, 4), make_version(1, 5)


def event(name: str, version: int = V5, cause: str = "", *, of_shard: bool = False) -> Event:
    return Event(1_700_000_000_123, "follower-1a", name, version, cause, of_shard)


def test_every_event_is_a_whole_sentence_with_and_without_version_and_cause() -> None:
    for name in SENTENCES:
        for each in (event(name, 0), event(name, cause="delivery 7 of leader-1")):
            said = sentence_of(each)
            assert re.fullmatch(r"[A-Z][^{}]*[^ ]\.", said), said
    assert sentence_of(event("stored", cause="database")).startswith("What the database answered was cached:")
    assert "A change came (delivery 7 of leader-1) and was applied" in sentence_of(
        event("applied", cause="delivery 7 of leader-1")
    )
    assert sentence_of(event("of_a_later_release", cause="x")) == "of_a_later_release (x)"


def test_the_timeline_is_a_table_that_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    found = KeyTimeline(V5)
    found.servers = [
        Holding("leader-1", "leader", "local", V5, V5, 1_699_999_000_000),
        Holding("follower-1a", "follower", "local", V4, V5, 1_699_999_900_000, stale=True),
        Holding("follower-1b", "follower", "local", None, V5, 1_699_999_900_000),
        Holding("follower-2a", "follower", "local", error="away"),
    ]
    found.events = [event("opened", 1 << 48, of_shard=True), event("applied", V5, "committed here")]
    history_module._print("object 77", found, ["follower-1a"])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line != line.rstrip()] == []
    lines = [" ".join(line.split()) for line in printed]
    assert lines[0] == "In the master database, object 77 has version 1.5: changed 5 times, last in version epoch 1."
    assert "leader-1 leader local 1.5 1.5 It is up to date." in lines
    assert (
        "follower-1a follower local 1.4 1.5 STALE: it is older than the database, and still was when asked again."
        in lines
    )
    assert "follower-1b follower local - 1.5 It holds nothing: the next read fetches it." in lines
    assert "follower-2a follower local - - It could not be asked: away" in lines
    assert (
        "11-14 22:13:20.123 follower-1a 1.5 A change came (committed here) and was applied to what was cached: "
        "reads see it from now on." in lines
    )
    assert (
        lines[-3] == "The servers' records go back to 11-14 22:11:40.000 at least; what happened before may be missing."
    )
    assert lines[-1].startswith("Stale: follower-1a.")


def test_a_key_that_nobody_wrote_and_a_database_that_is_away_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    history_module._print("list (7, friend)", KeyTimeline(0), [])
    history_module._print("object 7", KeyTimeline(None, "no database"), [])
    out = capsys.readouterr().out
    assert "The master database has no list (7, friend), and never had." in out
    assert "The master database could not be asked about object 7: no database" in out
    assert "No server holds it" in out
