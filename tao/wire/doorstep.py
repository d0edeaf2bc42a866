"""The doorstep of a port: what peers may cost before they have shown a credential.

Everybody who reaches a port can connect to it. A peer is *pending* until it has shown who it is, or at a port without
credentials, what it wants: until its greeting (frames), the first message of its call (gRPC), or its request (admin
port). Pending peers are bounded in time, in all, and per address. A peer that finds no room is not turned away: it
takes the place of another one at the same address, or at the address that has the most.

Pending peers are at one of three *stages*: they are silent, have spoken, or work has begun for them. The stage with the
most places of the address loses the peer that has been at it longest. An honest peer stays at a stage for a round trip
at most. So once most of an address say nothing, they displace one another, and nobody who has spoken; a crowd that
speaks displaces nobody for whom work has begun, which it does for a bounded number in a second. Over gRPC a peer waits
for its start, be it silent or not, and then has begun.

Every peer that is turned away is counted; only some are logged, because strangers must not fill a disk with lines.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from tao.model.errors import Overloaded, TooManyConnections
from tao.wire.identity import SERVER_ROLES, PeerIdentity
from tao.wire.settings import DoorstepSettings, ServingSettings

_logger = logging.getLogger(__name__)

LATE: Final = "late"
"""The reason for which a peer is turned away that has not shown who it is in time."""

DISPLACED: Final = "displaced"
"""The reason for which a peer is turned away whose place another peer has taken."""

_PAUSE_SECONDS: Final = 1.0
"""Sweeps that are so far apart say that this process was paused (stopped, swapped out, frozen with its machine)."""

LOCAL: Final = "local"
"""The address of all peers of a Unix socket."""

_IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The head of an IPv6 address that stands for an IPv4 address."""


def address_of(peer: object) -> str:
    """Return the address under which a connection is counted, of what its socket says about the peer."""
    if not isinstance(peer, tuple) or not peer:
        return LOCAL
    return _network_of(str(peer[0]))


def name_of(peer: object) -> str:
    """Return the name of a connection's peer for logs, of what its socket says about it."""
    if not isinstance(peer, tuple) or len(peer) < 2:
        return "unix"
    host = str(peer[0])
    return f"[{host}]:{peer[1]}" if ":" in host else f"{host}:{peer[1]}"


def _network_of(host: str) -> str:
    """Return the host, or the /64 network of an IPv6 address: every subscriber has one, with all of its addresses."""
    if ":" not in host:
        return host
    try:
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return host
    if packed.startswith(_IPV4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return f"{socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))}/64"


class Place:
    """The place of one peer in an `AddressPool`."""

    __slots__ = ("address", "displace", "entered_at", "stage")

    def __init__(self, address: str, entered_at: float, displace: Callable[[str], None]) -> None:
        self.address: Final = address
        self.entered_at: Final = entered_at
        self.displace = displace
        self.stage = 0


def _ignore(_reason: str) -> None:
    pass


class _SameAddress:
    """The places of one address."""

    __slots__ = ("by_stage", "count")

    def __init__(self) -> None:
        self.by_stage: Final[tuple[dict[Place, None], dict[Place, None], dict[Place, None]]] = ({}, {}, {})
        """The places of peers that are silent or wait (gRPC), of those that have spoken or begun (gRPC), and of those
        whose handshake has begun (frames): at each stage, the one that has been there longest first."""
        self.count = 0

    def next_to_go(self) -> Place:
        """Return the place that is lost next."""
        silent, spoken, begun = self.by_stage
        most = spoken if len(spoken) > len(silent) else silent
        return next(iter(begun if len(begun) > len(most) else most))


class AddressPool:
    """Peers that are bounded in all and per address. One more takes the place of another one of its address, or of the
    address that has the most: of the stage that has the most places there, the one that has been at it longest. So a
    peer keeps its place until a third of the places of its address, at least, were taken by peers that have come to its
    stage after it."""

    def __init__(self, max_peers: int, max_per_address: int, now: Callable[[], float] = time.monotonic) -> None:
        self._max_peers: Final = max_peers
        self._max_per_address: Final = max_per_address
        self._now: Final = now
        self._all: dict[Place, None] = {}  # the oldest first
        self._by_address: dict[str, _SameAddress] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        """The addresses that have so many places; a search among all addresses would cost each newcomer 40 µs."""

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, address: str, displace: Callable[[str], None]) -> Place:
        """Give a peer a place at the first stage. ``displace(reason)`` is called when it loses the place, and must not
        raise."""
        of_address = self._by_address.get(address)
        if of_address is not None and of_address.count >= self._max_per_address:
            return self._enter_instead(of_address, displace)
        if len(self._all) >= self._max_peers:
            largest = next(iter(self._by_count[max(self._by_count)]))
            self._displace(self._by_address[largest].next_to_go(), DISPLACED)
        place = Place(address, self._now(), displace)
        same_address = self._by_address.get(address)
        if same_address is None:
            same_address = self._by_address[address] = _SameAddress()
        self._all[place] = same_address.by_stage[0][place] = None
        self._recount(address, same_address, 1)
        return place

    def _enter_instead(self, of_address: _SameAddress, displace: Callable[[str], None]) -> Place:
        """Give a place of an address to another peer, which changes no count."""
        lost = of_address.next_to_go()
        was_displaced = lost.displace
        lost.displace = _ignore
        del self._all[lost], of_address.by_stage[lost.stage][lost]
        place = Place(lost.address, self._now(), displace)
        self._all[place] = of_address.by_stage[0][place] = None
        was_displaced(DISPLACED)
        return place

    def advance(self, place: Place) -> None:
        """Note that a peer has come one stage further, of two; it may have lost its place already."""
        if place in self._all:
            by_stage = self._by_address[place.address].by_stage
            del by_stage[place.stage][place]
            place.stage += 1
            by_stage[place.stage][place] = None

    def leave(self, place: Place) -> None:
        """Take the place back; it may have been lost already."""
        if place in self._all:
            # Its peer refers to the place: such a cycle would be left to the garbage collector, which stops the loop.
            place.displace = _ignore
            del self._all[place]
            same_address = self._by_address[place.address]
            del same_address.by_stage[place.stage][place]
            self._recount(place.address, same_address, -1)
            if not same_address.count:
                del self._by_address[place.address]

    def displace_older_than(self, seconds: float) -> None:
        """Take the places back that were given more than so many seconds ago."""
        since = self._now() - seconds
        while self._all and (oldest := next(iter(self._all))).entered_at < since:
            self._displace(oldest, LATE)

    def _recount(self, address: str, same_address: _SameAddress, change: int) -> None:
        before, after = same_address.count, same_address.count + change
        same_address.count = after
        if before:
            same_count = self._by_count[before]
            del same_count[address]
            if not same_count:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[address] = None

    def _displace(self, place: Place, reason: str) -> None:
        displace = place.displace
        self.leave(place)
        displace(reason)


