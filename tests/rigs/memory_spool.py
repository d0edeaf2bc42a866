"""The spool port without a disk, for models and simulations: an unsynced tail can be lost, a disk can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tao.model.delivery import SpoolMark, SpoolRow


@dataclass(slots=True)
class SpoolDisk:
    """A disk after a power failure: the first ``synced`` jobs of ``log`` remain, each of which changes the state."""

    log: list[Callable[[_State], None]] = field(default_factory=list)
    synced: int = 0

    def crash(self) -> None:
        """Lose all jobs that were not synced."""
        del self.log[self.synced :]

    def state(self) -> _State:
        """Return the state that is read after a crash."""
        state = _State()
        for job in self.log:
            job(state)
        return state


@dataclass(slots=True)
class _State:
    rows: list[SpoolRow] = field(default_factory=list)
    marks: dict[int, SpoolMark] = field(default_factory=dict)
    places: int = 0


class MemorySpool:
    """A `tao.model.ports.Spool` in memory. ``call`` runs the callbacks, in their order, at once or when the caller
    likes."""

    def __init__(self, disk: SpoolDisk, call: Callable[[Callable[[], None]], object] = lambda do: do()) -> None:
        self._disk = disk
        self._call = call
        self._unlink_all()
        self._state = disk.state()
        self._marks = tuple(self._state.marks.values())
        self._dropped: Callable[[int, str, int], None] = lambda shard, source, number: None
        self._lost: Callable[[], None] = lambda: None
        self._era = self._known_era = 0

    def marks(self) -> Sequence[SpoolMark]:
        return self._marks

    def on_change(self, dropped: Callable[[int, str, int], None], lost: Callable[[], None]) -> None:
        self._dropped, self._lost = dropped, lost

    def append(self, rows: Sequence[SpoolRow], marks: Sequence[SpoolMark], stored: Callable[[], None]) -> None:
        if self._known_era == self._era:

            def store(state: _State) -> None:
                for row in rows:
                    state.places += 1
                    state.rows.append(msgspec.structs.replace(row, place=state.places))
                state.marks.update({mark.shard: mark for mark in marks})

            self._do(store)
        self._call(stored)

    def prove(self, source: str, number: int) -> None:
        def store(state: _State) -> None:
            for mark in tuple(state.marks.values()):
                if mark.linked and mark.source == source:
                    state.marks[mark.shard] = msgspec.structs.replace(mark, head=max(mark.head, number))

        if self._known_era == self._era:
            self._do(store)

    def read(
        self,
        shard: int,
        source: str,
        after: tuple[int, int],
        max_bytes: int,
        answer: Callable[[Sequence[SpoolRow] | None], None],
    ) -> None:
        found = [
            row
            for row in self._state.rows
            if row.messages.shard == shard and row.source == source and (row.number, row.place) > after
        ]
        found.sort(key=lambda row: (row.number, row.place))
        # A row counts as 100 bytes here.
        self._call(lambda: answer(found[: max(1, max_bytes // 100)]))

    # ---- for tests -------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make all jobs so far survive a crash."""
        self._disk.synced = len(self._disk.log)

    def fail(self) -> None:
        """Fill the disk: the last jobs are not stored, nor any that are queued before the loss is reported."""
        self._era += 1
        self._unlink_all()

        def report_loss() -> None:
            self._known_era = self._era
            self._lost()

        self._call(report_loss)

    def drop_oldest(self, rows: int) -> None:
        """Drop these rows to make room."""
        gone = self._state.rows[:rows]

        def drop(state: _State) -> None:
            del state.rows[: len(gone)]
            for row in gone:
                mark = state.marks.get(row.messages.shard)
                if mark is not None and mark.source == row.source:
                    state.marks[mark.shard] = msgspec.structs.replace(mark, after=max(mark.after, row.number))

        self._do(drop)
        for row in gone:
            self._call(lambda row=row: self._dropped(row.messages.shard, row.source, row.number))  # type: ignore[misc]

    def _do(self, job: Callable[[_State], None]) -> None:
        self._disk.log.append(job)
        job(self._state)

    def _unlink_all(self) -> None:
        def unlink(state: _State) -> None:
            for mark in tuple(state.marks.values()):
                state.marks[mark.shard] = msgspec.structs.replace(mark, linked=False)

        self._disk.log.append(unlink)
