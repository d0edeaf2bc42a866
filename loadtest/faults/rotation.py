"""Scenario `rotation`: the authority, all certificates, tokens and rights of two regions change under load, and no
request fails.

Each change goes as an operator makes it (docs/how-to/certificates.md): what is new is accepted beside what is old, then
everybody shows the new, then the old is accepted no longer. Servers, databases and one application show certificates;
another application and the tailers show tokens. Applications of both regions read and write over frames and over gRPC,
and newcomers connect all the time. A request that fails is a fault of the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import yaml
from cryptography import x509
from msgspec.structs import replace

from loadtest import options
from loadtest.commands import TAO, run_command
from loadtest.conditions import together, within
from loadtest.results import Conditions, ScenarioResult, at_least, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.client import ClientSettings, Credentials, Graph, PermissionDenied, TaoError, TlsFiles, connect
from tao.devcluster.certificates import (
    APPLICATION,
    APPLICATION_ID,
    add_authority,
    certificate_ids,
    issue_certificates,
    remove_former_authorities,
    tls_files,
)
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import OperatorError
from tao.model.topology import CacheServer, Topology
from tao.storage.dialect import Dialect, SessionSetup
from tao.storage.session import ServerAccount, open_session
from tao.topology.document import parse_topology
from tao.topology.file_store import TopologyFile
from tao.wire.identity import read_secret
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb

_SHAPE: Final = Shape(regions=2, tiers=1, followers=2, leaders=2, shards=8, watchers=1)
_TOY_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, shards=4, watchers=1)
_RTT_MS: Final = 20.0
_WEB: Final = "web"
_PROBE: Final = "probe"
_RESTARTED: Final = (Role.LEADER, Role.TAILER, Role.FOLLOWER, Role.WATCHER)
_AUDITING: Final = (Role.LEADER, Role.FOLLOWER, Role.WATCHER)
_PAUSE_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 0.2
_PATIENCE_SECONDS: Final = 60.0
_TIMEOUT_SECONDS: Final = 10.0
_MOST_SECONDS: Final = 1_800.0
_EXAMPLES: Final = 20

Transport = Literal["frames", "grpc"]
_TRANSPORTS: Final[tuple[Transport, ...]] = ("frames", "grpc")


class _Place(NamedTuple):
    """Where an application is, how it connects, and whether by its certificate or by a token."""

    region: str
    transport: Transport
    who: str


class _Installation:
    """A cluster with TLS whose servers accept tokens, go by rights and keep audit logs."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster: Final = cluster
        self.folder: Final = StateFolder(cluster.topology_path.parent)
        self.shape: Final = cluster.record.shape
        self.secrets: Final = self.folder.path / "secrets"
        self.accepted: Final = self.secrets / "accepted.yaml"
        self._rights_version = 0

    @property
    def topology(self) -> Topology:
        """The topology document as it is now."""
        return parse_topology(self.folder.topology.read_bytes(), "topology")

    @property
    def ids(self) -> dict[str, str]:
        """The ids in all certificates. Tailers and one application have none, and show tokens."""
        tailers = dict.fromkeys(self.named(Role.TAILER), "")
        return {**certificate_ids(self.shape), **tailers, _WEB: ""}

    def named(self, *roles: Role) -> list[str]:
        """Return the names of all processes of these roles."""
        return [name for name, role in self.cluster.processes.items() if role in roles]

    def audit_log(self, server: str) -> Path:
        """Return the audit log of a server."""
        return self.folder.path / "audit" / f"{server}.jsonl"

    async def prepare(self) -> None:
        """Make tokens and rights, and have servers use them."""
        self.secrets.mkdir()
        issue_certificates(self.folder, self.ids)
        self.use_rights(pages=False)
        await self._hide_tailers()
        for caller, role in ((_WEB, "client"), ("", "tailer")):
            (await self.new_token(caller, role)).rename(self.token_file(role))
        for name, role in self.cluster.processes.items():
            if role in _RESTARTED:
                path = self.folder.settings_file(name)
                path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | self._settings_of(name, role)))
        for role in _RESTARTED:
            await together(map(self.cluster.restart, self.named(role)))

    async def _hide_tailers(self) -> None:
        """Take the addresses of tailers out of the topology: their certificates have no ids, so watchers would not
        believe them."""
        before = self.topology
        regions = tuple(
            replace(region, tailers=tuple(replace(tailer, frames="") for tailer in region.tailers))
            for region in before.regions
        )
        store = TopologyFile(self.folder.topology, on_error=lambda _: None)
        await store.change(before.version, replace(before, regions=regions))

    def _settings_of(self, name: str, role: Role) -> dict[str, Any]:
        # Any: settings differ in kind.
        if role is Role.TAILER:
            return {"token_file": str(self.token_file("tailer"))}
        return {"accepted_tokens_file": str(self.accepted), "audit": {"path": str(self.audit_log(name))}}

    def token_file(self, role: str) -> Path:
        """Return the file from which every process of a role takes its token."""
        return self.secrets / f"{role}.token"

    async def new_token(self, caller: str, role: str) -> Path:
        """Make a token that servers accept, and return the file that has it."""
        file = self.secrets / f"{role}.new"
        named = [caller] if caller else []
        await self._tao("token", "new", *named, "--role", role, "--out", str(file), "--file", str(self.accepted))
        return file

    async def revoke(self, token_id: str) -> None:
        """Accept a token no longer."""
        await self._tao("token", "revoke", token_id, "--file", str(self.accepted), "--yes")

    def use_rights(self, *, pages: bool) -> None:
        """Have servers go by a new version of the rights: one application may do everything, the other may use users,
        and pages if this says so."""
        self._rights_version += 1
        objects, everything = ["user", *(["page"] if pages else [])], "all"
        some = {"objects": objects, "associations": ["friend"]}
        roles = {
            "member": dict.fromkeys(("read", "write", "critical", "watch"), everything),
            "visitor": {**dict.fromkeys(("read", "write", "critical"), some), "watch": everything},
        }
        callers = {APPLICATION_ID.removeprefix("spiffe://localhost/"): ["member"], _WEB: ["visitor"]}
        document = {"format": 1, "version": self._rights_version, "roles": roles, "callers": callers}
        path = self.folder.path / "access.yaml"
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(document))  # which is YAML, too, without its aliases
        draft.replace(path)

    async def reload_databases(self) -> None:
        """Have database servers use their certificate files as they are now."""
        for name in self.named(Role.DATABASE):
            instance = self.cluster.database(name)
            root = ServerAccount(instance.host, instance.port, "root", "", str(instance.socket_path), tls=None)
            deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
            session = await open_session(root, name, SessionSetup(writes=False), deadline=deadline)
            reload = "FLUSH LOCAL SSL" if session.dialect is Dialect.MARIADB else "ALTER INSTANCE RELOAD TLS"
            await session.run(reload, deadline=deadline)
            session.quit()

    async def broken_chains(self) -> list[str]:
        """Return the servers whose audit log does not verify."""
        names = self.named(*_AUDITING)
        ended = [await run_command(*TAO, "audit", "verify", str(self.audit_log(name))) for name in names]
        return [f"{name}: {each.output}" for name, each in zip(names, ended, strict=True) if each.status]

    def recorded(self, server: str, action: str) -> list[dict[str, Any]]:
        """Return the records of an action in a server's audit log. `Any`: they are JSON."""
        text = self.audit_log(server).read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [record for line in whole if (record := json.loads(line))["api"]["operation"] == action]

    def ports(self) -> Iterator[tuple[CacheServer, Transport]]:
        """Yield the ports of all cache servers."""
        for _, server in self.topology.cache_servers:
            for transport in _TRANSPORTS:
                yield server, transport

    async def _tao(self, *words: str) -> None:
        ended = await run_command(*TAO, *words, env=dict(os.environ))
        if ended.status:
            raise OperatorError(f"tao {' '.join(words)}: exit status {ended.status}: {ended.errors}")


