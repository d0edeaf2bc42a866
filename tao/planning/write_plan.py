"""Plan a write transaction: locked rows and a batch of writes in, rows to write and the changeset out.

A pure function decides everything that must hold of a write transaction: a version rises by exactly one for each key
whose rows change and not at all for others, a count equals the edges, an invalid write fails alone, and a pair's mirror
is either written or recorded as an intent. Its caller only locks, reads, applies and commits.

A write that changes nothing succeeds. Since no version rises, no changeset brings its writer's caches a state that they
may not have yet, so the write gets invalidations at the current version instead.

`validate` refuses, before a write is queued, everything that can be judged without rows. Refusing early keeps
invalid input out of the transactions that others wait for. What depends on stored rows (a merged size, an object's
type, whether data fits a new type) is left to `draft_writes`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from tao.model.changes import Change, ListInvalidation, ObjectChange, ObjectInvalidation
from tao.model.edge_states import State
from tao.model.errors import InvalidArgument, RequestError, RetryableError, TooLarge
from tao.model.graph import MAX_OBJECT_DATA_BYTES, MAX_TIME, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT, check_id
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ListRow, ObjectRow, RowChanges, ShardRow, WriteKeys
from tao.model.versions import NEVER_WRITTEN, epoch_of, next_version
from tao.model.writes import (
    AddJob,
    AnnounceIntent,
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    AssocMerge,
    CancelJob,
    FlushCounter,
    FoldCounter,
    ForgetIntent,
    ForgetJob,
    JoinEdges,
    LeaseJob,
    NodeSetState,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    PauseJobs,
    PlaceEdges,
    PurgeEdge,
    ReadJob,
    ReadState,
    ReportJob,
    ResumeJob,
    SettleEdge,
    TouchKeys,
    Write,
    WriteOutcome,
)
from tao.planning.coordination import (
    PlannedWrite,
    coordinator_side,
    keys_of,
    touched_key,
)
from tao.planning.counters import flush_counter, fold_counter, validate_counter
from tao.planning.draft import (
    Draft,
    VersionedKey,
    add_edge,
    add_object,
    announce_intent,
    atypes_lacking,
    change_edge_type,
    coordinator_edges_of,
    delete_edge,
    delete_object,
    forget_intent,
    set_settled_edge,
    update_object,
)
from tao.planning.edge_states import (
    join_edges,
    join_settled_edge,
    merge_edge,
    purge_edge,
    read_state,
    settlement_of,
    validate_merge,
    write_registers,
)
from tao.planning.jobs import apply_job_write, validate_job, write_jobs
from tao.planning.net_changes import EdgeImages, ListImages, ObjectImages, net_changes
from tao.planning.node_states import (
    place_edges,
    set_node_state,
    validate_node_state,
    validate_page,
    write_nodes,
)
from tao.planning.retention import is_too_old, trim
from tao.schema.codec import validate_data, validate_new, validate_patch
from tao.schema.registry import Schema
from tao.schema.types import AssocType


def validate(write: Write, schema: Schema) -> None:
    """Check a write without its rows. Raises `UnknownType`, `InvalidArgument` (ids, time, token), `InvalidField` or
    `TooLarge`."""
    match write:
        case AssocAdd(id1=id1, atype=atype, id2=id2, time=time, data=data):
            _check_ends(id1, id2)
            _check_time(time)
            validate_new(_written_type(atype, schema), data)
        case AssocDelete(id1=id1, atype=atype, id2=id2):
            _check_ends(id1, id2)
            _written_type(atype, schema)
        case ObjAdd(id=home, otype=otype, data=data, allocated=allocated):
            if not allocated:  # otherwise the leader chooses the id, after this check
                check_id(home)
            validate_new(schema.otype(otype), data)
        case ObjUpdate(id=home, otype=otype, patch=patch):
            check_id(home)
            if otype:
                validate_patch(schema.otype(otype), patch)
            elif len(patch) > MAX_OBJECT_DATA_BYTES:
                # Without a type the fields can be checked only once the object is read.
                raise TooLarge(f"the patch is {len(patch)} bytes; at most {MAX_OBJECT_DATA_BYTES} are allowed")
        case ObjDelete(id=home, otype=otype):
            check_id(home)
            if otype:
                schema.otype(otype)
        case AssocChangeType(id1=id1, atype=atype, id2=id2, new_atype=new):
            _check_ends(id1, id2)
            for each in (atype, new):
                if _written_type(each, schema).states:
                    raise InvalidArgument(
                        f"type {schema.atype(each).name!r} has states, and its edges do not change their type: add the"
                        " edge under the new type and delete the old one"
                    )
        case AssocMerge(id1=id1, atype=atype, id2=id2, has_payload=has_payload, time=time, data=data):
            _check_ends(id1, id2)
            _check_time(time)
            merged = _written_type(atype, schema)
            validate_merge(write, schema)
            if has_payload:
                validate_new(merged, data)
        case ReadState(id1=id1, atype=atype, id2=id2) | PurgeEdge(id1=id1, atype=atype, id2=id2):
            _check_ends(id1, id2)
            schema.state_type(_written_type(atype, schema), State.NORMAL)
        case NodeSetState() | PlaceEdges():
            _validate_of_node(write, schema)
        case SettleEdge(id1=id1, atype=atype, id2=id2, present=present, time=time, data=data, registers=registers):
            _check_ends(id1, id2)
            known = _written_type(atype, schema)
            if bool(known.states) != (registers is not None):
                raise InvalidArgument(f"a copy of an edge of type {known.name!r} is joined only if the type has states")
            if present:
                _check_time(time)
                # The edge was accepted at its other side, maybe before a field became required.
                validate_data(known, data)
        case FlushCounter() | FoldCounter():
            validate_counter(write, schema)
        case JoinEdges() | AnnounceIntent():
            pass  # a leader makes them of checked writes
        case ForgetIntent(low_id=low, high_id=high, token=token):
            _check_ends(low, high)
            if low >= high or token < 0:
                raise InvalidArgument(
                    f"({low}, {high}, token {token}) names no intent; it needs low_id < high_id and token ≥ 0"
                )
        case TouchKeys():
            pass  # touches name existing rows, and it does not matter who created them
        case AddJob() | ReadJob() | CancelJob() | ResumeJob() | ForgetJob() | LeaseJob() | ReportJob() | PauseJobs():
            validate_job(write)


def _validate_of_node(write: NodeSetState | PlaceEdges, schema: Schema) -> None:
    if isinstance(write, PlaceEdges):
        check_id(write.id1, "id1")
        _written_type(write.atype, schema)
        validate_page(write, schema)
    else:
        check_id(write.id)
        for each in write.atypes:
            _written_type(each, schema)
        validate_node_state(write, schema)


def _written_type(number: int, schema: Schema) -> AssocType:
    atype = schema.atype(number)
    if atype.counter is not None:
        raise InvalidArgument(f"{atype.name!r} is a counter, whose slots followers write: use counter_add")
    if atype.state is not State.NORMAL:
        raise InvalidArgument(
            f"type {number} holds the {atype.state.label} edges of {atype.name!r}: write {atype.states[0]} with a state"
        )
    return atype


def _check_ends(id1: int, id2: int) -> None:
    check_id(id1, "id1")
    check_id(id2, "id2")


def _check_time(time: int) -> None:
    if not 0 <= time <= MAX_TIME:
        raise InvalidArgument(f"time {time} is outside 0 … 2^63 - 1")


Invalidation = ObjectInvalidation | ListInvalidation
_NEW_LIST: Final = ListRow(0, NEVER_WRITTEN)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The rows that one transaction writes, and the messages for each writer's caches.

    All lists but ``changes`` have one entry per write. ``changes``: one per key whose rows change, objects by id,
    then lists by key, the touched ones included. ``changes_of``: indexes into ``changes`` of the keys that the write
    named, even when another write of the batch changed them. ``unchanged_of``: for the keys it named that nobody
    changed, the version that the writer's caches must have at least. ``intents``: the intent that records the
    write's missing mirror, as it is after the transaction (None: nothing is missing). ``settles``: the writes that
    settle this intent; None when it covers edges that were not read here, so that `coordinator_edges_of` it must be
    read first."""

    rows: RowChanges
    changes: tuple[Change | ListInvalidation, ...]
    outcomes: list[WriteOutcome]
    changes_of: list[tuple[int, ...]]
    unchanged_of: list[tuple[Invalidation, ...]]
    intents: list[IntentRow | None]
    settles: list[tuple[SettleEdge, ...] | None]


