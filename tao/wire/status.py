"""Errors as gRPC statuses, and back.

A program that knows nothing of this system acts on the status code. The exact reason stands in the trailing metadata,
from which the error is rebuilt as it was raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import grpc

from tao.model.errors import (
    DeadlineExceeded,
    Fenced,
    InternalError,
    OperatorError,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    ProtocolError,
    RequestError,
    RetryableError,
    TaoError,
    TopologyConflict,
    Unauthorized,
    Unavailable,
    WriteLost,
    error_from_reason,
)
from tao.wire.v1 import session_pb2 as pb

REASON_KEY: Final = "tao-reason"
TOPOLOGY_VERSION_KEY: Final = "tao-topology-version"

# The first class that an error is an instance of decides. An error after which another server may answer is UNAVAILABLE
# (not mine, stale); one that may pass once the caller starts over is ABORTED; an unknown outcome is UNKNOWN, which no
# client library repeats by itself.
_CODES: Final[tuple[tuple[type[TaoError], grpc.StatusCode], ...]] = (
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Fenced, grpc.StatusCode.ABORTED),
    (RetryableError, grpc.StatusCode.UNAVAILABLE),
    (OutcomeUnknown, grpc.StatusCode.UNKNOWN),
    (WriteLost, grpc.StatusCode.DATA_LOSS),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (TopologyConflict, grpc.StatusCode.ABORTED),
    (OperatorError, grpc.StatusCode.FAILED_PRECONDITION),
    (InternalError, grpc.StatusCode.INTERNAL),
    (TaoError, grpc.StatusCode.UNKNOWN),
)


def status_of(error: TaoError) -> grpc.StatusCode:
    """Return the status code of an error."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def trailers_of(error: pb.Error) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that goes with the status."""
    reason = ((REASON_KEY, error.reason),)
    if not error.topology_version:
        return reason
    return (*reason, (TOPOLOGY_VERSION_KEY, str(error.topology_version)))


Trailers = Iterable[tuple[str, str | bytes]]


def has_reason(trailers: Trailers) -> bool:
    """Return whether a server has ended a call, and not gRPC itself or a proxy."""
    return any(key == REASON_KEY for key, _ in trailers)


def error_of(code: grpc.StatusCode, details: str | None, trailers: Trailers) -> TaoError:
    """Return the error that a call ended with. One without a reason comes from gRPC itself or from a proxy."""
    found = {key: value for key, value in trailers if isinstance(value, str)}
    message = details or code.name
    if REASON_KEY in found:
        return error_from_reason(found[REASON_KEY], message, int(found.get(TOPOLOGY_VERSION_KEY, "0")))
    return Unavailable(message if code is grpc.StatusCode.UNAVAILABLE else f"{code.name}: {message}")
