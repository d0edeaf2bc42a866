"""The graph in a Django project.

    # settings.py
    INSTALLED_APPS = [..., "tao.client.web.django.TaoConfig"]
    MIDDLEWARE = ["tao.client.web.django.TaoMiddleware", ...]
    TAO_GRAPH = WebSettings(target="topology.json", keys=[SECRET_KEY.encode()])

    # views.py
    def user(request, id):
        graph, fresh = request.tao.graph, request.tao.fresh
        return HttpResponse(found(graph.obj_get(id, consistency=fresh), f"user {id}", "user").fields["name"])

Outside of requests, as in a management command, ``apps.get_app_config("tao_graph").graph`` is the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tao.client.consistency import Consistency
from tao.client.sync_graph import SyncGraph
from tao.client.web.core import SyncWebCore, WebRequest, WebSettings
from tao.client.web.errors import FrameworkMissing
from tao.client.web.metrics import PROMETHEUS

try:
    from django.apps import AppConfig, apps
    from django.conf import settings
    from django.core.exceptions import ImproperlyConfigured
    from django.http import HttpResponse
except ModuleNotFoundError as missing:
    raise FrameworkMissing("Django", "django") from missing

_LABEL: Final = "tao_graph"
_SETTING: Final = "TAO_GRAPH"


# Django ships no type information, so its classes are `Any` here.
class TaoConfig(AppConfig):  # type: ignore[misc]
    """The application of a project that holds the graph. It has no models."""

    name = "tao.client.web.django"
    label = _LABEL
    verbose_name = "tao-graph"

    def ready(self) -> None:
        """Read the settings. Nothing is connected yet. Raises `ImproperlyConfigured`."""
        found = getattr(settings, _SETTING, None)
        if not isinstance(found, WebSettings):
            raise ImproperlyConfigured(f"{_SETTING} must be a tao.client.web.WebSettings, not {type(found).__name__}")
        self.core = SyncWebCore(found)

    @property
    def graph(self) -> SyncGraph:
        """The graph of this process. It is opened by its first operation."""
        return self.core.graph


@dataclass(frozen=True, slots=True)
class DjangoGraph:
    """The value of ``request.tao`` in views."""

    graph: SyncGraph
    """The graph of this process. It is opened by its first operation."""

    request: WebRequest
    """This request's use of the graph."""

    @property
    def fresh(self) -> Consistency:
        """The demand of reads that must see what the request's user has written; see `WebRequest.fresh`."""
        return self.request.fresh


class TaoMiddleware:
    """Reads the token of a request, answers errors of the SDK, and adds the token of the writes to the answer."""

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        """Raises `ImproperlyConfigured` when `TaoConfig` is not installed."""
        if not apps.is_installed(TaoConfig.name):
            raise ImproperlyConfigured(f'INSTALLED_APPS must have "{TaoConfig.name}.{TaoConfig.__name__}"')
        self._get_response = get_response
        self._core: SyncWebCore = apps.get_app_config(_LABEL).core

    def __call__(self, http_request: Any) -> Any:
        with self._core.serve(http_request.META.get("HTTP_COOKIE")) as request:
            http_request.tao = DjangoGraph(self._core.graph, request)
            response = self._get_response(http_request)
            cookie = request.end(response.status_code)
            if cookie is not None:
                response.cookies.load(cookie)
            return response

    def process_exception(self, http_request: Any, error: Exception) -> Any:
        """Answer an error of a view. Other errors are Django's."""
        answer = http_request.tao.request.answer_to(error)
        if answer is None:
            return None
        return HttpResponse(answer.body, status=int(answer.status), headers=dict(answer.headers))


def metrics(_: Any) -> Any:
    """Show the metrics of this process: a view for the project's ``urlpatterns``, which decides who may see it."""
    return HttpResponse(apps.get_app_config(_LABEL).core.metrics_text(), content_type=PROMETHEUS)
