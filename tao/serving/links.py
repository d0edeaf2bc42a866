"""What of the links to other servers the serving floor needs (`tao.peers.links` provides it)."""

from __future__ import annotations

from typing import Protocol

from tao.model.topology import CacheServer
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb


class LinkPort(Protocol):
    """The way to one server."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        """As `tao.peers.links.Link.send`."""


class LinksPort(Protocol):
    """The ways to all servers."""

    def to(self, server: CacheServer) -> LinkPort:
        """As `tao.peers.links.Links.to`."""
