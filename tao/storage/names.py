"""Names of schemas and tables, built from numbers and validated words. Only these names stand unbound in SQL."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Final

from tao.model.errors import OperatorError
from tao.model.ids import MAX_SHARDS
from tao.schema.registry import Schema

DEFAULT_EDGE_TABLE: Final = "assocs"
_CUSTOM_TABLE = re.compile(r"assocs_[a-z0-9][a-z0-9_]{0,33}\Z")
_SHARD_SCHEMA = re.compile(r"tao_([0-9]{5})\Z")
_INCOMING_SCHEMA = re.compile(r"tao_([0-9]{5})_incoming\Z")

EdgeTables = Callable[[int], str]
"""atype → the name of the table that holds its edges."""


@cache
def schema_name(shard: int) -> str:
    """The shard's database schema: ``tao_00042``. Raises `OperatorError` for what is no shard number."""
    if not 0 <= shard < MAX_SHARDS:
        raise OperatorError(f"shard {shard} is outside 0 … {MAX_SHARDS - 1}")
    return f"tao_{shard:05d}"


def shard_of_schema(name: str) -> int | None:
    """The shard that a schema holds; None for a schema that is no shard's."""
    matched = _SHARD_SCHEMA.match(name)
    return int(matched[1]) if matched else None


def incoming_schema_name(shard: int) -> str:
    """The schema of the copy of a shard that moves here: ``tao_00042_incoming``. It is no shard's schema, so tailers
    skip it. Raises as `schema_name`."""
    return f"{schema_name(shard)}_incoming"


def shard_of_incoming_schema(name: str) -> int | None:
    """The shard of which a schema holds an incoming copy; None for any other schema."""
    matched = _INCOMING_SCHEMA.match(name)
    return int(matched[1]) if matched else None


def check_edge_table(name: str) -> str:
    """Return the name of an edge table, or raise `OperatorError` when it cannot be one."""
    if name != DEFAULT_EDGE_TABLE and not _CUSTOM_TABLE.match(name):
        raise OperatorError(f"{name!r} is no edge table: use 'assocs' or 'assocs_' with lower-case letters and digits")
    return name


def edge_tables_of(schema: Callable[[], Schema]) -> EdgeTables:
    """Where the schema, as it is at each call, keeps a type's edges. The look-up raises `UnknownType`."""

    def table_of(atype: int) -> str:
        table = schema().atype(atype).table
        return DEFAULT_EDGE_TABLE if table is None else check_edge_table(table)

    return table_of
