"""Positions and deliveries: how maintenance messages reach the caches that subscribe to them.

A leader numbers the messages of a shard one by one, in a *stream* whose name changes whenever the numbering starts anew
(another leader, another generation of ownership). So a subscriber sees at once when a message is missing, and a broken
connection is continued. The position in the region's binlog up to which a subscriber has received everything outlives
leaders: any leader can continue from there. A leader that can do neither sends ``reset``.
"""

from __future__ import annotations

import msgspec

from tao.model.changes import ShardMessages


class Position(msgspec.Struct, frozen=True, gc=False):
    """How far a subscriber has received the messages of a shard. ``stream=""``: it has nothing.

    ``source`` names a history of commits as binlogs number it, and ``reached`` a transaction in it: the subscriber has
    received everything that was committed to the shard up to then. ``source=""``: that is not known.
    """

    shard: int
    stream: str = ""
    sequence: int = 0
    source: str = ""
    reached: int = 0


class Span(msgspec.Struct, frozen=True):
    """The part of a shard's history that a tailer delivers: everything committed to the shard in ``source`` after
    transaction ``after``, up to ``number``.

    ``source=""``: no position counts it, and it continues nothing that was delivered before. ``more``: what follows is
    on its way here, and some messages of the transaction after ``number`` may have come already; until all have come,
    no proof of time covers the shard. ``within``: messages of the transaction after ``after`` came before, with another
    span: a leader that has not received those has not received all that is delivered here.
    """

    shard: int
    source: str
    after: int
    number: int
    more: bool = False
    within: bool = False


class ShardDelivery(msgspec.Struct, frozen=True, gc=False):
    """Messages of one shard. ``position`` is the subscriber's position once they are applied; with ``reset`` it first
    drops everything that it holds of the shard. ``continued``: the stream is new, and goes on from where the subscriber
    has received the position's ``source``. ``repeated``: so many messages up to the position are left out, because the
    subscriber has received each of them in this stream before, under an earlier number."""

    position: Position
    reset: bool = False
    messages: ShardMessages | None = None
    continued: bool = False
    repeated: int = 0


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One acknowledged unit. ``refused``: shards that this leader does not own. ``proven``: ``(database, Unix
    milliseconds)``; once the messages here are applied, this series has delivered every commit up to then. ``reached``:
    ``(source, transaction)``, the same by number."""

    number: int
    shards: tuple[ShardDelivery, ...] = ()
    refused: tuple[int, ...] = ()
    proven: tuple[tuple[str, int], ...] = ()
    reached: tuple[tuple[str, int], ...] = ()


class SpoolRow(msgspec.Struct, frozen=True, gc=False):
    """Messages of one shard as they lie in a spool, in the order of ``place``, kept under the position ``number``."""

    source: str
    number: int
    messages: ShardMessages
    place: int = 0


class SpoolMark(msgspec.Struct, frozen=True, gc=False):
    """A mark of a shard: the spool holds everything delivered in ``source`` after ``after`` and up to ``head``.
    ``linked``: proofs about the source cover the shard too, from here on until the next mark."""

    shard: int
    source: str
    after: int
    head: int
    linked: bool
