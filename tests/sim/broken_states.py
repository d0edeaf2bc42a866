"""States of edges and nodes, and their jobs, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import msgspec

from tao.model.edge_states import EdgeRegisters
from tao.model.writes import PlaceEdges, ReportJob
from tao.planning import coordination, node_states, write_plan
from tao.worker.runner import JobRunner


def older_operation_wins() -> AbstractContextManager[None]:
    """Let an operation that arrives later win, whenever it was made."""
    return patch.multiple(EdgeRegisters, joined=lambda _, later: later)


def new_edge_ignores_its_node() -> AbstractContextManager[None]:
    """Let edges be placed as if all nodes were normal."""
    return patch.multiple(coordination, _nodes_of=lambda *_: ())


def pages_send_no_copies() -> AbstractContextManager[None]:
    """Let pages of a node's job move the near ends alone, and say that all is done."""
    real = node_states.place_edges

    def place(draft: Any, write: PlaceEdges, schema: Any) -> Any:
        outcome = real(draft, write, schema)
        assert outcome.page is not None, "a page that is placed has a result"
        return msgspec.structs.replace(outcome, page=msgspec.structs.replace(outcome.page, copies=(), known=()))

    return patch.multiple(write_plan, place_edges=place)


def failed_page_ends_its_job() -> AbstractContextManager[None]:
    """Let a worker report a page that failed as the last one of its job."""

    async def report_as_last(runner: JobRunner, held: Any, *_: object) -> None:
        row = held.row
        await runner._report(held, ReportJob(row.id, row.kind, row.leases, row.cursor, row.edges, done=True))

    return patch.multiple(JobRunner, _report_failure=report_as_last)