@dataclass(frozen=True, slots=True)
class DraftedWrites:
    """Writes that are applied to a draft of the rows, in order.

    ``outcomes``, ``named`` and ``pairs`` have one entry per write: its result, the keys it named, and the pair of which
    it changed only the coordinator's side."""

    draft: Draft
    writes: Sequence[PlannedWrite]
    schema: Schema
    now_unix_ms: int
    outcomes: list[WriteOutcome]
    named: list[Sequence[VersionedKey]]
    pairs: list[IntentKey | None]

    def unread_lists(self, keys: WriteKeys) -> set[ListKey]:
        """Return the lists that the writes changed or named, and whose rows are not among ``keys``, those that were
        read. They have to be locked and read, too, before the writes can be planned.

        An edge of a type with states is in one of several lists, and which ones a write changes is known only by its
        row. Most edges are new, or stay in the list that was read."""
        if not keys.nodes:  # every write of an edge of such a type names nodes
            return set()
        lists = {key for named in self.named for key in named if isinstance(key, ListKey)}
        return (lists | self.draft.lists.keys()) - keys.lists


def draft_writes(
    existing: ExistingRows, writes: Sequence[PlannedWrite], schema: Schema, now_unix_ms: int
) -> DraftedWrites:
    """Apply the writes in order to a draft of the rows.

    ``existing`` holds the rows of `keys_of` the writes. The fault of a write raises nothing: its outcome carries the
    error (`RequestError`, or `IdTaken`)."""
    draft = Draft(existing)
    outcomes: list[WriteOutcome] = []
    named: list[Sequence[VersionedKey]] = []
    pairs: list[IntentKey | None] = []
    for planned in writes:
        draft.named_keys = []
        try:
            pair = _one_sided_pair(planned, schema)
            outcomes.append(_apply(draft, planned, pair, schema, now_unix_ms))
        except (RequestError, RetryableError) as error:
            outcomes.append(WriteOutcome(error=error))
            named.append(())
            pairs.append(None)
        else:
            named.append(draft.named_keys)
            pairs.append(pair)
    trim(draft, schema)
    return DraftedWrites(draft, writes, schema, now_unix_ms, outcomes, named, pairs)


