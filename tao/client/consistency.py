"""`Consistency`: how fresh the answer to a read must be.

Every read takes one, as ``consistency=``; `ClientSettings.consistency` is the one of reads that say nothing. A value
that a read is given replaces that default, it does not add to it.

    await graph.obj_get(alice)                                                   # cached
    await graph.obj_get(alice, consistency=Consistency.at_least(token))          # no older than these writes
    await graph.obj_get(alice, consistency=Consistency.max_staleness(5_000))     # at most 5 s behind the master
    await graph.obj_get(alice, consistency=Consistency.master())                 # from the master database
    await graph.obj_get(alice, consistency=Consistency.at_least(token) & Consistency.max_staleness(5_000))

The keywords ``critical``, ``after`` and ``max_staleness_ms`` of the reads are short forms of these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Final, TypedDict

from tao.client.validation import check_staleness
from tao.model.errors import InvalidArgument
from tao.model.tokens import WriteToken

After = WriteToken | str | None
"""A write token or its text. None and an empty text name no writes."""


@dataclass(frozen=True, slots=True)
class Consistency:
    """An immutable demand on the freshness of a read. Make it with `cached`, `at_least`, `max_staleness` or `master`,
    and combine demands with ``&``. Raises `InvalidArgument` for a token or a bound that is not valid."""

    critical: bool = False
    """The master database answers the read, and no cache."""

    token: WriteToken | None = None
    """The answer is not older than the writes that this token names."""

    max_staleness_ms: int | None = None
    """The answer is at most this many milliseconds behind its master; None for no bound."""

    def __post_init__(self) -> None:
        if self.token is not None and not isinstance(self.token, WriteToken):
            raise InvalidArgument(f"token must be a WriteToken, not {type(self.token).__name__}")
        if self.max_staleness_ms is not None:
            check_staleness(self.max_staleness_ms)

    @property
    def has_pending(self) -> bool:
        """Return whether the token names lists that lack inverse edges."""
        return self.token is not None and self.token.has_pending

    @staticmethod
    def cached() -> Consistency:
        """Accept what the nearest cache holds, which includes the graph's own recent writes. Always returns the same
        object."""
        return CACHED

    @staticmethod
    def at_least(token: After) -> Consistency:
        """Accept nothing older than the writes that ``token`` names, wherever they were made. ``token`` is a
        `WriteToken` or its text; None and a token without writes demand nothing, so that a token from a cookie that
        may be missing can be passed on as it is. Raises `InvalidArgument` for a text that is not a token."""
        named = read_token(token, "token")
        return Consistency(token=named) if named else CACHED

    @staticmethod
    def max_staleness(ms: int) -> Consistency:
        """Accept nothing that may be more than ``ms`` milliseconds behind its master (1 to 2^32 - 1). A read whose
        region may be further behind goes to the master database; when that cannot be read, it raises `StaleRead`."""
        return Consistency(max_staleness_ms=ms)

    @staticmethod
    def master() -> Consistency:
        """Read the master database instead of any cache: slower, for the few reads that must see every write that has
        been committed."""
        return MASTER

    def __and__(self, other: Consistency) -> Consistency:
        """Return the demand that meets both: the tokens merged, and the smaller of two bounds."""
        if not isinstance(other, Consistency):
            return NotImplemented
        if other is CACHED:
            return self
        tokens = [each.token for each in (self, other) if each.token is not None]
        bounds = [each.max_staleness_ms for each in (self, other) if each.max_staleness_ms is not None]
        return Consistency(
            critical=self.critical or other.critical,
            token=reduce(WriteToken.merged, tokens) if tokens else None,
            max_staleness_ms=min(bounds, default=None),
        )


CACHED: Final = Consistency()
"""The value of `Consistency.cached`, so that a plain read allocates none and is recognized by identity."""

MASTER: Final = Consistency(critical=True)


class Freshness(TypedDict, total=False):
    """The keywords of every read: ``consistency``, or short forms of it, which demand all that they name together."""

    consistency: Consistency | None
    critical: bool
    """Short for `Consistency.master`."""
    after: After
    """Short for `Consistency.at_least`."""
    max_staleness_ms: int | None
    """Short for `Consistency.max_staleness`, in milliseconds."""


def from_keywords(
    consistency: Consistency | None = None,
    critical: bool = False,
    after: After = None,
    max_staleness_ms: int | None = None,
) -> Consistency | None:
    """Return the value that the keywords of a read stand for, or None when they demand nothing. Raises
    `InvalidArgument` for ``consistency`` beside a short form, and for a token or a bound that is not valid."""
    if not critical and after is None and max_staleness_ms is None:
        return consistency
    if consistency is not None:
        given = {"critical": critical, "after": after is not None, "max_staleness_ms": max_staleness_ms is not None}
        names = ", ".join(name for name, is_given in given.items() if is_given)
        raise InvalidArgument(
            f"give either consistency or {names}, not both; combine demands with '&', "
            "as in Consistency.at_least(token) & Consistency.max_staleness(5_000)"
        )
    return Consistency(critical=bool(critical), token=read_token(after, "after"), max_staleness_ms=max_staleness_ms)


def read_token(token: After, argument: str) -> WriteToken | None:
    """Return the token that an argument of this name holds, None when it names no writes. Raises `InvalidArgument`."""
    if token is None or isinstance(token, WriteToken):
        return token
    if not isinstance(token, str):
        raise InvalidArgument(f"{argument} must be a write token or its text, not {type(token).__name__}")
    return WriteToken.from_text(token) if token else None
