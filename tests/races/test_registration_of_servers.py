"""Servers that register themselves, among others who change the same document, in a file and in etcd.

Each change is a compare-and-set, so that of two at once one is repeated on what the other has made of the document:

near-3 at :1           near-3 at :2            the document
reads version 1        reads version 1
registers       →                              version 2: near-3 at :1
                       registers        →      conflict: reads version 2, is refused: the name is taken

near-3                 promotion               the document
reads version 1        version 2: epoch 2
registers       →                              conflict; version 3 has near-3, and the new master's epoch

near-3                                         watcher
gone, then starts      →                       finds it registered by version 4, and says nothing
                                               removes it by version 4: version 5
takes a step by version 4 → conflict; registers again in version 6, with weight 0

near-3                                         etcd
registers              →                       version 2: near-3; the answer is lost
starts again, registers →                      finds it registered, and stores nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tao.cache import CacheSettings, GraphCache
from tao.etcd.client import EtcdUnavailable
from tao.follower.subscriptions import Subscriptions, SubscriptionSettings
from tao.model.errors import NameTaken, TopologyConflict, TopologyError
from tao.model.ports import TopologyStore
from tao.model.topology import Registration, Role, Topology
from tao.observability.logs import logger
from tao.runtime.clock import LoopClock
from tao.serving.configuration import Configuration
from tao.serving.forward_path import WriteThrough
from tao.serving.registration import RegistrationKeeper, RegistrationSettings
from tao.serving.server import SchemaArenas
from tao.topology import edits
from tao.topology.document import dump_topology
from tao.topology.etcd_store import EtcdTopology
from tao.topology.file_store import TopologyFile
from tao.topology.registration import follow_absences, leave, placed
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tests.rigs.leader_rig import ARENAS, SCHEMA, make_topology
from tests.rigs.memory_etcd import PLACE, MemoryEtcd
from tests.rigs.server_context import make_context

NAME: Final = "near-3"
HOURS_MS: Final = 9_000_000


def fail(error: TopologyError) -> None:
    raise error


Document = Path | MemoryEtcd
"""Where the document is."""


class Store:
    """The store of one process. Something else may change the document between a server's look and its change."""

    def __init__(self, document: Document) -> None:
        self._store: Final[TopologyStore] = (
            TopologyFile(document, on_error=fail)
            if isinstance(document, Path)
            else EtcdTopology(document, PLACE, on_error=fail)
        )
        self.load: Final = self._store.load
        self.replace: Final = self._store.replace
        self.watch: Final = self._store.watch
        self.before_change: Callable[[Topology], Topology] | None = None

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        meanwhile, self.before_change = self.before_change, None
        if meanwhile is not None:
            await self.edit(meanwhile)
        return await self._store.change(expected_version, changed)

    async def edit(self, edit: Callable[[Topology], Topology]) -> Topology:
        before = await self.load()
        return await self._store.change(before.version, edit(before))


@pytest.fixture
async def etcd() -> MemoryEtcd:
    etcd = MemoryEtcd()
    await EtcdTopology(etcd, PLACE, on_error=fail).change(0, make_topology(1))
    return etcd


@pytest.fixture(params=["file", "etcd"])
def document(request: pytest.FixtureRequest, tmp_path: Path) -> Document:
    if request.param == "etcd":
        etcd: MemoryEtcd = request.getfixturevalue("etcd")
        return etcd
    path = tmp_path / "topology.json"
    path.write_text(dump_topology(make_topology(1)))
    return path


async def starting(store: Store, *, port: int = 1, tier: str = "near", step_seconds: float = 0.0) -> RegistrationKeeper:
    settings = RegistrationSettings(
        join=True, region="east", tier=tier, grpc=f"10.0.0.1:{port}", step_seconds=step_seconds
    )
    configuration = Configuration(await store.load(), SCHEMA, logger("test"), store.load)
    role: Role = "leader" if tier == "leaders" else "follower"
    return RegistrationKeeper(NAME, role, settings, configuration, store, LoopClock(), logger("test"))


def entry(topology: Topology) -> tuple[float, Registration | msgspec.UnsetType]:
    found = placed(topology, NAME)
    assert found is not None
    return found.server.weight, found.server.registration


async def test_of_two_servers_that_register_one_name_at_once_one_is_refused(document: Document) -> None:
    keepers = [await starting(Store(document), port=port) for port in (1, 2)]
    results = await asyncio.gather(*(each.register() for each in keepers), return_exceptions=True)
    assert sorted(map(repr, map(type, results))) == sorted(map(repr, (type(None), NameTaken)))
    winner = keepers[results.index(None)]
    found = placed(await Store(document).load(), NAME)
    assert found is not None
    assert found.server == winner.wanted.server


async def test_servers_of_different_names_that_register_at_once_are_all_registered(document: Document) -> None:
    store = Store(document)
    names = [f"near-{number}" for number in range(3, 9)]
    configuration = Configuration(await store.load(), SCHEMA, logger("test"), store.load)
    keepers = [
        RegistrationKeeper(
            name,
            "follower",
            RegistrationSettings(join=True, region="east", tier="near", grpc=f"10.0.0.1:{port}"),
            configuration,
            Store(document),
            LoopClock(),
            logger("test"),
        )
        for port, name in enumerate(names, 1)
    ]
    await asyncio.gather(*(each.register() for each in keepers))
    assert set(names) <= (await store.load()).server_places.keys()


async def test_a_server_that_registers_during_a_promotion_leaves_the_new_master_as_it_is(document: Document) -> None:
    store = Store(document)
    store.before_change = lambda found: edits.promote(found, "db", "east", 2)
    keeper = await starting(store)
    await keeper.register()
    found = await store.load()
    assert (found.version, found.databases[0].version_epoch) == (3, 2)
    assert entry(found) == (0.0, Registration())


