"""Errors become answers, requests become cookies and counts, whatever the framework."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tao.client import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    InvalidField,
    ListFull,
    OutcomeUnknown,
    PermissionDenied,
    SomeFailed,
    StaleRead,
    TopologyError,
    Unauthorized,
    Unavailable,
    WriteLost,
    WriteToken,
    WrongType,
)
from tao.client.own_writes import Recording
from tao.client.web import FrameworkMissing, NotFound, RequestRecord, WebCore, WebSettings, found
from tao.client.web.errors import answer_to
from tao.model.errors import TaoError
from tao.model.tokens import PendingInverse

KEY = b"a key of sixteen bytes"
TOKEN = WriteToken([(1, 0, 2)])
WRITTEN = WriteToken([(9, 0, 1)])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidArgument("id is 0"), 400),
        (InvalidField("no field"), 400),
        (PermissionDenied("caller 'web' may not read"), 403),
        (NotFound("user 7 does not exist"), 404),
        (WrongType("a photo"), 409),
        (ListFull("five edges"), 409),
        (WriteLost("lost"), 409),
        (Unavailable("10.0.0.1:7000 is down"), 503),
        (StaleRead("behind"), 503),
        (DeadlineExceeded("late"), 503),
        (OutcomeUnknown("cut"), 503),
        (Unauthorized("no token"), None),
        (InternalError("a bug"), None),
        (TopologyError("no tier"), None),
        (KeyError("x"), None),
        (SomeFailed([1, Unavailable("down"), InvalidArgument("id is 0")]), 400),
        (SomeFailed([InvalidArgument("id is 0"), PermissionDenied("caller 'web' may not read")]), 403),
        (SomeFailed([Unavailable("down")]), 503),
        (SomeFailed([Unavailable("down"), InternalError("a bug")]), None),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else str(each),
)
def test_an_error_has_a_status(error: Exception, status: int | None) -> None:
    answer = answer_to(error, 1)
    assert (None if answer is None else int(answer.status)) == status


def test_the_body_says_what_is_wrong_with_the_request() -> None:
    answer = answer_to(InvalidField("no field 'nmae'"), 1)
    assert answer is not None
    assert json.loads(answer.body) == {
        "error": {"reason": "INVALID_FIELD", "message": "no field 'nmae'", "retryable": False}
    }
    assert dict(answer.headers)["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("error", "retry_after"), [(Unavailable("10.0.0.1 is down"), "7"), (OutcomeUnknown("x"), None)]
)
def test_only_what_was_not_written_may_be_retried_and_no_server_is_named(
    error: TaoError, retry_after: str | None
) -> None:
    answer = answer_to(error, 7)
    assert answer is not None
    assert dict(answer.headers).get("Retry-After") == retry_after
    assert json.loads(answer.body)["error"]["retryable"] is (retry_after is not None)
    assert error.message not in answer.body.decode()


def test_an_answer_to_a_denied_request_names_neither_the_application_nor_its_roles() -> None:
    answer = answer_to(PermissionDenied("caller 'web' has the role reader"), 1)
    assert answer is not None
    assert json.loads(answer.body)["error"]["reason"] == "PERMISSION_DENIED"
    assert "web" not in answer.body.decode()


def test_found_raises_for_what_is_not_there() -> None:
    with pytest.raises(NotFound, match="user 7 does not exist"):
        found(None, "user 7")


class Application:
    """Requests of one core, without a graph."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.core = WebCore(WebSettings("unused:1", [KEY], observe=self.records.append))

    def cookies(self, token: WriteToken = TOKEN) -> str:
        return f"a=b; tao_after={self.core.carrier.seal(token)}"

    @contextmanager
    def recording(self, token: WriteToken) -> Iterator[Recording]:
        recording = Recording(lambda: None, None)
        recording.token = token
        yield recording

    def request(self, cookies: str | None, written: WriteToken = WriteToken(), error: Exception | None = None) -> str:  # noqa: B008
        """Serve one request. Returns its Set-Cookie header, or ""."""
        with self.core.request(cookies, self.recording(written)) as request:
            if error is not None:
                request.answer_to(error)
            return request.end(200) or ""

    def known(self, set_cookie: str) -> WriteToken | None:
        return self.core.carrier.from_cookies(set_cookie.partition(";")[0])


