"""Live counts of items bought together: each process reads the orders of new purchases in the log and counts them.

Training counts the complements of the items that it learns. Complements of items newer than the model come from later
orders. A purchase is counted together with those before it in its order, in whichever request they arrived, so each
pair is counted once. Purchases that are later undone or erased decay like all others, because counts contain no users.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from model.data.orders import PURCHASE, WINDOW_S
from model.lisa.item_complements import NEAR
from storage.errors import StorageBusy, StorageError, StorageUnavailable
from storage.items.trends import HALF_LIFE_S
from storage.protocol import UserStore
from storage.records import AppendResult
from storage.state.corrections import effective_events, posted_as
from storage.state.event import Event, LogRecord
from storage.state.switch_interval import in_thread

ALL_ORDERS = ""  # the name of the count of all orders with several items
SEPARATOR = "\n"  # between two item ids, which cannot contain it
MAX_AGE_HALF_LIVES = 10.0  # of a purchase; training reads older ones
MAX_WAITING = 10_000  # purchases to be flushed, about 3 MB; further ones are dropped until the next flush
MIN_ENTRIES = 100  # newest log entries that are read for a user's purchases
MAX_ENTRIES = 1_000
COUNTS_AT_ONCE = 500  # added in one step, for which other writers wait for some 3 ms
FEW_ENTRIES = 150  # are counted in less than a millisecond; a thread takes a tenth of one

logger = logging.getLogger(__name__)

IsItem = Callable[[str], bool]


class OrderCounter:
    """Counts orders of one tenant by the items in them; the weight of an order halves with each half-life.

    newest  the last read counts of all processes, by the names of `pair_name`, items and ALL_ORDERS; replaced as a
            whole when they change
    """

    def __init__(self, store: UserStore, tenant: str) -> None:
        self.newest: Mapping[str, float] = {}
        self._store = store
        self._tenant = tenant
        self._learned: Container[str] = ()
        self._flushing = asyncio.Lock()
        self._waiting: dict[tuple[str, str], float] = {}  # weights of purchases, by user and event
        self._counted: dict[str, float] = {}  # of purchases that have left the queue, but are not in the store yet

    def set_learned(self, item_ids: Container[str]) -> None:
        """Start counting the orders of all items except these, which a model was trained on."""
        self._learned = item_ids

    def count(self, events: Sequence[Event], results: Iterable[AppendResult], now_us: int) -> None:
        """Queue the new purchases among these events, which are in the log."""
        for event, result in zip(events, results, strict=True):
            if event.type == PURCHASE and not result.duplicate and len(self._waiting) < MAX_WAITING:
                age = max(now_us - event.timestamp_us, 0) / (HALF_LIFE_S * 1e6)
                if age <= MAX_AGE_HALF_LIVES:
                    self._waiting[posted_as(event)] = 0.5**age

    async def sync(self) -> None:
        """Flush, then read the counts of all processes; raise StorageError if the store cannot be used."""
        await self.flush()
        counts = await self._store.orders.counts(self._tenant)
        if counts != self.newest:
            self.newest = counts

    async def flush(self) -> None:
        """Add the orders of queued purchases to the store's counts; after a StorageError, the next call goes on."""
        async with self._flushing:
            await self._add_counted()  # what an earlier call could not add
            weights, self._waiting = self._waiting, {}
            try:
                self._counted = await self._counts(weights)
            except BaseException as exc:
                logger.debug("cannot count orders, retrying: %s", exc)
                self._waiting = weights | self._waiting
                raise
            await self._add_counted()

    async def _add_counted(self) -> None:
        """Add counted orders to the store's counts, some at a time, so that a later failure repeats none of them."""
        while some := dict(islice(self._counted.items(), COUNTS_AT_ONCE)):
            for name in some:
                del self._counted[name]
            try:
                await self._store.orders.add(self._tenant, some)
            except StorageError:  # a cancelled call may have added them
                self._counted |= some
                raise

    async def _counts(self, weights: Mapping[tuple[str, str], float]) -> dict[str, float]:
        # separately for each of a user's names, which share one log
        by_user: defaultdict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        for (user_id, event_id), weight in weights.items():
            by_user[user_id][user_id, event_id] = weight
        counts: defaultdict[str, float] = defaultdict(float)
        for user_id, own in by_user.items():
            entries = min(MIN_ENTRIES + len(own), MAX_ENTRIES)
            try:
                newest_first = await self._store.orders.newest(self._tenant, user_id, entries)
            except (StorageUnavailable, StorageBusy):
                raise
            except StorageError as exc:  # affects only this user; do not delay the orders of others
                logger.warning("not counting the orders of a user, because the log cannot be read: %s", exc)
                continue
            if len(newest_first) <= FEW_ENTRIES:
                self._add_counts(newest_first[::-1], own, counts)
            else:
                await in_thread(self._add_counts, newest_first[::-1], own, counts)
        return counts

    def _add_counts(
        self, log: Iterable[LogRecord], weights: Mapping[tuple[str, str], float], counts: dict[str, float]
    ) -> None:
        """Add what a user's purchases count: long orders take many milliseconds."""
        for name, weight in order_counts(log, weights, self._is_new, self.newest.__contains__):
            counts[name] += weight

    def _is_new(self, item_id: str) -> bool:
        return item_id not in self._learned


def pair_name(one: str, other: str) -> str:
    """Return the name under which orders with both items are counted."""
    return SEPARATOR.join(sorted((one, other)))


def order_counts(
    log: Iterable[LogRecord], weights: Mapping[tuple[str, str], float], is_new: IsItem, is_counted: IsItem
) -> Iterator[tuple[str, float]]:
    """Yield names of counts, and what the purchases among these entries add to them.

    log         entries of one user, in log order
    weights     weights of the purchases to count, by the user and the id that they were posted with
    is_new      returns whether no model has learned an item
    is_counted  returns whether an item already has counts, because it was bought with a new item
    """
    orders: defaultdict[Hashable, dict[str, float]] = defaultdict(dict)
    window, before_us = 0, 0
    for event in effective_events(log):
        if event.type != PURCHASE:
            continue
        order: Hashable = event.order_id
        if order is None:
            window += abs(event.timestamp_us - before_us) > WINDOW_S * 1e6
            order, before_us = window, event.timestamp_us
        orders[order].setdefault(event.item_id, weights.get(posted_as(event), 0.0))
    for items in orders.values():
        if len(items) > 1:
            yield from _counts_of_order(items, is_new, is_counted)


def _counts_of_order(weights: Mapping[str, float], is_new: IsItem, is_counted: IsItem) -> Iterator[tuple[str, float]]:
    """Yield what an order's items add, each with those before it; the second item also adds the count of the first."""
    items = list(weights)
    new = set(filter(is_new, items))
    for place, item_id in enumerate(items):
        weight = weights[item_id]
        if not place or not weight:
            continue
        if place == 1:
            yield ALL_ORDERS, weight
        for one in items[:2] if place == 1 else [item_id]:
            if new or is_counted(one):
                yield one, weight
        for distance, other in enumerate(reversed(items[max(place - NEAR, 0) : place]), start=1):
            if item_id in new or other in new:
                yield pair_name(item_id, other), float(weight / (distance * (len(items) - 1)) ** 0.5)