@dataclass
class _Load:
    """Applications that read and write, and newcomers that connect, until `stopping`. What fails is kept."""

    installation: _Installation
    stopping: bool = False
    step: str = "nothing changes"
    """What is being changed."""
    requests: int = 0
    connections: int = 0
    failures: list[str] = field(default_factory=list)
    failed_connections: list[str] = field(default_factory=list)
    acknowledged: dict[int, int] = field(default_factory=dict)
    """The last acknowledged number of each object."""
    rounds: dict[str, int] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def open(self, place: _Place) -> Any:
        """Return a graph that is to be opened, as an application of that place has it (`Any`: the SDK's context)."""
        files = tls_files(self.installation.folder, APPLICATION if place.who == APPLICATION else _WEB)
        settings = ClientSettings(
            tls=files, links=LinkSettings(transport=place.transport), timeout_seconds=_TIMEOUT_SECONDS
        )
        token_file = self.installation.token_file("client") if place.who == _WEB else None
        credentials = Credentials(place.who, "client", token_file=token_file)
        target = str(self.installation.folder.topology)
        return connect(target, region=place.region, settings=settings, credentials=credentials)

    async def begin(self, stack: AsyncExitStack) -> list[Graph]:
        """Connect applications in every place, and begin. Returns their graphs."""
        who = (APPLICATION, _WEB)
        regions = self.installation.shape.region_names
        places = [_Place(region, transport, each) for region in regions for transport in _TRANSPORTS for each in who]
        graphs = [await stack.enter_async_context(self.open(place)) for place in places]
        for place, graph in zip(places, graphs, strict=True):
            one, other = await graph.obj_add_many([("user", {"name": "rotation"})] * 2)
            self._tasks.append(asyncio.create_task(self._use(place, graph, one, other)))
            self._tasks.append(asyncio.create_task(self._connect(place, one)))
        return graphs

    def begin_step(self, progress: Progress, step: str, done: float) -> None:
        """Report what is changed from now on. ``done``: the part of the whole run that is over."""
        self.step = step
        progress.step(step, done)

    async def more_rounds(self, least: int) -> None:
        """Wait until every application and every newcomer has been round so often from now. Raises what ended one."""
        before = dict(self.rounds)

        async def done() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return all(self.rounds.get(name, 0) >= began + least for name, began in before.items())

        await within(_MOST_SECONDS, done, _LOOK_SECONDS, "the load does not go on")

    async def stop(self) -> None:
        """End the load."""
        self.stopping = True
        await asyncio.gather(*self._tasks)

    async def _use(self, place: _Place, graph: Graph, one: int, other: int) -> None:
        name = " ".join(place)
        self.rounds[name] = 0
        for number in count(1):
            if self.stopping:
                return
            if await self._succeeds(name, graph.obj_update(one, {"home": str(number)}, "user")):
                self.acknowledged[one] = number
            await self._succeeds(name, graph.assoc_add(one, "friend", other, number))
            await self._succeeds(name, self._read_back(graph, one))
            await self._succeeds(name, graph.assoc_range(one, "friend", 0, 10))
            self.rounds[name] += 1
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _read_back(self, graph: Graph, one: int) -> None:
        found = await graph.obj_get(one)
        seen = 0 if found is None else int(str(found.fields["home"] or 0))
        if seen < self.acknowledged.get(one, 0):
            self.failures.append(f"{one} is {seen}, {self.acknowledged[one]} was acknowledged")

    async def _succeeds(self, name: str, request: Coroutine[Any, Any, object]) -> bool:
        self.requests += 1
        began, step = time.monotonic(), self.step
        try:
            await request
        except TaoError as error:
            self.failures.append(self._failure(name, error, began, step))
            return False
        return True

    def _failure(self, name: str, error: TaoError, began: float, step: str) -> str:
        """Describe a failure so that its cause can be found in the logs of the servers."""
        seconds = time.monotonic() - began
        return f"{name}: {error.reason}: {error.message} (begun while {step}, failed {seconds:.1f} s later)"

    async def _connect(self, place: _Place, one: int) -> None:
        name = f"newcomer {' '.join(place)}"
        self.rounds[name] = 0
        while not self.stopping:
            self.connections += 1
            began, step = time.monotonic(), self.step
            try:
                async with self.open(place) as graph:
                    await graph.obj_get(one)
            except TaoError as error:
                self.failed_connections.append(self._failure(name, error, began, step))
            self.rounds[name] += 1
            await asyncio.sleep(5 * _PAUSE_SECONDS)