async def test_a_server_that_is_removed_as_it_comes_back_registers_again_with_weight_0(document: Document) -> None:
    store = Store(document)
    keeper = await starting(store)
    await keeper.register()
    await keeper.look(lambda: True)
    gone = await store.edit(lambda found: follow_absences(edits.mark_by_watcher(found, NAME, down=True), 1, 3600))
    assert entry(gone) == (0.125, Registration(gone_unix_ms=1))

    back = await starting(store)
    await back.register()
    assert (await store.load()).version == gone.version, "it is registered: there is nothing to store"
    store.before_change = lambda found: follow_absences(found, HOURS_MS, 3600)
    with pytest.raises(TopologyConflict):
        await back.look(lambda: True)
    back._configuration.use_topology(await store.load())
    assert placed(await store.load(), NAME) is None
    await back.look(lambda: True)
    assert entry(await store.load()) == (0.0, Registration())


async def test_a_watcher_does_not_remove_by_an_old_document_a_server_that_has_come_back(document: Document) -> None:
    store = Store(document)
    await (await starting(store)).register()
    gone = await store.edit(lambda found: follow_absences(edits.mark_by_watcher(found, NAME, down=True), 1, 3600))
    taken_over = await starting(store, port=2)
    await taken_over.register()
    with pytest.raises(TopologyConflict):
        await store.change(gone.version, follow_absences(gone, HOURS_MS, 3600))
    assert entry(await store.load()) == (0.0, Registration())


async def test_a_server_whose_name_another_has_taken_over_gets_no_more_shards_and_says_so(document: Document) -> None:
    store = Store(document)
    first = await starting(store)
    await first.register()
    await store.edit(lambda found: follow_absences(edits.mark_by_watcher(found, NAME, down=True), 1, 3600))
    second = await starting(store, port=2)
    await second.register()
    first._configuration.use_topology(await store.load())
    await first.look(lambda: True)
    assert first.trouble == "another server has registered as near-3, at 10.0.0.1:2: stop one of both"
    assert entry(await store.load()) == (0.0, Registration())


async def test_a_server_whose_name_another_has_taken_over_gives_up_the_shards_that_it_has(document: Document) -> None:
    store = Store(document)
    first = await starting(store)
    await first.register()
    await store.edit(lambda found: edits.move_shard(found, "east", "near", 1, NAME))
    configuration, subscriptions = subscribed(await store.load(), "10.0.0.1:1")
    assert subscriptions.hosted

    await store.edit(lambda found: follow_absences(edits.mark_by_watcher(found, NAME, down=True), 1, 3600))
    second = await starting(store, port=2)
    await second.register()
    await store.edit(lambda found: edits.move_shard(found, "east", "near", 1, NAME))
    configuration.use_topology(await store.load())
    assert configuration.routes.shards_of(NAME), "they are those of the other one"
    assert not subscriptions.hosted


def subscribed(topology: Topology, grpc: str) -> tuple[Configuration, Subscriptions]:
    """A follower that has registered itself at this address, without connections."""

    def start_nothing(job: Coroutine[object, object, None]) -> None:
        job.close()

    configuration = Configuration(topology, SCHEMA, logger("test"))
    cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), SchemaArenas(SCHEMA, ARENAS))
    links = Links(LinkSettings(), Credentials(NAME, "follower", ""))
    context = make_context(configuration, links, start_nothing, name=NAME, registered_grpc=grpc)
    subscriptions = Subscriptions(
        context, cache, WriteThrough(cache, LoopClock(), 60.0), SubscriptionSettings(retry_seconds=0.001)
    )
    subscriptions.follow_routes(configuration.routes)
    return configuration, subscriptions


async def test_a_server_that_was_asked_to_leave_does_not_register_again_while_it_runs(document: Document) -> None:
    store = Store(document)
    keeper = await starting(store)
    await keeper.register()
    for edit in (lambda found: leave(found, NAME), lambda found: edits.remove_server(found, NAME)):
        keeper._configuration.use_topology(await store.edit(edit))
        await keeper.look(lambda: True)
    assert placed(await store.load(), NAME) is None


async def test_steps_are_taken_one_at_a_time_and_only_when_the_server_is_ready(document: Document) -> None:
    store = Store(document)
    keeper = await starting(store, step_seconds=1_000.0)
    await keeper.register()
    await keeper.look(lambda: False)
    assert entry(await store.load())[0] == 0.0
    for _ in range(3):
        await keeper.look(lambda: True)
    assert entry(await store.load())[0] == 0.125


async def test_a_leader_takes_all_at_once(document: Document) -> None:
    store = Store(document)
    keeper = await starting(store, tier="leaders")
    await keeper.register()
    await keeper.look(lambda: True)
    assert entry(await store.load())[0] == 1.0


async def test_a_server_whose_registration_was_stored_although_etcd_did_not_answer_is_registered_once(
    etcd: MemoryEtcd,
) -> None:
    etcd.lost_answer = EtcdUnavailable("no answer")
    with pytest.raises(TopologyError, match="it is not known whether topology 2 was stored"):
        await (await starting(Store(etcd))).register()
    again = await starting(Store(etcd))
    await again.register()
    assert (await Store(etcd).load()).version == 2
    await again.look(lambda: True)
    assert entry(await Store(etcd).load()) == (0.125, Registration())


async def test_a_registration_that_etcd_carries_out_again_late_does_not_undo_what_came_after_it(
    etcd: MemoryEtcd,
) -> None:
    store = Store(etcd)
    keeper = await starting(store)
    await keeper.register()
    registered = etcd.transactions[-1]
    await keeper.look(lambda: True)
    before = await store.load()
    etcd.carry_out(registered)
    assert await Store(etcd).load() == before
