"""Trends: each process collects live visits to items, flushes them to the store, and reads those of all processes.

Counting an event takes one addition in memory. A process that is killed loses the visits of the last few seconds,
which are not yet flushed. Events that are undone or erased decay like all others, because trends contain no users.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

from storage.errors import StorageError
from storage.items.trends import HALF_LIFE_S, VISITOR_BYTES, Visit
from storage.protocol import UserStore
from storage.records import AppendResult
from storage.state.event import Event
from storage.state.switch_interval import in_thread

MAX_ITEMS = 4096  # items that are read; later ones are rarely used, and popular items follow
MAX_EVENT_AGE_HALF_LIVES = 10.0  # of an event; older ones do not indicate a trend
DIGEST_BYTES = 8  # of a user, until the visit is flushed
MAX_WAITING = 100_000  # visits to be flushed, about 20 MB; further ones are dropped until the next flush

logger = logging.getLogger(__name__)


class TrendCounter:
    """Counts the visitors of one tenant's items; the weight of a visit halves with each half-life.

    newest  the last read numbers of visitors of the most visited items, in all processes; replaced as a whole
    """

    def __init__(self, store: UserStore, tenant: str) -> None:
        self.newest: Mapping[str, float] = {}
        self._store = store
        self._tenant = tenant
        self._types: Collection[str] = ()
        self._secret = b""
        self._flushing = asyncio.Lock()
        self._waiting: dict[tuple[str, bytes], float] = {}  # weights of visits, by item and digest of the user

    def set_event_weights(self, event_weights: Mapping[str, float]) -> None:
        """Start counting the events of all types that have a weight."""
        self._types = frozenset(kind for kind, weight in event_weights.items() if weight > 0)

    def count(self, events: Sequence[Event], results: Iterable[AppendResult], now_us: int) -> None:
        """Count the new events among these."""
        waiting, types = self._waiting, self._types
        for event, result in zip(events, results, strict=True):
            if event.type in types and not result.duplicate and len(waiting) < MAX_WAITING:
                age = max(now_us - event.timestamp_us, 0) / (HALF_LIFE_S * 1e6)
                if age <= MAX_EVENT_AGE_HALF_LIVES:
                    visit = (event.item_id, _digest(event.user_id))
                    waiting[visit] = max(0.5**age, waiting.get(visit, 0.0))

    async def sync(self) -> None:
        """Flush, then read the trends of all processes; raise StorageError if the store cannot be used."""
        await self.flush()
        async with self._flushing:
            self.newest = await self._store.trends(self._tenant, MAX_ITEMS)

    async def flush(self) -> None:
        """Write the visits to the store; after a StorageError they are kept for the next flush."""
        # without the lock, this could return before a concurrent flush has written the visits that it took
        async with self._flushing:
            visits, self._waiting, hashed = self._waiting, {}, None
            if not visits:
                return
            try:
                self._secret = self._secret or await self._store.secret()
                hashed = await in_thread(_hashed, visits, self._secret)
                await self._store.add_visits(self._tenant, hashed)
            except BaseException as exc:
                if hashed is None or isinstance(exc, StorageError):  # else a cancelled call may have added them
                    logger.debug("cannot save trends, retrying: %s", exc)
                    self._waiting = visits | self._waiting
                raise


def _hashed(visits: Mapping[tuple[str, bytes], float], secret: bytes) -> list[Visit]:
    return [Visit(item_id, _visitor(secret, item_id, user), weight) for (item_id, user), weight in visits.items()]


def _digest(user_id: str) -> bytes:
    return blake2b(user_id.encode(), digest_size=DIGEST_BYTES).digest()


def _visitor(secret: bytes, item_id: str, digest: bytes) -> bytes:
    """Return a keyed hash that nobody outside can choose, and that differs between items."""
    return blake2b(item_id.encode() + digest, key=secret, digest_size=VISITOR_BYTES).digest()
