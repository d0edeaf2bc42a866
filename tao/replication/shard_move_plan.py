"""Pure decisions about moving a shard to another database: what the servers and the topology show, and the next step.

A move keeps no record of its own. While it is under way the master of the target holds a schema with the copy
(`tao.storage.names.incoming_schema_name`), which also names the source and the position that the copy has reached. The
*fence* is the shard's row at the source: it names the target's master, so no leader may write there and no critical
read is answered. So whatever step was a process's last one, the next one sees where to go on. Until the topology names
the target, everything can be undone; from then on there is only something to clear away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from tao.model.errors import OperatorError, RetryableError
from tao.model.rows import ShardRow
from tao.model.topology import Database, Topology

_DISK_SHARE: Final = 2
"""The shard itself, and the binlog that brings it to the target's replicas."""
LEFT_FREE_BYTES: Final = 1 << 30
"""What a copy has to leave free on a disk, for the servers that go on writing there: as much as `tao doctor` asks
for."""


class MoveRefused(OperatorError):
    """The shard cannot be moved to that database. Nothing was changed; the message says why."""

    reason = "MOVE_REFUSED"


class NoRoom(MoveRefused):
    """A disk of the target has no room for the shard."""

    reason = "NO_ROOM"


class AlreadyMoved(MoveRefused):
    """The database holds the shard, and no move has left anything to do."""

    reason = "ALREADY_MOVED"


class MovedElsewhere(MoveRefused):
    """Another process has moved the shard to a third database since the move was planned."""

    reason = "MOVED_ELSEWHERE"


class MoveAborted(RetryableError):
    """A move has ended before the shard's database was changed, and was undone. It can be repeated."""

    reason = "MOVE_ABORTED"


class CopyBehind(MoveAborted):
    """The shard changes faster than it is copied or compared. Another run ends in the same way while so much is
    written."""

    reason = "COPY_BEHIND"


class CopySpoiled(MoveAborted):
    """The copy cannot become equal to its source any more. The next run of the move makes another."""

    reason = "COPY_SPOILED"


class MoveStep(StrEnum):
    """The steps of a move, in order. The first four also undo what an interrupted run has left."""

    UNFENCE = "letting leaders write to the source again"
    RENAME_BACK = "taking back what an interrupted run has renamed"
    DROP_COPY = "dropping the copy of an interrupted run"
    COPY = "copying the shard"
    FOLLOW = "following its changes"
    COMPARE = "comparing the copy"
    FENCE = "fencing the shard at the source"
    CATCH_UP = "applying what was written before the fence"
    RENAME = "renaming the copy"
    REPLICAS = "waiting for the target's replicas"
    SWITCH = "changing the topology"
    CLEAR = "clearing away what the move has left"
    NOTHING = "nothing is left to do"


class CopyState(msgspec.Struct, frozen=True, kw_only=True):
    """The row in the schema of an incoming copy. ``source``: the database that is copied. ``source_epoch`` and
    ``target_epoch``: the version epochs of both databases when the copy began. ``position``: everything of the source
    up to there is in the copy; empty while the first copy is under way."""

    source: str
    source_epoch: int
    target_epoch: int
    position: str = ""


@dataclass(frozen=True, slots=True)
class MoveView:
    """What the topology and both masters show of a shard and a target. ``at_source``, ``at_target``: the shard's row
    there, or None when the server has no such shard. ``copy``: None when there is no schema of an incoming copy; an
    empty `CopyState.source` when it has no row. ``is_marked``: the source has noted that the shard has left."""

    shard: int
    source: Database
    target: Database
    is_switched: bool
    at_source: ShardRow | None
    at_target: ShardRow | None
    copy: CopyState | None
    is_marked: bool = False

    @property
    def is_fenced(self) -> bool:
        """Whether the row at the source names another master than the source's, so that nobody may write there."""
        return self.at_source is not None and self.at_source.master_server != master_of(self.source)

    @property
    def is_renamed(self) -> bool:
        """Whether the target has the shard because its copy was renamed. What an earlier move away from the target has
        left there has no copy beside it."""
        return self.at_target is not None and self.copy is not None

    @property
    def may_be_switched(self) -> bool:
        """Whether the renamed copy has everything that was ever written at the source: it belongs to the present fence.
        A later fence has a higher generation; leaders may have written in between."""
        here, there = self.at_source, self.at_target
        return (
            here is not None
            and there is not None
            and self.is_copy_usable
            and here.master_server == there.master_server == master_of(self.target)
            and there.generation == here.generation + 1
        )

    @property
    def is_copy_usable(self) -> bool:
        """Whether the copy can be continued: it is whole, and neither database has had another master since. A lost
        master may have taken with it what the copy has, or what the copy consists of."""
        copy, source = self.copy, self.source
        if copy is None or not copy.position:
            return False
        epochs = (source.version_epoch, self.target.version_epoch)
        return copy.source == source.name and (copy.source_epoch, copy.target_epoch) == epochs


def master_of(database: Database) -> str:
    """Return the name of the server that is the master of a database."""
    return database.servers[database.master_region].name


def holder_of(topology: Topology, shard: int) -> Database:
    """Return the database that holds a shard, which exists."""
    return next(each for each in topology.databases if any(first <= shard <= last for first, last in each.shards))