def plan_of(drafted: DraftedWrites, shards: Mapping[int, ShardRow]) -> WritePlan:
    """Compute the difference between the draft and the stored rows, which have all lists that the writes name.

    ``shards``: the row of every shard that the writes change."""
    draft, schema, now_unix_ms, pairs = drafted.draft, drafted.schema, drafted.now_unix_ms, drafted.pairs
    # The set of read rows matters only where an intent of an earlier transaction names some.
    read = keys_of(drafted.writes, schema).rows_of_edges() if draft.existing.intents else frozenset[EdgeKey]()
    rows = RowChanges()
    lists, touched = _write_lists(draft, shards, rows)
    changes: tuple[Change | ListInvalidation, ...] = net_changes(_write_objects(draft, shards, rows), lists)
    if touched:
        changes = tuple(sorted((*changes, *touched), key=_place))
    _write_intents(draft, rows, now_unix_ms)
    if draft.states:
        write_registers(draft, rows, now_unix_ms)
    write_nodes(draft, rows)
    write_jobs(draft, rows)
    changes_of, unchanged_of = _shares(draft.existing, changes, drafted.named)
    intents = [None if pair is None else draft.intent(pair) for pair in pairs]
    settles = [None if intent is None else _settlement(draft, intent, read, schema) for intent in intents]
    return WritePlan(rows, changes, drafted.outcomes, changes_of, unchanged_of, intents, settles)


def _place(change: Change | ListInvalidation) -> tuple[int, int, int]:
    """Return the place of a change in a changeset: objects by id, then lists by key."""
    return (0, change.id, 0) if isinstance(change, ObjectChange) else (1, change.id1, change.atype)


