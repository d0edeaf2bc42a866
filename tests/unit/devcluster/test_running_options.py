"""Options of `tao dev up` that differ from the cluster that runs already are named, with what runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape, StartOptions
from tao.devcluster.running_options import refused_options
from tao.devcluster.state_folder import ClusterRecord

PLAIN = ClusterRecord(shape=Shape(watchers=1), ports={"follower-1a": {"grpc": 4242}}, ready=True)
WITH_TLS = msgspec.structs.replace(PLAIN, options=StartOptions(tls=True, cache_mb=512.0))


def asked(record: ClusterRecord, options: Mapping[str, object], *, schema: Path = Path("none")) -> list[str]:
    """Return what is refused of a command line with these options."""
    shape = {name: value for name, value in options.items() if name in Shape.__struct_fields__}
    others: dict[str, Any] = {name: value for name, value in options.items() if name not in shape}  # by field
    settings = ClusterSettings(shape=msgspec.structs.replace(record.shape, **shape), **others)
    return refused_options(settings, options.keys(), record, schema)


def test_what_was_left_out_or_is_as_it_runs_is_not_refused() -> None:
    assert asked(PLAIN, {}) == []
    assert asked(WITH_TLS, {"detached": True}) == []
    assert asked(WITH_TLS, {"tls": True, "cache_mb": 512}) == []


@pytest.mark.parametrize(
    ("record", "options", "named"),
    [
        (PLAIN, {"tls": True}, "--tls (it runs without)"),
        (PLAIN, {"etcd": True}, "--etcd (it runs without)"),
        (PLAIN, {"followers": 3}, "--followers 3 (it runs with 2)"),
        (PLAIN, {"watchers": 0}, "--no-watcher (it runs with one in each region)"),
        (PLAIN, {"workers": 1}, "--worker (it runs with none)"),
        (PLAIN, {"durability": Durability.RELAXED}, "--durability relaxed (it runs with full)"),
        (PLAIN, {"semi_sync": True, "durability": Durability.FULL}, "--durability semi_sync (it runs with full)"),
        (PLAIN, {"client_port": 7070}, "--client-port 7070 (it runs with 4242)"),
        (PLAIN, {"rtt_ms": 10.0}, "--rtt-ms 10 (it runs with 58.1)"),
        (WITH_TLS, {"tls": False}, "--no-tls (it runs with --tls)"),
        (WITH_TLS, {"cache_mb": 128}, "--cache-mb 128 (it runs with 512)"),
        (PLAIN, {"log_level": "debug"}, "--log-level debug (it runs with info)"),
    ],
)
def test_an_option_that_differs_is_named_with_what_runs(
    record: ClusterRecord, options: dict[str, object], named: str
) -> None:
    assert asked(record, options) == [named]


def test_another_schema_is_refused_and_the_same_one_is_not(tmp_path: Path) -> None:
    own, same, other = (tmp_path / name for name in ("own.yaml", "same.yaml", "other.yaml"))
    for path in (own, same, other):
        path.write_text("objects: {}\n" if path != other else "objects: {user: {}}\n")
    assert asked(PLAIN, {"schema_file": same}, schema=own) == []
    named = asked(PLAIN, {"schema_file": other}, schema=own)
    assert named == [f"--schema {other} (it runs with {own})"]
