"""Changes of the topology that decide who is master of a database.

Each is one compare-and-set, which only one of several runs can win, whatever they believe about their lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tao.model.errors import OperatorError, TopologyConflict
from tao.model.ports import TopologyStore
from tao.model.topology import Topology
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, find_database
from tao.topology import edits

_MAX_CONFLICTS: Final = 20
"""Bound on conflicting changes of the document. Each takes milliseconds, and no server is open to writes meanwhile."""


async def name_master(
    store: TopologyStore, replicas: ReplicationSet, region: str, version_epoch: int, lost: str
) -> Topology:
    """Make a region's server master under an epoch above the topology's, and mark a ``lost`` one down. Returns the
    document as it is now. Raises as `_change`."""
    name = replicas.database.name
    return await _change(store, replicas, lambda found: edits.promote(found, name, region, version_epoch, lost))


async def keep_master(store: TopologyStore, replicas: ReplicationSet, epochs: Mapping[str, int]) -> Topology:
    """Give the master, which has everything, an epoch above those of interrupted promotions. Returns as `name_master`.

    ``epochs``: those in the servers' rows. Nobody can finish these promotions any more: a later run finds no epoch
    above the topology's, and a late one of them loses its compare-and-set and has too low an epoch to repeat it."""
    epoch = max(replicas.database.version_epoch, *epochs.values()) + 1
    return await name_master(store, replicas, replicas.database.master_region, epoch, "")


async def reject_late_promotion(store: TopologyStore, replicas: ReplicationSet, members: Sequence[SetMember]) -> None:
    """Store the document anew, with nothing changed, before the master goes on while another server is silent.

    The epoch of that one may have been raised by a run that gave up when etcd did not answer its compare-and-set. etcd
    may carry that out later, and would replace the master and all that it has acknowledged by then. After this that has
    happened, which is seen here, or it fails. Raises as `_change`."""
    if any(each.state is None and not each.is_master for each in members):
        await _change(store, replicas, lambda found: found)


class ChangesUnderWay:
    """Changes that a run which gave up may have left with the store."""

    def __init__(self, store: TopologyStore) -> None:
        self._store: Final = store
        self._rejected: Final[dict[str, Mapping[str, int]]] = {}
        """Database → the epochs in its servers' rows when they were rejected last."""

    async def reject(self, replicas: ReplicationSet, members: Sequence[SetMember], epochs: Mapping[str, int]) -> None:
        """Store the document anew, so that each fails that is still under way. Raises as `_change`.

        ``epochs``: those in the servers' rows. Once is enough until one is raised again, as each run does before it has
        another server named: a watcher may come here each second for hours."""
        name, all_known = replicas.database.name, all(each.is_master or each.state is not None for each in members)
        if not all_known or self._rejected.get(name) != epochs:
            await _change(self._store, replicas, lambda found: found)
            self._rejected[name] = epochs


async def _change(store: TopologyStore, replicas: ReplicationSet, change: Callable[[Topology], Topology]) -> Topology:
    """Change the topology while it names the set's master, and retry when something else in the document changed at the
    same time: marks do when a region fails.

    Raises `OperatorError` when the master is another one by now, `LockLost`, and `TopologyError`."""
    name = replicas.database.name
    conflicts = 0
    while True:
        topology = await store.load()
        replicas.check_hold()
        found = find_database(topology, name)
        if found.servers[found.master_region].name != replicas.master.name:
            raise OperatorError(f"the master of {name} was changed by somebody else meanwhile")
        try:
            return await store.change(topology.version, change(topology))
        except TopologyConflict:
            conflicts += 1
            if conflicts == _MAX_CONFLICTS:
                raise
