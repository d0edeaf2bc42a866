"""One suite for both transports: the guarantees that roles rely on hold over frames (TCP, Unix socket) and over
gRPC."""

import asyncio
import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from tao.model.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    TaoError,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from tao.wire.identity import (
    SERVER_ROLES,
    AcceptedCredentials,
    AcceptedToken,
    Credentials,
    PeerAuthenticator,
    PeerIdentity,
    digest_of,
)
from tao.wire.session import NO_DEADLINE_MS, Reply, Session
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import session_pb2 as pb
from tests.conformance.transport_rig import ME, Handler, Rig, Taken, echo, read, stuck_peer, until, write
from tests.rigs.pacing import PATIENT_SECONDS


async def test_an_answer_carries_what_the_handler_sent(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    answer = await session.ask(read(1, 22), PATIENT_SECONDS)
    assert list(answer.read.values) == [b"v1", b"v22"]
    assert session.server_name == "srv"
    assert session.is_open


async def test_the_server_knows_its_peer_and_how_much_time_is_left(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect(credentials=Credentials("web-1", "client"))
    taken = Taken()
    session.send(read(1, critical=True), 5.0, taken.append)
    await until(lambda: bool(rig.handler.held))
    assert (rig.handler.held[0].peer.name, rig.handler.held[0].peer.role) == ("web-1", "client")
    assert rig.handler.seen[0].deadline_ms == 5000


async def test_answers_come_in_any_order(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    asked = [asyncio.ensure_future(session.ask(read(n, critical=True), PATIENT_SECONDS)) for n in range(20)]
    await until(lambda: len(rig.handler.held) == 20)
    order = list(enumerate(rig.handler.held))
    random.Random(1).shuffle(order)
    for number, reply in order:
        echo(number + 1, reply)
    assert [list((await each).reserved_ids.ids) for each in asked] == [[n + 1] for n in range(20)]


async def test_a_thousand_requests_at_once_are_all_answered(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    answers = await asyncio.gather(*(session.ask(read(n), PATIENT_SECONDS) for n in range(1000)))
    assert [answer.read.values[0] for answer in answers] == [b"v%d" % n for n in range(1000)]


async def test_an_answer_in_parts_is_put_together(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    answer = await session.ask(read(3, 4, for_fill=True), PATIENT_SECONDS)
    assert dict(zip(answer.read.slots, answer.read.values, strict=True)) == {0: b"hit", 1: b"xxx"}
    taken = Taken()
    session.send(read(3, 4, for_fill=True), PATIENT_SECONDS, taken.append)
    await taken.last()
    assert [part.more for part in taken] == [True, False]


async def test_a_series_goes_on_until_it_is_cancelled(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    taken = Taken()
    number = session.send(pb.Request(watch=pb.Watch()), math.inf, taken.append)
    await until(lambda: bool(rig.handler.series))
    assert rig.handler.seen[0].deadline_ms == NO_DEADLINE_MS
    for version in range(1, 4):
        event = pb.WatchEvent(topology=pb.TopologyDocument(version=version))
        rig.handler.series[0].send(pb.Answer(more=True, watch=event))
    await until(lambda: len(taken) == 3)
    assert [part.watch.topology.version for part in taken] == [1, 2, 3]
    session.forget(number)
    await until(lambda: rig.handler.ended_series == 1)
    assert rig.handler.series[0].closed
    rig.handler.series[0].send(pb.Answer(more=True))
    await session.ask(read(1), PATIENT_SECONDS)
    assert len(taken) == 3


async def test_a_series_that_a_request_ends_frees_its_place_and_no_other_does(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect(SessionSettings(max_unanswered=1))
    taken = Taken()
    number = session.send(pb.Request(watch=pb.Watch()), math.inf, taken.append)
    await until(lambda: bool(rig.handler.series))
    forget = pb.Request(forget=pb.Forget(forgotten_number=number))
    session.send(forget, math.inf, Taken().append)  # its number belonged to a request of another session
    with pytest.raises(Overloaded):
        await session.ask(read(1), PATIENT_SECONDS)
    session.send(forget, math.inf, taken.append)
    await until(lambda: rig.handler.ended_series == 1)
    assert (await session.ask(read(1), PATIENT_SECONDS)).read.values == [b"v1"]
    assert taken == []


async def test_an_acknowledgement_has_no_answer(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    taken = Taken()
    session.send(pb.Request(acknowledge=pb.Acknowledge(delivery_number=9)), math.inf, taken.append)
    await session.ask(read(1), PATIENT_SECONDS)
    assert rig.handler.acknowledged == [9]
    assert taken == []


class Observed:
    """An `Observer` that records its calls."""

    def __init__(self) -> None:
        self.answered_after: list[float] = []
        self.timed_out_after: list[float] = []

    def answered(self, seconds: float) -> None:
        self.answered_after.append(seconds)

    def timed_out(self, seconds: float) -> None:
        self.timed_out_after.append(seconds)


async def test_a_read_unanswered_in_time_fails_and_a_late_answer_is_dropped(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    session.observer = observed = Observed()
    taken = Taken()
    session.send(read(1, critical=True), 0.05, taken.append)
    assert (await taken.last()).error.reason == "DEADLINE_EXCEEDED"
    assert (len(observed.timed_out_after), observed.answered_after) == (1, [])
    await until(lambda: bool(rig.handler.held))
    echo(1, rig.handler.held[0])
    await session.ask(read(1), PATIENT_SECONDS)
    assert len(taken) == 1
    late, in_time = observed.answered_after
    assert late == -math.inf
    assert in_time >= 0


async def test_a_request_without_time_left_is_not_sent(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    with pytest.raises(DeadlineExceeded):
        await session.ask(read(1), 0.0)
    assert rig.handler.seen == []


async def test_a_write_unanswered_in_time_may_have_happened(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    with pytest.raises(OutcomeUnknown):
        await session.ask(write(), 0.05)


async def test_when_the_connection_breaks_reads_are_unavailable_and_writes_unknown(rig: Rig) -> None:
    server = await rig.serve()
    session = await rig.connect()
    reading = asyncio.ensure_future(session.ask(read(1, critical=True), PATIENT_SECONDS))
    writing = asyncio.ensure_future(session.ask(write(), PATIENT_SECONDS))
    await until(lambda: len(rig.handler.held) == 2)
    await server.close()
    with pytest.raises(Unavailable):
        await reading
    with pytest.raises(OutcomeUnknown):
        await writing
    assert not session.is_open
    with pytest.raises(Unavailable):
        await session.ask(write(), 1.0)
    assert all(reply.closed for reply in rig.handler.held)


async def test_a_cancelled_request_leaves_nothing_behind(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    asked = asyncio.ensure_future(session.ask(read(1, critical=True), PATIENT_SECONDS))
    await until(lambda: bool(rig.handler.held))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    echo(1, rig.handler.held[0])
    assert (await session.ask(read(1), PATIENT_SECONDS)).read.values


async def test_an_exception_of_the_handler_is_an_internal_error(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    await rig.serve()
    session = await rig.connect()
    with pytest.raises(InternalError):
        await session.ask(pb.Request(get_schema=pb.GetSchema()), PATIENT_SECONDS)
    assert "a bug in the handler" in caplog.text
    with pytest.raises(NotMine) as caught:
        await session.ask(pb.Request(get_topology=pb.GetTopology()), PATIENT_SECONDS)
    assert caught.value.topology_version == 42


async def test_a_request_without_a_known_body_is_refused(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    with pytest.raises(InvalidArgument):
        await session.ask(pb.Request(), PATIENT_SECONDS)


def accepting(**secrets: str) -> ServingSettings:
    """Return settings of a server that accepts a token of each of these roles."""
    tokens = tuple(AcceptedToken(role, role, digest_of(secret)) for role, secret in secrets.items())
    accepted = AcceptedCredentials(tokens, is_listed=lambda *_: True)
    return ServingSettings(authenticator=PeerAuthenticator(accepted))


async def test_only_a_peer_with_an_accepted_token_is_served(rig: Rig) -> None:
    await rig.serve(accepting(client="right"))
    for wrong in ("", "righ", "righter"):
        with pytest.raises(Unauthorized):
            await rig.connect(credentials=replace(ME, token=wrong))
    session = await rig.connect(credentials=replace(ME, token="right"))
    assert (await session.ask(read(1), PATIENT_SECONDS)).read.values


@pytest.mark.parametrize("end", ["expiry", "revocation"])
async def test_a_connection_ends_when_its_token_runs_out_or_is_revoked(rig: Rig, end: str) -> None:
    now = [9.0]
    tokens = tuple(
        AcceptedToken(name, "client", digest_of(name), caller=name, expires_at=expires_at)
        for name, expires_at in (("short", 10.0), ("long", 20.0))
    )
    authenticator = PeerAuthenticator(AcceptedCredentials(tokens), lambda: now[0])
    await rig.serve(brief_stay(authenticator))
    short, other = [await rig.connect(credentials=replace(ME, token=token)) for token in ("short", "long")]
    served = await short.ask(read(1), PATIENT_SECONDS)
    assert served.read.values
    if end == "expiry":
        now[0] = 10.0
    else:
        authenticator.accepted = AcceptedCredentials(tokens[1:])
    await until(lambda: not short.is_open)
    with pytest.raises(Unauthorized):
        await rig.connect(credentials=replace(ME, token="short"))
    assert (await other.ask(read(1), PATIENT_SECONDS)).read.values


def brief_stay(authenticator: PeerAuthenticator, unary_deadline_seconds: float = PATIENT_SECONDS) -> ServingSettings:
    return ServingSettings(
        authenticator=authenticator,
        sweep_interval_seconds=0.01,
        leaving_seconds=0.02,
        unary_deadline_seconds=unary_deadline_seconds,
    )


async def until_refused(session: Session) -> None:
    with suppress(Unauthorized):
        while (await session.ask(read(1), PATIENT_SECONDS)).read.values:
            pass


async def test_what_was_accepted_is_answered_when_its_token_is_revoked_and_nothing_more(rig: Rig) -> None:
    settings = accepting(client="old")
    await rig.serve(brief_stay(settings.authenticator))
    session = await rig.connect(credentials=replace(ME, token="old"))
    held = asyncio.ensure_future(session.ask(read(1, critical=True), PATIENT_SECONDS))
    await until(lambda: bool(rig.handler.held))
    settings.authenticator.accepted = accepting(client="new").authenticator.accepted
    await until(lambda: not session.is_open)
    await until_refused(session)
    echo(7, rig.handler.held[0])
    assert list((await held).reserved_ids.ids) == [7]


async def test_a_peer_whose_token_is_revoked_does_not_stay_for_a_request_without_an_answer(rig: Rig) -> None:
    settings = accepting(client="old")
    await rig.serve(brief_stay(settings.authenticator, unary_deadline_seconds=0.02))
    session = await rig.connect(credentials=replace(ME, token="old"))
    held = asyncio.ensure_future(session.ask(read(1, critical=True), PATIENT_SECONDS))
    await until(lambda: bool(rig.handler.held))
    settings.authenticator.accepted = accepting(client="new").authenticator.accepted
    with pytest.raises(Unauthorized):
        await held


async def test_a_peer_that_is_refused_for_its_credentials_is_reported_as_what_it_says_it_is(rig: Rig) -> None:
    refused: list[tuple[PeerIdentity, TaoError]] = []
    accepted = accepting(leader="for leaders", client="for clients")
    await rig.serve(replace(accepted, on_refused=lambda *each: refused.append(each)))
    await rig.connect(credentials=replace(ME, token="for clients"))
    for credentials in (ME, Credentials("stranger", "operator", "for clients")):
        with pytest.raises(Unauthorized):
            await rig.connect(credentials=credentials)
    assert [(peer.name, peer.role, error.reason) for peer, error in refused] == [
        (ME.name, ME.role, "UNAUTHORIZED"),
        ("stranger", "operator", "UNAUTHORIZED"),
    ]
    hosts = {peer.address.rpartition(":")[0] or peer.address for peer, _ in refused}
    assert hosts == {"unix" if rig.transport == "unix" else "127.0.0.1"}


async def test_a_token_vouches_for_its_own_role_only(rig: Rig) -> None:
    roles = ("client", *sorted(SERVER_ROLES))
    await rig.serve(accepting(**{role: f"of {role}" for role in roles}))
    for shown, stated in itertools.product(roles, roles):
        credentials = Credentials("someone", stated, f"of {shown}")
        if stated in ("client", shown):  # who states no role of a server is what its token says
            session = await rig.connect(credentials=credentials)
            assert (await session.ask(read(1), PATIENT_SECONDS)).read.values
            await session.close()
        else:
            with pytest.raises(Unauthorized, match=f"that of a {shown}; a peer with the role {stated} must"):
                await rig.connect(credentials=credentials)
    with pytest.raises(Unauthorized, match="missing or wrong"):
        await rig.connect()


async def test_too_large_a_request_is_refused_before_it_is_sent(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect(SessionSettings(max_message_bytes=1000, connect_timeout_seconds=PATIENT_SECONDS))
    with pytest.raises(TooLarge):
        await session.ask(read(*range(1000)), PATIENT_SECONDS)
    assert (await session.ask(read(1), PATIENT_SECONDS)).read.values


async def test_a_value_that_fits_no_message_is_an_error_of_its_query_alone(rig: Rig) -> None:
    await rig.serve(ServingSettings(max_message_bytes=10_000))
    session = await rig.connect()
    answer = (await session.ask(read(10_001, 0, for_fill=True), PATIENT_SECONDS)).read
    assert list(answer.values) == [b"hit"]
    assert [(slot, error.reason) for slot, error in zip(answer.failed_slots, answer.errors, strict=True)] == [
        (1, "TOO_LARGE")
    ]
    assert (await session.ask(read(1), PATIENT_SECONDS)).read.values


async def test_too_large_a_request_costs_only_its_sender_the_connection(rig: Rig) -> None:
    await rig.serve(ServingSettings(max_message_bytes=10_000))
    rude, other = await rig.connect(), await rig.connect()
    with pytest.raises((Unavailable, TooLarge, Exception)) as caught:
        await rude.ask(read(*range(10_000)), PATIENT_SECONDS)
    assert not isinstance(caught.value, DeadlineExceeded)
    await until(lambda: not rude.is_open)
    assert (await other.ask(read(1), PATIENT_SECONDS)).read.values


async def test_a_large_answer_arrives_whole(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect()
    answer = await session.ask(read(5_000_000, 0, for_fill=True), PATIENT_SECONDS)
    assert answer.read.values[1] == b"x" * 5_000_000


async def test_more_unanswered_requests_than_the_server_allows_are_rejected(rig: Rig) -> None:
    await rig.serve(ServingSettings(max_unanswered=2))
    session = await rig.connect()
    asked = [asyncio.ensure_future(session.ask(read(n, critical=True), PATIENT_SECONDS)) for n in range(2)]
    await until(lambda: len(rig.handler.held) == 2)
    with pytest.raises(Overloaded):
        await session.ask(read(1), PATIENT_SECONDS)
    for reply in rig.handler.held:
        echo(1, reply)
    await asyncio.gather(*asked)
    assert (await session.ask(read(1), PATIENT_SECONDS)).read.values


async def test_more_unanswered_requests_than_the_client_allows_are_not_sent(rig: Rig) -> None:
    await rig.serve()
    session = await rig.connect(SessionSettings(max_unanswered=1, connect_timeout_seconds=PATIENT_SECONDS))
    asked = asyncio.ensure_future(session.ask(read(1, critical=True), PATIENT_SECONDS))
    await until(lambda: bool(rig.handler.held))
    with pytest.raises(Overloaded):
        await session.ask(read(1), PATIENT_SECONDS)
    echo(1, rig.handler.held[0])
    await asked


async def test_a_draining_server_answers_pending_requests_and_sends_new_ones_away(rig: Rig) -> None:
    server = await rig.serve()
    session = await rig.connect()
    taken = Taken()
    session.send(pb.Request(watch=pb.Watch()), math.inf, taken.append)
    asked = asyncio.ensure_future(session.ask(read(1, critical=True), PATIENT_SECONDS))
    await until(lambda: len(rig.handler.held) == 1 and len(rig.handler.series) == 1)
    draining = asyncio.ensure_future(server.drain(PATIENT_SECONDS))
    await until(lambda: not session.is_open)
    assert not draining.done()
    echo(7, rig.handler.held[0])
    assert list((await asked).reserved_ids.ids) == [7]
    await draining
    assert not taken
    await server.close()
    assert (await taken.last()).error.reason == "UNAVAILABLE"
    assert rig.handler.ended_series == 1


async def test_a_drain_ends_with_its_grace_period(rig: Rig) -> None:
    server = await rig.serve()
    session = await rig.connect()
    asked = asyncio.ensure_future(session.ask(read(1, critical=True), PATIENT_SECONDS))
    await until(lambda: bool(rig.handler.held))
    await server.drain(0.05)
    await server.close()
    with pytest.raises(Unavailable):
        await asked


async def test_a_peer_that_reads_nothing_affects_no_other(rig: Rig) -> None:
    bounds = ServingSettings(
        write_high_water_bytes=100_000,
        max_unsent_bytes=4_000_000,
        blocked_timeout_seconds=0.2,
        sweep_interval_seconds=0.05,
    )
    await rig.serve(bounds)
    other = await rig.connect()
    async with stuck_peer(rig) as ask_for_much:
        await ask_for_much()
        await until(lambda: len(rig.handler.series) > 0)
        reply = rig.handler.series[0]
        while not reply.closed:
            reply.send(pb.Answer(more=True, watch=pb.WatchEvent(schema=pb.SchemaDocument(json=b"x" * 100_000))))
            assert (await other.ask(read(1), PATIENT_SECONDS)).read.values
    assert rig.handler.ended_series == 1


class LargeAnswers(Handler):
    """Answers reads with 100 kB each."""

    def _read(self, read: pb.ReadBatch, reply: Reply) -> None:
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[b"x" * 100_000])))


async def test_requests_that_came_together_wait_while_their_peer_does_not_read(rig: Rig) -> None:
    rig.handler = LargeAnswers()
    await rig.serve(ServingSettings(write_high_water_bytes=100_000))
    other = await rig.connect()
    requests = [pb.Request(number=n + 1, deadline_ms=60_000, read=pb.ReadBatch(obj_ids=[n])) for n in range(5_000)]
    async with stuck_peer(rig, requests) as ask_for_much:
        asking = asyncio.ensure_future(ask_for_much())
        await until(lambda: len(rig.handler.seen) > 1)
        for _ in range(100):
            await other.ask(read(1), PATIENT_SECONDS)
        assert len(rig.handler.seen) < 500, "100 are the other's; the rest fills the buffers of the kernel"
        asking.cancel()
