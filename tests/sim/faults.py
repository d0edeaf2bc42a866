"""Faults, their beginning and their end.

Each fault ends by itself after its time, and all that still last are ended when the busy part of an act is over: from
then on everything can recover, and has to do so by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Final

from tao.routing.routes import Routes
from tests.sim.clients import Client
from tests.sim.etcd import ETCD
from tests.sim.foreign import write_past_the_product
from tests.sim.loop import Process
from tests.sim.moves import Moves
from tests.sim.operators import Operator
from tests.sim.plans import ETCD_GONE, OF_WATCHERS, PLANNED, RESTORES, UNSEEN_SECONDS, Fault
from tests.sim.promotion import Promotions
from tests.sim.restores import Restores
from tests.sim.rush import rush
from tests.sim.sequences import Sequences
from tests.sim.single_failures import LASTS_SECONDS
from tests.sim.topologies import DATABASES, REGIONS, TIERS, servers_of, tiers_of, with_homes, with_mark
from tests.sim.world import World

COMMIT_FAULTS: Final = ("aborted", "lost before", "lost after")


class Faults:
    """The faults of one world."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._lasting: Final[dict[Fault, Callable[[], None]]] = {}
        self._promotions: Final = Promotions(world)
        self._operator: Final = Operator(world)
        self._moves: Final = Moves(world)
        self._sequences: Final = Sequences(world, self._moves)
        self._restores: Final = Restores(world, self._promotions)
        self._kinds: Final[dict[str, Callable[[Fault], Callable[[], None] | None]]] = {
            "kill": self._kill,
            "kill tailer": self._kill_tailer,
            "pause": self._pause,
            "drain": self._drain,
            "cut server": self._cut_server,
            "cut pair": self._cut_pair,
            "cut one way": self._cut_one_way,
            "cut regions": self._cut_regions,
            "break": self._break,
            "slow": self._slow,
            "lag": self._lag,
            "replication stops": self._stop_replication,
            "commit fault": self._fail_commit,
            "database down": self._stop_database,
            "move shard": self._move_shard,
            "there and back": self._move_there_and_back,
            "depose": self._depose,
            "mark down": self._mark_down,
            "replaced unseen": self._replace_unseen,
            "tailer cut off": self._cut_tailer_off,
            "binlog lost": self._lose_binlog,
            "foreign write": partial(write_past_the_product, world),
            "spool needed": self._restart_leader_of_absent,
            "disk full": self._fill_disk,
            "promotion": self._promote,
            "topology late": self._hold_topology_back,
            "master lost": self._lose_master,
            "clone": self._operator.clone,
            "planned restart": self._operator.restart,
            "move to database": self._moves.move,
            "move dies": self._moves.die,
            "split database": self._sequences.split,
            "balance databases": self._sequences.balance,
            "move between followers": self._move_between_followers,
            "restart between writes": self._restart_between_writes,
            **dict.fromkeys(RESTORES, self._restores.begin),
            "rush": partial(rush, world, self._invalidate_everything),
            "kill watcher": self._kill_watcher,
            "watcher hangs": self._pause_watcher,
            "watcher cut off": self._cut_watcher_off,
            "master cut off": self._cut_master_off,
            "etcd away": self._stop_etcd,
            "etcd cut off": self._cut_etcd_off,
            "etcd compacted": self._compact_etcd,
        }

    def begin(self, fault: Fault) -> None:
        """Begin a fault; its end happens after its time, or in `mend`."""
        world = self._world
        world.trace.note("fault", fault.kind, fault.pick, fault.other, round(fault.seconds, 3))
        calm = world.checks.calm
        calm.undisturbed = calm.undisturbed and self._is_harmless(fault)
        if fault.kind != "clone":  # its tier can still answer
            calm.since = float("inf")
        end = self._kinds[fault.kind](fault)
        world.single_failures.begins(fault)
        if end is not None:
            self._lasting[fault] = end
            world.loop.call_later(fault.seconds, self._end, fault)
        else:
            seconds = LASTS_SECONDS.get(fault.kind, 0.0)
            world.loop.call_later(seconds, world.single_failures.ends, fault)

    def _is_harmless(self, fault: Fault) -> bool:
        """Return whether no request may fail because of a fault. Where nobody holds a lease, which needs a second
        region, watchers can go, and etcd while nothing changes the topology: a server that is cut off serves by the one
        that it has, and cannot serve shards that only a newer one names."""
        shape = self._world.shape
        has_leases = shape.regions > 1 and shape.watchers > 0
        if has_leases:
            return fault.kind in PLANNED
        is_of_etcd = fault.kind in ETCD_GONE and not self._world.has_new_topology()
        return is_of_etcd or fault.kind in (*PLANNED, *OF_WATCHERS)

    def mend(self) -> None:
        """End all faults."""
        for fault in list(self._lasting):
            self._end(fault)
        world = self._world
        world.at_pair_commit.clear()
        world.network.heal()
        world.network.slow.clear()
        for database in world.databases.values():
            database.commit_faults.clear()
        world.checks.calm.since = world.loop.now
        world.single_failures.calmed()

    def _end(self, fault: Fault) -> None:
        end = self._lasting.pop(fault, None)
        if end is not None:
            self._world.trace.note("fault over", fault.kind, fault.pick)
            self._world.bounds.look()  # before what has accumulated is released
            end()
            self._world.single_failures.ends(fault)

    def _server(self, number: int, *, tailers: bool = False) -> str:
        world = self._world
        names = world.names("leader") + world.names("follower") + (world.names("tailer") if tailers else [])
        return names[number % len(names)]

    # servers

    def _kill(self, fault: Fault) -> Callable[[], None] | None:
        name, world = self._server(fault.pick), self._world
        was_up = world.is_up(name)
        end = self._kill_named(name)
        if was_up and fault.other % 2 and world.journals.may_lose and name in world.names("follower"):
            world.trace.note("disk lost", name)
            world.journals.lose(name)
        return end

    def _kill_tailer(self, fault: Fault) -> Callable[[], None] | None:
        names = self._world.names("tailer")
        return self._kill_named(names[fault.pick % len(names)])

    def _kill_named(self, name: str) -> Callable[[], None] | None:
        world = self._world
        if not world.is_up(name):
            return None
        world.kill(name)
        return lambda: world.start_server(name)

    def _pause(self, fault: Fault) -> Callable[[], None] | None:
        return self._pause_named(self._server(fault.pick, tailers=True))

    def _pause_named(self, name: str) -> Callable[[], None] | None:
        world, process = self._world, self._world.processes[name]
        if process.state != "runs":
            return None
        world.loop.pause(process)
        world.network.silence(process)
        return lambda: world.loop.resume(process)

    def _drain(self, fault: Fault) -> Callable[[], None] | None:
        world, name = self._world, self._server(fault.pick, tailers=True)
        if not world.is_up(name) or name not in world.servers:
            return None

        async def stop() -> None:
            await world.stop(name)

        world.spawn(stop())
        return lambda: self._start_again(name)

    def _start_again(self, name: str) -> None:
        world = self._world
        if world.is_up(name):  # it is still draining
            world.kill(name)
        world.start_server(name)

    # watchers

    def _watcher(self, fault: Fault) -> str:
        """Return the name of a watcher, or an empty text where there is none."""
        names = self._world.names("watcher")
        return names[fault.pick % len(names)] if names else ""

    def _kill_watcher(self, fault: Fault) -> Callable[[], None] | None:
        name = self._watcher(fault)
        return self._kill_named(name) if name else None

    def _pause_watcher(self, fault: Fault) -> Callable[[], None] | None:
        name = self._watcher(fault)
        return self._pause_named(name) if name else None

    def _cut_watcher_off(self, fault: Fault) -> Callable[[], None] | None:
        """Cut a watcher off some servers: every second, every third, or all."""
        name = self._watcher(fault)
        if not name:
            return None
        return self._cut([name], [other for other in self._everyone() if other != name][:: 1 + fault.other % 3])

    def _cut_master_off(self, fault: Fault) -> Callable[[], None] | None:
        """Cut a master off everything but the leaders of its region, which go on writing there."""
        world = self._world
        master = world.masters[fault.pick % len(world.masters)]
        if not world.shape.watchers or self._promotions.is_changing(master.name):
            return None
        leaders = [name for name in world.names("leader") if world.processes[name].region == master.region]
        heal = self._cut([master.name], [each for each in self._everyone() if each not in (master.name, *leaders)])

        def end() -> None:
            heal()
            world.spawn(self._promotions.rejoin(master), world.operator)

        return end

    # network

    def _everyone(self) -> list[str]:
        world = self._world
        etcd = [] if world.documents is None else [ETCD]
        return [*world.processes, *world.databases, *(client.process.name for client in world.clients), *etcd]

    def _cut_server(self, fault: Fault) -> Callable[[], None]:
        name = self._server(fault.pick, tailers=True)
        return self._cut([name], [other for other in self._everyone() if other != name])

    def _cut_pair(self, fault: Fault) -> Callable[[], None]:
        everyone = self._everyone()
        one, other = everyone[fault.pick % len(everyone)], everyone[fault.other % len(everyone)]
        return self._cut([one], [other])

    def _cut_tailer_off(self, fault: Fault) -> Callable[[], None]:
        """Cut a server off its leaders while it goes on reading, and kill it in the middle."""
        world = self._world
        names = world.names("tailer")
        name = names[fault.pick % len(names)]
        end = self._cut([name], world.names("leader"))
        world.loop.call_later(fault.seconds / 2, self._kill_and_restart, name)
        return end

    def _kill_and_restart(self, name: str) -> None:
        if self._world.is_up(name):
            self._world.kill(name)
            self._world.loop.call_later(1.0, self._world.start_server, name)

    def _cut_one_way(self, fault: Fault) -> Callable[[], None]:
        everyone = self._everyone()
        one, other = everyone[fault.pick % len(everyone)], everyone[fault.other % len(everyone)]
        return self._cut([one], [other], both_ways=False)

    def _cut_regions(self, _: Fault) -> Callable[[], None]:
        east, west = ([name for name in self._everyone() if self._is_in(region, name)] for region in REGIONS)
        return self._cut(east, west)

    def _is_in(self, region: str, name: str) -> bool:
        documents = self._world.documents
        return region in name or (documents is not None and name == ETCD and documents.machine.region == region)

    def _cut(self, some: list[str], others: list[str], *, both_ways: bool = True) -> Callable[[], None]:
        # One partition at a time: the end of the next one would heal it too.
        self._world.network.cut(some, others, both_ways=both_ways)
        return self._world.network.heal

    def _break(self, _: Fault) -> None:
        connection = self._world.network.random_connection()
        if connection is not None:
            self._world.network.break_off(connection)

    def _slow(self, fault: Fault) -> Callable[[], None]:
        world, places = self._world, [*REGIONS, *self._everyone()]
        place = places[fault.pick % len(places)]
        world.network.slow[place] = (0.05, 0.5, 3.0)[fault.other % 3]
        return partial(self._slow_no_more, place)

    def _slow_no_more(self, place: str) -> None:
        self._world.network.slow.pop(place, None)

    # etcd

    def _stop_etcd(self, _: Fault) -> Callable[[], None] | None:
        documents = self._world.documents
        if documents is None or documents.etcd.is_away:
            return None
        documents.etcd.stop()
        return documents.etcd.start

    def _cut_etcd_off(self, fault: Fault) -> Callable[[], None] | None:
        """Cut etcd off from some processes: every second, every third, or all."""
        if self._world.documents is None:
            return None
        return self._cut([ETCD], [*self._world.processes][fault.pick % 2 :: 1 + fault.other % 3])

    def _compact_etcd(self, fault: Fault) -> Callable[[], None] | None:
        """Change the topology while etcd is cut off from some processes, and compact what they have missed."""
        documents = self._world.documents
        heal = self._cut_etcd_off(fault)
        if documents is None or heal is None:
            return None
        self._move_shard(fault)

        def end() -> None:
            documents.etcd.compact()
            heal()

        return end

    # databases

    def _database(self, number: int) -> str:
        return list(self._world.databases)[number % len(self._world.databases)]

    def _lag(self, fault: Fault) -> Callable[[], None]:
        database = self._world.databases[self._database(fault.pick)]
        database.lag_seconds = (0.2, 2.0, 8.0)[fault.other % 3]

        def catch_up() -> None:
            database.lag_seconds = 0.02

        return catch_up

    def _stop_replication(self, fault: Fault) -> None:
        database = self._world.databases[self._database(fault.pick)]
        database.stopped_until = self._world.loop.now + min(fault.seconds, 20.0)

    def _fail_commit(self, fault: Fault) -> None:
        masters = self._world.masters
        masters[fault.pick % len(masters)].commit_faults.append(COMMIT_FAULTS[fault.other % 3])

    def _stop_database(self, fault: Fault) -> Callable[[], None] | None:
        world = self._world
        database = world.databases[self._database(fault.pick)]
        if self._promotions.is_changing(database.name):
            return None
        world.stop_database(database)

        def start() -> None:
            database.stopped = False
            database.read_only = database.read_only or bool(database.lease_seconds)  # as its option file says
            world.spawn(self._promotions.rejoin(database), world.operator)

        return start

    def _promote(self, fault: Fault) -> Callable[[], None] | None:
        """Switch masters as planned."""
        return self._change_master(fault, None)

    def _hold_topology_back(self, fault: Fault) -> None:
        """Switch a master while the servers of one region do not learn of that: of the former master, which they reach
        and which receives nothing from its successor, or of the successor. Write elsewhere meanwhile, and read in that
        region critically."""
        world = self._world
        name = DATABASES[fault.pick % len(DATABASES)]
        database = next(each for each in world.topology.databases if each.name == name)
        regions = sorted(database.servers, key=lambda each: each != database.master_region)
        region = regions[fault.other % len(regions)]
        if region in world.late_topologies or self._change_master(fault, None) is None:
            return
        former, later, seconds = world.masters[DATABASES.index(name)], world.loop.call_later, LASTS_SECONDS[fault.kind]
        former.stopped_until = world.loop.now + seconds
        later(seconds, self._keep_topology_from(region))
        for at in (0.5 * seconds, 0.6 * seconds):
            later(at, self._write_everything_outside, region)
        for at in (0.55 * seconds, 0.7 * seconds, 0.8 * seconds):
            later(at, partial(self._read_everything, region, critical=True))

    def _keep_topology_from(self, region: str) -> Callable[[], None]:
        """Let the cache servers and tailers of a region hear of no other topology, until the result is called."""
        world = self._world
        if world.documents is not None:
            servers = [*world.names("leader"), *world.names("follower"), *world.names("tailer")]
            return self._cut([ETCD], [name for name in servers if world.processes[name].region == region])
        world.late_topologies[region] = world.topology

        def end() -> None:
            del world.late_topologies[region]
            world.look_at_topology()

        return end

    def _lose_master(self, fault: Fault) -> Callable[[], None] | None:
        """Lose a master whose last commits have reached no replica."""
        return self._change_master(fault, (0.05, 0.5, 2.5)[fault.other % 3])

    def _change_master(self, fault: Fault, lost_after: float | None) -> Callable[[], None] | None:
        name = DATABASES[fault.pick % len(DATABASES)]
        if not self._promotions.can_begin(name):
            return None
        returned = asyncio.Event()
        promotion = self._promotions.promote(name, returned, lost_after=lost_after)
        self._world.spawn(promotion, self._world.operator)
        return returned.set

    def _lose_binlog(self, fault: Fault) -> None:
        """Purge the binlog of a slow replica while its reader is away and everything is read."""
        world = self._world
        replicas = world.master_of(fault.pick % world.shape.shards).replicas
        if not replicas or replicas[0].down:
            return
        replica = replicas[0]
        name = f"tailer-{replica.region}-{replica.name.partition('-')[0]}"
        if world.is_up(name):
            world.kill(name)
        replica.answers_after = (0.55, 0.9)
        # As after an operator's `tao invalidate`: everything has to be read from the database.
        for leader in world.names("leader"):
            self._invalidate_everything(leader, replica.region)

        def follow_again() -> None:
            # Answers that are under way stay late.
            replica.answers_after = (0.0, 0.0)
            replica.purge()
            if not world.is_up(name):
                world.start_server(name)

        world.loop.call_later(0.1, self._read_everything, replica.region)
        world.loop.call_later(0.2, self._write_everything_outside, replica.region)
        world.loop.call_later(0.35, follow_again)
        world.loop.call_later(1.4, self._read_everything, replica.region)

    def _read_everything(self, region: str, *, critical: bool = False) -> None:
        for client in self._world.clients:
            if client.process.region == region:
                self._world.spawn(client.read_all_at_once(critical=critical), client.process)

    def _write_everything_outside(self, region: str) -> None:
        writer = next(client for client in self._world.clients if client.process.region != region)
        self._world.spawn(writer.write_all_at_once(), writer.process)

    def _restart_between_writes(self, fault: Fault) -> None:
        """Restart a follower just after everything that its leaders hold has been written, and read it."""
        followers = self._world.names("follower")
        name = followers[fault.pick % len(followers)]
        region, later = self._world.processes[name].region, self._world.loop.call_later
        self._read_everything(region)
        later(1.0, self._kill_and_restart, name)
        later(1.8, self._write_everything_outside, region)
        for seconds in (2.5, 3.0, 4.0):
            later(seconds, self._read_everything, region)

    def _invalidate_everything(self, leader: str, region: str) -> None:
        world = self._world
        process, server = world.processes[leader], world.servers.get(leader)
        if server is not None and process.state == "runs" and process.region == region:
            process.context.copy().run(server._relays.invalidate, range(world.shape.shards), "an operator")

    # disks

    def _fill_disk(self, fault: Fault) -> Callable[[], None] | None:
        world = self._world
        names = world.names("leader")
        file = world.spools.get(names[fault.pick % len(names)])
        if file is None:
            return None

        def free() -> None:
            file.full = False

        file.full = True
        return free

    def _restart_leader_of_absent(self, fault: Fault) -> Callable[[], None]:
        """Cut a follower off while its leader receives changes; then crash the leader."""
        world = self._world
        followers = world.names("follower")
        follower = followers[fault.pick % len(followers)]
        region = world.processes[follower].region
        leaders = [name for name in world.names("leader") if world.processes[name].region == region]
        end = self._cut([follower], leaders)
        world.loop.call_later(
            0.5 + min(fault.seconds, 15.0), self._kill_and_restart, leaders[fault.other % len(leaders)]
        )
        return end

    # topology

    def _move_shard(self, fault: Fault) -> None:
        """Move a shard to any server of one tier."""
        world = self._world
        shard = fault.pick % world.shape.shards
        tiers = tiers_of(world.topology)
        name = tiers[fault.other % len(tiers)]
        servers = servers_of(world.topology, name)
        self._move(name, {shard: servers[(fault.pick + fault.other) % len(servers)]})

    def _move_between_followers(self, fault: Fault) -> None:
        """Move a shard to the next follower of its tier, and read all objects while clients and followers learn of it
        at different moments."""
        world = self._world
        region, shard = REGIONS[fault.other % world.shape.regions], fault.pick % world.shape.shards
        place = (region, TIERS[0])
        servers = servers_of(world.topology, place)
        home = Routes(world.topology).tier(*place).home(shard).name
        self._move(place, {shard: servers[(servers.index(home) + 1) % len(servers)]})
        for tenth in range(1, 7):
            for client in [each for each in world.clients if each.process.region == region]:
                world.loop.call_later(tenth / 10, self._read_objects, client)

    def _read_objects(self, client: Client) -> None:
        self._world.spawn(client.read_objects(), client.process)

    def _move(self, place: tuple[str, str], homes: dict[int, str]) -> None:
        world = self._world
        world.when_documents_change(lambda: world.change_topology(with_homes(world.topology, place, homes)))

    def _move_there_and_back(self, fault: Fault) -> Callable[[], None] | None:
        """Take a shard from a leader whose database is slow, and give it back a moment later: after all servers have
        seen the change, or so soon that some see both changes at once."""
        world = self._world
        shard = fault.pick % world.shape.shards
        routes = Routes(world.topology)
        # In a region that does not master it: an owner learns from its own commits what it has missed.
        region = next((each for each in REGIONS[: world.shape.regions] if each != routes.master_region(shard)), "")
        if not region:
            return None
        place = (region, "leaders")
        home = routes.tier(*place).home(shard).name
        servers = servers_of(world.topology, place)
        other = servers[(servers.index(home) + 1) % len(servers)]
        database = routes.database_server(shard, region).name
        world.network.slow[database] = 3.0
        world.loop.call_later(1.0, self._move, place, {shard: other})
        world.loop.call_later((1.9, 1.35, 1.15)[fault.other % 3], self._move, place, {shard: home})
        return partial(self._slow_no_more, database)

    def _depose(self, fault: Fault) -> None:
        """Pause a leader when its next pair is committed at one side; others take its shards; it resumes."""
        world = self._world
        names = world.names("leader")
        name = names[fault.pick % len(names)]
        place = (world.processes[name].region, "leaders")
        servers = servers_of(world.topology, place)
        other = servers[(servers.index(name) + 1) % len(servers)]
        homes = dict.fromkeys(Routes(world.topology).tier(*place).shards_of(name), other)
        seconds = 0.7 + min(fault.seconds, 3.0)

        asleep = Fault(fault.at, "asleep", fault.pick, fault.other, seconds)

        def fall_asleep(process: Process) -> None:
            del world.at_pair_commit[name]
            world.loop.pause(process)
            self._move(place, homes)
            world.single_failures.begins(asleep)
            world.loop.call_later(seconds, world.loop.resume, process, context=Context())
            world.loop.call_later(seconds, world.single_failures.ends, asleep, context=Context())

        world.at_pair_commit[name] = fall_asleep

    def _replace_unseen(self, fault: Fault) -> None:
        """Pause a leader, let others lead its shards, and give them back before it resumes: it sees both changes at
        once."""
        world, names = self._world, self._world.names("leader")
        name = names[fault.pick % len(names)]
        resume = self._pause_named(name)
        if resume is None:
            return
        for mark, seconds in ((True, 0.3), (False, UNSEEN_SECONDS - 0.3)):
            world.loop.call_later(seconds, self._mark, name, mark)
        world.loop.call_later(UNSEEN_SECONDS, resume, context=Context())

    def _mark(self, name: str, down: bool) -> None:
        world = self._world
        world.when_documents_change(lambda: world.change_topology(with_mark(world.topology, name, down=down)))

    def _mark_down(self, fault: Fault) -> Callable[[], None]:
        name = self._server(fault.pick)
        self._mark(name, True)
        return lambda: self._mark(name, False)
