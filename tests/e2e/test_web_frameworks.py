"""The programs of docs/how-to/web-frameworks.md run under their real servers, each with two worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import pytest
import pytest_asyncio

from tao.client import WriteToken, connect
from tao.client.web import TokenCarrier
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tests.e2e.cluster_access import PATIENT
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.ports import free_ports

pytestmark = [
    pytest.mark.database,
    pytest.mark.e2e,
    pytest.mark.unhurried,
    pytest.mark.asyncio(loop_scope="module"),
]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = dict(
    re.findall(
        r'^```python title="([\w.]+)"\n(.*?)^```$',
        (ROOT / "docs/how-to/web-frameworks.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)
KEY = b"a key of sixteen bytes"
FOLLOWER = "follower-1a"
LATER = 1 << 30
"""Added to an id: the sum is an id of the same shard that is given out in some hours, and to nobody before."""

WORKER_WSGI = """
import os
from {module} import {name} as inner

def application(environ, start_response):
    def start(status, headers, *failure):
        return start_response(status, [*headers, ("X-Worker", str(os.getpid()))], *failure)
    return inner(environ, start)
"""
WORKER_ASGI = """
import os
from {module} import {name} as inner

async def application(scope, receive, send):
    async def send_with_worker(message):
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-worker", str(os.getpid()).encode())]
        await send(message)
    await inner(scope, receive, send_with_worker)
"""
GUNICORN = ("gunicorn", "--workers", "2", "--threads", "4", "--bind", "127.0.0.1:{port}", "with_worker:application")
UVICORN = ("uvicorn", "--workers", "2", "--host", "127.0.0.1", "--port", "{port}", "with_worker:application")


@dataclass(frozen=True)
class Framework:
    module: str
    name: str
    wrapper: str
    command: tuple[str, ...]


FRAMEWORKS = (
    Framework("fastapi_app", "app", WORKER_ASGI, UVICORN),
    Framework("flask_app", "app", WORKER_WSGI, GUNICORN),
    Framework("flask_app", "app", WORKER_WSGI, (*GUNICORN, "--preload")),
    Framework("django_app", "application", WORKER_WSGI, GUNICORN),
)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str
    worker: str = field(init=False)

    def __post_init__(self) -> None:
        self.worker = self.headers.get("x-worker", "")

    @property
    def json(self) -> dict[str, object]:
        decoded: dict[str, object] = json.loads(self.text)
        return decoded

    @property
    def error(self) -> dict[str, object]:
        shown = self.json["error"]
        assert isinstance(shown, dict)
        return shown

    @property
    def cookie(self) -> str:
        return self.headers["set-cookie"].partition(";")[0]


class Site:
    """A running application."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, method: str, path: str, body: object = None, cookie: str = "") -> Answer:
        """Ask on a connection of its own, so that any worker may answer."""
        return await asyncio.to_thread(self._ask, method, path, body, cookie)

    def _ask(self, method: str, path: str, body: object, cookie: str) -> Answer:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENT_SECONDS)
        try:
            headers = {"Content-Type": "application/json"} | ({"Cookie": cookie} if cookie else {})
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read().decode())
        finally:
            connection.close()

    async def ask_another_worker(self, than: str, path: str, cookie: str) -> Answer:
        """Ask until a worker other than ``than`` answers."""
        while True:
            answers = await asyncio.gather(*(self.ask("GET", path, cookie=cookie) for _ in range(8)))
            for answer in answers:
                if answer.worker != than:
                    return answer

    async def is_up(self) -> bool:
        try:
            return (await self.ask("GET", "/metrics")).status == 200
        except OSError:
            return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    """Yield a cluster of which applications know one server, their follower."""
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("web") / "s",
        shape=Shape(tiers=1, followers=1, leaders=1, databases=1, shards=4),
        durability=Durability.RELAXED,
    )
    async with DevCluster(settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: DevCluster, tmp_path: Path) -> AsyncIterator[DevCluster]:
    """Yield the cluster, in the folder where the programs look for it, and start at the end what a test has stopped."""
    (tmp_path / ".tao-dev").symlink_to(running.topology_path.parent)
    yield running
    await running.start_stopped()


