"""Compares the options of `tao dev up` with those of the cluster that the folder has.

Options that were left out mean what runs, or what ran last. Of a cluster that runs, others that differ are named: to
ignore one of them would let a developer believe, say, that the servers speak TLS. Of one that was stopped, options that
are kept are named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.state_folder import ClusterRecord
from tao.model.errors import OperatorError, unreadable

_ONE_OF_EACH_REGION = {"watchers": "watcher", "workers": "worker"}
"""The fields of a shape whose option has a singular name, with or without ``no-``."""


def refused_options(
    settings: ClusterSettings, given: Collection[str], record: ClusterRecord, schema: Path
) -> list[str]:
    """Return the options that differ from what runs, as an error names them, each with what runs instead.

    ``given``: the names of the options that the command line has; a shape has those of the ``record`` for the others.
    ``schema``: the running cluster's own copy. Raises `OperatorError` for a schema file that cannot be read."""
    return [_named(*found) for found in _differences(settings, given, record, schema)]


def kept_options(record: ClusterRecord, given: Collection[str]) -> list[str]:
    """Return the options that a start keeps from the last one and that the first start of another cluster would not
    have, as on a command line. The shape is left out: `tao dev up` shows all processes."""
    kept, plain = _start_values(record), _start_values(ClusterRecord(shape=record.shape))
    return [_option(name, value) for name, value in kept.items() if name not in given and value != plain[name]]


def _start_values(record: ClusterRecord) -> dict[str, object]:
    """Return the values of the options that any start may change, by their names in `tao dev up`."""
    options = record.options
    return {
        "tls": options.tls,
        "durability": "semi_sync" if options.semi_sync else options.durability.value,
        "rtt_ms": record.rtt_ms,
        "buffer_pool_mb": options.buffer_pool_mb,
        "cache_mb": options.cache_mb,
        "log_level": options.log_level,
    }


def _differences(
    settings: ClusterSettings, given: Collection[str], record: ClusterRecord, schema: Path
) -> Iterator[tuple[str, object, object]]:
    """Yield the name of each option that differs, what it asks for, and what runs."""
    shape = settings.shape or record.shape
    for name in Shape.__struct_fields__:
        if getattr(shape, name) != getattr(record.shape, name):
            yield name, getattr(shape, name), getattr(record.shape, name)
    if settings.schema_file is not None and _text_of(settings.schema_file) != _text_of(schema):
        yield "schema", settings.schema_file, schema
    wanted_values = {
        "tls": settings.tls,
        "durability": "semi_sync" if settings.semi_sync else settings.durability.value,
        "rtt_ms": settings.rtt_ms,
        "buffer_pool_mb": settings.buffer_pool_mb,
        "cache_mb": settings.cache_mb,
        "log_level": settings.log_level,
        "client_port": settings.client_port,
    }
    ports = record.ports.get(record.shape.first_follower(), {})
    running_values = {**_start_values(record), "client_port": ports.get("grpc")}
    for name, wanted in wanted_values.items():
        runs = running_values[name]
        if name in given and wanted != runs:
            yield name, wanted, runs


def _named(name: str, wanted: object, runs: object) -> str:
    if name in _ONE_OF_EACH_REGION:
        option = _ONE_OF_EACH_REGION[name]
        return f"--{option} (it runs with none)" if wanted else f"--no-{option} (it runs with one in each region)"
    if isinstance(wanted, bool):
        return f"{_option(name, wanted)} (it runs {'without' if wanted else f'with {_option(name, True)}'})"
    return f"{_option(name, wanted)} (it runs with {_text(runs)})"


def _option(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {_text(value)}"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(unreadable(path, error)) from error
