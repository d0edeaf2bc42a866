"""Split a read answer that is too large for one message into several.

The size of an answer is known only when it is complete: each object may have 1 MB, and the tasks whose queries share a
batch do not know of each other. So the answer is sent in parts. Only a value that fits no message by itself, or that
exceeds what one answer may take of the connection's memory, fails. It fails alone, with a reason, and its neighbours do
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tao.model.errors import AnswerFull, TooLarge
from tao.wire.convert import error_to_pb
from tao.wire.v1 import session_pb2 as pb

_OVERHEAD_BYTES: Final = 32
"""Bytes of slot numbers and lengths that go with a value."""


def read_parts(answer: pb.Answer, max_part_bytes: int, max_value_bytes: int, max_total_bytes: int) -> list[pb.Answer]:
    """Return the same read answer in messages with at most ``max_part_bytes`` of values each, or one larger value.

    Values above ``max_value_bytes`` become failures of their slots (TOO_LARGE). Values beyond ``max_total_bytes``
    become failures too (ANSWER_FULL: a batch without the others may get them).
    """
    read = answer.read
    slots: Sequence[int] = list(read.slots) or range(len(read.values))
    missed = frozenset(read.missed_slots)
    part = pb.Answer()
    parts: list[pb.Answer] = []
    in_part = total = 0
    last = pb.Answer(number=answer.number, more=answer.more)
    last.read.failed_slots.extend(read.failed_slots)
    last.read.errors.extend(read.errors)
    for slot, value in zip(slots, read.values, strict=True):
        size = len(value) + _OVERHEAD_BYTES
        if size > max_value_bytes or total + size > max_total_bytes:
            last.read.failed_slots.append(slot)
            last.read.errors.append(_failure(size, max_value_bytes, max_total_bytes))
            continue
        if not parts or in_part + size > max_part_bytes:
            part = pb.Answer(number=answer.number, more=True)
            part.read.epoch_shards.extend(read.epoch_shards)
            part.read.version_epochs.extend(read.version_epochs)
            part.read.served_by = read.served_by
            parts.append(part)
            in_part = 0
        in_part += size
        total += size
        part.read.slots.append(slot)
        part.read.values.append(value)
        if slot in missed:
            part.read.missed_slots.append(slot)
    return [*parts, last]


def _failure(size: int, max_value_bytes: int, max_total_bytes: int) -> pb.Error:
    if size > max_value_bytes:
        return error_to_pb(TooLarge(f"this answer has {size} bytes, more than {max_value_bytes}; ask for less at once"))
    return error_to_pb(
        AnswerFull(f"this answer exceeds the {max_total_bytes} bytes that are left for the batch; repeat the query")
    )
