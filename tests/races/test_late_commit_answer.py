"""The answer to a COMMIT arrives after the shard has changed its owner twice.

leader-1                           leader-2
commit of version 1 …
(moved away by the topology)       takes the shard, commits version 2
takes the shard again
… the answer comes                 version 1 must not enter the cache of the new ownership
"""

from __future__ import annotations

import asyncio

import pytest

from tao.leader.write_path import WritePath
from tao.model.ports import Transaction
from tao.model.writes import AssocAdd
from tests.rigs.leader_rig import COMMENT, LeaderRig, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate

A, B = make_id(64), make_id(65)


async def test_what_was_committed_under_an_earlier_ownership_does_not_enter_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, gate = MemoryStore(4), Gate()
    one, two = LeaderRig(store, store, name="leader-1"), LeaderRig(store, store, name="leader-2")
    await one.take(0)
    with monkeypatch.context() as patched:
        answer_commits_late(one.writes, store, gate, patched)
        late = asyncio.ensure_future(one.write(AssocAdd(A, COMMENT, B, 1, b"")))
        await gate.arrived.wait()
    one.ownership.want([])
    await two.take(0)
    await two.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    two.ownership.want([])
    await one.take(0)
    gate.open()
    await late
    assert one.cache.peek_list(A, COMMENT) is None
    assert one.cache.peek_count(A, COMMENT) is None
    await one.close()
    await two.close()


def answer_commits_late(writes: WritePath, store: MemoryStore, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    make = store.transaction

    def transaction(server: str, *, timeout_seconds: float) -> Transaction:
        made = make(server, timeout_seconds=timeout_seconds)
        commit = made.commit

        async def late() -> None:
            await commit()
            await store.unlock(made._locked)
            made._locked = []
            await gate.pass_through()

        monkeypatch.setattr(made, "commit", late, raising=False)
        return made

    monkeypatch.setattr(store, "transaction", transaction)
