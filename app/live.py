"""What live events teach beside the states: what is used just now, and codes of items that no model has learned."""

from __future__ import annotations

from collections.abc import Sequence

from app.newcomers import Newcomers, Witnessed, with_codes_of
from app.trends import Trends
from storage.state import Event
from storage.store import Appended


class Live:
    """Of one tenant.

    newcomers  of the generations that are served
    """

    def __init__(self, trends: Trends) -> None:
        self.trends = trends
        self.newcomers: Sequence[Newcomers] = ()

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
        appended: Sequence[Appended],
        witnessed: Sequence[tuple[Newcomers, Witnessed]],
    ) -> None:
        """The events, as they were posted, are logged."""
        self.trends.count(events, appended)
        for newcomers, own in witnessed:
            newcomers.learn(events, appended, own)
