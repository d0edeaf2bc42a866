"""The graph in a Flask application.

    tao = FlaskGraph(WebSettings(target="topology.json", keys=[secret]))
    graph = tao.graph
    app = Flask(__name__)
    tao.init_app(app)

    @app.get("/users/<int:id>")
    def user(id):
        return found(graph.obj_get(id, consistency=tao.fresh), f"user {id}", "user").fields["name"]

The token travels by a WSGI middleware, which sees every answer, those of error handlers included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from tao.client.consistency import Consistency
from tao.client.sync_graph import SyncGraph
from tao.client.web.core import SyncWebCore, WebRequest, WebSettings
from tao.client.web.errors import ANSWERED, FrameworkMissing
from tao.client.web.metrics import PROMETHEUS

try:
    import flask
except ModuleNotFoundError as missing:
    raise FrameworkMissing("Flask", "flask") from missing

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_REQUEST: Final = "tao.request"


class FlaskGraph:
    """One for each application; safe at module level, before the server forks its workers."""

    def __init__(self, settings: WebSettings, app: flask.Flask | None = None) -> None:
        """Connect nothing yet. Raises `InvalidArgument` for keys that are missing or too short."""
        self._core: Final = SyncWebCore(settings)
        if app is not None:
            self.init_app(app)

    @property
    def graph(self) -> SyncGraph:
        """The graph of this process. It is opened by its first operation."""
        return self._core.graph

    @property
    def request(self) -> WebRequest:
        """The current request's use of the graph. Raises `RuntimeError` outside a request."""
        request: WebRequest = flask.request.environ[_REQUEST]
        return request

    @property
    def fresh(self) -> Consistency:
        """The demand of reads that must see what the current request's user has written; see `WebRequest.fresh`."""
        return self.request.fresh

    def init_app(self, app: flask.Flask) -> None:
        """Install the middleware and the error handlers. An application that registers its own handler of an error,
        later, replaces that of this one."""
        for kind in ANSWERED:
            app.register_error_handler(kind, self._answer)
        app.wsgi_app = _Middleware(self._core, app.wsgi_app)  # type: ignore[method-assign]  # as Flask documents it
        app.extensions["tao"] = self

    def metrics(self) -> flask.Response:
        """Return the answer of a page of metrics. The application decides at which path, and who may see it."""
        return flask.Response(self._core.metrics_text(), content_type=PROMETHEUS)

    def _answer(self, error: Exception) -> flask.Response:
        answer = self.request.answer_to(error)
        if answer is None:
            raise error
        return flask.Response(answer.body, answer.status, list(answer.headers))


class _Middleware:
    """Reads the token of a request, and adds that of its writes to the answer."""

    def __init__(self, core: SyncWebCore, app: WSGIApplication) -> None:
        self._core = core
        self._app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with self._core.serve(environ.get("HTTP_COOKIE")) as request:
            environ[_REQUEST] = request

            def start(status: str, headers: list[tuple[str, str]], *failure: Any) -> Any:  # Any: as WSGI has it
                cookie = request.end(int(status[:3]))
                if cookie is not None:
                    headers = [*headers, ("Set-Cookie", cookie)]
                return start_response(status, headers, *failure)

            return self._app(environ, start)
