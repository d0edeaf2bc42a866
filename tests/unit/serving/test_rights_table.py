"""The tables of docs/reference/access.md, cell by cell, asked of the servers' own handlers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tao.access.document import load_access
from tao.follower.service import UnaryPath, UnarySettings
from tao.model.errors import InvalidArgument, PermissionDenied, TaoError, Unauthorized
from tao.serving.audit import AuditTrail
from tao.serving.requests import FOLLOWER_RULES, LEADER_RULES
from tao.serving.status_port import StatusService
from tao.wire.session import RequestHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FRIEND, USER, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import quiet
from tests.rigs.region_rig import FollowerRig, RegionRig
from tests.rigs.server_context import make_context

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "access.md"
USER_ID = make_id(64)
REQUESTS = {
    "read": pb.Request(read=pb.ReadBatch(count_id1s=[USER_ID], count_atypes=[FRIEND])),
    "fill": pb.Request(read=pb.ReadBatch(count_id1s=[USER_ID], count_atypes=[FRIEND], for_fill=True)),
    "critical_fill": pb.Request(
        read=pb.ReadBatch(count_id1s=[USER_ID], count_atypes=[FRIEND], for_fill=True, critical=True)
    ),
    "probe": pb.Request(read=pb.ReadBatch()),
    "write": pb.Request(write=pb.WriteBatch(writes=[pb.Write(obj_delete=pb.ObjDelete(id=USER_ID, otype=USER))])),
    "settle_edge": pb.Request(
        write=pb.WriteBatch(writes=[pb.Write(settle_edge=pb.SettleEdge(id1=1, atype=FRIEND, id2=2))])
    ),
    "reserve_ids": pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=1)),
    "settle_pairs": pb.Request(
        settle_pairs=pb.SettlePairs(pairs=[pb.Pair(low_id=USER_ID, high_id=USER_ID + 1, atypes=[FRIEND])])
    ),
    "select": pb.Request(select=pb.SelectRequest(limit=1)),
    "get_topology": pb.Request(get_topology=pb.GetTopology()),
    "get_schema": pb.Request(get_schema=pb.GetSchema()),
    "watch": pb.Request(watch=pb.Watch()),
    "inspect": pb.Request(inspect=pb.Inspect(obj_ids=[USER_ID])),
    "most_read": pb.Request(inspect=pb.Inspect(hot_limit=9)),
    "invalidate": pb.Request(invalidate=pb.Invalidate(shards=[0])),
    "touch_keys": pb.Request(touch_keys=pb.TouchKeys()),
    "subscribe": pb.Request(subscribe=pb.Subscribe(subscriber="x")),
    "acknowledge": pb.Request(acknowledge=pb.Acknowledge(subscribe_number=99)),
    "scan_pairs": pb.Request(scan_pairs=pb.ScanPairs(atype=1, limit=1)),
    "apply": pb.Request(apply=pb.ApplyChanges()),
    "relay": pb.Request(relay=pb.Relay()),
    "relay_by_reference": pb.Request(relay_by_reference=pb.Relay()),
    "lease_jobs": pb.Request(lease_jobs=pb.LeaseJobs(limits=[1, 1, 1], lease_ms=1_000)),
    "report_jobs": pb.Request(report_jobs=pb.ReportJobs()),
    "scan_shard": pb.Request(scan_shard=pb.ScanShard(limit=1)),
    "purge_removed": pb.Request(purge_removed=pb.PurgeRemoved(limit=1)),
    "fold_counters": pb.Request(fold_counters=pb.FoldCounters(limit=1)),
    "get_counters": pb.Request(get_counters=pb.GetCounters(ids=[USER_ID], atypes=[401])),
    "list_jobs": pb.Request(list_jobs=pb.ListJobs()),
    "change_jobs": pb.Request(change_jobs=pb.ChangeJobs(pause_kind="walk")),
    "await_applied": pb.Request(await_applied=pb.AwaitApplied(accepted=b"receipt")),
    "get_clock": pb.Request(get_clock=pb.GetClock()),
    "inspect_journal": pb.Request(inspect_journal=pb.InspectJournal()),
    "change_journal": pb.Request(change_journal=pb.ChangeJournal(discard=1)),
    "keep_copies": pb.Request(keep_copies=pb.KeepCopies(journal="j")),
    "get_watcher_report": pb.Request(get_watcher_report=pb.GetWatcherReport()),
}
PEERS = {
    "client": ("client", "app"),
    "operator": ("operator", "operator/op"),
    "follower": ("near-2", "follower/near-2"),
    "leader": ("leader-2", "leader/leader-2"),
    "tailer": ("tailer", "tailer/t-1"),
    "watcher": ("watcher", "watcher/w-1"),
    "worker": ("worker", "worker/k-1"),
    "passed on": ("near-2", "follower/near-2"),
}
CALLERS = "callers: {app: [it], operator/op: [it], worker/k-1: [it]}\n"
NOTHING = f"format: 1\nversion: 1\nroles: {{it: {{}}}}\n{CALLERS}"
EVERYTHING = (
    "format: 1\nversion: 2\nroles: {it: {read: all, write: all, critical: all, watch: all, administer: all}}\n"
    + CALLERS
)


def table(heading: str) -> dict[tuple[str, str], str]:
    """Return the cells of the table below a heading, by request and peer."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    head, _, *rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if line.startswith("|")]
    return {(row[0].strip("`"), peer): cell for row in rows for peer, cell in zip(head[1:], row[1:], strict=True)}


