"""Takes a server out of use before it is stopped, and puts it back into use afterwards.

A server is marked down by hand; callers then use other servers, and other leaders take its shards over. The functions
here wait until that has happened, by what the servers report on their admin ports: the version of the topology that
they use, the shards that they own, and counters of requests, which stand still when nobody asks. A server that refuses
connections has stopped and needs nothing. A server that is silent may only be paused or busy, so it is waited for.

A server that has registered itself is not marked: it is asked to leave the ring, which it does in steps, and then
removed from the topology. When it starts again it registers again.

A replica is a special case. Where it is the only one that acknowledges commits, its master would wait without end, and
every write with it. So the command makes the master commit without waiting until `tao undrain`. If the master is lost
in that time, the writes that it acknowledged are lost with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec

from tao.admin.connection import ask_each
from tao.admin.documents import change_in_file, database_of_server, mark_in_file, topology_file, topology_locks
from tao.admin.server_stats import Stats, admin_addresses, server_stats, unreadiness
from tao.etcd.location import Location
from tao.model.errors import OperatorError, TaoError, TopologyError
from tao.model.topology import Registration, Topology
from tao.replication.accounts import SERVICES
from tao.replication.locks import LockHold, hold_exclusively, mastership_lock
from tao.replication.promotion import Promoter, PromotionSettings
from tao.replication.replication_set import NotCaughtUp, ReplicationSet, SetAccounts, is_silence
from tao.replication.server_statements import server_processes
from tao.routing.routes import Routes
from tao.runtime.admin_client import NobodyListens
from tao.storage.failures import NotListening
from tao.topology import edits
from tao.topology.registration import STEPS, eighths, leave, placed

PAUSE_SECONDS: Final = 0.1
_STATEMENT_SECONDS: Final = 5.0
QUIET_SECONDS: Final = 1.0
"""A server is out of use when it has had no request for so long: callers that know the new topology stay away at once,
and a request under way is answered or given up within seconds."""

Show = Callable[[str], None]
"""Shows what is waited for."""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The result of draining or undraining a server.

    ``marked``: it is marked down, so callers that use the current topology avoid it. ``waiting_for``: the conditions
    that were not met when the time was up."""

    server: str
    role: str
    safe_to_stop: bool
    marked: bool
    topology_version: int = 0
    waiting_for: list[str] = []
    notes: list[str] = []
    """Further remarks for the operator."""

    def describe(self) -> str:
        """Return the result as one line for a person."""
        if self.waiting_for:
            return f"{self.server}: still waiting for: {'; '.join(self.waiting_for)}"
        if self.safe_to_stop:
            return f"{self.server}: safe to stop" + (f"; then: tao undrain {self.server}" if self.marked else "")
        return f"{self.server}: in use"


async def drain_cache_server(file: Location, name: str, timeout_seconds: float, show: Show) -> Drained:
    """Mark a leader or follower down, or have it leave if it has registered itself, and wait until no server or client
    uses it.

    Raises `TopologyError` when no other server could replace it, and `OperatorError` when a server has no admin address
    to ask; in both cases nothing is changed."""
    if _registration(await topology_file(file).load(), name):
        return await _remove_registered(file, name, timeout_seconds, show)

    def check(before: Topology, name: str) -> None:
        _check_stand_in(before, name)
        check_seen(before)

    topology = await mark_in_file(file, name, down=True, check=check)
    place = Routes(topology).locate(name)
    watched = Quiet()

    async def missing() -> list[str]:
        stats = await figures(topology, wanted=name)
        return [*_unheard(stats, topology.version), *_unfinished(name, place.tier, topology, stats, watched)]

    left = await until_none(missing, timeout_seconds, show)
    return Drained(
        server=name,
        role=place.role,
        safe_to_stop=not left,
        marked=True,
        topology_version=topology.version,
        waiting_for=left,
    )


