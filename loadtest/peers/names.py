"""The contestants' names, as the JSON has them."""

from __future__ import annotations

from typing import Final

TAO: Final = "tao"
REDIS: Final = "redis_lookaside"
MEMCACHED: Final = "memcached_lookaside"
MYSQL: Final = "mysql"
CONTESTANTS: Final = (TAO, REDIS, MEMCACHED, MYSQL)
CACHES: Final = (TAO, REDIS, MEMCACHED)
"""The contestants with a cache."""

MANY: Final = "many"
OPEN: Final = "open"
ONE: Final = "one"
BATCHES: Final = "batches"
PAIR: Final = "pair"
SHAPES: Final = (MANY, OPEN, ONE, BATCHES, PAIR)
"""Kinds of load, in the order in which they run."""
