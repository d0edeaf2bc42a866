"""Background jobs as operators see them: listed at the leaders of their shards, paused and resumed by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tao.admin.connection import ask_each
from tao.model.errors import InvalidArgument, TaoError
from tao.model.jobs import KINDS_OF_EVERY_WORKER, NODE_STATE_KIND, JobRow, NodeStateBody, PausedKind
from tao.model.topology import CacheServer, Topology
from tao.wire.convert import error_from_pb, job_from_pb
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb

ASK_SECONDS: Final = 10.0


@dataclass(slots=True)
class FoundJobs:
    """The jobs of a cluster: those that end last come last. ``silent``: by leader, why its shards
    are left out, or which of them."""

    jobs: list[JobRow] = field(default_factory=list)
    paused: list[PausedKind] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    """The kinds that workers have asked for lately: others are done by no worker."""
    silent: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ChangedKind:
    """What a pause or its end has changed. ``silent``: by leader, why nothing was changed on its shards."""

    shards: int = 0
    resumed: int = 0
    silent: dict[str, str] = field(default_factory=dict)


async def list_jobs(
    topology: Topology,
    links: Links,
    kind: str,
    states: Sequence[int],
    limit: int,
    routine_kinds: Sequence[str] = (),
) -> FoundJobs:
    """List at most ``limit`` jobs of a kind (empty: of any), in these states (none: in any). Jobs of ``routine_kinds``
    are left out while they wait without a failure."""
    asked = pb.Request(
        list_jobs=pb.ListJobs(kind=kind, states=states, limit=limit, routine_kinds=routine_kinds),
    )
    found = FoundJobs()
    for leader, answer in await _ask_leaders(topology, links, asked):
        if isinstance(answer, TaoError):
            found.silent[leader.name] = answer.message
            continue
        if missing := answer.jobs.missing_shards:
            named = ", ".join(map(str, missing))
            found.silent[leader.name] = f"the database did not answer; the list lacks shards {named}"
        found.jobs += map(job_from_pb, answer.jobs.jobs)
        found.kinds.update(answer.jobs.kinds)
        found.paused += (PausedKind(each.shard, each.kind) for each in answer.jobs.paused)
    found.jobs = sorted(found.jobs, key=lambda row: (row.state, row.priority, row.due_unix_ms, row.id))[:limit]
    found.paused.sort()
    return found


async def pause_kind(topology: Topology, links: Links, kind: str, *, paused: bool) -> ChangedKind:
    """Pause a kind of jobs on all shards, or end that and have its jobs that failed done at once. Raises
    `InvalidArgument` for a kind that nothing knows: no worker, no job, and no pause."""
    found = await list_jobs(topology, links, kind, (), 1)
    known = {
        *found.kinds,
        *KINDS_OF_EVERY_WORKER,
        *(row.kind for row in found.jobs),
        *(each.kind for each in found.paused),
    }
    if kind not in known and not found.silent:
        raise InvalidArgument(
            f"no worker knows the kind {kind}, and there is no job of it; known are {', '.join(sorted(known))}"
        )
    change = pb.ChangeJobs(pause_kind=kind) if paused else pb.ChangeJobs(resume_kind=kind)
    changed = ChangedKind()
    for leader, answer in await _ask_leaders(topology, links, pb.Request(change_jobs=change)):
        if isinstance(answer, TaoError):
            changed.silent[leader.name] = answer.message
        else:
            changed.shards += answer.changed_jobs.shards
            changed.resumed += answer.changed_jobs.resumed
    return changed


def body_of(row: JobRow) -> object:
    """Return the body of a job as plain values: by its fields where it is of a kind of this project, as it was added
    where an application has added it, and as hexadecimal digits where it is something else."""
    try:
        if row.kind == NODE_STATE_KIND:
            return msgspec.to_builtins(msgspec.structs.asdict(msgspec.msgpack.decode(row.body, type=NodeStateBody)))
        return msgspec.to_builtins(msgspec.msgpack.decode(row.body), str_keys=True)
    except (msgspec.MsgspecError, TypeError):
        return row.body.hex()


async def _ask_leaders(
    topology: Topology, links: Links, request: pb.Request
) -> list[tuple[CacheServer, pb.Answer | TaoError]]:
    leaders = [server for region in topology.regions for server in region.leaders.servers]

    async def ask(leader: CacheServer) -> pb.Answer:
        own = pb.Request()
        own.CopyFrom(request)
        answer = await links.to(leader).ask(own, ASK_SECONDS)
        if answer.HasField("error"):
            raise error_from_pb(answer.error)
        return answer

    return list(zip(leaders, await ask_each(leaders, ask), strict=True))
