"""Eviction on paper and in the cache: the commands work, and say what they are to say."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from loadtest.research.eviction import main as policies
from loadtest.research.policies import POLICIES, Priced
from loadtest.research.replay import main as replay


def test_a_small_entry_stays_where_a_large_one_used_as_often_leaves() -> None:
    policy = Priced(1_000)
    for key in range(40):
        policy.add(key, 200 if key % 5 == 0 else 20)
        policy.hit(key)
    assert sum(policy.held.values()) <= 1_000
    assert len(policy.held) > 25


def test_every_policy_is_played_with_and_without_a_scan(tmp_path: Path) -> None:
    plot = tmp_path / "eviction.png"
    done = CliRunner().invoke(policies, ["--nodes", "300", "--requests", "2000", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert plot.exists()
    assert "with a scan" in done.output
    assert len(POLICIES) == 7


def test_the_cache_itself_answers_the_more_of_the_stream_the_larger_it_is() -> None:
    def hit_rate(share: str, *options: str) -> float:
        arguments = ["--nodes", "500", "--warm", "5000", "--requests", "5000", "--cache-share", share, *options]
        done = CliRunner().invoke(replay, arguments)
        assert done.exit_code == 0, done.output
        found = re.search(r"follower: ([\d.]+)% hits", done.output)
        assert found is not None
        return float(found[1])

    assert hit_rate("0.05") < hit_rate("0.5")
    assert 0 < hit_rate("0.05", "--scan") < 100
