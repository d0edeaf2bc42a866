"""Documents in etcd: read, followed through cuts and compactions, and parsed when they have changed.

A follower of a document reads all of it first, and then receives changes from that revision on. After an interruption
it reads everything again. So it needs no changes that etcd has compacted, and notices an etcd that was restored from a
snapshot, whose revisions have gone back. A watch at a member that is cut off receives nothing and does not fail, so the
key that every change rewrites is read every few seconds. It is compared by its value, because a restored etcd gives out
the same revisions again.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tao.access.document import AccessDocument, load_access
from tao.etcd.client import EtcdClient, WatchBroken, end_of
from tao.model.errors import AccessError, OperatorError, SchemaError, TaoError, unreadable
from tao.schema.registry import Schema, load_schema
from tao.topology.watched_document import Document, Failure, NoDocument, WatchedDocument

_logger = logging.getLogger(__name__)

CHECK_SECONDS: Final = 5.0
"""Interval between two reads of the head of a document whose watch is silent."""

_RETRY_SECONDS: Final = 0.5
"""Pause after a watch has ended or a read has failed."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a document, up to ``end``. ``head`` is rewritten by every change."""

    head: bytes
    start: bytes
    end: bytes

    @classmethod
    def of_one(cls, key: bytes) -> Keys:
        """Return the keys of a document that is one key."""
        return cls(key, key, key + b"\0")

    @classmethod
    def below(cls, prefix: bytes, head: bytes) -> Keys:
        """Return the keys that begin with a prefix; ``head`` is one of them."""
        return cls(head, prefix, end_of(prefix))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The keys and values of a document as of a revision; ``head_revision`` changed its head, and is 0 without one."""

    revision: int
    head_revision: int
    values: Mapping[bytes, bytes]


async def read_snapshot(client: EtcdClient, keys: Keys) -> Snapshot:
    """Return what etcd has now. Raises `TaoError`."""
    found = await client.read(keys.start, keys.end)
    revisions = [each.mod_revision for each in found.kvs if each.key == keys.head]
    return Snapshot(found.header.revision, sum(revisions), {each.key: each.value for each in found.kvs})


async def _read_head(client: EtcdClient, keys: Keys) -> bytes | None:
    found = await client.read(keys.head)
    return found.kvs[0].value if found.kvs else None


async def follow(
    client: EtcdClient,
    keys: Keys,
    use: Callable[[Snapshot], Awaitable[None]],
    report: Callable[[TaoError], None],
) -> None:
    """Call ``use`` with what etcd has, and with every later state in which the head has changed, until cancelled.

    Errors, those of ``use`` among them, go to ``report``, and it goes on."""
    while True:
        try:
            await _follow_once(client, keys, use, report)
        except WatchBroken as error:
            _logger.info("the watch of %s goes on anew: %s", keys.head.decode(), error.message)
        except TaoError as error:
            report(error)
        except Exception as error:
            _logger.exception("following %s failed", keys.head.decode())
            report(OperatorError(f"following it failed: {error!r}"))
        await asyncio.sleep(_RETRY_SECONDS)


async def _follow_once(
    client: EtcdClient,
    keys: Keys,
    use: Callable[[Snapshot], Awaitable[None]],
    report: Callable[[TaoError], None],
) -> None:
    snapshot = await read_snapshot(client, keys)
    await _use(snapshot, use, report)
    changes = client.watch(keys.start, keys.end, snapshot.revision + 1, CHECK_SECONDS)
    async for change in changes:
        if change is None:
            if await _read_head(client, keys) != snapshot.values.get(keys.head):
                await changes.aclose()
                return
            continue
        values, head_revision = dict(snapshot.values), snapshot.head_revision
        for event in change.events:
            removed = event.type == event.DELETE
            if removed:
                values.pop(event.kv.key, None)
            else:
                values[event.kv.key] = event.kv.value
            if event.kv.key == keys.head:
                head_revision = 0 if removed else event.kv.mod_revision
        changed = head_revision != snapshot.head_revision
        snapshot = Snapshot(change.header.revision, head_revision, values)
        if changed:
            await _use(snapshot, use, report)


async def _use(
    snapshot: Snapshot, use: Callable[[Snapshot], Awaitable[None]], report: Callable[[TaoError], None]
) -> None:
    try:
        await use(snapshot)
    except NoDocument:
        pass
    except TaoError as error:
        report(error)


class EtcdDocument(WatchedDocument[Document, Failure]):
    """The `DocumentStore` port over etcd."""

    advice = (
        "an etcd that was restored from a snapshot has an old document: store a newer one with `tao topology import`"
    )

    def __init__(self, client: EtcdClient, keys: Keys, place: str, on_error: Callable[[Failure], None]) -> None:
        """``place`` names the document in errors. Several documents may share a client."""
        super().__init__(place, on_error)
        self._client: Final = client
        self._keys: Final = keys
        self._state: tuple[Snapshot, Document] | None = None
        self._newest_loaded: Document | None = None

    @abstractmethod
    def _parse(self, snapshot: Snapshot) -> Document:
        """Return the document of the values. Raises the failure, or `NoDocument` when there need not be one."""

    async def load(self) -> Document:
        """Return the document that etcd has now. Raises the failure when there is none, when it is wrong or older than
        one that was loaded or watched before, or another one of the same version, and when etcd does not answer.

        An etcd that was restored from a snapshot gives out the same versions again, with other content. A change that
        is made from such a document may undo a promotion."""
        known = self._newest()  # before the read, which then finds nothing older unless etcd has gone back
        try:
            document = (await self._current())[1]
        except self.failure:
            raise
        except TaoError as error:
            raise self.failure(f"the {self.what} cannot be read: {error.message}") from error
        if known is not None and document.version < known.version:
            raise self.failure(f"{self._place}: its version {document.version} is below {known.version}; {self.advice}")
        if known is not None and document.version == known.version and document != known:
            raise self.failure(f"{self._place}: its version {document.version} had other content before; {self.advice}")
        if known is None or document.version > known.version:
            self._newest_loaded = document
        return self._loaded(document)

    def _newest(self) -> Document | None:
        """Return the newest document that was loaded or watched."""
        found = [each for each in (self._seen, self._newest_loaded) if each is not None]
        return max(found, key=lambda each: each.version, default=None)

    async def _current(self) -> tuple[Snapshot, Document]:
        """Return what etcd has now: a large document is fetched and parsed only when it has changed."""
        state = self._state
        if state is not None:
            head = await _read_head(self._client, self._keys)
            if head is not None and head == state[0].values.get(self._keys.head):
                return state
        return await self._take(await read_snapshot(self._client, self._keys))

    async def _take(self, snapshot: Snapshot) -> tuple[Snapshot, Document]:
        state = snapshot, await asyncio.to_thread(self._parse, snapshot)
        self._state = state
        return state

    def _look_again(self) -> None:
        if self._following is not None and self._state is not None:
            asyncio.get_running_loop().call_soon(self._use_quietly, self._state[1])

    async def _follow(self) -> None:
        async def use(snapshot: Snapshot) -> None:
            self._use((await self._take(snapshot))[1])

        await follow(self._client, self._keys, use, self._report_any)

    def _use_quietly(self, document: Document) -> None:
        try:
            self._use(document)
        except self.failure as error:
            self._report(error)

    def _report_any(self, error: TaoError) -> None:
        if not isinstance(error, self.failure):
            error = self.failure(f"the {self.what} cannot be read: {error.message}")
        self._report(error)


class EtcdAccess(EtcdDocument[AccessDocument, AccessError]):
    """The `DocumentStore` of access documents over a key in etcd, with the text of an access file."""

    failure = AccessError
    what = "access document"

    def __init__(
        self, client: EtcdClient, key: bytes, place: str, *, required: bool, on_error: Callable[[AccessError], None]
    ) -> None:
        """``required``: False allows that there is no document, as long as none has been seen."""
        super().__init__(client, Keys.of_one(key), place, on_error)
        self._required: Final = required

    async def load_if_there(self) -> AccessDocument | None:
        """Return the document, or None when there is none and there need not be one. Raises `AccessError`."""
        try:
            return await self.load()
        except NoDocument:
            return None

    def _parse(self, snapshot: Snapshot) -> AccessDocument:
        text = snapshot.values.get(self._keys.head)
        if text is None and not self._required and self._seen is None:
            raise NoDocument
        return load_access(_text_of(text, self._place, AccessError), self._place)


class EtcdSchema:
    """The schema in a key of etcd, with the text of a schema file."""

    def __init__(self, client: EtcdClient, key: bytes, place: str) -> None:
        self._client: Final = client
        self._keys: Final = Keys.of_one(key)
        self._place: Final = place
        self._text = ""
        self._last_problem = ""

    async def load(self) -> Schema:
        """Return the schema. Raises `SchemaError`, also when etcd does not answer."""
        try:
            self._text = self._text_of(await read_snapshot(self._client, self._keys))
        except SchemaError:
            raise
        except TaoError as error:
            raise SchemaError(f"the schema cannot be read: {error.message}") from error
        return load_schema(self._text, self._place)

    async def watch(self, on_change: Callable[[str, str], object]) -> None:
        """Call back with the text and its place whenever the text changes, until cancelled."""

        async def use(snapshot: Snapshot) -> None:
            self._use(self._text_of(snapshot), on_change)

        await follow(self._client, self._keys, use, self._report)

    async def look(self, on_change: Callable[[str, str], object]) -> None:
        """Call back now if the text has changed."""
        try:
            self._use(self._text_of(await read_snapshot(self._client, self._keys)), on_change)
        except TaoError as error:
            self._report(error)

    def _use(self, text: str, on_change: Callable[[str, str], object]) -> None:
        self._last_problem = ""
        if text != self._text:
            self._text = text
            on_change(text, self._place)

    def _report(self, error: TaoError) -> None:
        if error.message != self._last_problem:
            self._last_problem = error.message
            _logger.warning("%s: %s; what it said before stays in use", self._place, error.message)

    def _text_of(self, snapshot: Snapshot) -> str:
        return _text_of(snapshot.values.get(self._keys.head), self._place, SchemaError)


def _text_of(value: bytes | None, place: str, failure: type[OperatorError]) -> str:
    if value is None:
        raise failure(f"{place}: there is no document; store one with `tao topology import`")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise failure(unreadable(place, error)) from error