def _one_sided_pair(planned: PlannedWrite, schema: Schema) -> IntentKey | None:
    """Return the pair of which the write changes only the coordinator's side, or announces that it will."""
    write = planned.write
    if isinstance(write, AnnounceIntent):
        return IntentKey(write.low_id, write.high_id)
    if planned.both_sides:
        return None
    ids = coordinator_side(write, schema)
    return None if ids is None else IntentKey(*ids)


def _apply(
    draft: Draft, planned: PlannedWrite, pair: IntentKey | None, schema: Schema, now_unix_ms: int
) -> WriteOutcome:
    match planned.write:
        # The most frequent ones first: each case before costs as much as a look at a type.
        case (AssocAdd() | AssocDelete()) as write:
            atype = schema.atype(write.atype)
            if atype.states:
                return merge_edge(draft, write, pair, schema, now_unix_ms)
            if isinstance(write, AssocDelete):
                return delete_edge(draft, write, atype, pair)
            if write.atype in schema.retention:
                own = EdgeKey(write.id1, write.atype, write.id2)
                if is_too_old(draft, own, write.time, schema):
                    draft.name_list(own)
                    return WriteOutcome()
            return add_edge(draft, write, atype, pair, schema)
        case AssocMerge() as write:
            return merge_edge(draft, write, pair, schema, now_unix_ms)
        case ReadState() as write:
            return read_state(draft, write, schema)
        case NodeSetState() as write:
            return set_node_state(draft, write, schema, now_unix_ms)
        case PlaceEdges() as write:
            return place_edges(draft, write, schema)
        case FlushCounter() as write:
            return flush_counter(draft, write, now_unix_ms)
        case PurgeEdge() as write:
            return purge_edge(draft, write, schema, now_unix_ms)
        case FoldCounter() as write:
            return fold_counter(draft, write, now_unix_ms)
        case SettleEdge() as write if write.registers is not None:
            return join_settled_edge(draft, write, schema)
        case JoinEdges() as write:
            return join_edges(draft, write, schema)
        case AssocChangeType() as write:
            return change_edge_type(draft, write, pair, schema)
        case ObjAdd() as write:
            return add_object(draft, write)
        case ObjUpdate() as write:
            return update_object(draft, write, schema)
        case ObjDelete() as write:
            return delete_object(draft, write, schema)
        case SettleEdge() as write:
            return set_settled_edge(draft, write, schema)
        case AnnounceIntent() as write:
            return announce_intent(draft, write, schema)
        case ForgetIntent() as write:
            return forget_intent(draft, write)
        case TouchKeys() as write:
            for touch in write.touches:
                key = touched_key(touch)
                # Nobody reads lists of a type that has left the schema, and their table is unknown.
                if isinstance(key, int) or schema.knows_atype(key.atype):
                    draft.raise_version(key, touch.version)
            return WriteOutcome(found=True)
        case write:
            return apply_job_write(draft, write, now_unix_ms)


def _write_objects(draft: Draft, shards: Mapping[int, ShardRow], rows: RowChanges) -> list[ObjectImages]:
    images: list[ObjectImages] = []
    for object_id, row in draft.objects.items():
        before = draft.existing.objects.get(object_id)
        raised = draft.raised.get(object_id)
        if row == before and raised is None:
            continue
        version = _above(row.version, shards[object_id >> SHARD_SHIFT].version_epoch, raised or NEVER_WRITTEN)
        after = ObjectRow(object_id, row.otype, version, row.deleted, row.data)
        rows.put_objects.append(after)
        images.append(ObjectImages(before, after))
    return images


