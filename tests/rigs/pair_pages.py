"""The pages of all edges of a type that a database reads, from rows in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import PairPage, PairsQuery
from tao.storage.scans import page_end, pair_page


def page_of_rows(
    version_epoch: int, query: PairsQuery, versions: Mapping[ListKey, int], rows: Iterable[EdgeKey]
) -> PairPage:
    """Return the page of the lists with ``versions`` and the edges ``rows``, which may be of all types and shards."""
    first, atype, limit = query.after_id1, query.atype, query.limit

    def is_asked_for(key: ListKey | EdgeKey) -> bool:
        is_later = first < key.id1 <= query.last_id1
        return key.id1 >> SHARD_SHIFT == query.shard and (is_later or (key.id1, key.atype) == (first, atype))

    lists = sorted(filter(is_asked_for, versions))
    edges = sorted(key for key in rows if is_asked_for(key) and key > EdgeKey(first, atype, query.after_id2))
    return pair_page(
        version_epoch,
        [(key.id1, versions[key]) for key in lists[:limit] if key.atype == atype],
        [(key.id1, key.id2) for key in edges[:limit] if key.atype == atype],
        page_end(
            atype,
            lists[limit - 1] if len(lists) >= limit else None,
            edges[limit - 1] if len(edges) >= limit else None,
        ),
    )
