"""The settings of a graph, each with its unit, its default, and the reason for that default in a web process."""

from __future__ import annotations

import math
import warnings
from dataclasses import InitVar, dataclass, field, fields
from typing import Final

from tao.client.consistency import CACHED, Consistency
from tao.model.errors import InvalidArgument
from tao.routing.budgets import RetrySettings
from tao.wire.links import LinkSettings
from tao.wire.tls import TlsFiles

NOT_GIVEN: Final = object()
"""The default of a setting's former name: it shows that the caller left it out."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of one `Graph`. Raises `InvalidArgument`, naming the field, for a number that is not above zero."""

    timeout_seconds: float = 2.0
    """Time for one operation, all attempts included. It is longer than a slow miss and shorter than a person waits for
    a page. A caller that has less time uses `asyncio.timeout`."""

    connect_timeout_seconds: float = 5.0
    """Time for topology and schema together when a graph is opened. A process that starts can wait for them, and cannot
    do without."""

    max_batch_queries: int = 1000
    """Queries in one message. With 100-byte values such a message takes a server about a millisecond, so that other
    requests do not wait long behind it; larger messages cost hardly less per query."""

    max_batch_edges: int = 250_000
    """Edges that the queries of one message ask for together: 500 lists of 500, as two hops ask for. Without data they
    take 4 MB, a quarter of the bound of a message, and a list is rarely as long as its limit."""

    max_batch_bytes: int = 4 << 20
    """Bytes of the writes in one message: four objects of the largest size, a quarter of the bound of a message."""

    max_waiting_queries: int = 100_000
    """Unanswered queries of all servers together, including those that wait for a retry. At 100,000 queries a second
    this is one second of backlog. Further queries fail at once with `Overloaded`, instead of filling memory."""

    max_attempts: int = 3
    """Servers asked for one query, the first included: the home, its stand-in in the next tier, and one more."""

    first_attempt_share: float = 0.5
    """The share of the time left that a read's first server gets, while another server could still answer. A server
    that hangs then costs half of the time and not the answer. Writes get all of the time, since a write that was sent
    cannot be sent again."""

    retry_backoff_seconds: float = 0.02
    """Pause before the same server is asked again; it doubles each time and has jitter. A leader takes a shard over, or
    a server receives a new topology, in tens of milliseconds."""

    retries: RetrySettings = field(default_factory=RetrySettings)
    """The budget of retries, as a share of the messages that were answered."""

    watch_retry_seconds: float = 1.0
    """Pause before topology and schema are watched through another server, after the connection to the one before has
    broken; it has jitter. The new server sends at once what has changed meanwhile, and a request that a server refuses
    refreshes the topology by itself."""

    attach_own_writes: bool = True
    """Ask in each read for nothing older than this graph's own recent writes. It costs one look-up in a dictionary
    while there are any. Without it, a read that another tier or clone answers may miss a write."""

    own_writes_keys: int = 10_000
    """Objects and lists whose last write is remembered: some seconds of a busy process, in 2 MB. The oldest are
    forgotten first, and are then as fresh as any other item in the tier that took the write."""

    own_writes_seconds: float = 60.0
    """Time for which a write is remembered. It is longer than replication and messages are late in a cluster that is
    well enough to serve."""

    keep_hot_items: bool = True
    """Keep the answers that followers report as hot, share one query among reads made in the same tick, and pause when
    a follower asks for it. Answers are as fresh as without it."""

    hot_items: int = 1000
    """Hot queries whose answers are kept. There are never many that one server answers a thousand times a second."""

    hot_items_bytes: int = 8 << 20
    """Bytes of those answers together: eight objects of the largest size, a thousandth of a follower's memory."""

    hot_unchecked_ms: float | None = None
    """Time for which a hot item is answered without a query, counted from the query before. Writes of other processes
    are seen that much later, own writes at once. None: a follower checks every answer."""

    reverse_lookup_id2s: int | None = 16
    """Id2s of one `assoc_get` on a long list that may be looked up in the inverse lists, where the schema allows it.
    Each is a query of its own; sixteen cost as much as one database query for all of them. None: the list itself is
    always asked."""

    long_lists: int = 10_000
    """Lists that are remembered to be longer than their type's limit, in 2 MB; there are few of them. A list that is
    forgotten is asked itself once more."""

    tls: TlsFiles | None = None
    """Files for encrypted connections; None for plain ones. ``TlsFiles(authorities=Path("ca.pem"))`` trusts that
    authority, ``TlsFiles()`` the authorities of the system. Certificate and key are for servers that demand them."""

    links: LinkSettings = field(default_factory=LinkSettings)
    """Settings of connections: the transport, the failure detector with its probes, and the bounds of a session."""

    consistency: Consistency = CACHED
    """Freshness of the reads that do not say one. The nearest cache answers in microseconds, and shows the graph's own
    writes; reads that need more say so one by one."""

    turned_id2s: InitVar[object] = NOT_GIVEN
    """Former name of `reverse_lookup_id2s`, accepted with a warning."""

    def __post_init__(self, turned_id2s: object) -> None:
        if turned_id2s is not NOT_GIVEN:
            default = next(each.default for each in fields(self) if each.name == "reverse_lookup_id2s")
            if self.reverse_lookup_id2s != default:
                raise InvalidArgument("give reverse_lookup_id2s or turned_id2s, its former name, and not both")
            warnings.warn("turned_id2s is now called reverse_lookup_id2s", FutureWarning, stacklevel=3)
            object.__setattr__(self, "reverse_lookup_id2s", turned_id2s)
        for each in fields(self):
            value = getattr(self, each.name)
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and not (value > 0 and math.isfinite(value))
            ):
                raise InvalidArgument(f"{each.name} is {value}; it must be a number above 0")
        if not isinstance(self.consistency, Consistency):
            raise InvalidArgument(f"consistency must be a Consistency, not {type(self.consistency).__name__}")
        if self.first_attempt_share > 1:
            raise InvalidArgument(f"first_attempt_share is {self.first_attempt_share}; it must be at most 1")
