"""What live events teach beside the states: what is used just now, codes of new items, what came of recommendations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from app.clicks import Clicks
from app.metrics import Metrics
from app.newcomers import Newcomers, Witnessed, with_codes_of
from app.trends import Trends
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import AppendResult
from storage.state_event import Event

LOOK_EVERY_S = 5.0


class Live:
    """Of one tenant.

    newcomers  of the generations that are served
    """

    def __init__(self, store: UserStore, tenant: str, metrics: Metrics) -> None:
        self.trends = Trends(store, tenant)
        self.clicks = Clicks(store, tenant, metrics)
        self.newcomers: Sequence[Newcomers] = ()

    async def follow(self) -> None:
        """Tell the store what was counted, and read what all have, again and again."""
        while True:
            with suppress(StorageError):
                await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """raises  StorageError  when the store cannot be used; what was counted is told the next time"""
        await self.clicks.look()
        await self.trends.look()

    async def tell(self) -> None:
        """Tell what was counted; StorageError as for `look`."""
        await self.clicks.tell()
        await self.trends.tell()

    async def close(self) -> None:
        """Stop what is under way."""
        for newcomers in self.newcomers:
            await newcomers.close()

    async def before(self, events: Sequence[Event]) -> tuple[Sequence[Event], Sequence[tuple[Newcomers, Witnessed]]]:
        """The events as they are to be logged, and what is wanted again afterwards."""
        newcomers = self.newcomers
        logged = with_codes_of(newcomers, events)
        return logged, [(one, await one.witness(logged)) for one in newcomers]

    def after(
        self,
        events: Sequence[Event],
        appended: Sequence[AppendResult],
        witnessed: Sequence[tuple[Newcomers, Witnessed]],
    ) -> None:
        """The events, as they were posted, are logged."""
        self.trends.count(events, appended)
        self.clicks.count(events, appended)
        for newcomers, own in witnessed:
            newcomers.learn(events, appended, own)
