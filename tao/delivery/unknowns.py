"""What a leader does not know of its shards before the tailer of their database has said it (DESIGN.md §7).

Each database has a tailer of its own, which reads nothing of the others' shards and must not be asked of them: it would
say that there is nothing new, and what somebody else was told would be missed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from tao.delivery.coverage import Coverage
from tao.model.delivery import Span

_MAX_WANTS: Final = 4_096
"""Shards in one answer to a tailer; the next one has the others."""


class _OfDatabase:
    """``unlinked``: where these go on is not known; ``asked``: those that its tailer has been asked of since it proved
    time last. ``unheard``: of these something may have been told to others, and has not come yet. ``wanted``: by shard
    and source, what has to come again, from where."""

    __slots__ = ("asked", "unheard", "unlinked", "wanted")

    def __init__(self) -> None:
        self.unlinked: dict[int, None] = {}
        self.asked: set[int] = set()
        self.unheard: set[int] = set()
        self.wanted: dict[int, dict[str, int]] = {}


class Unknowns:
    """Of all open shards of one leader."""

    def __init__(self, database_of: Callable[[int], str]) -> None:
        """``database_of``: by name."""
        self._database_of: Final = database_of
        self._of_databases: Final[defaultdict[str, _OfDatabase]] = defaultdict(_OfDatabase)

    @property
    def unlinked(self) -> int:
        """How many shards there are of which it is not known where they go on."""
        return sum(len(each.unlinked) for each in self._of_databases.values())

    def is_unlinked(self, shard: int) -> bool:
        """Whether it is not known where the shard goes on."""
        return shard in self._of(shard).unlinked

    def has_times(self, database: str) -> bool:
        """Whether a time that was proved of the database is true of all its shards."""
        return not self._of_databases[database].unheard

    def has_positions(self, database: str) -> bool:
        """Whether a position that was proved of the database is true of all its shards."""
        return self.has_times(database) and not self._of_databases[database].unlinked

    def lose_sight(self, shard: int) -> None:
        """The shard has just been opened, or may have been away."""
        unknown = self._of(shard)
        unknown.unlinked[shard] = None
        unknown.unheard.add(shard)

    def forget(self, shard: int) -> None:
        """The shard is closed."""
        unknown = self._of(shard)
        unknown.unlinked.pop(shard, None)
        unknown.asked.discard(shard)
        unknown.unheard.discard(shard)
        unknown.wanted.pop(shard, None)

    def heard(self, shard: int, coverage: Coverage) -> None:
        """The tailer has said something of the shard, which the coverage has taken."""
        unknown = self._of(shard)
        if coverage.owing:
            unknown.unheard.add(shard)
        else:
            unknown.unheard.discard(shard)
        if coverage.linked:
            unknown.unlinked.pop(shard, None)
        else:
            unknown.unlinked[shard] = None

    def want(self, shard: int, source: str, number: int) -> None:
        """What came after ``number`` shall come again."""
        wanted = self._of(shard).wanted.setdefault(shard, {})
        wanted[source] = min(number, wanted.get(source, number))

    def wants(self, database: str, coverages: Mapping[int, Coverage]) -> list[Span]:
        """As `tao.delivery.publisher.Publisher.wants`."""
        unknown = self._of_databases[database]
        asked: dict[tuple[int, str], int] = {}
        for shard in islice([shard for shard in unknown.unlinked if shard not in unknown.asked], _MAX_WANTS):
            unknown.asked.add(shard)
            if shard not in unknown.wanted:  # the answer to a subscriber's want says it, too
                asked[shard, coverages[shard].source] = coverages[shard].head
        for shard in tuple(islice(unknown.wanted, _MAX_WANTS)):
            for source, number in unknown.wanted.pop(shard).items():
                asked[shard, source] = number
        return [Span(shard, source, number, number) for (shard, source), number in asked.items()]

    def ask_again(self, database: str) -> None:
        """Whatever has been asked of its shards and not been answered."""
        self._of_databases[database].asked.clear()

    def ask_all_again(self) -> None:
        """Of every database."""
        for database in self._of_databases:
            self.ask_again(database)

    def _of(self, shard: int) -> _OfDatabase:
        return self._of_databases[self._database_of(shard)]
