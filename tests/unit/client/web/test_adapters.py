"""The adapters without their servers: an application starts without its cluster, and faults stay the framework's."""

from __future__ import annotations

from typing import Any

import flask
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import tao.client.web.starlette as starlette_module
from tao.client import Graph, InternalError, RetryableError, SyncGraph, Unavailable
from tao.client.web import WebSettings
from tao.client.web.flask import FlaskGraph
from tao.client.web.starlette import StarletteGraph
from tests.unit.client.fakes import FakeCluster, make_id

SETTINGS = WebSettings("fake:1", [b"a key of sixteen bytes"])


class Outage:
    """Replaces `connect`: fails as many times as ``failures`` says, then opens a graph of a fake cluster."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.cluster = FakeCluster()
        self.opened = 0

    async def connect(self, target: str, **_: Any) -> Graph:
        if self.failures:
            self.failures -= 1
            raise Unavailable(f"{target} does not answer")
        self.opened += 1
        return await self.cluster.connect()


async def ask(app: Starlette, path: str) -> tuple[int, dict[str, str]]:
    """Send one request to an ASGI application."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers


def starlette_application(tao: StarletteGraph) -> Starlette:
    async def write(_: Request) -> Response:
        graph = await tao.graph()
        await graph.assoc_add(make_id(1), "friend", make_id(2))
        return JSONResponse({})

    async def break_down(_: Request) -> Response:
        raise InternalError("a bug")

    app = Starlette(lifespan=tao.lifespan)
    app.add_route("/write", write)
    app.add_route("/fault", break_down)
    app.add_route("/metrics", tao.metrics)
    tao.init_app(app)
    return app


async def test_an_application_starts_without_its_cluster_and_connects_later(monkeypatch: pytest.MonkeyPatch) -> None:
    outage, tao = Outage(failures=2), StarletteGraph(SETTINGS)
    monkeypatch.setattr(starlette_module, "connect", outage.connect)
    app = starlette_application(tao)
    async with tao.lifespan(app):
        status, headers = await ask(app, "/write")
        assert (status, headers["retry-after"], outage.opened) == (503, "1", 0)
        assert (await ask(app, "/metrics"))[0] == 200
        status, headers = await ask(app, "/write")
        assert (status, outage.opened) == (200, 1)
        assert headers["set-cookie"].startswith("tao_after=")  # of the request that opened the graph, too
        await ask(app, "/write")
        assert outage.opened == 1
    assert outage.cluster.is_closed


async def test_a_fault_is_left_to_starlette() -> None:
    with pytest.raises(InternalError):  # Starlette shows its page of status 500, and raises on for the server's log
        await ask(starlette_application(StarletteGraph(SETTINGS)), "/fault")


def flask_application(cluster: FakeCluster) -> flask.Flask:
    app = flask.Flask(__name__)
    tao = FlaskGraph(SETTINGS, app)
    tao._core.graph = SyncGraph("fake:1", opener=cluster.connect)  # type: ignore[misc]  # final for all but this test
    failures = {"retryable": RetryableError("later"), "fault": InternalError("a bug")}

    @app.post("/write")
    def write() -> str:
        tao.graph.assoc_add(make_id(1), "friend", make_id(2))
        return ""

    @app.post("/write/<reason>")
    def fail(reason: str) -> str:
        tao.graph.assoc_add(make_id(1), "friend", make_id(2))
        raise failures[reason]

    return app


def test_flask_answers_with_the_token_of_the_writes_even_when_the_request_fails() -> None:
    browser = flask_application(FakeCluster()).test_client()
    for path, status in (("/write", 200), ("/write/retryable", 503), ("/write/fault", 500)):
        answer = browser.post(path)
        assert (answer.status_code, "tao_after=" in answer.headers["Set-Cookie"]) == (status, True)


def test_a_handler_of_the_application_replaces_ours() -> None:
    app = flask_application(FakeCluster())
    app.register_error_handler(RetryableError, lambda _: ("a page of our own", 418))
    assert app.test_client().post("/write/retryable").status_code == 418


async def test_a_handler_of_a_fastapi_application_replaces_ours() -> None:
    app, tao = FastAPI(), StarletteGraph(SETTINGS)
    tao.init_app(app)

    @app.get("/fail")
    async def fail() -> None:
        raise RetryableError("later")

    assert (await ask(app, "/fail"))[0] == 503
    app = FastAPI()
    tao.init_app(app)
    app.add_api_route("/fail", fail)

    @app.exception_handler(RetryableError)
    async def show(_: Request, __: Exception) -> Response:
        return Response("a page of our own", 418)

    assert (await ask(app, "/fail"))[0] == 418
