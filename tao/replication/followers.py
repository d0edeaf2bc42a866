"""Have the servers of a set follow its master: once it is opened, and after a promotion that was not carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tao.model.errors import TaoError
from tao.replication.promotion_plan import SetMember, check_rejoin, check_seeded
from tao.replication.replication_set import ReplicationSet
from tao.replication.server_statements import receive_again


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


async def give_back(replicas: ReplicationSet, before: Sequence[SetMember]) -> dict[str, str]:
    """Have replicas receive again from a master that cannot be compared with them: it refuses this process, or does not
    answer it. Returns why a server does not.

    ``before``: how they were when this run began, under the lock that it still holds. One that followed the master then
    and follows nobody now was detached by this run, so it has nothing but what it received from that master. Any other
    one that follows nobody may have another history, and is left alone; so is one that an operator has marked.
    """
    region = replicas.database.master_region
    followed = {member.name for member in before if not member.is_master and replicas.follows(member, region)}
    servers = {place: server for place, server in replicas.database.places.items() if place != region}
    stopped = [place for place, server in servers.items() if not server.down]
    done = await asyncio.gather(
        *(_give_back(replicas, place, was_detached=servers[place].name in followed) for place in stopped),
        return_exceptions=True,
    )
    left: dict[str, str] = {}
    for place, error in zip(stopped, done, strict=True):
        if isinstance(error, TaoError):
            left[servers[place].name] = error.message
        elif error is not None:
            raise error
    return left


async def _give_back(replicas: ReplicationSet, region: str, *, was_detached: bool) -> None:
    member, master_region = await replicas.member(region), replicas.database.master_region
    following = None if member.state is None else member.state.following
    if following is None and member.is_complete and was_detached:
        await replicas.follow(region, master_region)
    elif following is not None and following.receiving_stopped and replicas.follows(member, master_region):
        async with replicas.session(region) as session:
            await receive_again(session, deadline=replicas.statement_deadline())