class Doorstep:
    """The pending peers of one port, and the count of those that were turned away."""

    def __init__(self, port: str, settings: DoorstepSettings, now: Callable[[], float] = time.monotonic) -> None:
        """``port`` names the port in logs and metrics."""
        self.settings: Final = settings
        self.pending: Final = AddressPool(settings.max_pending, settings.max_pending_per_address, now)
        self.turned_away: Final[Counter[str]] = Counter()
        """Number of peers that were turned away, by reason."""
        self.port: Final = port
        self._now: Final = now
        self._swept_at = now()
        self._interval_ends = 0.0
        self._lines_left = 0
        self._left_out = 0

    def turn_away(self, reason: str) -> bool:
        """Count a peer that is turned away. Returns whether that may be logged."""
        self.turned_away[reason] += 1
        now = self._now()
        if now >= self._interval_ends:
            self._begin_interval(now)
        if self._lines_left:
            self._lines_left -= 1
            return True
        self._left_out += 1
        return False

    def sweep(self) -> None:
        """Turn away the peers that are late. Call this several times a second.

        After a pause of the process nobody is turned away before the next sweep: what peers have sent meanwhile may not
        have been read yet."""
        if self.begin_sweep():
            self.pending.displace_older_than(self.settings.greeting_timeout_seconds)
        self.report_left_out()

    def begin_sweep(self) -> bool:
        """Note that a sweep begins. Returns whether it may turn late peers away: not right after a pause of the
        process."""
        before, self._swept_at = self._swept_at, self._now()
        return self._swept_at - before < _PAUSE_SECONDS

    def report_left_out(self) -> None:
        """Log how many lines were left out, when their interval is over."""
        if self._left_out and self._now() >= self._interval_ends:
            self._begin_interval(self._now())

    def _begin_interval(self, now: float) -> None:
        if self._left_out:
            _logger.warning(
                "%d more peers without a credential were turned away at the %s port; peers_turned_away_total has all",
                self._left_out,
                self.port,
            )
        self._left_out = 0
        self._lines_left = self.settings.max_log_lines
        self._interval_ends = now + self.settings.log_interval_seconds


class CallerPlaces:
    """The places of one port for peers that have shown who they are: bounded in all, and for each application that has
    a credential. Some are kept free for servers and operators, which have no bound of their own."""

    def __init__(self, settings: ServingSettings, name: str, what: str, most: int | None = None) -> None:
        """``name`` is the server's and ``what`` the noun for what takes the places, for messages. ``most``: the number
        of places, of which one caller may have half; None: that of the settings."""
        self._max: Final = settings.max_connections if most is None else most
        self._max_of_applications: Final = self._max - self._max // 10
        per_caller = settings.doorstep.max_connections_per_caller
        self._max_per_caller: Final = per_caller if most is None else min(per_caller, max(1, most // 2))
        self._name: Final = name
        self._what: Final = what
        self._all = 0
        self._by_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._all

    def enter(self, peer: PeerIdentity) -> str:
        """Give a peer a place. Returns the name under which it is counted. Raises `Overloaded`, as `TooManyConnections`
        when the caller has its share."""
        is_server = peer.role in SERVER_ROLES
        most = self._max if is_server else self._max_of_applications
        if self._all >= most:
            raise Overloaded(f"{self._name} has {self._all} {self._what} already, and may have {most}")
        counted = "" if is_server else peer.caller
        if counted and self._by_caller[counted] >= self._max_per_caller:
            raise TooManyConnections(
                f"{self._name} has {self._max_per_caller} {self._what} of {counted} already, which is the most of one "
                "caller (doorstep.max_connections_per_caller)"
            )
        self._all += 1
        self._by_caller[counted] += 1
        return counted

    def leave(self, counted: str) -> None:
        """Take the place back of a peer that was counted under this name."""
        self._all -= 1
        self._by_caller[counted] -= 1
        if not self._by_caller[counted]:
            del self._by_caller[counted]
