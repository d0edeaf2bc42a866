"""The checks of arguments: before anything is sent, and with a message that names the wrong argument.

The leader checks again, because programs in any language may write. The check here saves a round trip, and raises the
error where the mistake was made. A bool does not count as an int: ``obj_get(True)`` is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tao.client.batches import are_ids
from tao.model.edge_states import STATES_BY_LABEL, State
from tao.model.errors import InvalidArgument, TooLarge
from tao.model.graph import MAX_ID2_SET, MAX_TIME
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.schema.registry import Schema
from tao.schema.types import AssocType, ObjectType

MAX_LIMIT = (1 << 32) - 1  # the bound of the wire; a type's own limit is far lower, and larger limits are cut to it
MAX_STALENESS_MS = (1 << 32) - 1  # the bound of the wire: seven weeks
_SEQUENCES = (list, tuple)  # the usual types; `isinstance` with an abstract class costs more than all other checks


def check_number(value: object, name: str, low: int, high: int) -> int:
    """Return the value, or raise `InvalidArgument` when it is not an int in ``low … high``."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{name} must be an int, not {value!r} ({type(value).__name__})")
        value = int(value)  # an IntEnum or another subclass: the wire needs a plain int
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}; it must be {low} to {_power(high)}")
    return value


def check_id(value: object, name: str = "id") -> int:
    """Return an object id, or raise `InvalidArgument`."""
    return check_number(value, name, 1, MAX_ID)


def check_ids(values: Iterable[int], name: str) -> tuple[int, ...]:
    """Return ids in order. Raises `InvalidArgument` that names the index of the first value that is no id."""
    if type(values) not in _SEQUENCES and (isinstance(values, (str, bytes)) or not isinstance(values, Iterable)):
        raise InvalidArgument(f"{name} must be a sequence of ids, not {values!r}")
    ids = tuple(values)
    if len(ids) == 1 and type(ids[0]) is int and 0 < ids[0] <= MAX_ID:
        return ids  # the usual case, at a fifth of the cost of the checks below
    if not are_ids(ids):  # checked one by one only when one of them is wrong
        return tuple(check_id(each, f"{name}[{index}]") for index, each in enumerate(ids))
    return ids


def check_id2s(values: Iterable[int]) -> tuple[int, ...]:
    """Return the id2s of one query without duplicates. Raises `TooLarge` above 6,000, duplicates counted."""
    ids = check_ids(values, "id2s")
    if len(ids) > MAX_ID2_SET:
        raise TooLarge(f"id2s holds {len(ids)} ids; one query takes at most {MAX_ID2_SET}, so ask in several")
    return ids if len(ids) == 1 else tuple(dict.fromkeys(ids))


def check_staleness(value: object) -> int:
    """Return a bound in milliseconds on how far behind its master an answer may be. Raises `InvalidArgument`."""
    return check_number(value, "max_staleness_ms", 1, MAX_STALENESS_MS)


def check_time(value: object, name: str) -> int:
    """Return the time of an association. Raises `InvalidArgument`."""
    return check_number(value, name, 0, MAX_TIME)


def check_bounds(high: object, low: object) -> tuple[int, int]:
    """Return inclusive time bounds ``(high, low)``; None is no bound. Raises `InvalidArgument`."""
    if high is None and low is None:
        return MAX_TIME, 0
    return (
        MAX_TIME if high is None else check_time(high, "high"),
        0 if low is None else check_time(low, "low"),
    )


def check_page(pos: object, limit: object) -> tuple[int, int]:
    """Return position and limit of a range. Raises `InvalidArgument`."""
    # One test for both: nearly all are right, and a call for each costs more than the whole test.
    if type(pos) is int and type(limit) is int and 0 <= pos <= MAX_TIME and 0 <= limit <= MAX_LIMIT:
        return pos, limit
    return check_position(pos), check_limit(limit)


def check_position(pos: object) -> int:
    """Return a number of edges to skip. Raises `InvalidArgument`."""
    return check_number(pos, "pos", 0, MAX_TIME)


def check_limit(limit: object) -> int:
    """Return a maximal number of edges; 0 is allowed. Raises `InvalidArgument`."""
    return check_number(limit, "limit", 0, MAX_LIMIT)


def check_otype(schema: Schema, name: object) -> ObjectType:
    """Return the object type of a name. Raises `InvalidArgument`, or `UnknownType` that names similar types."""
    return schema.otype(_type_name(name, "otype"))


def check_atype(schema: Schema, name: object, argument: str = "atype") -> AssocType:
    """Return the association type of a name. Raises as `check_otype`."""
    return schema.atype(_type_name(name, argument))


def check_state(label: object) -> State:
    """Return the state of a name. Raises `InvalidArgument`."""
    found = STATES_BY_LABEL.get(label) if isinstance(label, str) else None
    if found is None:
        raise InvalidArgument(f"state must be one of {', '.join(map(repr, STATES_BY_LABEL))}, not {label!r}")
    return found


def check_new_object_place(shards: int, near: int | None, object_id: int | None) -> int | None:
    """Return the shard that ``near`` or ``id`` puts a new object on, None for any. Raises `InvalidArgument`."""
    of_near = None if near is None else shard_in(shards, check_id(near, "near"), "near")
    if object_id is None:
        return of_near
    of_id = shard_in(shards, check_id(object_id), "id")
    if of_near not in (None, of_id):
        raise InvalidArgument(f"id {object_id} is on shard {of_id}, near {near} on shard {of_near}: leave one out")
    return of_id


def shard_in(shards: int, object_id: int, name: str) -> int:
    """Return the shard of an id. Raises `InvalidArgument` when the graph has no such shard."""
    shard = object_id >> SHARD_SHIFT
    if shard >= shards:
        raise InvalidArgument(f"{name} {object_id} is of shard {shard}; this graph has shards 0 to {shards - 1}")
    return shard


def check_fields(fields: Mapping[str, object] | None) -> Mapping[str, object]:
    """Return fields by name, an empty mapping for None. The schema checks the values. Raises `InvalidArgument`."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise InvalidArgument(f"fields must be a mapping of names to values, not {fields!r}")
    return fields


def check_items(items: Iterable[Sequence[Any]], low: int, high: int) -> list[Sequence[Any]]:
    """Return the argument tuples of a many-form. Raises `InvalidArgument` that names the first item that is not a tuple
    or list of ``low`` to ``high`` values."""
    checked = list(items)
    for index, item in enumerate(checked):
        if not isinstance(item, (tuple, list)) or not low <= len(item) <= high:
            shape = f"{low}" if low == high else f"{low} to {high}"
            raise InvalidArgument(f"item {index} must be a tuple of {shape} arguments, not {item!r}")
    return checked


def _type_name(name: object, argument: str) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(f"{argument} must be the name of a type, not {name!r}")
    return name


def _power(bound: int) -> str:
    return f"2^{bound.bit_length()} - 1" if bound > MAX_LIMIT else str(bound)
