"""Servers of a replication set as tests state them."""

from __future__ import annotations

from tao.replication.gtid import GtidSet
from tao.replication.promotion_plan import SetMember
from tao.replication.server_statements import MemberState, ReplicationStatus
from tao.storage.dialect import Dialect


def gtids(text: str) -> GtidSet:
    return GtidSet(Dialect.MARIADB, text)


def following(
    *,
    receiving: bool = False,
    lag: int | None = 0,
    stopped: bool = False,
    failed: bool = False,
    heard: str | None = None,
) -> ReplicationStatus:
    """``stopped``: receiving was; ``failed``: by an error that would come again."""
    return ReplicationStatus(
        source="127.0.0.1:1",
        receiving=receiving,
        applying=True,
        stopped=not receiving,
        lag_seconds=lag,
        received="",
        executed="",
        error="",
        receiving_stopped=stopped or failed,
        receiving_failed=failed,
        heard=heard,
    )


def master(
    has: str | None,
    *,
    closed: bool = False,
    region: str = "east",
    waits: bool = False,
    waiting: int = 0,
    clients: int = 0,
) -> SetMember:
    """``has``: GTIDs; None when it does not answer. ``waits``: its commits do, for a replica; ``waiting``: of how many
    that is so now; ``clients``: replicas that acknowledge to it."""
    state = None
    if has is not None:
        state = MemberState(
            closed,
            None,
            gtids(has),
            gtids(has),
            waits_for_replica=waits,
            waiting_commits=waiting,
            acknowledging_clients=clients,
        )
    return SetMember(f"{region}-db", region, state, "" if state else "refused", is_master=True)


def replica(
    region: str,
    has: str | None,
    *,
    received: str = "",
    receiving: bool = False,
    alone: bool = False,
    seeding: bool = False,
    acknowledges: bool = False,
    stopped: bool = False,
    failed: bool = False,
    heard: str | None = None,
    seen_at: float = 0.0,
) -> SetMember:
    """``has``: what it has executed; ``received``: what waits in its relay log besides; ``alone``: follows nobody;
    ``seeding``: it has a part of the data; ``stopped``, ``failed`` and ``heard``: as in `following`."""
    if has is None:
        return SetMember(f"{region}-db", region, None, "refused")
    status = None if alone else following(receiving=receiving, stopped=stopped, failed=failed, heard=heard)
    received_too = GtidSet(Dialect.MARIADB, has, received)
    return SetMember(
        f"{region}-db",
        region,
        MemberState(True, status, gtids(has), received_too, seeding, acknowledges=acknowledges),
        seen_at=seen_at,
    )
