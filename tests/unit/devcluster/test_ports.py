"""Ports stay reserved for the server that will use them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tao.devcluster.ports import reserve_port
from tao.model.errors import OperatorError


def test_a_reserved_port_is_refused_to_others_and_open_to_the_server_it_is_for() -> None:
    with reserve_port() as reservation:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", reservation.port))
        # create_server sets SO_REUSEADDR, as every server here does.
        with socket.create_server(("127.0.0.1", reservation.port)) as server:
            reservation.release()
            with socket.create_connection(server.getsockname()):
                pass


def test_reserved_ports_differ_and_lie_below_those_of_outgoing_connections() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    reservations = [reserve_port() for _ in range(50)]
    try:
        ports = {reservation.port for reservation in reservations}
    finally:
        for reservation in reservations:
            reservation.release()
    assert len(ports) == 50
    assert max(ports) < first_ephemeral or first_ephemeral <= 20_000


def test_a_port_that_is_taken_is_refused_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OperatorError, match=f"port {port} on 127.0.0.1 cannot be used .* another port"):
            reserve_port(port)
