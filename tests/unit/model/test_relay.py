"""A relay says what has changed its keys, for their history."""

from __future__ import annotations

from tao.model.relay import REGION_INVALIDATED, Relay


def test_the_cause_of_a_relay_is_a_place_in_a_binlog_or_a_tailer_without_one() -> None:
    assert Relay(source="db-1", position="1-1-288").cause == "binlog of db-1 up to 1-1-288"
    assert Relay(source="db-1", position=REGION_INVALIDATED).cause == "tailer of db-1, which began without a position"
