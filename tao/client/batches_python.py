"""The work for each item of a many-form: checks, routing, results and objects. The implementation in Python, and the
specification.

`tao.client.batches_core` is the compiled implementation; `tao.client.batches` chooses between them. One suite
(`tests/conformance/test_client_batches.py`) holds both to the same results. What is done once for a batch is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tao.model.graph import OBJECT_HEADER_BYTES
from tao.model.ids import MAX_ID, SHARD_SHIFT

Row = TypeVar("Row", bound=tuple[Any, ...])  # Any: rows have five shapes, which begin with an id
Receiver = TypeVar("Receiver")
Server = TypeVar("Server")
Type = TypeVar("Type")
Made = TypeVar("Made")


def are_ids(values: tuple[object, ...]) -> bool:
    """Return whether all values are plain ints within the bounds of ids."""
    return set(map(type, values)) <= {int} and (not values or (min(values) > 0 and max(values) <= MAX_ID))  # type: ignore[type-var, operator]


def by_server(
    rows: Sequence[Row], receivers: Sequence[Receiver], reader: Callable[[int], Server]
) -> dict[Server, tuple[list[Row], list[Receiver]]]:
    """Return the rows with their receivers by the server that reads them, in order. ``reader`` chooses the server of a
    shard, and is asked once for each shard."""
    parts: dict[Server, tuple[list[Row], list[Receiver]]] = {}
    part_of: dict[int, tuple[list[Row], list[Receiver]]] = {}
    for row, receiver in zip(rows, receivers, strict=True):
        shard = row[0] >> SHARD_SHIFT
        part = part_of.get(shard)
        if part is None:
            part = part_of[shard] = parts.setdefault(reader(shard), ([], []))
        part[0].append(row)
        part[1].append(receiver)
    return parts


def deliver(waiters: list[Any], slots: Sequence[int] | None, values: Sequence[Any], joined: type[Any]) -> None:
    """Hand each value to the waiter of its slot, None for slots in order, and remove the waiter. A slot without a
    waiter is passed over.

    A waiter is a future, or a place in an object of type ``joined`` (`tao.client.server_queues.JoinedFuture`), which is
    notified once for each run of its values, or a place in another object with a method ``put``. `Any`: futures of what
    the values are."""
    current: Any = None
    arrived = 0
    for slot, value in zip(range(len(values)) if slots is None else slots, values, strict=True):
        waiter = waiters[slot]
        if waiter is None:
            continue
        waiters[slot] = None
        if not isinstance(waiter, tuple):
            if not waiter.done():
                waiter.set_result(value)
            continue
        to, index = waiter
        if type(to) is not joined:
            to.put(index, value)
            continue
        if to is not current:
            if arrived:
                current.note_arrived(arrived)
            current, arrived = to, 0
        to.results[index] = value
        arrived += 1
    if arrived:
        current.note_arrived(arrived)


def objects_of(
    ids: Sequence[int],
    values: Sequence[object],
    types: Mapping[bytes, Type],
    make: Callable[[int, Type, bytes], Made],
) -> list[Made] | None:
    """Return what ``make`` makes of each id, its type and its data. None when a value is an error, too short, or of a
    type that is not in ``types``, which maps the bytes of types' numbers to types."""
    if set(map(type, values)) - {bytes}:
        return None
    made = []
    for object_id, value in zip(ids, values, strict=True):
        assert isinstance(value, bytes), "compared above"
        otype = types.get(value[8:OBJECT_HEADER_BYTES])
        if otype is None:
            return None
        made.append(make(object_id, otype, value[OBJECT_HEADER_BYTES:]))
    return made
