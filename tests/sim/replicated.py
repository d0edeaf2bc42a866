"""Database servers of one replication set on machines with links, for `tests.sim.lost_masters`.

The product's statements (`tao.replication.server_statements`, `tao.replication.lease`) are replaced by functions of a
`Server`, which travel over the links: they are carried out when they arrive, and answered when the answer arrives. A
transaction is a number; what a server has received it has executed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any, Final, TypeVar

from tao.model.errors import OperatorError
from tao.replication import lease, server_statements
from tao.replication.gtid import GtidSet
from tao.replication.lease import EVENT_SECONDS, LeaseTerms
from tao.replication.server_statements import HEARTBEAT_SECONDS, MemberState, ReplicationSource, ReplicationStatus
from tao.storage import session as sessions
from tao.storage.dialect import Dialect, SessionSetup
from tao.storage.failures import ConnectionLost, NotListening
from tao.storage.session import ServerAccount
from tests.sim.loop import CURRENT, SimLoop
from tests.sim.substitutes import Substitution

NET_TIMEOUT_SECONDS: Final = 5.0
"""``slave_net_timeout`` of the option files in config/: how long a replica takes a silent master for connected."""
_START_RETRY_SECONDS: Final = 1.0
_END_CONNECTION_SECONDS: Final = 1.0
"""How long a semi-synchronous replica that stops receiving tries to end its connection at its master."""
_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class Server:
    """A database server on a machine of its own."""

    name: str
    region: str
    number: int
    runs: bool = True
    """The process runs; otherwise connections are refused, if the machine can be reached."""
    started_at: float = 0.0
    stands_still_since: float = 0.0
    stands_still_until: float = 0.0
    disk_stands_still_until: float = 0.0
    """Until then what writes to its disk waits, and everything else goes on."""
    refuses_until: float = 0.0
    """Until then it refuses the account of administrators who connect. Replicas connect with another one."""
    read_only: bool = True
    master_row: str = ""
    epoch: int = 1
    epoch_raised_at: float = 0.0
    is_taken: bool = True
    """A leader has taken the shard since its epoch was raised."""
    waits: bool = False
    terms: LeaseTerms = field(default_factory=LeaseTerms)
    lease_ends: float = 0.0
    log: dict[int, int] = field(default_factory=dict)
    """Server number → the last of its transactions that is here."""
    following: Server | None = None
    io_runs: bool = False
    starts: int = 0
    """How often it was restarted: sessions end with the process."""
    acknowledged: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Transactions that wait until a replica has them."""

    def gtids(self) -> str:
        return ",".join(f"0-{server}-{last}" for server, last in sorted(self.log.items()))

    @property
    def last(self) -> int:
        return max(self.log.values(), default=0)

    def restart(self, *, runs: bool) -> None:
        """End the process, and start it again if it ``runs``: closed to writes, as its option file says, and receiving
        from the master that it follows."""
        self.runs, self.read_only, self.waits = runs, True, False
        self.starts += 1
        self.io_runs = self.following is not None
        for waiting in self.acknowledged.values():
            waiting.cancel()
        self.acknowledged.clear()


