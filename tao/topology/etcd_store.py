"""The topology in etcd, one key for each section of the document (`tao.topology.sections`), changed by compare-and-set.

``PREFIX/topology/head`` is the section that every change rewrites. It also names the edition under which the others
are stored, ``PREFIX/topology/sections/EDITION/…``, and has a mark of who wrote it. A change is one transaction: it
compares what was read and stores the sections that differ. A whole document may be more than a transaction holds, so it
is stored under a new edition first, in several steps, and the last one exchanges the head.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from tao.etcd.client import (
    MAX_TRANSACTION_BYTES,
    MAX_TRANSACTION_OPERATIONS,
    EtcdClient,
    EtcdUnavailable,
    delete,
    end_of,
    has_value,
    is_at,
    is_unchanged_since,
    put,
)
from tao.etcd.location import EtcdLocation
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import TopologyConflict, TopologyError, TopologyTooLarge
from tao.model.topology import Topology
from tao.routing.topology_changes import record_change
from tao.topology.document import check_topology
from tao.topology.etcd_document import EtcdDocument, Keys, Snapshot, read_snapshot
from tao.topology.sections import HEAD, sections_of, topology_of

_EDITION: Final = "edition"
_WRITER: Final = "writer"
_ATTEMPTS: Final = 3
"""Attempts of a change whose comparison fails although the version is the expected one: somebody edits keys by hand."""


class EtcdTopology(EtcdDocument[Topology, TopologyError]):
    """The `TopologyStore` port over etcd."""

    failure = TopologyError
    what = "topology"

    def __init__(
        self, client: EtcdClient, location: EtcdLocation, *, on_error: Callable[[TopologyError], None]
    ) -> None:
        """Several documents may share a client."""
        root = location.key("topology/")
        super().__init__(client, Keys.below(root, root + HEAD.encode()), str(location), on_error)
        self._sections: Final = root + b"sections/"

    def _parse(self, snapshot: Snapshot) -> Topology:
        head = self._head_of(snapshot)
        if head is None:
            raise TopologyError(f"{self._place}: there is no topology; store one with `tao topology import`")
        folder = self._folder(str(head.pop(_EDITION, "")))
        head.pop(_WRITER, None)
        sections = {
            key.removeprefix(folder).decode(errors="replace"): value
            for key, value in snapshot.values.items()
            if key.startswith(folder)
        }
        return topology_of({**sections, HEAD: msgspec.json.encode(head)}, self._place)

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        """Store ``changed`` as version ``expected_version + 1`` (0: there is no document yet), with the change
        recorded in it (`tao.routing.topology_changes`), and return it.

        Raises `TopologyConflict` when the document has another version, `TopologyTooLarge` when the change does not fit
        into a transaction, and `TopologyError` when it breaks a rule or etcd does not answer. In the last case it may
        have been stored.
        """
        stored = msgspec.structs.replace(changed, version=expected_version + 1)
        check_topology(stored)
        try:
            if expected_version == 0:
                return await self._replace(0, stored)
            return await self._change(expected_version, stored)
        except EtcdUnavailable as error:
            raise TopologyError(
                f"it is not known whether topology {stored.version} was stored: {error.message}"
            ) from error

    async def replace(self, expected_version: int, document: Topology) -> Topology:
        """Store a whole document of a version above ``expected_version`` (0: there is none yet), of any size, and
        return it. Raises as `change`."""
        check_topology(document)
        if document.version <= expected_version:
            raise TopologyError(f"{self._place}: version {document.version} is not above {expected_version}")
        try:
            return await self._replace(expected_version, document)
        except EtcdUnavailable as error:
            raise TopologyError(
                f"it is not known whether topology {document.version} was stored: {error.message}"
            ) from error

    async def _change(self, expected_version: int, wanted: Topology) -> Topology:
        writer = secrets.token_hex(8)
        state = self._state
        if state is None or state[1].version != expected_version:
            state = await self._current()
        for _ in range(_ATTEMPTS):
            snapshot, before = state
            self._check_version(before.version, expected_version)
            stored = record_change(before, wanted)
            head = self._head_of(snapshot)
            assert head is not None, "a snapshot with a document has a head"
            edition = str(head[_EDITION])
            values = self._keyed(sections_of(stored), edition, writer)
            operations = list(_difference(snapshot.values, values, self._folder(edition)))
            _check_size(operations)
            answer = await self._transact(self._unchanged(snapshot, edition), operations, writer)
            if answer is not None:
                self._state = self._after(snapshot, values, answer, edition), stored
                return stored
            state = await self._take(await read_snapshot(self._client, self._keys))
        raise TopologyConflict(f"{self._place}: keys of the document are being changed by somebody else; try again")

    async def _replace(self, expected_version: int, document: Topology) -> Topology:
        """Store all sections under a new edition, then exchange the head, and remove the former editions."""
        snapshot = await read_snapshot(self._client, self._keys)
        found = 0 if self._head_of(snapshot) is None else self._version_of(snapshot)
        self._check_version(found, expected_version)
        writer = secrets.token_hex(8)
        edition = f"{document.version}-{writer}"
        folder = self._folder(edition)
        values = self._keyed(sections_of(document), edition, writer)
        head = values.pop(self._keys.head)
        former = [delete(self._sections, folder), delete(end_of(folder), end_of(self._sections))]
        unchanged = [is_at(self._keys.head, snapshot.head_revision)]
        steps = [*_batches([put(key, value) for key, value in values.items()]), [put(self._keys.head, head), *former]]
        for step in steps:
            # A step that is repeated late stores nothing: the head was exchanged before.
            if await self._transact(unchanged, step, writer) is not None:
                continue
            await self._client.transact((), [delete(folder, end_of(folder))])
            self._check_version(await self._version_now(), expected_version)
            raise TopologyConflict(f"{self._place}: somebody else changed the document meanwhile; try again")
        return document

    async def _transact(
        self, compare: Sequence[pb.Compare], operations: Sequence[pb.RequestOp], writer: str
    ) -> pb.TxnResponse | None:
        """Carry out a transaction; None when something has changed. One that was repeated, because its first answer was
        lost, is recognised by the writer's mark."""
        head = pb.RequestOp(request_range=pb.RangeRequest(key=self._keys.head))
        answer = await self._client.transact(compare, operations, [head])
        if answer.succeeded:
            return answer
        found = answer.responses[0].response_range.kvs
        is_own = bool(found) and _head(found[0].value, self._place).get(_WRITER) == writer
        return answer if is_own else None

    def _unchanged(self, snapshot: Snapshot, edition: str) -> list[pb.Compare]:
        """Return the comparisons that the document is still that of the snapshot."""
        folder = self._folder(edition)
        return [
            is_at(self._keys.head, snapshot.head_revision),
            has_value(self._keys.head, snapshot.values[self._keys.head]),
            is_unchanged_since(folder, end_of(folder), snapshot.revision),
        ]

    def _after(
        self, snapshot: Snapshot, values: Mapping[bytes, bytes], answer: pb.TxnResponse, edition: str
    ) -> Snapshot:
        """Return what etcd has after a change. A repeated transaction was not the last one for certain."""
        folder = self._folder(edition)
        others = {key: value for key, value in snapshot.values.items() if not key.startswith(folder)}
        revision = answer.header.revision if answer.succeeded else snapshot.revision
        return Snapshot(revision, revision, {**others, **values})

    def _check_version(self, found: int, expected: int) -> None:
        if found != expected:
            raise TopologyConflict(
                f"{self._place}: is at version {found}, not {expected}: it was changed meanwhile; "
                "read it again and repeat the change"
            )

    async def _version_now(self) -> int:
        return self._version_of(await read_snapshot(self._client, self._keys))

    def _version_of(self, snapshot: Snapshot) -> int:
        """Return the version in the head, whatever else is wrong with the document."""
        head = self._head_of(snapshot)
        version = 0 if head is None else head.get("version", 0)
        return version if isinstance(version, int) else 0

    def _head_of(self, snapshot: Snapshot) -> dict[str, Any] | None:
        value = snapshot.values.get(self._keys.head)
        return None if value is None else _head(value, self._place)

    def _keyed(self, sections: Mapping[str, bytes], edition: str, writer: str) -> dict[bytes, bytes]:
        """Return the sections of a document by their keys in etcd."""
        folder = self._folder(edition)
        head = {**_head(sections[HEAD], self._place), _EDITION: edition, _WRITER: writer}
        values = {folder + name.encode(): value for name, value in sections.items() if name != HEAD}
        return {self._keys.head: msgspec.json.encode(head), **values}

    def _folder(self, edition: str) -> bytes:
        return self._sections + edition.encode() + b"/"