def check_move(topology: Topology, shard: int, target: str) -> tuple[Database, Database]:
    """Return the database that holds a shard, and the target, which may be the same after a finished move. Raises
    `MoveRefused` for a shard or target that does not exist, and for a target that keeps less of a lost master."""
    if not 0 <= shard < topology.shards:
        raise MoveRefused(f"there is no shard {shard}; they are 0 to {topology.shards - 1}")
    by_name = {database.name: database for database in topology.databases}
    if target not in by_name:
        raise MoveRefused(f"there is no database {target!r}; there are {', '.join(by_name)}")
    source = holder_of(topology, shard)
    found = by_name[target]
    without = sorted(set(source.servers) - set(found.servers))
    if without:
        raise MoveRefused(f"{target} has no server in {', '.join(without)}, where {source.name} has one")
    if source.keeps_lease and not found.keeps_lease:
        raise MoveRefused(
            f"{target} has one server, and {source.name} has one to promote when its master is lost: give {target} a "
            "standby first"
        )
    if source.semi_sync and not found.semi_sync:
        raise MoveRefused(
            f"{source.name} is semi-synchronous and {target} is not: a lost master would take acknowledged writes with "
            f"it. Make {target} semi-synchronous first"
        )
    return source, found


def check_room(shard: int, about_bytes: int, free_bytes: Mapping[str, int]) -> None:
    """Check that a copy of a shard fits onto the disks of a database's servers, as far as these are known, by name of
    the server. Raises `NoRoom` for the fullest of them when it does not."""
    needed = _DISK_SHARE * about_bytes + LEFT_FREE_BYTES
    server = min(free_bytes, key=free_bytes.__getitem__, default="")
    if server and free_bytes[server] < needed:
        raise NoRoom(
            f"{server} has {free_bytes[server] >> 20:,} MiB of free disk, and needs {needed >> 20:,} MiB: shard "
            f"{shard} has about {about_bytes >> 20:,} MiB, which are written to the binlog, too, and "
            f"{LEFT_FREE_BYTES >> 20:,} MiB have to stay free. Make room there, or choose another database"
        )


def not_arrived(view: MoveView) -> MoveRefused:
    """Return the error for a shard that the topology gives to a target which has no more than a copy of it."""
    return MoveRefused(
        f"the topology says that {view.target.name} holds shard {view.shard}, and {master_of(view.target)} has no more "
        f"than an incoming copy of it: nothing is dropped. Its rows are at {view.source.name}"
    )


def next_step(view: MoveView) -> MoveStep:
    """Return the step to take now. `MoveStep.FOLLOW` stands for all from there to `MoveStep.SWITCH`, which one process
    takes together, or undoes. Raises `MoveRefused` when the target holds what is left of an earlier move, and when the
    topology names a target that has no more than a copy."""
    if view.is_switched:
        if view.at_target is None:
            raise not_arrived(view)
        done = view.copy is None and (view.at_source is None or view.is_marked)
        return MoveStep.NOTHING if done else MoveStep.CLEAR
    if view.at_source is None:
        raise MoveRefused(
            f"{master_of(view.source)} has no shard {view.shard}, though the topology says that {view.source.name} "
            "holds it: run `tao migrate`"
        )
    if view.at_target is not None and not view.is_renamed:
        raise MoveRefused(
            f"{master_of(view.target)} still has what shard {view.shard} was before it left {view.target.name}: "
            f"`tao database drop-moved {view.shard}` drops it when it is a day old, and before with --keep-hours 0"
        )
    if view.is_renamed:
        return MoveStep.SWITCH if view.may_be_switched else MoveStep.RENAME_BACK
    if view.is_fenced:
        return MoveStep.UNFENCE
    if view.copy is None:
        return MoveStep.COPY
    return MoveStep.FOLLOW if view.is_copy_usable else MoveStep.DROP_COPY


def steps_to_undo(view: MoveView) -> list[MoveStep]:
    """Return the steps that undo a move for good, in order. Raises `MoveRefused` after the switch."""
    if view.is_switched:
        raise MoveRefused(f"{view.target.name} holds shard {view.shard}: to go back, move it to the former database")
    steps = [MoveStep.UNFENCE] if view.is_fenced else []
    if view.is_renamed:
        steps.append(MoveStep.RENAME_BACK)
    if view.copy is not None:
        steps.append(MoveStep.DROP_COPY)
    return steps


def fenced_row(row: ShardRow, target_master: str) -> ShardRow:
    """Return the row of a shard that leaves for another database: nobody owns it, and it names the master there."""
    return msgspec.structs.replace(row, master_server=target_master, owner="", generation=row.generation + 1)


def unfenced_row(row: ShardRow, source_master: str, source_epoch: int) -> ShardRow:
    """Return the row of a shard that stays after all. The leader takes it again, under the next generation.
    ``source_epoch``: the version epoch of its database, which a promotion may have raised behind the fence."""
    return msgspec.structs.replace(
        row,
        master_server=source_master,
        owner="",
        generation=row.generation + 1,
        version_epoch=max(row.version_epoch, source_epoch),
    )


def arrived_row(fenced: ShardRow, target_epoch: int) -> ShardRow:
    """Return the row of the shard at the target. Versions given out there are above any of the source, and no cache
    believes what is read at the source any more. ``target_epoch``: the version epoch of the target database."""
    return msgspec.structs.replace(
        fenced, generation=fenced.generation + 1, version_epoch=max(fenced.version_epoch, target_epoch) + 1
    )