class Machines:
    """Servers and watchers, each on a machine, and the links between them."""

    def __init__(self, loop: SimLoop, rng: random.Random, servers: list[Server], *, refuses: bool) -> None:
        self.loop: Final = loop
        self.random: Final = rng
        self.servers: Final = {server.name: server for server in servers}
        self.regions: Final = {server.name: server.region for server in servers}
        self.cuts: Final[dict[frozenset[str], float]] = {}
        """Pair of machines → since when nothing gets from one to the other."""
        self.healed_at = -inf
        """When the links were mended last."""
        self._mended_at: Final[dict[frozenset[str], float]] = {}
        """Pair of machines → when the link between them was mended last."""
        self.refuses: Final = refuses
        """Refuse connections through a cut at once, as the rule of a firewall does."""
        self.slow: Final[dict[str, float]] = {}
        """Machine → most seconds by which it answers late."""
        self._slow_until: Final[dict[str, tuple[float, float]]] = {}
        """Machine → the most seconds by which it answered late, and until when."""
        self.two_masters: Final[list[str]] = []
        self.numbers: Final = count(1)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cuts

    def cut(self, one: str, other: str) -> None:
        if one != other:
            self.cuts.setdefault(frozenset((one, other)), self.loop.now)

    def heal(self) -> None:
        """Mend all links, and let replicas connect again."""
        now = self.healed_at = self.loop.now
        self._mended_at.update(dict.fromkeys(self.cuts, now))
        self._slow_until.update({name: (seconds, now) for name, seconds in self.slow.items()})
        self.cuts.clear()
        self.slow.clear()
        self.send_all()

    def well_since(self, here: str, server: Server, within_seconds: float) -> float:
        """Return since when a server has answered all questions from a machine within some seconds; infinity when it
        does not."""
        pair = frozenset((here, server.name))
        is_slow = self.slow.get(server.name, 0.0) >= within_seconds
        if not server.runs or server.stands_still_until > self.loop.now or is_slow or pair in self.cuts:
            return inf
        was_slow_by, slow_until = self._slow_until.get(server.name, (0.0, 0.0))
        not_slow_since = slow_until if was_slow_by >= within_seconds else 0.0
        return max(self._mended_at.get(pair, 0.0), server.started_at, server.stands_still_until, not_slow_since)

    def send_all(self) -> None:
        for server in self.servers.values():
            self.send(server)

    def one_way_seconds(self, one: str, other: str) -> float:
        near = self.regions[one] == self.regions[other]
        seconds = (0.0004 if near else 0.03) * (1 + self.random.random())
        if self.random.random() < 0.002:
            seconds += self.random.random() * 0.8
        return seconds

    async def trip(
        self, server: Server, statement: Callable[[Server], _Result], deadline: float, *, writes: bool = False
    ) -> _Result:
        """Carry out a statement of the present process at a server. ``writes``: its disk has to answer. Raises
        `ConnectionLost`."""
        process = CURRENT.get()
        assert process is not None
        here = process.name
        wait = self.one_way_seconds(here, server.name)
        await self._sleep(wait, here, server, deadline)
        if self.is_cut(here, server.name):
            await self._end_at_cut(server, deadline)
        if not server.runs:
            raise NotListening(f"{server.name}: connection refused")
        late = self.random.random() * self.slow.get(server.name, 0.0)
        ready = max(self.loop.now + late, server.stands_still_until, server.disk_stands_still_until if writes else 0.0)
        if ready > self.loop.now:
            await self._sleep(ready - self.loop.now, here, server, deadline)
        if not server.runs:
            raise ConnectionLost(f"{server.name}: the connection broke")
        result = statement(server)
        await self._sleep(wait, here, server, deadline)
        if self.is_cut(here, server.name):
            await self._end_at_cut(server, deadline)
        return result

    async def _sleep(self, seconds: float, here: str, server: Server, deadline: float) -> None:
        if self.loop.now + seconds > deadline:
            await self._silence(server, deadline)
        await asyncio.sleep(seconds)

    async def _end_at_cut(self, server: Server, deadline: float) -> None:
        if self.refuses:
            raise NotListening(f"{server.name}: refused on the way")
        await self._silence(server, deadline)

    async def _silence(self, server: Server, deadline: float) -> None:
        await asyncio.sleep(max(0.0, deadline - self.loop.now))
        raise ConnectionLost(f"{server.name} did not answer in time")

    def receives(self, replica: Server) -> bool:
        """Return whether a replica takes itself for connected to its master."""
        master = replica.following
        if master is None or not replica.io_runs:
            return False
        if not master.runs and frozenset((replica.name, master.name)) not in self.cuts:
            return False
        return self.loop.now - self._silent_since(replica, master) < NET_TIMEOUT_SECONDS

    def _silent_since(self, replica: Server, master: Server) -> float:
        """Return since when nothing comes from a master to its replica; infinity while something could."""
        since = self.cuts.get(frozenset((replica.name, master.name)), inf)
        return min(since, master.stands_still_since) if master.stands_still_until > self.loop.now else since

    def is_silent_to(self, replica: Server) -> bool:
        """Return whether a replica's master leaves questions unanswered."""
        master = replica.following
        if master is None or (self.refuses and self.is_cut(replica.name, master.name)):
            return False
        return self._silent_since(replica, master) < inf

    def heard(self, replica: Server, master: Server) -> str:
        """Return what changes with everything that a replica hears from its master (`ReplicationStatus.heard`). A slow
        one also sends its heartbeats late."""
        until = min(self.loop.now, self._silent_since(replica, master))
        slow, number = self.slow.get(master.name, 0.0), int(until // HEARTBEAT_SECONDS)
        lateness = random.Random(f"{master.name} {number}").random() * slow
        if number * HEARTBEAT_SECONDS + lateness > until:
            number -= 1
        return f"{number} {replica.gtids()}"

    def acknowledging(self, master: Server) -> int:
        """Return how many replicas acknowledge to a master."""
        return sum(each.following is master and self.receives(each) for each in self.servers.values())

    def send(self, master: Server) -> None:
        """Send what they lack to all replicas that can be reached."""
        for replica in self.servers.values():
            if replica.following is master and replica.io_runs and not self.is_cut(master.name, replica.name):
                delay = self.one_way_seconds(master.name, replica.name)
                rows = master.epoch, master.master_row, master.is_taken
                self.loop.call_later(delay, self._receive, replica, master, dict(master.log), rows)

    def _receive(self, replica: Server, master: Server, log: dict[int, int], rows: tuple[int, str, bool]) -> None:
        is_following = replica.following is master and replica.io_runs and replica.runs
        if not is_following or self.is_cut(master.name, replica.name):
            return
        if replica.stands_still_until > self.loop.now:
            self.loop.call_at(replica.stands_still_until, self._receive, replica, master, log, rows)
            return
        for server, last in log.items():
            replica.log[server] = max(replica.log.get(server, 0), last)
        if rows[0] > replica.epoch or rows[:2] == (replica.epoch, replica.master_row):
            replica.epoch, replica.master_row, replica.is_taken = rows
        delay = self.one_way_seconds(master.name, replica.name)
        self.loop.call_later(delay, self._acknowledge, replica, master, log.get(master.number, 0))

    def _acknowledge(self, replica: Server, master: Server, number: int) -> None:
        if self.is_cut(master.name, replica.name) or not master.runs:
            return
        for waiting in [each for each in master.acknowledged if each <= number]:
            future = master.acknowledged.pop(waiting)
            if not future.done():
                future.set_result(None)

    def close_without_lease(self) -> None:
        """Do what the event of each server does every second."""
        for server in self.servers.values():
            over = server.lease_ends + server.terms.grace_seconds if server.lease_ends else 0.0
            if server.runs and server.terms.seconds and self.loop.now >= max(over, server.stands_still_until):
                server.read_only = True
        self.loop.call_later(EVENT_SECONDS, self.close_without_lease)

    def state(self, server: Server) -> MemberState:
        """Return what `member_state` returns."""
        following = server.following
        gtids = GtidSet(Dialect.MARIADB, server.gtids())
        status = None
        if following is not None:
            receives = self.receives(server)
            source = f"127.0.0.1:{following.number}"
            stopped = not server.io_runs
            heard = self.heard(server, following)
            status = ReplicationStatus(
                source, receives, True, stopped, 0, "", "", "", receiving_stopped=stopped, heard=heard
            )
        return MemberState(
            server.read_only,
            status,
            gtids,
            gtids,
            waits_for_replica=server.waits,
            acknowledging_clients=self.acknowledging(server),
            acknowledges=status is not None and status.receiving,
        )


class Session:
    """An administrator's session. It ends with the server's process, when it is idle for too long, and when a statement
    is not answered."""

    dialect: Final = Dialect.MARIADB

    def __init__(self, machines: Machines, server: Server, idle_seconds: float, starts: int) -> None:
        """``idle_seconds``: how long it may be idle; 0: for ever. ``starts``: those of the server that it is at."""
        self._machines: Final = machines
        self.server: Final = server
        self._idle_seconds: Final = idle_seconds
        self._starts: Final = starts
        self._used_at = machines.loop.now
        self.idle_since = 0.0
        self.is_open = True

    async def run(self, statement: Callable[[Server], _Result], deadline: float, *, writes: bool = False) -> _Result:
        def at_server(server: Server) -> _Result:
            idle = self._machines.loop.now - self._used_at
            if server.starts != self._starts or 0 < self._idle_seconds < idle:
                raise ConnectionLost(f"{server.name}: the connection broke")
            self._used_at = self._machines.loop.now
            return statement(server)

        try:
            if not self.is_open:
                raise ConnectionLost(f"{self.server.name}: the connection is closed")
            return await self._machines.trip(self.server, at_server, deadline, writes=writes)
        except ConnectionLost:
            self.is_open = False
            raise

    def quit(self) -> None:
        self.is_open = False


Statement = Callable[..., Any]
"""Any: each has the parameters of the function that it replaces."""


def statements(machines: Machines) -> list[Substitution]:
    """Return the replacements of the product's statements."""
    loop, servers = machines.loop, machines.servers

    async def open_session(_: ServerAccount, name: str, setup: SessionSetup, *, deadline: float) -> Session:
        def log_in(server: Server) -> int:
            if server.refuses_until > loop.now:
                refusal = OperatorError(f"{name}: access denied")
                refusal.is_refusal = True
                raise refusal
            return server.starts

        starts = await machines.trip(servers[name], log_in, deadline)
        return Session(machines, servers[name], setup.under_lock_seconds, starts)

    def attach(server: Server, source: ReplicationSource) -> None:
        server.following = next(each for each in servers.values() if each.number == source.port)
        server.io_runs, server.read_only = True, True
        loop.call_later(_START_RETRY_SECONDS * machines.random.random(), machines.send, server.following)

    def detach(server: Server) -> None:
        server.following, server.io_runs = None, False

    def receive_again(server: Server) -> None:
        server.io_runs = server.following is not None
        machines.send_all()

    def set_semi_sync(server: Server, *, waits: bool) -> None:
        server.waits = waits

    def open_to_writes(server: Server, *, semi_sync: bool) -> None:
        server.waits, server.read_only = semi_sync, False

    def fence(server: Server, *_: object) -> int:
        server.read_only = True
        return 0

    def raise_epoch(server: Server, _: object, master: str, epoch: int, **__: object) -> None:
        if server.master_row != master or server.epoch < epoch:
            server.master_row, server.epoch, server.is_taken = master, max(server.epoch, epoch), False
            server.epoch_raised_at = loop.now
            server.log[server.number] = next(machines.numbers)

    def highest_epoch(server: Server, _: object, *, master: str = "", taken: bool = False) -> int:
        return server.epoch if master in ("", server.master_row) and server.is_taken >= taken else 0

    by_original: dict[Any, Statement] = {
        server_statements.attach: attach,
        server_statements.detach: detach,
        server_statements.roll_back: lambda server: None,
        server_statements.receive_again: receive_again,
        server_statements.set_semi_sync: set_semi_sync,
        server_statements.open_to_writes: open_to_writes,
        server_statements.fence: fence,
        server_statements.raise_epoch: raise_epoch,
        server_statements.schemas_with_reserved_ids: lambda server: frozenset(),
        server_statements.highest_epoch: highest_epoch,
        server_statements.acknowledging_replicas: machines.acknowledging,
        server_statements.acknowledge_as_replica: lambda server: None,
        server_statements.apply_received: lambda server: None,
        server_statements.member_state: machines.state,
        server_statements.executed_position: Server.gtids,
        server_statements.wait_for_position: lambda server, position: None,
    }
    return [
        Substitution(sessions.open_session, open_session),
        Substitution(server_statements.stop_receiving, _stop_receiving_at(machines)),
        *(Substitution(original, _travelling(instead)) for original, instead in by_original.items()),
        *_lease_statements(loop),
    ]


def _stop_receiving_at(machines: Machines) -> Statement:
    async def stop_receiving(session: Session, *, deadline: float) -> MemberState:
        """Stop at once, and return the state when the connection is ended at the master or cannot be."""

        def stop(server: Server) -> tuple[bool, MemberState]:
            hangs = server.io_runs and machines.is_silent_to(server)
            server.io_runs = False
            return hangs, machines.state(server)

        hangs, state = await session.run(stop, deadline)
        if hangs:
            await asyncio.sleep(_END_CONNECTION_SECONDS)
        return state

    return stop_receiving


def _lease_statements(loop: SimLoop) -> list[Substitution]:
    def grant_lease(server: Server, since: int) -> None:
        server.lease_ends = since / 1000 + server.terms.seconds

    def renew_lease(server: Server, since: int, terms: LeaseTerms) -> bool:
        if server.read_only or not server.lease_ends or loop.now >= server.lease_ends + terms.grace_seconds:
            return False
        server.lease_ends = max(server.lease_ends, since / 1000 + server.terms.seconds)
        return True

    def revoke_lease(server: Server) -> None:
        if not server.read_only:
            server.lease_ends = 0.0

    def install_lease(server: Server, terms: LeaseTerms) -> None:
        server.terms = terms

    by_original: dict[Any, Statement] = {
        lease.grant_lease: grant_lease,
        lease.renew_lease: renew_lease,
        lease.revoke_lease: revoke_lease,
        lease.install_lease: install_lease,
        lease.lease_terms: lambda server: server.terms,
        lease.server_unix_ms: lambda server: int(loop.now * 1000),
    }
    return [Substitution(original, _travelling(instead)) for original, instead in by_original.items()]


_WRITING: Final = ("raise_epoch", "grant_lease", "renew_lease", "revoke_lease", "install_lease")
"""Statements that wait for the disk."""


def _travelling(statement: Statement) -> Statement:
    writes = statement.__name__ in _WRITING

    async def travel(session: Session, *arguments: Any, deadline: float, **named: Any) -> Any:
        return await session.run(lambda server: statement(server, *arguments, **named), deadline, writes=writes)

    return travel


async def write(machines: Machines, server: Server, timeout_seconds: float) -> int:
    """Write at a server as a leader that takes it for the master, and return the number of the transaction once it is
    acknowledged. Raises `OperatorError` where it is refused, and `ConnectionLost`."""
    deadline = machines.loop.now + timeout_seconds

    def commit(at: Server) -> tuple[int, asyncio.Future[None] | None]:
        if at.read_only or at.master_row != at.name:
            raise OperatorError(f"{at.name} is no master")
        number = next(machines.numbers)
        at.log[at.number] = number
        at.is_taken = True
        waiting: asyncio.Future[None] | None = machines.loop.create_future() if at.waits else None
        # Nothing stops a server that wakes up too late to be asked by the promotion, until its event runs.
        woke = at.stands_still_until
        has_woken = machines.loop.now < woke + EVENT_SECONDS
        for other in machines.servers.values():
            if (
                waiting is None
                and not (has_woken and other.epoch_raised_at <= woke)
                and not other.read_only
                and other.master_row == other.name
                and other.epoch > at.epoch
            ):
                machines.two_masters.append(f"{at.name} takes writes beside {other.name}")
        if waiting is not None:
            at.acknowledged[number] = waiting
        machines.send(at)
        return number, waiting

    number, waiting = await machines.trip(server, commit, deadline, writes=True)
    if waiting is not None:
        done, _ = await asyncio.wait((waiting,), timeout=max(0.0, deadline - machines.loop.now))
        if not done or waiting.cancelled():
            raise ConnectionLost("the outcome is unknown")
        here = CURRENT.get()
        if here is not None and machines.is_cut(here.name, server.name):
            raise ConnectionLost("the outcome is unknown")
    return number


async def critical_read(machines: Machines, server: Server, timeout_seconds: float) -> dict[int, int]:
    """Return the transactions of a server that proves to be the master (`tao.storage.master_check`). Raises as
    `write`."""

    def read(at: Server) -> dict[int, int]:
        lease_ended = bool(at.terms.seconds) and machines.loop.now >= at.lease_ends
        if at.read_only or lease_ended or at.master_row != at.name:
            raise OperatorError(f"{at.name} is no master")
        return dict(at.log)

    return await machines.trip(server, read, machines.loop.now + timeout_seconds)
