"""What the watchers of other regions see, from their admin pages (DESIGN.md §9)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from tao.model.errors import TaoError
from tao.runtime.admin_client import admin_get
from tao.watcher.marks import Verdict, View
from tao.watcher.settings import ProbeSettings


class _Page(msgspec.Struct):
    region: str
    verdicts: dict[str, Verdict]


class PeerViews:
    """Region → what its watcher sees, None while that does not answer."""

    def __init__(self, addresses: Mapping[str, str], settings: ProbeSettings) -> None:
        """``addresses``: region → ``host:port`` of its watcher's admin page."""
        self._addresses: Final = addresses
        self._settings: Final = settings
        self.views: dict[str, View | None] = dict.fromkeys(addresses)

    async def run(self) -> None:
        """Ask them, until cancelled."""
        while True:
            found = await asyncio.gather(*map(self._ask, self._addresses.values()))
            self.views = dict(zip(self._addresses, found, strict=True))
            await asyncio.sleep(self._settings.interval_seconds)

    async def _ask(self, address: str) -> View | None:
        try:
            _, body = await admin_get(address, "/stats", self._settings.timeout_seconds)
            page = msgspec.json.decode(body, type=_Page)
        except (TaoError, msgspec.MsgspecError):
            return None  # whatever the reason, nothing is known of that region
        return View(page.region, page.verdicts)
