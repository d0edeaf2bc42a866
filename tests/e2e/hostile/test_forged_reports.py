"""A watcher marks a server of another region only when a watcher there agrees. Nobody else can agree for it, and nobody
else is answered what a watcher sees."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Self

import pytest

from loadtest.hostile.attacks import SECONDS, Grip
from tao.model.errors import TaoError
from tao.runtime.admin_client import admin_get
from tao.serving.audit import AuditTrail
from tao.serving.status_port import StatusService
from tao.wire.frames_server import FrameServer
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.region_access import until
from tests.e2e.watcher_rig import CLUSTER, LEADER, WATCHER, running_watcher
from tests.rigs.certificates import TestAuthority

pytestmark = [pytest.mark.e2e]

FORGED = pb.WatcherReport(region="west", verdicts={LEADER: "down"}, renewed_seconds_ago={"db": 1_000.0})
TRIES = 3


class Answerer:
    """Answers at the address of the west's watcher that the leader there is down."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        self.handshakes = 0
        context.sni_callback = self._count
        self._address = address
        self._server = FrameServer(
            StatusService("get_watcher_report", lambda: pb.Answer(watcher_report=FORGED), AuditTrail()),
            ServingSettings(),
            name=WATCHER,
            topology_version=lambda: 1,
            tls=context,
        )

    def _count(self, *_: object) -> None:
        self.handshakes += 1

    async def __aenter__(self) -> Self:
        await self._server.start(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()


async def test_a_report_of_somebody_else_marks_no_server_and_that_of_the_watcher_does(tmp_path: Path) -> None:
    async with running_watcher(tmp_path) as watcher:
        right_id = f"{CLUSTER}/west/watcher/{WATCHER}"
        elsewhere = TestAuthority(tmp_path / "elsewhere", "another authority")
        forgers = {
            "an application": watcher.issue("app", "spiffe://example.org/app/web"),
            "a leader": watcher.issue(LEADER, f"{CLUSTER}/west/leader/{LEADER}"),
            "another watcher": watcher.issue("other", f"{CLUSTER}/west/watcher/west-watcher-2"),
            "another authority": watcher.issue("forger", right_id, elsewhere),
        }

        for who, files in forgers.items():
            async with Answerer(watcher.other, files.server_context()) as forger:

                async def has_asked(asked: Answerer = forger) -> bool:
                    return asked.handshakes >= TRIES

                await until(has_asked, f"the watcher does not ask {who}")
                assert (await watcher.stats())["peers"] == {"west": False}, who
        assert not watcher.is_marked
        async with Answerer(watcher.other, watcher.issue(WATCHER, right_id).server_context()):

            async def is_marked() -> bool:
                return watcher.is_marked

            await until(is_marked, "the leader is not marked")


async def test_only_watchers_are_answered_and_strangers_keep_them_from_no_answer(tmp_path: Path) -> None:
    async with running_watcher(tmp_path) as watcher, Grip() as grip:
        await grip.open(300, watcher.itself.frames)
        await grip.open(300, watcher.admin)
        files = watcher.issue(WATCHER, f"{CLUSTER}/west/watcher/{WATCHER}")
        assert (await watcher.ask(files, WATCHER, "watcher")).watcher_report.region == "east"
        assert (await admin_get(watcher.admin, "/health", SECONDS))[0] == 200
        app = watcher.issue("app", "spiffe://example.org/app/web")
        foreign = watcher.issue("forger", f"{CLUSTER}/west/watcher/{WATCHER}", TestAuthority(tmp_path / "foreign", "x"))
        for wrong, name in ((app, "web"), (app, WATCHER), (foreign, WATCHER), (None, WATCHER)):
            with pytest.raises(TaoError):
                await watcher.ask(wrong, name, "watcher")
