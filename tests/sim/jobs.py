"""Background jobs in the simulation: a kind that counts its items, and the check that no job is called done before they
are handled.

The jobs of nodes run as well. When one is done, every far end of its edges knows the state that it was for, and both
ends are where that state belongs.

An item is handled when its page has read the master: pages fail under faults and now and then, and are done again. A
job names itself by a number in its body, because a kind of jobs does not see the ids of its jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from tao.client import Consistency, Graph
from tao.model.edge_states import UNSET_NODE, NodeState
from tao.model.errors import Unavailable
from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import NODE_STATE_KIND, JobRow, JobState, NodeStateBody
from tao.model.rows import IntentKey, RowChanges
from tao.schema.registry import Schema
from tao.schema.types import AssocType
from tao.worker.kinds import Page
from tests.sim.checks import Violation
from tests.sim.database import SimDatabase, unix_ms

KIND: Final = "walk"
LEASE_SECONDS: Final = 12.0


class WalkBody(msgspec.Struct, frozen=True):
    """The body of a job. ``near`` is the object whose list every page reads."""

    number: str
    items: int
    near: int


class JobChecks:
    """What workers have handled, and whether jobs say so."""

    def __init__(
        self,
        master_of: Callable[[int], SimDatabase],
        schema: Schema,
        now: Callable[[], float],
        found: Callable[[Violation], None],
    ) -> None:
        self._master_of: Final = master_of
        self._schema: Final = schema
        self._now: Final = now
        self._found: Final = found
        self._handled: Final[dict[str, set[int]]] = defaultdict(set)
        self._added: Final[dict[int, WalkBody]] = {}

    def added(self, job_id: int, body: WalkBody) -> None:
        """Note a job whose insertion was acknowledged."""
        self._added[job_id] = body

    def handled(self, body: WalkBody, items: range) -> None:
        """Note the items of a page that was done."""
        self._handled[body.number].update(items)

    def committed(self, changes: RowChanges) -> None:
        """Check that a job that is done from now on has handled all of its items, and counts each once."""
        for row in changes.put_jobs.values():
            if row.kind == KIND and row.state == JobState.DONE:
                body = msgspec.msgpack.decode(row.body, type=WalkBody)
                left = set(range(body.items)) - self._handled[body.number]
                if left or row.edges != body.items:
                    counts = f"it counts {row.edges} of {body.items} items"
                    self._found(Violation("jobs", f"job {row.id} is done: {sorted(left)} are not handled, {counts}"))

    def check_calm(self) -> None:
        """Check that every acknowledged job is done, unless it waits after failures or is lost with its master."""
        for job_id in self._added:
            master = self._master_of(job_id >> SHARD_SHIFT)
            row = master.truth.jobs.get(job_id)
            if row is None and job_id not in master.past.lost_jobs:
                raise Violation("jobs", f"job {job_id} was acknowledged, and is gone")
            if row is not None and row.state != JobState.DONE and not self._waits_after_failure(row):
                raise Violation("jobs", f"long after the last fault job {job_id} is not done: {row}")

    def check_nodes(self, masters: Sequence[SimDatabase]) -> int:
        """Check the edges of every node whose job is done, unless a newer operation has overtaken it. Returns how many
        ends were compared."""
        compared = 0
        for master in masters:
            for row in master.truth.jobs.values():
                if row.kind != NODE_STATE_KIND or row.state != JobState.DONE:
                    continue
                if self._master_of(row.id >> SHARD_SHIFT) is not master:
                    continue
                body = msgspec.msgpack.decode(row.body, type=NodeStateBody)
                for number in body.atypes:
                    key = ListKey(body.id, number)
                    node = master.truth.nodes.get(key, UNSET_NODE)
                    if node.state_us == body.state_us:
                        compared += self._check_node(master, key, node)
        return compared

    def _check_node(self, master: SimDatabase, key: ListKey, node: NodeState) -> int:
        atype = self._schema.atype(key.atype)
        inverse = self._schema.inverse_of(atype)
        assert inverse is not None, "clients set the states of nodes for edges with an inverse"
        id2s = {id2 for number in atype.state_numbers for id2 in master.truth.edges.get(ListKey(key.id1, number), ())}
        for id2 in sorted(id2s):
            far = self._master_of(id2 >> SHARD_SHIFT)
            pair = IntentKey(*sorted((key.id1, id2)))
            if pair in master.past.lost_pairs or pair in far.past.lost_pairs:
                continue  # what a lost master had of it is left to `tao repair`
            known = far.truth.joined(id2, inverse.state_numbers, key.id1).id2_node
            if known != node:
                raise Violation(
                    "node", f"{id2} {inverse.name} {key.id1}: {known} is known of {node}, whose job is done"
                )
            self._check_place(master, EdgeKey(key.id1, key.atype, id2), atype)
            self._check_place(far, EdgeKey(id2, inverse.number, key.id1), inverse)
        return len(id2s)

    def _check_place(self, master: SimDatabase, key: EdgeKey, atype: AssocType) -> None:
        """Check that the one row of an end is in the list of its effective state."""
        truth = master.truth
        registers = truth.joined(key.id1, atype.state_numbers, key.id2)
        node = truth.nodes.get(ListKey(key.id1, atype.number), UNSET_NODE)
        wanted = atype.states[registers.effective_state(node.state)]
        places = [number for number in atype.state_numbers if key.id2 in truth.edges.get(ListKey(key.id1, number), ())]
        if places != [wanted]:
            raise Violation("node", f"{key} with {registers} under {node} is in {places}, and belongs to {wanted}")

    def _waits_after_failure(self, row: JobRow) -> bool:
        # Clocks of leaders differ by a second, and it may have been leased just now.
        return row.attempts > 0 and row.due_unix_ms + 1000 * LEASE_SECONDS > unix_ms(self._now())


class Walk:
    """A `tao.worker.kinds.JobKind` whose pages read the master. A third of them fail once besides."""

    name = KIND

    def __init__(self, checks: JobChecks) -> None:
        self._checks: Final = checks
        self._failed: Final[set[tuple[str, int]]] = set()

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        job = msgspec.msgpack.decode(body, type=WalkBody)
        start = int(cursor or b"0")
        items = range(start, min(start + limit, job.items))
        if (start + job.items) % 3 == 0 and (job.number, start) not in self._failed:
            self._failed.add((job.number, start))
            raise Unavailable("this page fails once")
        for _ in items:
            await graph.assoc_count(job.near, "friend", consistency=Consistency.master())
        self._checks.handled(job, items)
        return Page(str(items.stop).encode(), len(items), items.stop >= job.items)
