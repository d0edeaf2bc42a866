"""One request of a web application, whatever its framework: the token that it carries, what it writes, how it ends.

The adapters (`starlette`, `flask`, `django` beside this module) take a request apart and put an answer together. All
that is decided is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from tao.client.consistency import Consistency
from tao.client.own_writes import Recording
from tao.client.settings import ClientSettings
from tao.client.sync_graph import SyncGraph
from tao.client.web.errors import ErrorAnswer, answer_to
from tao.client.web.metrics import RequestRecord, WebMetrics
from tao.client.web.token_cookie import CarrierSettings, TokenCarrier
from tao.model.errors import InvalidArgument, WriteLost
from tao.model.tokens import WriteToken
from tao.wire.identity import Credentials

_FAULT: Final = 500


@dataclass(frozen=True, slots=True)
class WebSettings:
    """What a web application says once of its graph. Raises `InvalidArgument`."""

    target: str
    """A topology file, or the address of any follower, as for `tao.client.connect`."""

    keys: Sequence[bytes] = field(repr=False)
    """The keys that sign the cookie: the first signs, all are accepted. The same in every process of the
    application."""

    region: str | None = None
    """The region of this process; may be left out as for `tao.client.connect`."""

    tier: str | None = None
    """The follower tier to prefer."""

    client: ClientSettings = field(default_factory=ClientSettings)
    """The settings of the graph, such as the time that an operation may take."""

    credentials: Credentials | None = None
    """The credentials for servers that ask for a token."""

    cookie: CarrierSettings = field(default_factory=CarrierSettings)
    """The name and lifetime of the cookie."""

    retry_after_seconds: int = 1
    """What a 503 says in ``Retry-After``. A lost server is replaced by the next tier at once, a lost master in some
    eight seconds; clients that wait for one second spread their repeats."""

    observe: Callable[[RequestRecord], None] | None = None
    """Called after each request, for metrics of the application's own. It must be quick, and must not raise."""

    def __post_init__(self) -> None:
        if self.retry_after_seconds < 1:
            raise InvalidArgument(f"retry_after_seconds is {self.retry_after_seconds}; it must be at least 1")


class WebRequest:
    """The use that one request makes of the graph. Made by `WebCore.request`."""

    __slots__ = ("_core", "_known", "_lost", "_reason", "_recording", "_started_at", "ended")

    def __init__(self, core: WebCore, known: WriteToken | None, recording: Recording) -> None:
        self._core = core
        self._known = known
        self._recording = recording
        self._lost = False
        self._reason = ""
        self._started_at = time.perf_counter()
        self.ended = False

    @property
    def fresh(self) -> Consistency:
        """The demand of reads that must see what this user has written in earlier requests; pass it as
        ``consistency=``. What this process has written is seen by every read, and reads without the demand are served
        by the nearest cache."""
        return Consistency.at_least(self._known)

    def forget(self) -> None:
        """Drop the token that the request carried, because a write that it names is lost; the answer replaces or
        deletes the cookie. For applications that catch `WriteLost` themselves."""
        self._lost = self._lost or self._known is not None
        self._known = None

    def answer_to(self, error: Exception) -> ErrorAnswer | None:
        """Return the answer to an error, None for one that the framework should treat as a fault."""
        answer = answer_to(error, self._core.settings.retry_after_seconds)
        if answer is not None:
            self._reason = answer.reason
            if isinstance(error, WriteLost) or any(
                isinstance(each, WriteLost) for each in getattr(error, "errors", {}).values()
            ):
                self.forget()
        return answer

    def end(self, status: int) -> str | None:
        """Count the request. Returns the ``Set-Cookie`` header of its answer, None for none. Call it when the head of
        the answer is made: later writes are in no cookie."""
        self.ended = True
        core, token = self._core, self._recording.token
        # A request that only reads sets no cookie: it could replace that of a write which was answered meanwhile.
        cookie = core.carrier.set_cookie(self._recording.renewed(self._known)) if token else None
        if cookie is not None:
            core.metrics.count_token("set")
        elif self._lost:
            cookie = core.carrier.delete_cookie()
        if self._lost:
            core.metrics.count_token("lost")
        seconds = time.perf_counter() - self._started_at
        record = RequestRecord(status, seconds, self._reason, self._known is not None, bool(token))
        core.metrics.count(record)
        if core.settings.observe is not None:
            core.settings.observe(record)
        return cookie


class WebCore:
    """The part of an integration that knows no framework."""

    def __init__(self, settings: WebSettings) -> None:
        """Raises `InvalidArgument` for keys that are missing or too short."""
        self.settings: Final = settings
        self.carrier: Final = TokenCarrier(settings.keys, settings.cookie)
        self.metrics: Final = WebMetrics()

    @contextmanager
    def request(self, cookies: str | None, recording: AbstractContextManager[Recording]) -> Iterator[WebRequest]:
        """Serve one request: read its token from its ``Cookie`` header, and collect what it writes. A request that
        ends by an exception is counted as a fault."""
        known = self.carrier.from_cookies(cookies)
        if known is not None:
            self.metrics.count_token("carried")
        elif self.carrier.is_in(cookies):
            self.metrics.count_token("rejected")
        with recording as recorded:
            request = WebRequest(self, known, recorded)
            try:
                yield request
            finally:
                if not request.ended:
                    request.end(_FAULT)


class SyncWebCore(WebCore):
    """The core of an application whose requests run in threads: one `SyncGraph`, which each worker process opens with
    its first operation. So a server may import the application before it forks its workers, provided that nothing is
    asked of the graph before the fork. The graph is closed when the process ends."""

    def __init__(self, settings: WebSettings) -> None:
        """Connect nothing yet. Raises `InvalidArgument` for keys that are missing or too short."""
        super().__init__(settings)
        self.graph: Final = SyncGraph(
            settings.target,
            region=settings.region,
            tier=settings.tier,
            settings=settings.client,
            credentials=settings.credentials,
        )

    def serve(self, cookies: str | None) -> AbstractContextManager[WebRequest]:
        """Serve one request of the calling thread; see `request`."""
        return self.request(cookies, self.graph.recording())

    def metrics_text(self) -> str:
        """Return the metrics of this process as Prometheus text. It opens no connection."""
        opened = self.graph._opened()
        return self.metrics.text(None, {}) if opened is None else self.metrics.text(opened.stats, self.graph.servers())