TABLES = {"At a follower": table("At a follower"), "At a leader": table("At a leader")}


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    rig = RegionRig()
    await rig.start()
    yield rig
    await rig.close()


class UnaryCalls:
    """The handler of a follower's unary calls, which hosts no shard: it asks another follower for each read and
    write."""

    def __init__(self, follower: FollowerRig) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        context = make_context(follower.configuration, follower.links.as_links(), self._spawn)
        service = follower.service
        self.handle = UnaryPath(
            context, service, service.admit, follower.reads.shares, frozenset, UnarySettings()
        ).handle

    def _spawn(self, job: Coroutine[Any, Any, None]) -> object:
        self.tasks.append(asyncio.get_running_loop().create_task(job))
        return self.tasks[-1]


async def refusal(server: RequestHandler, kind: str, peer: str, *, settles: bool = False) -> str:
    """Return the reason for which a request is refused, at once or in its answer; "" when it is begun."""
    name, caller = PEERS[peer]
    request = pb.Request(deadline_ms=60_000)
    request.MergeFrom(REQUESTS[kind])
    if settles:
        request.settle_shards_first.add(low_shard=0, high_shard=0)
    if peer == "passed on":
        request.caller = "app"
    answers: list[pb.Answer] = []
    try:
        server.handle(request, MemoryReply(answers.append, peer=name, caller=caller))
    except (PermissionDenied, Unauthorized) as error:
        return error.reason
    except TaoError:
        return ""
    if kind == "critical_fill":
        await quiet()  # those of the peers before it have the share of the master's reads
    if isinstance(server, UnaryCalls):
        await asyncio.gather(*server.tasks)
    for answer in answers:
        if answer.error.reason in (PermissionDenied.reason, Unauthorized.reason):
            return answer.error.reason
        reasons = [each.reason for each in (*answer.read.errors, *answer.counter_values.errors)]
        reasons += [each.error.reason for each in answer.write.results]
        if PermissionDenied.reason in reasons:
            return PermissionDenied.reason
    return ""


@pytest.mark.parametrize(
    ("heading", "kind"), sorted({(name, kind) for name, cells in TABLES.items() for kind, _ in cells})
)
async def test_a_cell_says_what_happens(region: RegionRig, heading: str, kind: str) -> None:
    server, configuration = (
        (region.near.service, region.near.configuration)
        if heading == "At a follower"
        else (region.leader.service, region.leader.configuration)
    )
    expected = {"no": "UNAUTHORIZED", "yes": ""}
    for rules in ("", NOTHING, EVERYTHING):
        if rules:
            configuration.access.use_document(load_access(rules, "access.yaml"))
        for peer in PEERS:
            cell = TABLES[heading][kind, peer]
            denied = PermissionDenied.reason if rules is NOTHING else ""
            assert await refusal(server, kind, peer) == expected.get(cell, denied), (peer, cell, rules)


