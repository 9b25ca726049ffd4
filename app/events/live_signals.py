"""Live signals derived from events, in addition to users' states: trends, click-through, orders, new items' codes."""

from collections.abc import Collection, Iterable, Sequence

from app.errors import ErrorDetail, InvalidRequest
from app.events.click_through import ClickThrough
from app.events.cold_item_learner import ColdItemLearner
from app.events.order_counter import OrderCounter
from app.events.trend_counter import TrendCounter
from app.observability.metrics import Metrics
from storage.protocol import UserStore

MAX_NAMES = 20  # event types that an error lists


class LiveSignals:
    """Counts and learns from the events of one tenant.

    learners     learn codes of new items, one for each served generation
    event_types  types that have a weight in a served generation, even 0, or that count as unseen in one
    """

    def __init__(self, store: UserStore, tenant: str, metrics: Metrics) -> None:
        self.trend_counter = TrendCounter(store, tenant)
        self.order_counter = OrderCounter(store, tenant)
        self.click_through = ClickThrough(store, tenant, metrics)
        self.learners: Sequence[ColdItemLearner] = ()
        self.event_types: Collection[str] = ()

    def require_types(self, types: Iterable[str], path: str = "") -> None:
        """Check that the types in `exclude_events` are known, because a misspelt one would exclude nothing.

        path  path of the request or the settings in the body, for errors

        raises  InvalidRequest  which lists the known types
        """
        if not set(types).issubset(self.event_types):
            known = ", ".join(sorted(self.event_types)[:MAX_NAMES])
            reason = f"has a type without a weight in the served models; known types: {known}"
            raise InvalidRequest(
                "this event type does not exist", [ErrorDetail(field=f"{path}exclude_events", reason=reason)]
            )

    async def sync(self) -> None:
        """Write this process's counts to the store, and read those of all processes.

        raises  StorageError  when the store cannot be used; the counts are kept for the next time
        """
        await self.click_through.sync()
        await self.trend_counter.sync()
        await self.order_counter.sync()

    async def flush(self) -> None:
        """Write this process's counts to the store; raise StorageError as `sync` does."""
        await self.click_through.flush()
        await self.trend_counter.flush()
        await self.order_counter.flush()
