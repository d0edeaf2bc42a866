"""The graph in a FastAPI or Starlette application.

    tao = StarletteGraph(WebSettings(target="topology.json", keys=[secret]))
    app = FastAPI(lifespan=tao.lifespan)
    tao.init_app(app)

    Opened, Fresh = Annotated[Graph, Depends(tao.graph)], Annotated[Consistency, Depends(tao.fresh)]

    @app.get("/users/{id}")
    async def user(id: int, graph: Opened, fresh: Fresh):
        return found(await graph.obj_get(id, consistency=fresh), f"user {id}", "user").fields["name"]

Endpoints that use the graph are ``async def``: Starlette runs the others in threads, where a `Graph` cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Final

from tao.client.consistency import Consistency
from tao.client.graph import Graph, connect
from tao.client.own_writes import OwnWrites, recording_of
from tao.client.web.core import WebCore, WebRequest, WebSettings
from tao.client.web.errors import FrameworkMissing
from tao.client.web.metrics import PROMETHEUS
from tao.model.errors import RetryableError

try:
    from starlette.applications import Starlette
    from starlette.datastructures import MutableHeaders
    from starlette.requests import HTTPConnection
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as missing:
    raise FrameworkMissing("Starlette", "fastapi") from missing

_REQUEST: Final = "tao.request"
_logger = logging.getLogger(__name__)


class StarletteGraph:
    """One for each application, at module level. Each worker process opens a graph on its own event loop: when it
    starts, or, if the cluster cannot be reached then, with the first request that needs it."""

    def __init__(self, settings: WebSettings) -> None:
        """Connect nothing yet. Raises `InvalidArgument` for keys that are missing or too short."""
        self._core: Final = WebCore(settings)
        self._opening: asyncio.Task[Graph] | None = None

    def init_app(self, app: Starlette) -> None:
        """Install the middleware. An exception handler of the application for an error of the SDK goes first."""
        app.add_middleware(_Middleware, tao=self, core=self._core)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Open the graph while the application runs. An application with a lifespan of its own enters this one in it.
        Raises the errors of `tao.client.connect` that no waiting helps."""
        try:
            await self.graph()
        except RetryableError as error:
            _logger.warning("the application starts without the graph: %s: %s", error.reason, error.message)
        try:
            yield
        finally:
            opening, graph = self._opening, self._opened()
            self._opening = None
            if graph is not None:
                await graph.close()
            elif opening is not None:
                opening.cancel()

    async def graph(self) -> Graph:
        """Return the graph of this process. As a dependency: ``Annotated[Graph, Depends(tao.graph)]``. Raises the
        errors of `tao.client.connect`; a later call tries again."""
        opening = self._opening
        if opening is None or opening.get_loop() is not asyncio.get_running_loop() or _has_failed(opening):
            opening = self._opening = asyncio.create_task(
                self._open(),
                name="open the graph",
                context=Context(),  # what the graph starts outlives the request that opens it
            )
            opening.add_done_callback(_has_failed)  # perhaps nobody waits any more to be told of its error
        await asyncio.wait([opening])  # not awaited itself: others wait for it, too
        return opening.result()

    async def fresh(self, connection: HTTPConnection) -> Consistency:
        """Return the demand of reads that must see what the request's user has written (`WebRequest.fresh`). As a
        dependency: ``Annotated[Consistency, Depends(tao.fresh)]``."""
        return self.request(connection).fresh

    def request(self, connection: HTTPConnection) -> WebRequest:
        """Return a request's use of the graph."""
        request: WebRequest = connection.scope[_REQUEST]
        return request

    async def metrics(self, _: HTTPConnection) -> Response:
        """Answer a request for a page of metrics. The application decides at which path, and who may see it."""
        graph = self._opened()
        text = self._core.metrics.text(None if graph is None else graph.stats, {} if graph is None else graph.servers())
        return Response(text, media_type=PROMETHEUS)

    async def _open(self) -> Graph:
        settings = self._core.settings
        return await connect(
            settings.target,
            region=settings.region,
            tier=settings.tier,
            settings=settings.client,
            credentials=settings.credentials,
        )

    def _opened(self) -> Graph | None:
        opening = self._opening
        if opening is None or not opening.done() or _has_failed(opening):
            return None
        return opening.result()

    def _own_writes(self) -> OwnWrites | None:
        graph = self._opened()
        return None if graph is None else graph._own_writes


def _has_failed(opening: asyncio.Task[Graph]) -> bool:
    return opening.done() and (opening.cancelled() or opening.exception() is not None)


class _Middleware:
    """Reads the token of a request, answers errors of the SDK, and adds the token of the writes to the answer."""

    def __init__(self, app: ASGIApp, tao: StarletteGraph, core: WebCore) -> None:
        self._app = app
        self._tao = tao
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        cookies = HTTPConnection(scope).headers.get("cookie")
        with self._core.request(cookies, recording_of(self._tao._own_writes)) as request:
            scope[_REQUEST] = request
            await self._serve(request, scope, receive, send)

    async def _serve(self, request: WebRequest, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = request.end(message["status"])
                if cookie is not None:
                    MutableHeaders(scope=message).append("set-cookie", cookie)
            await send(message)

        try:
            await self._app(scope, receive, send_with_cookie)
        except Exception as error:
            answer = None if request.ended or scope["type"] != "http" else request.answer_to(error)
            if answer is None:
                raise
            response = Response(answer.body, int(answer.status), dict(answer.headers))
            await response(scope, receive, send_with_cookie)
