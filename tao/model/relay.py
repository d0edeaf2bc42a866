"""Relays from a tailer to a leader: messages read from a binlog, and keys that another program wrote.

A leader applies the messages, forwards them to its subscribers and acknowledges the relay. A *touch* names a key whose
rows were changed without their version step: no message can be sent until the owner of the shard has raised its
version.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from tao.model.changes import ShardMessages
from tao.model.delivery import Span
from tao.model.ids import SHARD_SHIFT

WHOLE_OBJECT: Final = 0
"""The ``atype`` of a touched object."""


class TouchKind(Enum):
    """The key that a touch names."""

    OBJECT = "object"
    LIST = "list"


class Touch(msgspec.Struct, frozen=True, order=True):
    """Object ``id`` (``atype=WHOLE_OBJECT``) or list ``(id, atype)`` was changed by a program that keeps no versions.
    ``version`` is the highest seen in its rows, because nothing else remembers the version of a row that is gone. The
    new version must be above it, above the row's, and above any that the leader knows."""

    id: int
    atype: int
    version: int

    @property
    def kind(self) -> TouchKind:
        return TouchKind.OBJECT if self.atype == WHOLE_OBJECT else TouchKind.LIST

    @property
    def shard(self) -> int:
        return self.id >> SHARD_SHIFT


REGION_INVALIDATED: Final = "region invalidated"
"""Stands for the GTID of a relay that invalidates all shards, because the tailer has no usable position. When it is
acknowledged, every leader has done so, and the new position counts."""


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """One acknowledged unit from a tailer to a leader, in binlog order. Duplicates are harmless.

    ``bulk_shards`` are invalidated as a whole. ``source`` is the database (replication set) whose binlog was read, and
    ``source_unix_ms`` the time up to which all of its commits have been delivered, this relay included (0: not known).
    ``position`` is the GTID of its newest transaction, for people. ``spans`` name the parts of shards' histories that
    the relay holds completely, and ``reached`` is ``source_unix_ms`` by transaction: ``(history, number)``.
    """

    changes: tuple[ShardMessages, ...] = ()
    touches: tuple[Touch, ...] = ()
    bulk_shards: tuple[int, ...] = ()
    source: str = ""
    source_unix_ms: int = 0
    position: str = ""
    spans: tuple[Span, ...] = ()
    reached: tuple[str, int] = ("", 0)

    @property
    def cause(self) -> str:
        """What has changed the keys, for their history."""
        if self.position == REGION_INVALIDATED:
            return f"tailer of {self.source}, which began without a position"
        return f"binlog of {self.source} up to {self.position}"
