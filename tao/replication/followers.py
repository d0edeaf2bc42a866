"""Have the servers of a set follow its master: once it is opened, and after a promotion that was not carried out."""

from __future__ import annotations

import asyncio

from tao.model.errors import TaoError
from tao.replication.promotion_plan import SetMember, check_rejoin, check_seeded
from tao.replication.replication_set import ReplicationSet


async def follow_master(replicas: ReplicationSet, *, lost: str) -> tuple[list[str], dict[str, str]]:
    """Make the other servers follow the master, all at a time. Returns which do, and why each other one does not.

    A ``lost`` server is not asked: writes would wait for its silence. It rejoins when it is back."""
    places = replicas.database.places
    asked = [region for region in places if places[region].name != lost]
    left = {lost: f"{lost} does not answer"} if lost else {}
    if len(asked) == 1:
        return [], left
    members = await asyncio.gather(*map(replicas.member, asked))
    master = next(member for member in members if member.is_master)
    others = [member for member in members if not member.is_master]
    done = await asyncio.gather(*(_follow(replicas, member, master) for member in others), return_exceptions=True)
    for member, error in zip(others, done, strict=True):
        if isinstance(error, TaoError):
            left[member.name] = error.message
        elif error is not None:
            raise error
    return [member.name for member in others if member.name not in left], left


async def _follow(replicas: ReplicationSet, member: SetMember, master: SetMember) -> None:
    """Make a server that answers follow the master. Raises `ServerDiverged` when it must not."""
    arrives = member.acknowledges if replicas.database.semi_sync else member.receives
    if replicas.follows(member, master.region) and arrives:
        return  # Keep the connection: an open master would hold up all commits until the replica has reconnected.
    check_seeded(member)
    if member.state is not None and member.state.following is None and not member.state.read_only:
        # It may be an old master that is still open. Close it first, so that the comparison covers all it will ever
        # have had. One that was found closed commits nothing more: opening it needs the lock.
        await replicas.close(member.region)
    check_rejoin(*await replicas.beside_master(member.region))
    await replicas.follow(member.region, master.region)
