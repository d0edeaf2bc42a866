"""The topology document as values: which servers, tiers, regions, databases and mappings exist (DESIGN.md §1, §5).

Clients and servers hold the same document, at some version, and derive the same routes from it (`tao.routing`).
It changes by compare-and-set on ``version``; who stores and watches it is `tao.topology`'s affair.
"""

from __future__ import annotations

import msgspec


class CacheServer(msgspec.Struct, frozen=True, kw_only=True):
    """A follower or leader. Addresses are ``host:port`` (or ``unix:/path`` for ``frames``); an empty ``frames`` means
    that peers use gRPC."""

    name: str
    grpc: str
    frames: str = ""
    admin: str = ""
    weight: float = 1.0
    down: bool = False


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """Cache servers that together answer any request. ``moved`` holds explicit mappings ``shard → server names``
    (the first is the home, more are clones), which win over the ring."""

    name: str
    servers: tuple[CacheServer, ...]
    moved: dict[int, tuple[str, ...]] = {}


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One leader tier and the follower tiers that clients of the region may use, nearest first."""

    name: str
    leaders: Tier
    followers: tuple[Tier, ...]


class DatabaseServer(msgspec.Struct, frozen=True, kw_only=True):
    """A MySQL or MariaDB server of one region. ``socket`` wins over ``host:port`` when both are given."""

    name: str
    host: str = "127.0.0.1"
    port: int = 3306
    socket: str = ""
    down: bool = False


class Database(msgspec.Struct, frozen=True, kw_only=True):
    """A replication set: one server per region. ``shards`` are inclusive ranges ``(first, last)``."""

    name: str
    master_region: str
    servers: dict[str, DatabaseServer]
    shards: tuple[tuple[int, int], ...]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document. ``shards``: how many logical shards exist (fixed for the life of the data)."""

    version: int
    shards: int
    regions: tuple[Region, ...]
    databases: tuple[Database, ...]
