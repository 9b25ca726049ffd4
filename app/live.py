"""What live events teach beside the states: what is used just now, codes of new items, what came of recommendations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from app.clicks import ClickThrough
from app.metrics import Metrics
from app.newcomers import ColdItemLearner, Observations, with_codes_of
from app.trends import TrendCounter
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import AppendResult
from storage.state_event import Event

LOOK_EVERY_S = 5.0


class LiveSignals:
    """Of one tenant.

    newcomers  of the generations that are served
    """

    def __init__(self, store: UserStore, tenant: str, metrics: Metrics) -> None:
        self.trend_counter = TrendCounter(store, tenant)
        self.click_through = ClickThrough(store, tenant, metrics)
        self.learners: Sequence[ColdItemLearner] = ()

    async def follow(self) -> None:
        """Tell the store what was counted, and read what all have, again and again."""
        while True:
            with suppress(StorageError):
                await self.sync()
            await asyncio.sleep(LOOK_EVERY_S)

    async def sync(self) -> None:
        """raises  StorageError  when the store cannot be used; what was counted is told the next time"""
        await self.click_through.sync()
        await self.trend_counter.sync()

    async def flush(self) -> None:
        """Tell what was counted; StorageError as for `look`."""
        await self.click_through.flush()
        await self.trend_counter.flush()

    async def close(self) -> None:
        """Stop what is under way."""
        for newcomers in self.learners:
            await newcomers.close()

    async def before(
        self, events: Sequence[Event]
    ) -> tuple[Sequence[Event], Sequence[tuple[ColdItemLearner, Observations]]]:
        """The events as they are to be logged, and what is wanted again afterwards."""
        newcomers = self.learners
        logged = with_codes_of(newcomers, events)
        return logged, [(one, await one.witness(logged)) for one in newcomers]

    def after(
        self,
        events: Sequence[Event],
        appended: Sequence[AppendResult],
        witnessed: Sequence[tuple[ColdItemLearner, Observations]],
    ) -> None:
        """The events, as they were posted, are logged."""
        self.trend_counter.count(events, appended)
        self.click_through.count(events, appended)
        for newcomers, own in witnessed:
            newcomers.learn(events, appended, own)