@asynccontextmanager
async def serve(framework: Framework, folder: Path) -> AsyncIterator[Site]:
    """Run the program of the page under its server."""
    (folder / f"{framework.module}.py").write_text(PROGRAMS[f"{framework.module}.py"])
    (folder / "with_worker.py").write_text(framework.wrapper.format(module=framework.module, name=framework.name))
    (port,) = free_ports(1)
    program, *arguments = (part.format(port=port) for part in framework.command)
    log = folder / "server.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).parent / program, *arguments, cwd=folder, stdout=out, stderr=out,
            env={**os.environ, "COOKIE_KEY": KEY.decode(), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    site = Site(port)
    try:
        async with asyncio.timeout(PATIENT_SECONDS):
            while not await site.is_up():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
        yield site
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    assert "Traceback" not in log.read_text(), log.read_text()


async def check_reading_own_writes(site: Site) -> int:
    """Write, and read on another worker. Returns the id of a user."""
    created, other = [await site.ask("POST", "/users", {"name": name}) for name in ("Alice", "Bob")]
    alice, bob = int(str(created.json["id"])), other.json["id"]
    written = await site.ask("PUT", f"/users/{alice}/friends/{bob}")
    assert (written.status, "HttpOnly" in written.headers["set-cookie"]) == (204, True)
    page = f"/users/{alice}/friends"
    seen = await site.ask_another_worker(written.worker, page, written.cookie)
    assert (seen.status, seen.json) == (200, {"name": "Alice", "friends": ["Bob"]})
    assert "set-cookie" not in seen.headers

    # A token of a write that no copy has: the page is refused, so the token's demand reaches the reads of any worker.
    carrier = TokenCarrier([KEY])
    known = carrier.from_cookies(created.cookie)
    assert known is not None
    signed = f"tao_after={carrier.seal(WriteToken([(alice, 0, known.minimum_of_object(alice) + 1_000)]))}"
    refused = await site.ask_another_worker(written.worker, page, signed)
    assert refused.status in (409, 503), refused
    assert refused.error["reason"] in ("WRITE_LOST", "STALE_READ")
    forged = signed[:-4] + ("AAAA" if signed[-4:] != "AAAA" else "BBBB")
    assert (await site.ask("GET", page, cookie=forged)).status == 200
    return alice


async def check_errors(site: Site, topology: Path, alice: int) -> None:
    bad_input = await site.ask("POST", "/users", {"nmae": "Carol"})
    assert (bad_input.status, bad_input.error["reason"]) == (400, "INVALID_FIELD")
    assert "did you mean 'name'" in str(bad_input.error["message"])
    missing = await site.ask("GET", f"/users/{alice + LATER}/friends")
    assert (missing.status, missing.error["reason"]) == (404, "NOT_FOUND")
    async with connect(str(topology), settings=PATIENT) as graph:
        checkin = await graph.obj_add("checkin", {"text": "Tea garden"})
    conflict = await site.ask("PUT", f"/users/{checkin}", {"name": "Carol"})
    assert (conflict.status, conflict.error["reason"]) == (409, "WRONG_TYPE")
    assert (await site.ask("GET", f"/users/{checkin}/friends")).status == 404


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda each: " ".join((each.module, *each.command[8:])))
async def test_an_application_of_the_page_under_its_server(
    framework: Framework, cluster: DevCluster, tmp_path: Path
) -> None:
    async with serve(framework, tmp_path) as site:
        alice = await check_reading_own_writes(site)
        await check_errors(site, tmp_path / ".tao-dev/topology.json", alice)

        async def metrics_are_there() -> bool:
            text = (await site.ask("GET", "/metrics")).text
            return all(
                each in text
                for each in (
                    'tao_web_requests_total{status="404",worker="',
                    'tao_web_tokens_total{event="carried",worker="',
                    'tao_client_servers{health="up",worker="',
                    "tao_client_writes_total{worker=",
                )
            )

        page = f"/users/{alice + LATER}/friends"
        while not await metrics_are_there():  # each worker counts for itself
            await site.ask("GET", page, cookie=(await site.ask("POST", "/users", {"name": "David"})).cookie)

        await cluster.kill(FOLLOWER)
        down = await site.ask("GET", f"/users/{alice}/friends")
        assert (down.status, down.headers["retry-after"]) == (503, "1")
        assert down.error["retryable"] is True
        assert "127.0.0.1" not in down.text
        assert (await site.ask("GET", "/metrics")).status == 200
