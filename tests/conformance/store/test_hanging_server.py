"""A database server hangs: callers notice it early, and few queries are sent to it until it recovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.model.errors import DatabaseDown, Overloaded
from tao.routing.failure_detector import DetectorSettings, Health
from tao.storage.failures import ConnectionLost
from tao.storage.pools import PoolSettings
from tao.storage.server_health import HealthSettings
from tests.conformance.store.stores import SERVER, MakePools
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = pytest.mark.database


class Stall:
    """A proxy to the server through which nothing passes while ``is_open`` is cleared, and new connections come to
    nothing unless it ``lets_in``."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.lets_in = True
        self.connections = 0

    @asynccontextmanager
    async def proxy(self, server_port: int) -> AsyncIterator[int]:
        tasks: set[asyncio.Task[None]] = set()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while chunk := await reader.read(65_536):
                    await self.is_open.wait()
                    writer.write(chunk)
            except OSError:
                return  # the other direction has closed
            finally:
                writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            if not self.lets_in:
                await reader.read()
                writer.close()
                return
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", server_port)
            for one in (pump(reader, to_writer), pump(to_reader, writer)):
                tasks.add(asyncio.create_task(one))

        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield proxy.sockets[0].getsockname()[1]
        finally:
            proxy.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_hanging_server_is_noticed_early_and_few_queries_reach_it_until_it_recovers(
    migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    """SIGSTOP and a cut connection look alike: no bytes arrive. Deadlines are far away; no caller waits for them."""
    stall = Stall()
    health = HealthSettings(
        # So long that a database on a busy machine is not taken for one that hangs, nor probed twice while it is asked.
        silence_seconds=0.5,
        detector=DetectorSettings(failures_until_down=1, first_probe_seconds=0.5, probe_timeout_seconds=0.5),
    )
    settings = PoolSettings(max_connections=4, max_waiting=50, health=health)
    async with stall.proxy(migrated.port) as port:
        pools = make_pools(writes=False, port=port, settings=settings)
        pool = pools.of(SERVER)
        loop = asyncio.get_running_loop()

        async def ask() -> object:
            deadline = loop.time() + 600
            async with pool.session(deadline=deadline) as session:
                return await session.run("SELECT 1", deadline=deadline)

        await asyncio.gather(*(ask() for _ in range(20)))
        stall.is_open.clear()
        failures = await asyncio.gather(*(ask() for _ in range(100)), return_exceptions=True)
        assert {type(failure) for failure in failures} <= {DatabaseDown, Overloaded, ConnectionLost}
        assert (pool.waiting, pool.lent) == (0, 0)
        asked = stall.connections
        for _ in range(100):
            with pytest.raises(DatabaseDown):
                await ask()
        assert stall.connections <= asked + 1, "probes alone, one at a time"
        stall.is_open.set()
        async with asyncio.timeout(PATIENT_SECONDS):
            while pool.state.health is not Health.UP:  # noqa: ASYNC110 - the state is the condition
                await asyncio.sleep(0.01)
        assert await ask() == [[(1,)]]
        assert {name: standing.transitions for name, standing in pools.states().items()} == {SERVER: 2}


async def test_a_connection_that_opens_too_late_closes_none_that_is_in_use(
    migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    """A database answers on its open connections, and a new one is lost on the way. A connection in COMMIT is left
    alone."""
    stall = Stall()
    health = HealthSettings(silence_seconds=600.0, detector=DetectorSettings(failures_until_down=1))
    async with stall.proxy(migrated.port) as port:
        pool = make_pools(writes=False, port=port, settings=PoolSettings(connect_seconds=1.0, health=health)).of(SERVER)
        deadline = asyncio.get_running_loop().time() + 600
        async with pool.session(deadline=deadline) as in_use:
            async with pool.session(deadline=deadline) as other:
                await other.run("SELECT 1", deadline=deadline)
            stall.lets_in = False
            async with pool.session(deadline=deadline):
                with pytest.raises(ConnectionLost, match="did not answer a new connection within"):
                    async with pool.session(deadline=deadline):
                        pass
            assert await in_use.run("SELECT 2", deadline=deadline) == [[(2,)]]


async def test_a_caller_is_rejected_at_once_when_the_queue_is_longer_than_its_deadline(make_pools: MakePools) -> None:
    pool = make_pools(writes=False, settings=PoolSettings(max_connections=1)).of(SERVER)
    loop = asyncio.get_running_loop()
    for _ in range(20):
        async with pool.session(deadline=loop.time() + 30):
            await asyncio.sleep(0.05)
    async with pool.session(deadline=loop.time() + 30):
        with pytest.raises(Overloaded, match="the line for database server"):
            async with pool.session(deadline=loop.time() + 0.01):
                pass
