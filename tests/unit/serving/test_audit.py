"""What servers record: denials within a bound, operators' requests with their outcome, changes of documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tao.access.decisions import TypeKind
from tao.model.errors import AuditFull, Overloaded, PermissionDenied, TaoError, Unauthorized, Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.observability.audit_records import verify
from tao.observability.logs import logger
from tao.observability.metrics import Metrics
from tao.runtime.credentials import AcceptedCredentialFiles, CredentialSources
from tao.runtime.token_file import TokenRole, dump_tokens, entry_for
from tao.serving.audit import AuditTrail, Denial, recorded_caller, recorded_name
from tao.serving.configuration import Configuration
from tao.serving.metrics import register_audit
from tao.serving.request_scope import NamedType, Scope
from tao.topology.document import dump_topology
from tao.wire.doorstep import name_of
from tao.wire.identity import PeerIdentity
from tao.wire.session import Reply, failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.audit_rig import UNIX_MS, AuditRig, audit_rig, read_records
from tests.rigs.leader_rig import FRIEND, SCHEMA, USER, make_topology
from tests.rigs.links_rig import MemoryReply
from tests.rigs.region_rig import FollowerRig

STRANGER = PeerIdentity("web-1", "client", name_of(("10.0.0.7", 40001)))
WRONG = Unauthorized("the token is missing or wrong")
CALLERS: tuple[tuple[str, TokenRole], ...] = (("web", "client"), ("ann", "operator"))
SCHEMA_TEXT = (Path(__file__).parents[3] / "config/schema.yaml").read_text()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[AuditRig]:
    with audit_rig(tmp_path, max_denials_per_second=3) as rig:
        yield rig


def request(**body: Any) -> pb.Request:
    return pb.Request(deadline_ms=5_000, **body)


INVALIDATE = request(invalidate=pb.Invalidate(shards=[1, 2], otypes=[1], atypes=[4]))


# ---- denials ---------------------------------------------------------------------------------------------------------


async def test_equal_denials_of_a_second_are_one_record_with_a_count(rig: AuditRig) -> None:
    for port in (40001, 40002, 40003):
        rig.trail.connection_refused(PeerIdentity("web-1", "client", name_of(("10.0.0.7", port))), WRONG)
        rig.now += 100
        rig.trail.connection_refused(PeerIdentity("web-1", "client", name_of(("2001:db8::8", port, 0, 0))), WRONG)
    first, other = await rig.records()
    assert (first["count"], first["start_time"], first["end_time"]) == (3, UNIX_MS, UNIX_MS + 200)
    assert other["count"] == 3
    assert (first["api"]["operation"], first["status_id"], first["status_code"]) == ("connect", 2, "UNAUTHORIZED")
    assert [each["src_endpoint"]["name"] for each in (first, other)] == ["10.0.0.7", "2001:db8::8"]
    rig.trail.connection_refused(STRANGER, WRONG)
    assert len(await rig.records()) == 3


async def test_strangers_cannot_fill_the_disk_by_taking_many_names(rig: AuditRig) -> None:
    for number in range(1_000):
        rig.trail.connection_refused(PeerIdentity(f"web-{number}", "client"), WRONG)
    assert await rig.shown() == [
        ("client/web-0", "connect", 2),
        ("client/web-1", "connect", 2),
        ("client/web-2", "connect", 2),
        ("", "denials", 2),
    ]
    assert (await rig.records())[-1]["count"] == 997


async def test_denials_are_recorded_a_second_later_without_being_asked_for(rig: AuditRig) -> None:
    rig.trail.connection_refused(STRANGER, WRONG)
    timer = vars(rig.trail)["_timer"]
    assert timer.when() - timer._loop.time() <= 1.0
    timer._run()
    assert len(await rig.records()) == 1


async def test_a_denial_refuses_nothing_even_when_the_log_cannot_be_written(rig: AuditRig) -> None:
    rig.log.trouble = "the disk is full"
    rig.trail.connection_refused(STRANGER, WRONG)
    rig.trail.record_denials()
    with pytest.raises(AuditFull):
        rig.trail.begin("operator/ann", "invalidate")
    rig.log.trouble = ""


async def test_only_errors_that_deny_are_recorded_of_refused_connections(rig: AuditRig) -> None:
    rig.trail.connection_refused(STRANGER, Unavailable("the topology lists no such follower"))
    assert await rig.records() == []


async def test_a_request_that_a_role_may_not_make_is_recorded_and_refused_as_before(rig: AuditRig) -> None:
    follower = FollowerRig("near-1", make_topology(), audit=rig.trail)
    for _ in range(2):
        with pytest.raises(Unauthorized):
            follower.service.handle(INVALIDATE, MemoryReply(lambda _: None, peer="client"))
    with pytest.raises(TaoError):
        follower.service.handle(request(subscribe=pb.Subscribe()), MemoryReply(lambda _: None, peer="client"))
    (record,) = await rig.records()
    assert (record["api"]["operation"], record["count"]) == ("invalidate", 2)
    assert record["unmapped"]["types"] == ["association 4", "object 1"]
    assert record["unmapped"]["shards"] == [1, 2]
    await follower.tasks.close()


# ---- what was denied -------------------------------------------------------------------------------------------------


def denied(*types: int, shard: int = 0, caller: str = "web", action: str = "read", unread: int = 0) -> Denial:
    named = frozenset(NamedType(TypeKind.ASSOCIATION, each) for each in types)
    scope = Scope(named, frozenset({shard}), unread, unread)
    peer = PeerIdentity("web-1", "client", name_of(("10.0.0.7", 40001)), caller)
    return Denial(caller, action, PermissionDenied(f"no right on {types}"), peer, scope)


async def test_denials_of_several_types_within_a_second_are_one_record_that_names_each(rig: AuditRig) -> None:
    rig.trail.started(make_topology(), SCHEMA)
    rig.trail.denied(denied(FRIEND, shard=7))
    rig.trail.denied(denied(77, shard=3))
    rig.trail.denied(denied(FRIEND, shard=3))
    _, record = await rig.records()
    assert record["count"] == 3
    assert (record["unmapped"]["types"], record["unmapped"]["shards"]) == (["association 77", "friend"], [3, 7])
    assert (record["unmapped"]["type_count"], record["unmapped"]["shard_count"]) == (2, 2)
    assert (record["unmapped"]["role"], record["src_endpoint"]["name"]) == ("client", "10.0.0.7")
    assert record["status_detail"] == f"no right on ({FRIEND},)", "the first one"


async def test_what_a_record_of_denials_does_not_list_is_counted(rig: AuditRig) -> None:
    for number in range(1, 251):
        rig.trail.denied(denied(number, shard=number))
    for number in (1, 250):
        rig.trail.denied(denied(number, shard=number))
    rig.trail.denied(denied(1, shard=1, unread=40))
    (record,) = await rig.records()
    unmapped = record["unmapped"]
    assert unmapped["shards"] == list(range(1, 101))
    assert len(unmapped["types"]) == 100
    assert (record["count"], unmapped["type_count"], unmapped["shard_count"]) == (253, 291, 291)


async def test_the_record_of_further_denials_has_their_types_and_shards_and_how_many_of_each_kind(
    rig: AuditRig,
) -> None:
    for number in range(3):
        rig.trail.denied(denied(1, caller=f"app-{number}"))
    rig.trail.denied(denied(5, shard=9, caller="app-3"))
    rig.trail.denied(denied(6, shard=8, caller="app-4", action="write"))
    rig.trail.connection_refused(STRANGER, WRONG)
    further = (await rig.records())[-1]
    assert (further["api"]["operation"], further["count"]) == ("denials", 3)
    assert further["unmapped"]["types"] == ["association 5", "association 6"]
    assert further["unmapped"]["shards"] == [8, 9]
    assert further["unmapped"]["denied"] == {"read": 1, "write": 1, "connect": 1}


async def test_a_request_of_a_hundred_thousand_keys_is_not_read_to_its_end_to_be_recorded(rig: AuditRig) -> None:
    ids = [each << SHARD_SHIFT | 1 for each in range(60_000)]
    rig.trail.request_refused("read", request(read=pb.ReadBatch(obj_ids=ids * 2)), STRANGER, WRONG)
    (record,) = await rig.records()
    assert len(record["unmapped"]["shards"]) == 100
    assert record["unmapped"]["shard_count"] == 120_000


async def test_four_hundred_keys_of_a_denied_request_are_looked_at_and_the_others_counted(rig: AuditRig) -> None:
    lists = pb.ReadBatch(count_id1s=[3 << SHARD_SHIFT | 1] * 10_000, count_atypes=[FRIEND] * 10_000)
    rig.trail.request_refused("read", request(read=lists), STRANGER, WRONG)
    writes = [pb.Write(assoc_add=pb.AssocAdd(id1=3 << SHARD_SHIFT | 1, atype=FRIEND))] * 6_000
    rig.trail.request_refused("write", request(write=pb.WriteBatch(writes=writes)), STRANGER, WRONG)
    for record, shard_count, type_count in zip(await rig.records(), (9_601, 5_601), (1, 5_601), strict=True):
        assert record["unmapped"]["shards"] == [3]
        assert record["unmapped"]["types"] == [f"association {FRIEND}"]
        assert (record["unmapped"]["shard_count"], record["unmapped"]["type_count"]) == (shard_count, type_count)


async def test_a_denied_request_is_only_counted_when_its_record_lists_all_that_it_may(rig: AuditRig) -> None:
    ids = [each << SHARD_SHIFT | 1 for each in range(100)]
    lists = pb.ReadBatch(count_id1s=ids, count_atypes=range(1, 101))
    for _ in range(3):
        rig.trail.request_refused("read", request(read=lists), STRANGER, WRONG)
    (record,) = await rig.records()
    assert (record["unmapped"]["shard_count"], record["unmapped"]["type_count"]) == (300, 300)


# ---- operators -------------------------------------------------------------------------------------------------------


async def test_an_operators_request_is_recorded_with_what_it_asks_for_and_its_outcome(rig: AuditRig) -> None:
    follower = FollowerRig("near-1", make_topology(), audit=rig.trail)
    rig.trail.policy_version = "12"
    follower.service.handle(INVALIDATE, MemoryReply(lambda _: None, peer="operator"))
    follower.service.handle(INVALIDATE, MemoryReply(lambda _: None, peer="leader-1"))
    (record,) = await rig.records()
    assert record["unmapped"] == {
        "server": "leader-1",
        "role": "operator",
        "policy_version": "12",
        "shards": [1, 2],
        "shard_count": 2,
        "types": ["association 4", "object 1"],
        "type_count": 2,
    }
    assert await rig.shown() == [("operator/operator", "invalidate", 1)]
    await follower.tasks.close()


async def test_operators_requests_name_types_by_the_schema(rig: AuditRig) -> None:
    rig.trail.started(make_topology(), SCHEMA)
    recorded = rig.trail.of_operators("invalidate", lambda _, reply: reply.send(pb.Answer()))
    asked = request(invalidate=pb.Invalidate(otypes=[USER], atypes=[FRIEND]))
    recorded(asked, MemoryReply(lambda _: None, peer="operator"))
    assert (await rig.records())[-1]["unmapped"]["types"] == ["friend", "user"]


async def test_the_outcome_is_that_of_the_last_answer_or_of_the_error_raised(rig: AuditRig) -> None:
    replies: list[Reply] = []

    def path(asked: pb.Request, reply: Reply) -> None:
        if asked.HasField("touch_keys"):
            raise Overloaded("too many tasks")
        replies.append(reply)

    recorded = rig.trail.of_operators("settle_pairs", path)
    answers: list[pb.Answer] = []
    settle = request(settle_pairs=pb.SettlePairs(pairs=[pb.Pair(low_id=3 << 48 | 1, high_id=1 << 48)]))
    for _ in range(2):
        recorded(settle, MemoryReply(answers.append, peer="operator"))
    assert await rig.records() == [], "no answer yet"
    replies[0].send(pb.Answer(more=True, settled_pairs=pb.SettledPairs(settled=1)))
    replies[0].send(pb.Answer(settled_pairs=pb.SettledPairs(settled=1)))
    replies[1].send(failure(Unavailable("the leader is gone")))
    with pytest.raises(Overloaded):
        recorded(request(touch_keys=pb.TouchKeys()), MemoryReply(answers.append, peer="operator"))
    assert len(answers) == 3
    assert [each["status_id"] for each in await rig.records()] == [1, 2, 2]
    assert [each.get("status_code") for each in await rig.records()] == [None, "UNAVAILABLE", "OVERLOADED"]


async def test_an_operators_request_that_cannot_be_recorded_is_refused_before_it_is_done(rig: AuditRig) -> None:
    follower = FollowerRig("near-1", make_topology(), audit=rig.trail)
    rig.log.trouble = "the disk is full"
    answers: list[pb.Answer] = []
    with pytest.raises(AuditFull, match="the disk is full"):
        follower.service.handle(INVALIDATE, MemoryReply(answers.append, peer="operator"))
    assert answers == []
    rig.log.trouble = ""
    await follower.tasks.close()


async def test_a_repair_of_ten_thousand_pairs_of_one_type_has_a_type_count_of_one(rig: AuditRig) -> None:
    recorded = rig.trail.of_operators("settle_pairs", lambda _, reply: reply.send(pb.Answer()))
    pair = pb.Pair(low_id=1 << SHARD_SHIFT, high_id=3 << SHARD_SHIFT, atypes=[FRIEND])
    settle = request(settle_pairs=pb.SettlePairs(pairs=[pair] * 10_000))
    recorded(settle, MemoryReply(lambda _: None, peer="operator"))
    (record,) = await rig.records()
    unmapped = record["unmapped"]
    assert (unmapped["types"], unmapped["type_count"]) == ([f"association {FRIEND}"], 1)
    assert (unmapped["shards"], unmapped["shard_count"]) == ([1, 3], 2)


# ---- documents -------------------------------------------------------------------------------------------------------


async def test_a_newer_topology_and_schema_are_recorded_with_the_digests_of_their_documents(rig: AuditRig) -> None:
    configuration = Configuration(make_topology(2), SCHEMA, logger("test"))
    configuration.on_routes(lambda routes: rig.trail.use_topology(routes.topology))
    configuration.on_schema(rig.trail.use_schema)
    rig.trail.started(configuration.routes.topology, configuration.schema)
    configuration.use_topology(make_topology(5))
    configuration.use_topology(make_topology(4))
    grown = SCHEMA_TEXT.replace("  location:", "  robot: {number: 77}\n\n  location:")
    assert configuration.use_schema_text(grown, "schema.yaml")
    await rig.trail.close()
    started, topology, schema, stopped = await rig.records()
    digest = hashlib.sha256(dump_topology(make_topology(5)).encode()).hexdigest()
    assert started["unmapped"]["topology_version"] == 2
    assert topology["api"]["operation"] == "topology_changed"
    assert {key: topology["unmapped"][key] for key in ("former_version", "version", "sha256")} == {
        "former_version": "2",
        "version": "5",
        "sha256": digest,
    }
    assert schema["unmapped"]["former_version"] == SCHEMA.version_hash
    assert schema["unmapped"]["sha256"] == configuration.schema.version_hash != SCHEMA.version_hash
    assert stopped["api"]["operation"] == "server_stopped"
    assert verify(rig.path.read_bytes().splitlines(keepends=True), newest=rig.log.published.hash).fault is None


async def test_a_change_of_what_is_accepted_is_recorded_and_starts_name_the_digests_of_the_files(
    rig: AuditRig, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.yaml"
    web, ann = (entry_for(f"{name}'s", name, role, None, []) for name, role in CALLERS)
    path.write_text(dump_tokens((web,)))
    files = AcceptedCredentialFiles(CredentialSources(accepted_tokens_file=path), logger("test"))
    await files.load(lambda *_: False)
    rig.trail.started(make_topology(), accepted=files)
    path.write_text(dump_tokens((ann,)))
    await files.look()
    started, changed = await rig.records()
    assert (changed["api"]["operation"], changed["activity_id"]) == ("accepted_tokens_changed", 3)
    found = changed["unmapped"]
    assert (found["added"], found["removed"], found["added_count"]) == (["ann-1 operator ann"], ["web-1 client web"], 1)
    assert found["removed_count"] == 1
    assert found["former_version"] == started["unmapped"]["accepted_tokens_sha256"]
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert web.sha256 not in rig.path.read_text(), "digests of tokens are nobody's business"


# ---- metrics ---------------------------------------------------------------------------------------------------------


async def test_the_published_hash_is_the_only_label_of_its_metric_and_its_value_the_number(rig: AuditRig) -> None:
    metrics = Metrics(role="leader", server="leader-1")
    register_audit(metrics, rig.log)
    rig.trail.started(make_topology())
    for number in (1, 2):
        await rig.records()
        rig.log.publish()
        (shown,) = metrics.snapshot()["tao_audit_hash_info"]
        assert (shown["labels"], shown["value"]) == ({"hash": rig.log.published.hash}, number)
        lines = [each for each in metrics.render().decode().splitlines() if each.startswith("tao_audit_hash_info{")]
        assert len(lines) == 1
        assert f'hash="{read_records(rig.path)[-1]["hash"]}"' in lines[0]
        rig.trail.denied(denied(1))


# ---- without a log ---------------------------------------------------------------------------------------------------


async def test_without_an_audit_log_paths_are_left_as_they_are_and_nothing_is_recorded() -> None:
    trail = AuditTrail()

    def path(_: pb.Request, reply: Reply) -> None:
        reply.send(pb.Answer())

    assert trail.of_operators("invalidate", path) is path
    assert trail.begin("operator/ann", "invalidate") is None
    trail.connection_refused(STRANGER, WRONG)
    trail.denied(denied(1))
    trail.request_refused("read", request(read=pb.ReadBatch()), STRANGER, WRONG)
    trail.started(make_topology(), SCHEMA)
    trail.changed("rights", "1", "2", "digest")
    await trail.close()


def test_a_caller_is_what_credentials_prove_or_else_what_the_peer_says() -> None:
    assert recorded_name(PeerIdentity("web-1", "client", caller="app/web")) == "app/web"
    assert recorded_name(PeerIdentity("web-1", "client")) == "client/web-1"
    assert recorded_name(PeerIdentity("", "")) == "peer/"


def test_only_a_cache_server_names_another_caller_of_its_requests() -> None:
    passed = pb.Request(caller="app/web")
    assert recorded_caller(passed, PeerIdentity("near-1", "follower")) == "app/web"
    assert recorded_caller(passed, PeerIdentity("leader-2", "leader")) == "app/web"
    assert recorded_caller(pb.Request(caller=""), PeerIdentity("near-1", "follower")) == "anonymous"
    for role in ("client", "operator", "tailer", ""):
        assert recorded_caller(passed, PeerIdentity("x", role)) == f"{role or 'peer'}/x"
    assert recorded_caller(pb.Request(), PeerIdentity("near-1", "follower")) == "follower/near-1"


def test_only_a_cache_server_names_the_operator_of_its_requests() -> None:
    passed = pb.Request(operator="operator/ann")
    assert recorded_caller(passed, PeerIdentity("near-1", "follower")) == "operator/ann"
    assert recorded_caller(passed, PeerIdentity("leader-2", "leader")) == "operator/ann"
    for role in ("client", "operator", "tailer", ""):
        assert recorded_caller(passed, PeerIdentity("x", role)) == f"{role or 'peer'}/x"


async def test_what_a_server_passes_on_for_an_operator_is_recorded_in_the_operators_name(rig: AuditRig) -> None:
    recorded = rig.trail.of_operators("settle_pairs", lambda _, reply: reply.send(pb.Answer()))
    settle = request(settle_pairs=pb.SettlePairs(), operator="operator/ann")
    for peer in ("near-1", "client", "leader-2"):
        recorded(settle, MemoryReply(lambda _: None, peer=peer))
    recorded(request(settle_pairs=pb.SettlePairs(), caller="app/web"), MemoryReply(lambda _: None, peer="near-1"))
    assert await rig.shown() == [("operator/ann", "settle_pairs", 1)] * 2
    assert [each["unmapped"]["role"] for each in await rig.records()] == ["follower", "leader"]
