"""Receipts of accepted writes: which follower accepted a write into which journal, and as which entry."""

from __future__ import annotations

from typing import Final

import msgspec

from tao.model.errors import InvalidArgument


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """Names an accepted write: the follower that accepted it, its journal, and the number of the entry there. Its
    bearer may read the result of the write, so ``proof`` keeps receipts from being guessed."""

    server: str
    journal: str
    number: int
    proof: bytes

    def encoded(self) -> bytes:
        """Return the bytes that travel."""
        return _encode(self)

    @classmethod
    def decoded(cls, receipt: bytes) -> Receipt:
        """Parse what `encoded` returns. Raises `InvalidArgument`."""
        try:
            return _decode(receipt)
        except msgspec.MsgspecError:
            raise InvalidArgument("this is no receipt of an accepted write: pass on what its answer carried") from None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Receipt).decode