class _Knocker:
    """Asks ports of servers for the topology, with files or a token of its own."""

    def __init__(self, installation: _Installation, files: TlsFiles, credentials: Credentials) -> None:
        self._installation: Final = installation
        self._links: Final[dict[Transport, Links]] = {
            transport: Links(LinkSettings(transport=transport), credentials, files) for transport in _TRANSPORTS
        }

    async def served(self) -> int:
        """Return how many ports answer."""
        found = 0
        for server, transport in self._installation.ports():
            with suppress(TaoError):
                await self._links[transport].to(server).ask(pb.Request(get_topology=pb.GetTopology()), _TIMEOUT_SECONDS)
                found += 1
        return found

    async def until_served(self, *, everywhere: bool, what: str) -> None:
        """Wait until every port answers, or none does. Raises `OperatorError` with ``what`` when that takes too
        long."""
        wanted = len(list(self._installation.ports())) if everywhere else 0

        async def are() -> bool:
            return await self.served() == wanted

        await within(_PATIENCE_SECONDS, are, _LOOK_SECONDS, what)

    async def close(self) -> None:
        """Close all connections."""
        for links in self._links.values():
            await links.close()


@asynccontextmanager
async def _knocker(
    installation: _Installation, name: str, role: str = "client", token: Path | None = None
) -> AsyncIterator[_Knocker]:
    secret = "" if token is None else read_secret(token)
    made = _Knocker(installation, tls_files(installation.folder, name), Credentials(name, role, secret))
    try:
        yield made
    finally:
        await made.close()