@pytest.fixture
def application() -> Application:
    return Application()


def test_reads_of_a_request_demand_what_its_cookie_names(application: Application) -> None:
    with application.core.request(application.cookies(), application.recording(WriteToken())) as request:
        assert request.fresh.token == TOKEN
        assert request.end(200) is None
    with application.core.request("tao_after=forged", application.recording(WriteToken())) as request:
        assert request.fresh.token is None
        request.end(200)
    text = application.core.metrics.text(None, {})
    assert 'tao_web_tokens_total{event="carried",' in text
    assert 'tao_web_tokens_total{event="rejected",' in text


def test_an_answer_names_what_was_written_and_what_was_known(application: Application) -> None:
    assert application.request(None) == ""
    assert application.known(application.request(None, WRITTEN)) == WRITTEN
    assert application.known(application.request(application.cookies(), WRITTEN)) == WriteToken([(1, 0, 2), (9, 0, 1)])


def test_the_cookie_of_a_write_leaves_out_the_pending_inverses_that_the_request_has_had_written(
    application: Application,
) -> None:
    pending = PendingInverse(9, 7, 5)
    known = WriteToken(pending=[pending])
    recording = Recording(lambda: None, None)
    with application.core.request(application.cookies(known), nullcontext(recording)) as request:
        recording._inverses[pending] = 4
        recording.token = WRITTEN
        cookie = request.end(200)
    assert cookie is not None
    assert application.known(cookie) == WriteToken([(9, 7, 4)]).merged(WRITTEN)


def test_a_request_that_only_reads_keeps_the_cookie_of_a_write_that_was_answered_meanwhile(
    application: Application,
) -> None:
    pending = PendingInverse(9, 7, 5)
    cookies = application.cookies(WriteToken(pending=[pending]))
    recording = Recording(lambda: None, None)
    with application.core.request(cookies, nullcontext(recording)) as reading:
        recording._inverses[pending] = 4
        assert application.request(cookies, WRITTEN), "the write's answer comes first"
        assert reading.end(200) is None


def test_a_lost_write_leaves_the_cookie(application: Application) -> None:
    lost = WriteLost("lost")
    assert "Max-Age=0" in application.request(application.cookies(), error=lost)
    assert application.known(application.request(application.cookies(), WRITTEN, lost)) == WRITTEN
    assert "Max-Age=0" in application.request(application.cookies(), error=SomeFailed([lost]))
    assert application.request(None, error=lost) == ""


def test_every_request_is_counted_once_and_observed(application: Application) -> None:
    application.request(application.cookies(), error=Unavailable("down"))
    with pytest.raises(KeyError), application.core.request(None, application.recording(WriteToken())):
        raise KeyError
    assert [(each.status, each.reason, each.token_carried) for each in application.records] == [
        (200, "UNAVAILABLE", True),
        (500, "", False),
    ]
    text = application.core.metrics.text(None, {"a": {"health": "up"}, "b": {"health": "up"}})
    assert 'tao_web_errors_total{reason="UNAVAILABLE",' in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("tao_client_servers{")] == ["2"]
    assert text.count("# TYPE tao_web_requests_total counter") == 1


@pytest.mark.parametrize(("module", "extra"), [("flask", "flask"), ("django", "django"), ("starlette", "fastapi")])
def test_a_missing_framework_names_its_extra(monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"tao.client.web.{module}", raising=False)
    with pytest.raises(FrameworkMissing, match=rf"pip install 'tao-graph\[{extra}\]'"):
        importlib.import_module(f"tao.client.web.{module}")


def test_settings_hide_their_keys_and_check_their_bounds() -> None:
    assert KEY.decode() not in repr(WebSettings("unused:1", [KEY]))
    with pytest.raises(InvalidArgument, match="retry_after_seconds is 0"):
        WebSettings("unused:1", [KEY], retry_after_seconds=0)
    with pytest.raises(InvalidArgument, match="key"):
        WebCore(WebSettings("unused:1", [b"short"]))
