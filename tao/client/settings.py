"""What an application may turn, with a default that suits a web process (DESIGN.md §12, §16)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from tao.model.errors import InvalidArgument
from tao.peers.links import LinkSettings
from tao.routing.retry_budget import RetrySettings
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Bounds of one `Graph`. Raises `InvalidArgument`, naming the field, for a number that is not above zero."""

    timeout_seconds: float = 2.0
    """Of one operation, every attempt included. Longer than a slow miss, shorter than a person waits for a page; a
    caller that has less time uses `asyncio.timeout`."""

    connect_timeout_seconds: float = 5.0
    """For topology and schema together when a graph is opened. A process that starts can wait; it cannot do without."""

    max_batch_queries: int = 1000
    """Queries in one message. With 100-byte values it takes a server about a millisecond, so that nobody else on its
    loop waits long; larger ones cost hardly less per query."""

    max_batch_edges: int = 200_000
    """Edges that the queries of one message ask for together. Without data they take 3 MB, far below what a message
    may hold, and a list is rarely as long as its limit."""

    max_batch_bytes: int = 4 << 20
    """Data of the writes in one message: four objects of the largest size, a quarter of what a message may hold."""

    max_waiting_queries: int = 100_000
    """Queries unanswered, of all servers together, those that wait to be asked again among them. At 100,000 a second
    this is a second of arrears; what is asked on top fails at once as Overloaded instead of filling memory."""

    max_attempts: int = 3
    """Servers asked for one query, the first included: home, its stand-in in the next tier, and one more."""

    first_attempt_share: float = 0.5
    """Part of the time left that a read's first server gets while another could still answer. A server that hangs
    then costs half the time allowed and not the answer. Writes get all of it: they cannot be asked twice."""

    retry_backoff_seconds: float = 0.02
    """Before the same server is asked again, doubled each time, with jitter. A leader takes a shard over, or a server
    learns the new topology, in tens of milliseconds."""

    retries: RetrySettings = field(default_factory=RetrySettings)
    """How many messages may be repeated, as a share of those answered."""

    watch_retry_seconds: float = 1.0
    """Before topology and schema are watched through another server when the one asked has gone, with jitter. What
    changed meanwhile is told at once; and a request that goes astray refreshes the topology by itself."""

    attach_own_writes: bool = True
    """Ask, in reads of what this graph has written of late, for nothing older than that. It costs a look-up in a
    dictionary while there is anything in it; without it a read behind another tier or clone may miss a write."""

    own_writes_keys: int = 10_000
    """Objects and lists whose last write is remembered: seconds of a busy process, in 2 MB. The oldest are forgotten
    first, and are then as fresh as anything in the tier that took the write."""

    own_writes_seconds: float = 60.0
    """How long a write is remembered: longer than a replica or a message is late when all is well enough to go on."""

    keep_hot_items: bool = True
    """Keep what followers call hot, ask for it once for all who want it at the same moment, and pace oneself when they
    say so. Answers are as fresh as without it."""

    hot_items: int = 1000
    """Queries kept so: there are never many that a single server answers a thousand times a second."""

    hot_items_bytes: int = 8 << 20
    """Of their answers together, eight objects of the largest size: a thousandth of what a follower has."""

    hot_unchecked_ms: float | None = None
    """For so long after it was asked for, a hot item is answered without asking again: what others write is seen that
    much later, own writes at once. None: every answer is checked with a follower."""

    turned_id2s: int | None = 16
    """Edges of a long list that one `assoc_get` may ask for at the inverse lists, where the schema allows it: each is a
    query of its own, which by then costs as much as one of the database for them all. None: the list itself is asked
    always."""

    long_lists: int = 10_000
    """Lists remembered to be longer than their type's limit, in 2 MB; there are few of them. One that is forgotten is
    asked itself once more."""

    tls: TlsFiles | None = None
    """None: plain connections. ``TlsFiles(authorities=Path("ca.pem"))`` trusts that authority, ``TlsFiles()`` those of
    the system; certificate and key are for servers that demand them."""

    links: LinkSettings = field(default_factory=LinkSettings)
    """Connections: transport, when a server is down and how it is probed, bounds of a session."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and not (value > 0 and math.isfinite(value))
            ):
                raise InvalidArgument(f"{each.name} is {value}; it must be a number above 0")
        if self.first_attempt_share > 1:
            raise InvalidArgument(f"first_attempt_share is {self.first_attempt_share}; it must be at most 1")
