"""Relays from a tailer to a leader: messages read from a binlog, and keys that another program wrote.

A leader applies the messages, forwards them to its subscribers and acknowledges the relay. A *reference* stands for
messages that the leader has, because it has committed the transaction itself. A *touch* names a key whose
rows were changed without their version step: no message can be sent until the owner of the shard has raised its
version.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from tao.model.changes import Message, ShardMessages
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


class Reference(msgspec.Struct, frozen=True):
    """The messages of transactions ``numbers`` of ``source`` in one shard, in order. ``place``: how many of the relay's
    ``changes`` come before them."""

    shard: int
    source: str
    numbers: tuple[int, ...]
    place: int = 0


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """One acknowledged unit from a tailer to a leader, in binlog order. Duplicates are harmless.

    ``bulk_shards`` are invalidated as a whole. ``source`` is the database (replication set) whose binlog was read, and
    ``source_unix_ms`` the time up to which all of its commits have been delivered, this relay included (0: not known).
    ``position`` is the GTID of its newest transaction, for people. ``spans`` name the parts of shards' histories that
    the relay holds completely, and ``reached`` is ``source_unix_ms`` by transaction: ``(history, number)``.
    """

    changes: tuple[ShardMessages, ...] = ()
    references: tuple[Reference, ...] = ()
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


class Relayed(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's answer to a relay.

    ``wanted``: the shards about which it asks where they continue. ``missing``: the references that it cannot resolve;
    then nothing of the relay was entered. ``takes_references``: it has messages of its own commits to the database."""

    wanted: tuple[Span, ...] = ()
    missing: tuple[Reference, ...] = ()
    takes_references: bool = False


class ChangeRuns:
    """Gathers the changes and references of a relay, shard by shard and in their order; neighbours become one run."""

    def __init__(self) -> None:
        self._runs: dict[int, list[_Run]] = {}

    def add(self, messages: ShardMessages) -> None:
        """Append messages. Messages of one epoch become one run."""
        runs = self._runs.setdefault(messages.shard, [])
        if runs and not messages.messages:
            return
        if not runs or runs[-1].source or (runs[-1].messages and runs[-1].version_epoch != messages.version_epoch):
            runs.append(_Run())
        runs[-1].version_epoch = messages.version_epoch
        runs[-1].messages.extend(messages.messages)

    def refer(self, shard: int, source: str, number: int) -> None:
        """Append a reference to a transaction's messages in a shard."""
        runs = self._runs.setdefault(shard, [])
        if not runs or runs[-1].source != source:
            runs.append(_Run(source=source))
        runs[-1].numbers.append(number)

    def gathered(self) -> tuple[tuple[ShardMessages, ...], tuple[Reference, ...]]:
        """Return the changes and the references of the relay."""
        changes: list[ShardMessages] = []
        references: list[Reference] = []
        for shard, runs in self._runs.items():
            for run in runs:
                if run.source:
                    references.append(Reference(shard, run.source, tuple(run.numbers), len(changes)))
                else:
                    changes.append(ShardMessages(shard, run.version_epoch, tuple(run.messages)))
        return tuple(changes), tuple(references)


class _Run(msgspec.Struct):
    """Neighbouring messages of a shard under one epoch, or, with a ``source``, neighbouring references."""

    version_epoch: int = 0
    messages: list[Message] = msgspec.field(default_factory=list)
    source: str = ""
    numbers: list[int] = msgspec.field(default_factory=list)


FindMessages = Callable[[str, int, int], ShardMessages | None]
"""Returns the messages of a transaction (source and number) in a shard, or None when they are not there."""


def missing_of(relay: Relay, find: FindMessages) -> tuple[Reference, ...]:
    """Return the references of a relay whose messages are not there."""
    missing = []
    for each in relay.references:
        numbers = tuple([number for number in each.numbers if find(each.source, number, each.shard) is None])
        if numbers:
            missing.append(Reference(each.shard, each.source, numbers))
    return tuple(missing)


def with_messages(relay: Relay, find: FindMessages) -> Relay:
    """Return the relay with the messages in place of its references, as if it had come with them. None may be missing.
    The references stay, to name what was entered."""
    runs = ChangeRuns()
    at = 0
    for reference in relay.references:
        for messages in relay.changes[at : reference.place]:
            runs.add(messages)
        at = reference.place
        for number in reference.numbers:
            found = find(reference.source, number, reference.shard)
            assert found is not None, "a relay is entered when nothing of it is missing"
            runs.add(found)
    for messages in relay.changes[at:]:
        runs.add(messages)
    return msgspec.structs.replace(relay, changes=runs.gathered()[0])
