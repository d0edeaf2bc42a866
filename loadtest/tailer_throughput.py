"""Scenario `tailing`: from a binlog full of a leader's transactions to acknowledged relays, in one process.

The transactions are committed first, so that neither the database's commits nor a leader's planning is measured; the
leader that acknowledges answers after a millisecond, as one in the same region does. What is measured is reading,
decoding, translating and relaying: the work of a tailer that has fallen behind. The same binlog is then read once more
for leaders that have all messages themselves, so that rows stay undecoded.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from loadtest.results import Quantity, ScenarioResult, at_least
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.ids import make_id
from tao.model.relay import Relay, Relayed
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.model.writes import AssocAdd
from tao.observability.logs import logger
from tao.planning.coordination import PlannedWrite, keys_of
from tao.planning.row_events import Translated, translate
from tao.planning.write_plan import draft_writes, plan_of
from tao.replication.accounts import Account, ServiceAccounts
from tao.routing.routes import Routes
from tao.runtime.tasks import BackgroundTasks
from tao.schema.registry import Schema, load_schema
from tao.storage.migrations import migrate
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.session import ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tao.tailer.binlog import UndecodedRows
from tao.tailer.continuity import Continuity
from tao.tailer.delivery_path import DeliveryPath, RelayScope
from tao.tailer.reader import BinlogReader
from tao.tailer.settings import OutboxSettings, ReaderSettings
from tao.wire.convert import relay_to_pb

_SHARDS: Final = 8
_ATYPE: Final = "peer"
_BATCHES: Final = (64, 1)
_WRITES: Final = {64: 20_000, 1: 4_000}
_TOY_WRITES: Final = 128
_IDS_PER_SHARD: Final = 4_000
_NOW_MS: Final = 1_700_000_000_000
_ANSWER_SECONDS: Final = 0.001
_STEP_SECONDS: Final = 30.0
_AIM: Final = 20_000


class _Acknowledging:
    """The leaders' port: encodes a relay, as the way to a leader would, and acknowledges it."""

    def __init__(self, *, takes_references: bool) -> None:
        self._answer: Final = Relayed(takes_references=takes_references)

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
        relay_to_pb(relay).SerializeToString()
        await asyncio.sleep(_ANSWER_SECONDS)
        return self._answer


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Fill a binlog and let a tailer catch up, by writes a transaction. Raises `OperatorError`."""
    roles = ("administrator", "leader", "reader", "replicator")
    accounts = ServiceAccounts(**{role: Account(f"tao_{role}", os.urandom(8).hex()) for role in roles})
    binary = find_server_binary(os.environ)
    settings.versions[binary.flavour] = binary.version_text
    instance = DatabaseInstance(
        binary,
        InstanceSettings(
            folder=settings.work_dir / "tailing",
            accounts=accounts,
            cache_folder=default_cache_folder(os.environ),
            options=ServerOptions(durability=Durability.RELAXED),
        ),
    )
    await instance.start()
    quantities: list[Quantity] = []
    try:
        schema = load_schema(SCHEMA.read_text(), str(SCHEMA))
        await migrate(_account(instance, "administrator"), range(_SHARDS), schema.custom_tables(), "db")
        for number, batch in enumerate(_BATCHES):
            writes = _TOY_WRITES if settings.toy else _WRITES[batch]
            progress.step(f"{writes:,} writes, {batch} a transaction", number / len(_BATCHES))
            quantities += await _measure(instance, schema, writes, batch)
    finally:
        await instance.stop()
    return ScenarioResult(
        conditions={"shards": _SHARDS, "rows_per_write": 4, "durability": "relaxed", "aim_writes_per_second": _AIM},
        quantities=quantities,
        aims=[at_least(f"at least {_AIM:,} writes a second", quantities[0].value, _AIM, quantities[0].name)],
    )


SCENARIO: Final = Scenario(
    name="tailing",
    summary=("a tailer that catches up: binlog to acknowledged relay, assoc_add with inverse, by writes a transaction"),
    run=run,
)


def _account(instance: DatabaseInstance, role: str) -> ServerAccount:
    account: Account = getattr(instance.accounts, role)
    return ServerAccount(instance.host, instance.port, account.user, account.password, socket="", tls=None)


async def _measure(instance: DatabaseInstance, schema: Schema, writes: int, batch: int) -> list[Quantity]:
    reader = BinlogReader(_account(instance, "replicator"), 4_000_000_000, ReaderSettings(), logger("bench"))
    start = await reader.current_position()
    committed = await _commit(instance, schema, writes, batch)
    quantities: list[Quantity] = []
    for by_reference in (False, True):
        wall, cpu = await _tail(reader, schema, start, committed, by_reference=by_reference)
        name = f"writes, {batch} a transaction"
        rates = {
            name: writes / wall,
            f"{name}, of CPU time": writes / cpu,
            f"transactions of {batch}": committed / wall,
        }
        how = ", by reference" if by_reference else ""
        quantities += [Quantity(name=f"{what}{how}", value=value, unit="per_second") for what, value in rates.items()]
    return quantities


async def _tail(
    reader: BinlogReader, schema: Schema, start: str, committed: int, *, by_reference: bool
) -> tuple[float, float]:
    """Relay ``committed`` transactions; returns the seconds that it took, and those of CPU time."""
    position = reader.position(start)
    routes = _routes()
    log = logger("bench")
    tasks = BackgroundTasks("bench", log)

    async def refresh() -> None:
        return

    async def decode(undecoded: Sequence[UndecodedRows]) -> Sequence[Translated]:
        return [translate(rows.decode().events, schema) for rows in undecoded]

    continuity = Continuity("db", lambda: 1, lambda _: True)
    continuity.begin(start)
    delivery = DeliveryPath(
        RelayScope("east", "db", lambda: routes, refresh), _Acknowledging(takes_references=by_reference), continuity,
        position.advance, lambda job: tasks.start(job, "leader outbox"), OutboxSettings(), log,
    )  # fmt: skip
    delivery.decode = decode
    reader.leave_undecoded(by_reference)
    read = 0
    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.timeout(_STEP_SECONDS), aclosing(reader.batches(start)) as batches:
        async for transactions in batches:
            for transaction in transactions:
                translated = translate(transaction.events, schema)
                await delivery.submit(transaction.gtid, translated, undecoded=transaction.undecoded)
            read += len(transactions)
            if read >= committed:
                break
        await delivery.drained()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await tasks.close()
    return wall, cpu


async def _commit(instance: DatabaseInstance, schema: Schema, writes: int, batch: int) -> int:
    """Fill the binlog; returns the number of transactions."""
    chance = random.Random(1)
    ids = [make_id(shard, _NOW_MS + number, 0) for shard in range(_SHARDS) for number in range(_IDS_PER_SHARD)]
    atype = schema.atype(_ATYPE).number
    account = _account(instance, "leader")
    pools = Pools(lambda _: account, WRITE_SETUP)
    store = MySqlWriteStore(lambda _: "db", pools, edge_tables_of(lambda: schema))
    committed = 0
    for first in range(0, writes, batch):
        ends = (chance.sample(ids, 2) for _ in range(batch))
        planned = [PlannedWrite(AssocAdd(id1, atype, id2, batch * writes + first, b""), True) for id1, id2 in ends]
        async with store.transaction("db", timeout_seconds=_STEP_SECONDS) as transaction:
            shards, existing = await transaction.lock_and_read(range(_SHARDS), keys_of(planned, schema))
            rows = plan_of(draft_writes(existing, planned, schema, _NOW_MS), shards).rows
            await transaction.apply(rows)
            await transaction.commit()
        committed += bool(rows)  # what changes nothing is in no binlog
    await pools.close()
    return committed


def _routes() -> Routes:
    leaders = tuple(CacheServer(name=f"leader-{number}", grpc=f"127.0.0.1:{number}") for number in (1, 2))
    follower = CacheServer(name="follower-1", grpc="127.0.0.1:3")
    return Routes(
        Topology(
            version=1,
            shards=_SHARDS,
            regions=(
                Region(
                    name="east",
                    leaders=Tier(name="leaders", servers=leaders),
                    followers=(Tier(name="near", servers=(follower,)),),
                ),
            ),
            databases=(
                Database(
                    name="db",
                    master_region="east",
                    servers={"east": DatabaseServer(name="db")},
                    shards=((0, _SHARDS - 1),),
                ),
            ),
        )
    )