async def _remove_registered(file: Location, name: str, timeout_seconds: float, show: Show) -> Drained:
    """Have a server that has registered itself leave the ring, wait until no server or client uses it, and remove it
    from the topology. One that does not run, or does not see to its registration, leaves at once."""

    def begin(before: Topology) -> Topology:
        _check_others_on_ring(before, name)
        check_seen(before)
        return leave(before, name)

    topology = await change_in_file(file, begin)
    watched, place = Quiet(), Routes(topology).locate(name)

    async def missing() -> list[str]:
        nonlocal topology
        topology = await topology_file(file).load()
        found = _registration(topology, name)
        if found is None:
            return []
        stats = await figures(topology, wanted=name)
        if not found.leaving:
            return [f"{name} to leave: it has started again meanwhile, or was undrained; drain it again"]
        if name not in stats or (stats[name] and "registration" not in stats[name]):
            topology = await change_in_file(file, partial(leave, name=name, at_once=True))
        server = Routes(topology).server(name)
        if server.weight:
            return [f"{name} to leave the ring ({eighths(server)}/{STEPS} of its share left)"]
        registration = stats.get(name, {}).get("registration")
        if registration and not registration["leaving"]:
            # It has seen the topology, and not what that says of itself: once removed, it would register again.
            return [f"{name} to notice that it leaves"]
        return [*_unheard(stats, topology.version), *_unfinished(name, place.tier, topology, stats, watched)]

    left = await until_none(missing, timeout_seconds, show)
    if not left and _registration(topology, name):
        topology = await change_in_file(file, partial(edits.remove_server, name=name))
    return Drained(
        server=name,
        role=place.role,
        safe_to_stop=not left,
        marked=False,
        topology_version=topology.version,
        waiting_for=left,
        notes=[] if left else [f"{name} has left the topology: it registers again when it starts"],
    )


def _registration(topology: Topology, name: str) -> Registration | None:
    """Return the registration of a cache server; None for one without, and for a name that is not there."""
    found = placed(topology, name)
    return (found.server.registration or None) if found is not None else None


def _check_others_on_ring(topology: Topology, name: str) -> None:
    """Raise `TopologyError` when no server of the tier would be left to take over the shards of this one."""
    tier = topology.place_of(name).tier
    others = [each for each in tier.servers if each.name != name and each.takes_shards]
    if all(each.registration and each.registration.leaving for each in others):
        raise TopologyError(f"{name} is the last server of {tier.name} in use: no other server could take its shards")


async def undrain_cache_server(file: Location, name: str, timeout_seconds: float, show: Show) -> Drained:
    """Wait until a server is ready, mark it up, or have it stay if it was leaving, and wait until it has taken its
    shards back.

    Raises `TopologyError` for a server that is not in the topology, such as one that has left it by draining."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    before = await topology_file(file).load()
    if placed(before, name) is None:
        raise TopologyError(
            f"there is no server {name!r} in topology version {before.version}: one that registers itself leaves the "
            "topology when it has been drained, and registers again when it starts, so start it again instead; add any "
            "other with `tao topology add-server`"
        )
    if _registration(before, name):
        before = await change_in_file(file, partial(leave, name=name, leaving=False))
    server = Routes(before).server(name)

    async def unready() -> list[str]:
        return await not_ready(name, server.admin)

    left = await until_none(unready, timeout_seconds, show)
    topology = before
    if not left:
        topology = await mark_in_file(file, name, down=False)

        async def missing() -> list[str]:
            return [*_unheard(await figures(topology), topology.version), *await unready()]

        left = await until_none(missing, deadline - asyncio.get_running_loop().time(), show)
    return Drained(
        server=name,
        role=Routes(topology).locate(name).role,
        safe_to_stop=False,
        marked=Routes(topology).server(name).down,
        topology_version=topology.version,
        waiting_for=left,
    )


async def until_none(missing: Callable[[], Awaitable[list[str]]], timeout_seconds: float, show: Show) -> list[str]:
    """Call ``missing`` until it returns nothing; return what is still missing when the time is up."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    shown = ""
    while True:
        left = await missing()
        if not left or asyncio.get_running_loop().time() >= deadline:
            return left
        if left[0] != shown:
            shown = left[0]
            show(shown)
        await asyncio.sleep(PAUSE_SECONDS)


def check_seen(topology: Topology) -> None:
    """Raise `OperatorError` when a server has no admin address."""
    unseen = [name for name, admin in admin_addresses(topology).items() if not admin]
    if unseen:
        they = "has no admin address" if len(unseen) == 1 else "have no admin addresses"
        raise OperatorError(
            f"{', '.join(unseen)} {they} in the topology, so it cannot be seen whether every server uses the new "
            "topology: add the address, or use `tao topology mark-down` and look at the servers yourself"
        )


