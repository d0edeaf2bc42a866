"""What can be refused before a write is queued: everything that needs no row (DESIGN.md §2).

Refusing early keeps hostile or mistaken input out of the transactions that others wait for. What depends on stored
rows (a merged size, an object's type, a new type's fit) is left to `tao.planning.write_plan`.
"""

from __future__ import annotations

from tao.model.errors import InvalidArgument, TooLarge
from tao.model.graph import MAX_OBJECT_DATA_BYTES, MAX_TIME
from tao.model.ids import check_id
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    ForgetIntent,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    SettleEdge,
    TouchKeys,
    Write,
)
from tao.schema.codec import validate_data, validate_patch
from tao.schema.registry import Schema


def validate(write: Write, schema: Schema) -> None:
    """Raises `UnknownType`, `InvalidArgument` (ids, time, token), `InvalidField` or `TooLarge`."""
    match write:
        case ObjAdd(id=home, otype=otype, data=data):
            check_id(home)
            validate_data(schema.otype(otype), data)
        case ObjUpdate(id=home, otype=otype, patch=patch):
            check_id(home)
            if otype:
                validate_patch(schema.otype(otype), patch)
            elif len(patch) > MAX_OBJECT_DATA_BYTES:
                # Without a type the fields can be checked only once the object is read.
                raise TooLarge(f"the patch is {len(patch)} bytes; at most {MAX_OBJECT_DATA_BYTES} are allowed")
        case ObjDelete(id=home):
            check_id(home)
        case AssocAdd(id1=id1, atype=atype, id2=id2, time=time, data=data):
            _check_ends(id1, id2)
            _check_time(time)
            validate_data(schema.atype(atype), data)
        case AssocDelete(id1=id1, atype=atype, id2=id2):
            _check_ends(id1, id2)
            schema.atype(atype)
        case AssocChangeType(id1=id1, atype=atype, id2=id2, new_atype=new):
            _check_ends(id1, id2)
            schema.atype(atype)
            schema.atype(new)
        case SettleEdge(id1=id1, atype=atype, id2=id2, present=present, time=time, data=data):
            _check_ends(id1, id2)
            known = schema.atype(atype)
            if present:
                _check_time(time)
                validate_data(known, data)
        case ForgetIntent(low_id=low, high_id=high, token=token):
            _check_ends(low, high)
            if low >= high or token < 0:
                raise InvalidArgument(f"({low}, {high}, token {token}) names no intent: low_id < high_id, token ≥ 0")
        case TouchKeys():
            pass  # names rows that exist, whoever made them


def _check_ends(id1: int, id2: int) -> None:
    check_id(id1, "id1")
    check_id(id2, "id2")


def _check_time(time: int) -> None:
    if not 0 <= time <= MAX_TIME:
        raise InvalidArgument(f"time {time} is outside 0 … 2^63 - 1")