def _head(value: bytes, place: str) -> dict[str, Any]:  # Any: the fields of the head
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"{place}: the head of the topology is wrong: {error}") from error


def _difference(before: Mapping[bytes, bytes], after: Mapping[bytes, bytes], folder: bytes) -> Iterator[pb.RequestOp]:
    """Yield the operations that make the keys of a folder, and the head, those of ``after``."""
    for key, value in after.items():
        if before.get(key) != value:
            yield put(key, value)
    for key in before:
        if key.startswith(folder) and key not in after:
            yield delete(key)


def _check_size(operations: Sequence[pb.RequestOp]) -> None:
    size_bytes = sum(each.ByteSize() for each in operations)
    if len(operations) > MAX_TRANSACTION_OPERATIONS or size_bytes > MAX_TRANSACTION_BYTES:
        raise TopologyTooLarge(
            f"the change has {len(operations)} keys of {size_bytes:,} bytes, and one transaction of etcd holds "
            f"{MAX_TRANSACTION_OPERATIONS} keys of {MAX_TRANSACTION_BYTES:,} bytes: make several changes, or store the "
            "whole document with `tao topology import`"
        )


def _batches(operations: Sequence[pb.RequestOp]) -> Iterator[list[pb.RequestOp]]:
    """Yield the operations in transactions that etcd accepts."""
    batch: list[pb.RequestOp] = []
    size_bytes = 0
    for each in operations:
        if batch and (len(batch) == MAX_TRANSACTION_OPERATIONS or size_bytes + each.ByteSize() > MAX_TRANSACTION_BYTES):
            yield batch
            batch, size_bytes = [], 0
        _check_size([each])
        batch.append(each)
        size_bytes += each.ByteSize()
    if batch:
        yield batch
