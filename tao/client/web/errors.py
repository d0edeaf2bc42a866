"""Errors of the SDK as answers of a web application: a status, headers and a JSON body.

==================================================================  ======  ====================================
error                                                               status  why
==================================================================  ======  ====================================
`InvalidArgument`, `InvalidField`, `UnknownType`, `TooLarge`        400     the request holds what no graph takes
`PermissionDenied`                                                  403     the application may not do this
`NotFound` (raised by `found`)                                      404     the page's object does not exist
`WrongType`, `WriteLost`, `ListFull`                                409     the graph is not as the request expects
every `RetryableError`                                              503     nothing was written; ``Retry-After``
`OutcomeUnknown`                                                    503     no ``Retry-After``: it may be written
the others                                                          500     a fault of the program or the cluster
==================================================================  ======  ====================================

The last row is the framework's business, which logs the traceback and shows its own page. The message of an error is
part of the body where it speaks of the request. It is left out at 403, where it names the application and its roles,
and at 503, where it names servers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec

from tao.client.operations import SomeFailed
from tao.client.values import Object
from tao.model.errors import (
    ListFull,
    OutcomeUnknown,
    PermissionDenied,
    RequestError,
    RetryableError,
    TaoError,
    Unauthorized,
    WriteLost,
    WrongType,
)

JSON: Final = "application/json"

_logger = logging.getLogger(__name__)
_NOT_ALLOWED: Final = "this application has no right to do that"
_TRY_LATER: Final = "the data cannot be reached at the moment; try again"
_MAY_BE_WRITTEN: Final = "the change may have been made or not; look before you repeat it"


class FrameworkMissing(ModuleNotFoundError):
    """The framework that a module of `tao.client.web` is for is not installed."""

    def __init__(self, framework: str, extra: str) -> None:
        super().__init__(
            f"{framework} is not installed: run `pip install 'tao-graph[{extra}]'`, or install {framework} yourself",
            name=framework.lower(),
        )


class NotFound(Exception):
    """What a page is about does not exist. Raised by `found`."""

    reason: Final = "NOT_FOUND"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


ANSWERED: Final = (RequestError, RetryableError, OutcomeUnknown, WriteLost, SomeFailed, NotFound)
"""The classes that `answer_to` knows, except `Unauthorized`. For frameworks in which handlers belong to classes."""


def found(value: Object | None, what: str, otype: str = "") -> Object:
    """Return an object that was read. Raises `NotFound` when there is none, or when ``otype`` is given and the object
    is of another type: a page of a user is not found under the id of a photo. ``what`` names it to the caller."""
    if value is None or (otype and value.otype != otype):
        raise NotFound(f"{what} does not exist")
    return value


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The answer to a request that failed with an error of the SDK."""

    status: HTTPStatus
    reason: str
    body: bytes
    """JSON: ``{"error": {"reason": …, "message": …, "retryable": …}}``."""

    headers: tuple[tuple[str, str], ...]


def answer_to(error: Exception, retry_after_seconds: int) -> ErrorAnswer | None:
    """Return the answer to an error, None for one that the framework should treat as a fault."""
    cause = _decisive(error.errors.values()) if isinstance(error, SomeFailed) else error
    if not isinstance(error, TaoError | NotFound) or not isinstance(cause, TaoError | NotFound):
        return None
    status = _status_of(cause)
    if status is None:
        return None
    message, headers = cause.message, [("Content-Type", JSON), ("Cache-Control", "no-store")]
    if status in (HTTPStatus.FORBIDDEN, HTTPStatus.SERVICE_UNAVAILABLE):
        _logger.warning("answered %d: %s: %s", status, error.reason, error.message)
        message = _NOT_ALLOWED if status is HTTPStatus.FORBIDDEN else _MAY_BE_WRITTEN
        if isinstance(cause, RetryableError):
            message = _TRY_LATER
            headers.append(("Retry-After", str(retry_after_seconds)))
    shown = {"reason": error.reason, "message": message, "retryable": isinstance(cause, RetryableError)}
    return ErrorAnswer(status, error.reason, msgspec.json.encode({"error": shown}), tuple(headers))


def _status_of(error: TaoError | NotFound) -> HTTPStatus | None:
    match error:
        case NotFound():
            return HTTPStatus.NOT_FOUND
        case WrongType() | WriteLost() | ListFull():
            return HTTPStatus.CONFLICT
        case Unauthorized():
            return None  # the application's own credentials; its user can do nothing about them
        case PermissionDenied():
            return HTTPStatus.FORBIDDEN
        case RequestError():
            return HTTPStatus.BAD_REQUEST
        case RetryableError() | OutcomeUnknown():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return None


def _decisive(errors: Iterable[TaoError]) -> TaoError:
    """The error of a many-form's items that decides: a fault before a mistake before what may succeed later."""
    order = (None, HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.BAD_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE)
    return min(errors, key=lambda error: (order.index(_status_of(error)), error.retryable))
