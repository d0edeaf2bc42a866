"""Positions and deliveries: how maintenance messages reach the caches that subscribed (DESIGN.md §7).

A leader numbers what it tells of a shard one by one, in a *stream* whose name changes whenever that numbering starts
anew (another leader, another generation of ownership): so a subscriber sees at once when anything is missing, and a
connection that broke is continued. What outlives leaders is the place in the region's binlog up to which a subscriber
has been told: from there any leader can continue it. A leader that can do neither says ``reset``.
"""

from __future__ import annotations

import msgspec

from tao.model.changes import ShardMessages


class Position(msgspec.Struct, frozen=True):
    """How far a subscriber has been told. ``stream=""``: it has nothing.

    ``source`` names a history of commits as binlogs number it, and ``reached`` a transaction in it: everything that was
    ever committed to the shard up to then has been told. ``source=""``: that is not known."""

    shard: int
    stream: str = ""
    sequence: int = 0
    source: str = ""
    reached: int = 0


class Span(msgspec.Struct, frozen=True):
    """What a tailer tells of a shard: everything committed to it in ``source`` after transaction ``after``, up to
    ``number``. ``source=""``: no position counts it, and nothing that was told before is continued. ``more``: others
    have been told what follows, and it is on its way; until it has come, no proof says anything of the shard."""

    shard: int
    source: str
    after: int
    number: int
    more: bool = False


class ShardDelivery(msgspec.Struct, frozen=True):
    """Messages of one shard. ``position`` is the subscriber's once they are applied; with ``reset`` it first drops
    everything it holds of the shard. ``continued``: the stream is a new one, and goes on from where the subscriber has
    been told in the position's ``source``."""

    position: Position
    reset: bool = False
    messages: ShardMessages | None = None
    continued: bool = False


class Delivery(msgspec.Struct, frozen=True):
    """One acknowledged unit. ``refused``: shards that this leader does not own. ``proven``: ``(database, Unix
    milliseconds)``, every commit up to then has been told in this series once the messages here are applied.
    ``reached``: ``(source, transaction)``, likewise by number."""

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
    """Of a shard: everything told in ``source`` after ``after`` and up to ``head`` is in the spool. ``linked``: what is
    proved of the source from here on, until the next mark, is proved of the shard, too."""

    shard: int
    source: str
    after: int
    head: int
    linked: bool