async def _ports_with_old_certificates(installation: _Installation) -> int:
    """Return how many ports show a certificate that the newest authority has not issued."""
    files = tls_files(installation.folder, APPLICATION)
    assert files.authorities is not None
    assert files.certificate is not None
    newest = x509.load_pem_x509_certificate(files.authorities.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(files.certificate, files.private_key)
    context.set_alpn_protocols(["h2"])
    old = 0
    for server, transport in installation.ports():
        host, port = (server.grpc if transport == "grpc" else server.frames).rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        old += x509.load_der_x509_certificate(shown).issuer != newest.subject
    return old


async def _replace_authority(installation: _Installation, load: _Load, rounds: int, progress: Progress) -> None:
    folder = installation.folder
    load.begin_step(progress, "trusting a second authority", 0.3)
    add_authority(folder)
    await installation.reload_databases()
    issue_certificates(folder, {_PROBE: APPLICATION_ID})
    async with _knocker(installation, _PROBE) as knocker:
        await knocker.until_served(everywhere=True, what="not every port accepts the new authority")
    await load.more_rounds(rounds)
    load.begin_step(progress, "replacing all certificates", 0.4)
    issue_certificates(folder, installation.ids)
    await installation.reload_databases()

    async def shown() -> bool:
        return not await _ports_with_old_certificates(installation)

    await within(_PATIENCE_SECONDS, shown, _LOOK_SECONDS, "not every port shows its new certificate")
    await load.more_rounds(rounds)
    load.begin_step(progress, "trusting the old authority no longer", 0.5)
    remove_former_authorities(folder)
    await installation.reload_databases()
    await load.more_rounds(rounds)
    # They connect to leaders, databases and each other anew, and answer no requests.
    load.begin_step(progress, "restarting tailers and watchers", 0.6)
    await together(map(installation.cluster.restart, installation.named(Role.TAILER, Role.WATCHER)))
    await load.more_rounds(rounds)


async def _replace_tokens(installation: _Installation, load: _Load, rounds: int, progress: Progress) -> int:
    """Return how many ports still serve the application's old token."""
    load.begin_step(progress, "replacing tokens", 0.65)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(_knocker(installation, _WEB, token=installation.token_file("client")))
        await old.until_served(everywhere=True, what="not every port accepts the first token")
        for caller, role in ((_WEB, "client"), ("", "tailer")):
            new = await installation.new_token(caller, role)
            if role == "client":
                knocker = await stack.enter_async_context(_knocker(installation, _WEB, token=new))
                await knocker.until_served(everywhere=True, what="not every port accepts the new token")
            new.replace(installation.token_file(role))
        await load.more_rounds(rounds)
        load.begin_step(progress, "revoking the old tokens", 0.75)
        for token_id in (f"{_WEB}-1", "tailer-1"):
            await installation.revoke(token_id)
        await old.until_served(everywhere=False, what="the old token is still served")
        await load.more_rounds(rounds)
        return await old.served()


async def _change_rights(installation: _Installation, load: _Load, visitor: Graph, rounds: int) -> int:
    """Give the second application another right. Returns how many requests were denied before."""
    denied = 0
    try:
        await visitor.obj_add("page", {"name": "not yet"})
    except PermissionDenied:
        denied += 1
    installation.use_rights(pages=True)

    async def recorded() -> bool:
        names = installation.named(Role.LEADER, Role.FOLLOWER)
        return all(installation.recorded(name, "rights_changed") for name in names)

    await within(_PATIENCE_SECONDS, recorded, _LOOK_SECONDS, "not every server records the new rights")
    await visitor.obj_add("page", {"name": "now"})
    await load.more_rounds(rounds)
    return denied


@dataclass(frozen=True, kw_only=True)
class RotationOptions(options.Options):
    """The options of the scenario."""

    rounds: int = options.ROUNDS.default(100, high=1_000, toy=2, help="Rounds of every client between two changes.")


async def run(settings: BenchSettings, progress: Progress, asked: RotationOptions) -> ScenarioResult:
    """Replace everything, and judge. Raises `OperatorError` when the cluster does not start, or a change does not
    arrive."""
    rounds = asked.rounds
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "rotation",
        shape=_TOY_SHAPE if settings.toy else _SHAPE,
        rtt_ms=_RTT_MS,
        durability=Durability.RELAXED,
        tls=True,
        log_level="info",
    )
    async with AsyncExitStack() as stack:
        cluster = DevCluster(cluster_settings, lambda text: progress.step(text, 0.05))
        installation = _Installation(await stack.enter_async_context(cluster))
        progress.step("giving out tokens and rights", 0.2)
        await installation.prepare()
        load = _Load(installation)
        graphs = await load.begin(stack)
        await load.more_rounds(rounds)
        await _replace_authority(installation, load, rounds, progress)
        outlived = await _replace_tokens(installation, load, rounds, progress)
        load.begin_step(progress, "changing rights", 0.9)
        denied = await _change_rights(installation, load, graphs[1], rounds)
        await load.stop()
        return await _judge(installation, load, graphs[0], rounds, (outlived, denied))