async def figures(topology: Topology, *, wanted: str = "") -> dict[str, dict[str, Any]]:
    """Return the figures of all cache servers and tailers by name.

    A silent server has empty figures. A server that refuses connections is left out, and so is a silent one that is
    marked down, unless it is ``wanted``: its machine may be lost, and nobody uses it. `Any`: each role has its own
    figures."""

    ignored = {server.name for _, server in topology.cache_servers if server.down and server.name != wanted}
    asked = {name: admin for name, admin in admin_addresses(topology).items() if admin}
    found: dict[str, dict[str, Any]] = {}
    for name, answer in zip(asked, await ask_each(asked.values(), server_stats), strict=True):
        if isinstance(answer, NobodyListens):
            continue  # it reads the topology when it starts
        if not isinstance(answer, TaoError):
            found[name] = answer
        elif name not in ignored:
            found[name] = {}
    return found


async def not_ready(name: str, admin: str) -> list[str]:
    """Return why a server is not ready, or nothing. Raises `OperatorError` for one without an admin address."""
    if not admin:
        raise OperatorError(f"{name} has no admin address in the topology: add one, so that its readiness can be seen")
    try:
        reason = await unreadiness(admin)
    except TaoError as error:
        return [f"{name} to answer ({error.message})"]
    return [f"{name} to be ready: {reason}"] if reason else []


class Quiet:
    """Measures for how long counters have stood still."""

    def __init__(self) -> None:
        self._count: object = None
        self._since = 0.0

    def lasts(self, count: object, now: float) -> bool:
        """Note a count that was read at ``now``; True when it has been the same for `QUIET_SECONDS`."""
        if count != self._count:
            self._count, self._since = count, now
        return now - self._since >= QUIET_SECONDS


def work_of(stats: Stats) -> tuple[int, ...]:
    """Return the requests of a cache server so far: reads by their outcome, then writes."""
    writes = stats["writes"]
    done = writes["forwarded"] if "forwarded" in writes else writes["committed"]
    return (stats["hits"], stats["misses"], stats["failures"], done, writes["failed"])


def _unheard(stats: Mapping[str, Stats], version: int) -> list[str]:
    late = [name for name, each in stats.items() if each and each["topology_version"] < version]
    silent = [name for name, each in stats.items() if not each]
    return [*(f"{name} to answer" for name in silent), *(f"{name} to notice topology {version}" for name in late)]


def _unfinished(name: str, tier: str, topology: Topology, stats: Mapping[str, Stats], watched: Quiet) -> list[str]:
    own = stats.get(name)
    if not own:
        return []  # it has stopped already; a silent server is reported by `_unheard`
    found: list[str] = []
    if own["role"] == "leader":
        shards = own["owned_shards"] + own["hosted_shards"]
        if shards:
            found.append(f"{shards} shards to be handed over")
        found += [
            f"{other} to take its shards"
            for other in _others(topology, name)
            if stats.get(other) and not _has_all(topology, other, stats[other])
        ]
    journaled = sum(own.get("journal", {}).get("waiting", {}).values())
    if journaled:
        found.append(f"{journaled} accepted writes to be made (or moved: tao journal drain {name} --to FOLLOWER)")
    if not watched.lasts(work_of(own), asyncio.get_running_loop().time()):
        found.append(f"{name} to be asked nothing any more (by clients of {tier} that follow the topology)")
    return found


def _has_all(topology: Topology, leader: str, stats: Stats) -> bool:
    return bool(stats["owned_shards"] + stats["hosted_shards"] >= len(Routes(topology).shards_of(leader)))


def _others(topology: Topology, name: str) -> Sequence[str]:
    """Return the servers of the same tier to which the ring gives its shards."""
    return [
        server.name for server in topology.place_of(name).tier.servers if server.name != name and server.takes_shards
    ]


def _check_stand_in(topology: Topology, name: str) -> None:
    """Raise `TopologyError` when no server would be left to replace this one.

    The shards of a leader that is down are taken over in its tier. A follower keeps its shards: only a server that has
    them already, as a clone or in another tier, answers in its place."""
    place = topology.place_of(name)
    region, tier = place
    if place.role == "leader":
        if not _others(topology, name):
            raise TopologyError(
                f"{name} is the last server of {tier.name} in {region.name} that has a weight and is not marked down: "
                "no other server could replace it"
            )
        return
    alone = Routes(topology).shards_without(name)
    if alone:
        raise TopologyError(
            f"{name} is the last server of {region.name} that has shard {alone[0]} and is not marked down "
            f"({len(alone)} such shards): their reads would fail. Bring servers of another tier back first, give the "
            "region one, or clone the shards (`tao shard clone`)"
        )