@pytest.mark.parametrize(
    ("kind", "settles"), [("read", True), *((kind, False) for kind in ("read", "probe", "write", "watch"))]
)
async def test_a_cell_says_what_happens_to_a_unary_call_for_which_another_follower_is_asked(
    region: RegionRig, kind: str, settles: bool
) -> None:
    near = region.near
    expected = {"no": "UNAUTHORIZED", "yes": ""}
    for rules in ("", NOTHING, EVERYTHING):
        if rules:
            near.configuration.access.use_document(load_access(rules, "access.yaml"))
        for peer in PEERS:
            cell = TABLES["At a follower"][kind, peer]
            denied = PermissionDenied.reason if rules is NOTHING else ""
            calls = UnaryCalls(near)
            sent = sum(len(near.links[name].sent) for name in ("near-1", "leader-1"))
            assert await refusal(calls, kind, peer, settles=settles) == expected.get(cell, denied), (peer, cell, rules)
            if cell == "no" or (peer == "operator" and expected.get(cell, denied)):
                after = sum(len(near.links[name].sent) for name in ("near-1", "leader-1"))
                assert after == sent, "nothing is passed on"


@pytest.mark.parametrize(("heading", "kind"), [("At a watcher", "get_watcher_report"), ("At a tailer", "probe")])
async def test_a_cell_says_what_happens_at_a_port_that_watchers_ask(heading: str, kind: str) -> None:
    cells = table(heading)
    assert {each for each, _ in cells} == {kind}
    server = StatusService(kind, pb.Answer, AuditTrail())
    for peer in PEERS:
        assert await refusal(server, kind, peer) == ("" if cells[kind, peer] == "yes" else "UNAUTHORIZED"), peer
        for other in REQUESTS.keys() - {kind, "read", "fill", "critical_fill"}:
            with pytest.raises(InvalidArgument):
                server.handle(REQUESTS[other], MemoryReply(lambda _: None, peer=PEERS[peer][0]))


async def test_a_request_that_is_not_in_the_table_of_a_server_is_refused_to_every_role(region: RegionRig) -> None:
    kinds = {each.name for each in pb.Request.DESCRIPTOR.oneofs_by_name["body"].fields}
    kinds.remove("forget")  # sessions serve it themselves: it ends a series of the same peer
    assert kinds <= REQUESTS.keys()
    for heading, server in (("At a follower", region.near.service), ("At a leader", region.leader.service)):
        for kind in kinds - {each for each, _ in TABLES[heading]}:
            for name, caller in PEERS.values():
                with pytest.raises(InvalidArgument):
                    server.handle(REQUESTS[kind], MemoryReply(lambda _: None, peer=name, caller=caller))


def test_the_tables_have_every_request_that_has_rules() -> None:
    assert {kind for kind, _ in TABLES["At a follower"]} >= FOLLOWER_RULES.keys()
    assert {kind for kind, _ in TABLES["At a leader"]} >= LEADER_RULES.keys() | {"settle_edge"}


STATES_WRITER = "{associations: [subscribes, subscribers]}"


@pytest.mark.parametrize(
    ("role", "scan", "is_denied"),
    [
        ("read: all", pb.ScanShard(atype=FRIEND, limit=1), True),
        ("critical: {associations: [friend]}", pb.ScanShard(atype=FRIEND, limit=1), True),
        ("read: all, critical: {associations: [friend]}", pb.ScanShard(atype=FRIEND, limit=1), False),
        ("read: all, critical: {associations: [friend]}", pb.ScanShard(otype=USER, limit=1), True),
        ("read: all, critical: {objects: [user]}", pb.ScanShard(otype=USER, limit=1), False),
        ("read: all, critical: {objects: [user]}", pb.ScanShard(limit=1), True),
        ("read: all, critical: {objects: all}", pb.ScanShard(limit=1), False),
        ("read: all, critical: all, write: {objects: all}", None, True),
        (f"write: {STATES_WRITER}", None, False),
    ],
)
async def test_a_worker_scans_and_purges_within_its_rights(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch, role: str, scan: pb.ScanShard | None, is_denied: bool
) -> None:
    rules = f"format: 1\nversion: 1\nroles: {{it: {{{role}}}}}\n{CALLERS}"
    region.leader.configuration.access.use_document(load_access(rules, "access.yaml"))
    kind = "purge_removed" if scan is None else "scan_shard"
    if scan is not None:
        monkeypatch.setitem(REQUESTS, kind, pb.Request(scan_shard=scan))
    assert await refusal(region.leader.service, kind, "worker") == (PermissionDenied.reason if is_denied else "")
