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
    renewed_seconds_ago: dict[str, float]


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
            found = await asyncio.gather(*map(self._view, self._addresses.values()))
            self.views = dict(zip(self._addresses, found, strict=True))
            await asyncio.sleep(self._settings.interval_seconds)

    def says_up(self, region: str, server: str) -> bool:
        """The watcher of the region sees the server well."""
        view = self.views.get(region)
        return view is not None and view.verdicts.get(server) is Verdict.UP

    async def renewed_seconds_ago(self, region: str, database: str) -> float:
        """When, at the latest, the watcher of a region renewed a master's lease: asked now. 0 when it does not say."""
        page = await self._ask(self._addresses[region])
        return 0.0 if page is None else page.renewed_seconds_ago.get(database, 0.0)

    async def _view(self, address: str) -> View | None:
        page = await self._ask(address)
        return None if page is None else View(page.region, page.verdicts)

    async def _ask(self, address: str) -> _Page | None:
        try:
            _, body = await admin_get(address, "/stats", self._settings.timeout_seconds)
            return msgspec.json.decode(body, type=_Page)
        except (TaoError, msgspec.MsgspecError):
            return None  # whatever the reason, nothing is known of that region