async def drain_replica(
    file: Location, accounts: SetAccounts, name: str, timeout_seconds: float, show: Show
) -> Drained:
    """Mark a replica down and wait until nobody reads from it. One that refuses connections has stopped already.

    Raises `TopologyError` for a master, and `OperatorError` when a server has no admin address to ask, or the replica
    refuses the administrator. Raises `LockTaken` while the master is being changed. Nothing is marked then."""
    before = await topology_file(file).load()
    _check_replica(before, name)
    database = database_of_server(before, name)
    region = next(region for region, server in database.places.items() if server.name == name)
    await _busy_with(_replication_set(before, name, accounts), region)
    lock = hold_exclusively(topology_locks(file), mastership_lock(database.name), PromotionSettings().lock_seconds)
    async with lock as hold:
        # Mark it, and read the topology, under the lock: its former holder may have changed the master. Commits of a
        # former master wait for replicas that do not follow it any more, and must not be acknowledged.
        topology = await mark_in_file(file, name, down=True, check=_check_replica)
        with _says_how_to_take_mark_away(name):
            let_go = await _replication_set(topology, name, accounts, hold).let_master_go()
    replicas = _replication_set(topology, name, accounts)
    quiet = Quiet()

    async def missing() -> list[str]:
        stats = await figures(topology)
        late = [who for who, each in stats.items() if each.get("topology_version", 0) < topology.version]
        found = [f"{who} to notice topology {topology.version}" for who in late]
        found += [f"{who} to read another server" for who, each in stats.items() if each.get("reads_from") == name]
        busy = await _busy_with(replicas, region)
        if busy:
            found.append(f"{name} {busy}")
        elif not quiet.lasts(tuple(found), asyncio.get_running_loop().time()):
            found.append(f"{name} to be asked nothing any more")
        return found

    with _says_how_to_take_mark_away(name):
        left = await until_none(missing, timeout_seconds, show)
    return Drained(
        server=name,
        role="replica",
        safe_to_stop=not left,
        marked=True,
        topology_version=topology.version,
        waiting_for=left,
        notes=[
            *([f"commits of {database.name} wait for no replica until tao undrain"] if let_go else []),
            *([_stays_marked(name)] if left else []),
        ],
    )


@contextmanager
def _says_how_to_take_mark_away(name: str) -> Iterator[None]:
    """Say at an error that a server stays marked down, and how to change that."""
    try:
        yield
    except TaoError as error:
        error.add_note(_stays_marked(name))
        raise


def _stays_marked(name: str) -> str:
    return f"{name} stays marked down: drain it again, or use it again with tao undrain or tao topology mark-up {name}"


def _replication_set(
    topology: Topology, name: str, accounts: SetAccounts, hold: LockHold | None = None
) -> ReplicationSet:
    """Return the set that a server belongs to. ``hold``: that of its mastership lock, while the set is changed."""
    return ReplicationSet(
        database_of_server(topology, name), accounts, seen_from="", statement_seconds=_STATEMENT_SECONDS, hold=hold
    )


async def undrain_replica(file: Location, promoter: Promoter, name: str) -> Drained:
    """Have a replica follow its master, wait until it has caught up, and mark it up.

    The promoter's settings say how long to wait; a replica that takes longer is reported in the result. Raises what
    `Promoter.rejoin` raises otherwise."""
    topology = await topology_file(file).load()
    left: list[str] = []
    try:
        await promoter.rejoin(database_of_server(topology, name).name, name)
    except NotCaughtUp:
        left = [f"{name} to catch up with its master"]
    topology = await topology_file(file).load()
    servers = database_of_server(topology, name).places
    return Drained(
        server=name,
        role="replica",
        safe_to_stop=False,
        marked=any(server.name == name and server.down for server in servers.values()),
        topology_version=topology.version,
        waiting_for=left,
    )


async def _busy_with(replicas: ReplicationSet, region: str) -> str:
    """Return what a replica is to do before it may be stopped, or an empty string; one that is silent is to answer.
    Raises the `TaoError` of one that refuses the administrator."""
    try:
        async with replicas.session(region) as session:
            processes = await server_processes(session, deadline=replicas.statement_deadline())
    except NotListening:
        return ""
    except TaoError as error:
        if not is_silence(error):
            raise
        return f"to answer ({error.message})"
    statements = sum(each.user.startswith(SERVICES) and each.command == "Query" for each in processes)
    return f"to end {statements} statements" if statements else ""


def _check_replica(topology: Topology, name: str) -> None:
    database = database_of_server(topology, name)
    if database.servers[database.master_region].name == name:
        raise TopologyError(f"{name} is the master of {database.name}: tao promote {database.name} --to another region")
    check_seen(topology)