def _write_lists(
    draft: Draft, shards: Mapping[int, ShardRow], rows: RowChanges
) -> tuple[list[ListImages], list[ListInvalidation]]:
    """Return the images of the written lists, and invalidations of the touched ones.

    No change can describe what a foreign writer did to a touched list."""
    images: list[ListImages] = []
    touched: list[ListInvalidation] = []
    stored_lists, stored_edges = draft.existing.lists, draft.existing.edges
    put_edges, delete_edges = rows.put_edges, rows.delete_edges
    for key, edges in draft.lists.items():
        changed: list[EdgeImages] = []
        grown = 0
        for edge_key, edge in edges.items():
            previous = stored_edges.get(edge_key)
            if edge == previous:
                continue
            changed.append((previous, edge))
            if edge is None:
                delete_edges.append(edge_key)
                grown -= 1
            else:
                put_edges[edge_key] = edge
                grown += previous is None
        raised = draft.raised.get(key)
        if not changed and raised is None:
            continue
        before, epoch = stored_lists.get(key, _NEW_LIST), shards[key.id1 >> SHARD_SHIFT].version_epoch
        if raised is None:
            # Rows changed by hand can leave a count too low. A negative count would fail everybody's transactions.
            after = ListRow(max(0, before.count + grown), next_version(before.version, epoch))
            images.append(ListImages(key, before, after, changed))
        else:
            counted = draft.existing.recounted.get(key, _NEW_LIST)
            after = ListRow(counted.count + grown, _above(before.version, epoch, raised, counted.version))
            touched.append(ListInvalidation(key.id1, key.atype, after.version))
        rows.put_lists[key] = after
    return images, touched


def _above(before: int, epoch: int, *seen: int) -> int:
    """Return the next version, above all versions seen.

    A version of an epoch that the shard has not reached is invalid; following it would spread it."""
    return next_version(max([before, *(version for version in seen if epoch_of(version) <= epoch)]), epoch)


def _write_intents(draft: Draft, rows: RowChanges, now_unix_ms: int) -> None:
    """Put an intent for each pair whose coordinator's edges changed, and delete intents that are settled or
    forgotten."""
    for pair in dict.fromkeys((*draft.one_sided, *draft.announced)):
        edges = draft.one_sided.get(pair, ())
        changed = {
            key.atype for key in edges if key in draft.states or draft.edge(key) != draft.existing.edges.get(key)
        }
        changed.update(draft.announced.get(pair, ()))
        if not changed:
            continue
        stored, standing = draft.existing.intents.get(pair), draft.intent(pair)
        # Tokens start at the clock: a token that a slow settler remembers must not name a later intent of the pair.
        token = now_unix_ms if stored is None else stored.token + 1
        created = now_unix_ms
        if standing is not None:
            changed.update(standing.atypes)
            created = standing.created_unix_ms
        intent = IntentRow(pair.low_id, pair.high_id, tuple(sorted(changed)), token, created)
        draft.intents[pair] = intent
        rows.put_intents.append(intent)
    rows.delete_intents.extend(pair for pair, intent in draft.intents.items() if intent is None)


def _shares(
    existing: ExistingRows, changes: Sequence[Change | ListInvalidation], named: Sequence[Sequence[VersionedKey]]
) -> tuple[list[tuple[int, ...]], list[tuple[Invalidation, ...]]]:
    """Return, for each write, the changes of the keys it named, and the versions of the named keys that nobody
    changed."""
    places: dict[VersionedKey, int] = {}
    for index, change in enumerate(changes):
        places[change.id if isinstance(change, ObjectChange) else ListKey(change.id1, change.atype)] = index
    changes_of: list[tuple[int, ...]] = []
    unchanged_of: list[tuple[Invalidation, ...]] = []
    for keys in named:
        unique = dict.fromkeys(keys) if len(keys) > 1 else keys
        changes_of.append(tuple([places[key] for key in unique if key in places]))
        unchanged = [key for key in unique if key not in places]
        unchanged_of.append(tuple(_at_current_version(existing, unchanged)) if unchanged else ())
    return changes_of, unchanged_of


def _at_current_version(existing: ExistingRows, keys: Iterable[VersionedKey]) -> Iterator[Invalidation]:
    for key in keys:
        if isinstance(key, int):
            if (row := existing.objects.get(key)) is not None:
                yield ObjectInvalidation(key, row.version)
        elif (list_row := existing.lists.get(key)) is not None:
            yield ListInvalidation(key.id1, key.atype, list_row.version)


def _settlement(
    draft: Draft, intent: IntentRow, read: AbstractSet[EdgeKey], schema: Schema
) -> tuple[SettleEdge, ...] | None:
    keys = coordinator_edges_of(intent)
    # Without an earlier intent, all of its types were written and hence read in this transaction.
    if draft.existing.intents and not read >= set(keys):
        return None
    if atypes_lacking(intent, schema):
        return None
    return tuple(settlement_of(draft, intent, schema))