async def _judge(
    installation: _Installation, load: _Load, graph: Graph, rounds: int, counts: tuple[int, int]
) -> ScenarioResult:
    """Compare what was acknowledged with what is stored, and check the audit logs. ``counts``: ports that still serve
    a revoked token, and writes that were denied."""
    outlived, denied = counts
    found = await graph.obj_get_many([*load.acknowledged], critical=True)
    stored = [0 if each is None else int(str(each.fields["home"] or 0)) for each in found]
    lost = sum(max(0, last - have) for last, have in zip(load.acknowledged.values(), stored, strict=True))
    old = await _ports_with_old_certificates(installation)
    broken = await installation.broken_chains()
    denials = sum(
        record["status_id"] == 2 and record["actor"]["user"]["name"] == _WEB
        for name in installation.named(Role.FOLLOWER)
        for record in installation.recorded(name, "write")
    )
    names = installation.named(Role.LEADER, Role.FOLLOWER)
    silent = [name for name in names if not installation.recorded(name, "rights_changed")]
    demands = [
        at_most("failed requests", len(load.failures), 0),
        at_most("failed new connections", len(load.failed_connections), 0),
        at_most("lost acknowledged writes", lost, 0),
        at_most("ports that show a certificate of the former authority", old, 0),
        at_most("ports that serve a revoked token", outlived, 0),
        at_most("audit logs whose chain does not verify", len(broken), 0),
        at_most("audit logs without the change of rights", len(silent), 0),
        at_least("denials in the audit logs, of those made", denials, denied),
    ]
    measured = {
        "requests": load.requests,
        "new_connections": load.connections,
        "acked_writes": sum(load.acknowledged.values()),
        "denials": denials,
    }
    conditions: Conditions = {"rtt_ms": _RTT_MS, "rounds_of_each_client_between_changes": rounds}
    examples = [*load.failures[:_EXAMPLES], *load.failed_connections[:_EXAMPLES], *broken[:_EXAMPLES]]
    return result_of(conditions, measured, demands, examples=examples)


SCENARIO: Final = Scenario(
    name="rotation",
    summary="authority, certificates, tokens and rights of two regions replaced under load: no request may fail",
    run=run,
    options=RotationOptions,
    help="""Replace the authority, all certificates, tokens and rights of two regions under load.

    The exit status is 1 when any request fails, an acknowledged write is lost, or an audit log does not verify.""",
    in_bench=False,
    seconds_bound=lambda _: _MOST_SECONDS,
)
