"""The tailer's way to the region's leaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from tao.model.delivery import Span
from tao.model.relay import Relay
from tao.model.topology import CacheServer
from tao.peers.links import Links
from tao.wire.convert import relay_to_pb, span_from_pb
from tao.wire.v1 import session_pb2 as pb


class LeaderPort(Protocol):
    """The way to leaders."""

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Iterable[Span]:
        """Returns when the leader has applied and passed on the whole relay, with the shards of which it wants to know
        where they go on. Raises `NotMine` when a shard of it is not that leader's, and then, or with any other
        `TaoError`, it has to be sent again."""


class LinkedLeaders:
    """`LeaderPort` over links."""

    def __init__(self, links: Links, topology_version: Callable[[], int]) -> None:
        self._links: Final = links
        self._topology_version: Final = topology_version

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Iterable[Span]:
        """See `LeaderPort`."""
        request = pb.Request(topology_version=self._topology_version(), relay=relay_to_pb(relay))
        answer = await self._links.to(leader).ask(request, timeout_seconds)
        return map(span_from_pb, answer.relayed.wanted)
