"""Taking a replica out of use: reads and its region's tailer go to the master region, and commits do not wait for it.

Where it is the only one that acknowledges, its master would wait without end, and every write with it. So the master is
told to wait for none, until `tao undrain`: for that time a loss of the master loses what nobody else has.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from tao.cli.draining import Drained, Quiet, Show, check_seen, figures, load, marked, until_none
from tao.model.errors import TopologyError
from tao.model.topology import Database, Topology
from tao.storage.accounts import SERVICES
from tao.storage.processes import server_processes
from tao.storage.session import Session
from tao.watcher.locks import FileLocks, held_alone, mastership_lock
from tao.watcher.promotion import Promoter
from tao.watcher.replication_set import NotCaughtUp, ReplicationSet, SetAccounts
from tao.watcher.settings import PromotionSettings

_STATEMENT_SECONDS: Final = 5.0


async def drain_replica(file: Path, accounts: SetAccounts, name: str, timeout_seconds: float, show: Show) -> Drained:
    """Mark a replica and wait until nothing is asked of it. Raises `TopologyError` for a master, `OperatorError` when
    it cannot be seen who goes by the mark."""
    topology = await marked(file, name, down=True, check=_check_replica)
    database = _database_of(topology, name)
    region = next(region for region, server in database.servers.items() if server.name == name)
    replicas = ReplicationSet(database, accounts, seen_from="", statement_seconds=_STATEMENT_SECONDS)
    async with held_alone(FileLocks(file), mastership_lock(database.name), PromotionSettings().lock_seconds):
        let_go = await replicas.let_master_go()
    quiet = Quiet()

    async def missing() -> list[str]:
        stats = await figures(topology)
        late = [who for who, each in stats.items() if each.get("topology_version", 0) < topology.version]
        found = [f"{who} to notice topology {topology.version}" for who in late]
        found += [f"{who} to read elsewhere" for who, each in stats.items() if each.get("reads_from") == name]
        async with replicas.session(region) as session:
            busy = await _statements(session, replicas.soon())
        if busy:
            found.append(f"{busy} statements at {name} to end")
        elif not quiet.lasts(tuple(found), asyncio.get_running_loop().time()):
            found.append(f"{name} to be asked nothing any more")
        return found

    left = await until_none(missing, timeout_seconds, show)
    return Drained(
        server=name,
        role="replica",
        safe_to_stop=not left,
        marked=True,
        topology_version=topology.version,
        waiting_for=left,
        notes=[f"commits of {database.name} wait for no replica until tao undrain"] if let_go else [],
    )


async def undrain_replica(file: Path, promoter: Promoter, name: str) -> Drained:
    """Have a replica follow its master, wait for as long as the promoter does until it has caught up, and take its mark
    away. Raises as `Promoter.rejoin`, but for a replica that takes longer."""
    topology = await load(file)
    left: list[str] = []
    try:
        await promoter.rejoin(_database_of(topology, name).name, name)
    except NotCaughtUp:
        left = [f"{name} to catch up with its master"]
    topology = await load(file)
    return Drained(
        server=name,
        role="replica",
        safe_to_stop=False,
        marked=any(server.name == name and server.down for server in _database_of(topology, name).servers.values()),
        topology_version=topology.version,
        waiting_for=left,
    )


async def _statements(session: Session, deadline: float) -> int:
    """Statements of leaders and followers under way."""
    processes = await server_processes(session, deadline=deadline)
    return sum(each.user.startswith(SERVICES) and each.command == "Query" for each in processes)


def _database_of(topology: Topology, name: str) -> Database:
    for database in topology.databases:
        if any(server.name == name for server in database.servers.values()):
            return database
    raise TopologyError(f"there is no database server {name!r}")


def _check_replica(topology: Topology, name: str) -> None:
    database = _database_of(topology, name)
    if database.servers[database.master_region].name == name:
        raise TopologyError(f"{name} is the master of {database.name}: tao promote {database.name} --to another region")
    check_seen(topology)
