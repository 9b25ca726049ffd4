"""Counters of sliding windows, in the store's Redis or in one process. A cost is spent from all quotas, or from none.

The count of a sliding window is that of the current fixed window and a share of the previous one, as if the latter had
been used evenly. Whatever the order of requests, no window of that length has more than twice the limit.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from app.recommendation.batching import Limits, MicroBatcherByLane, Requester
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command, ReplicaAcks, storage_error
from storage.redis.scripts.quotas import SPEND

REDIS_TIMEOUT_S = 0.25  # a slower Redis must not slow down every request
AT_ONCE = Limits(max_batch=64, max_waiting=1024)  # calls of a node in one round trip, which costs far more than a call


class Quota(NamedTuple):
    """The limit of a counter, by the counter's key in Redis."""

    key: str
    limit: int


class Spending(NamedTuple):
    """A cost to spend from all quotas, or from none."""

    quotas: Sequence[Quota]
    cost: int
    window_s: int

    def command(self, *, has_script: bool = True) -> Command:
        """Return the command that spends it, with the whole script if the server does not have it."""
        keys, limits = [quota.key for quota in self.quotas], [quota.limit for quota in self.quotas]
        found = SPEND.command(keys, [1000 * self.window_s, self.cost, *limits])
        return found if has_script else Command(found.key, ("EVAL", SPEND.text, *found.args[2:]))


class Refusal(NamedTuple):
    """The place of the first quota that lacks the cost, and the seconds until it has it, at most one window."""

    place: int
    wait_s: int


class SharedCounters:
    """Counters in Redis, of all processes together. The keys of quotas that are spent together share a hash tag.

    A node that hangs delays only the requests that detect it; then its counters fail at once until it responds.
    """

    def __init__(self, url: str) -> None:
        """Raise ValueError if the URL, or a file that it names, cannot be used."""
        timeout_s = REDIS_TIMEOUT_S
        self._servers = RedisServers(url, connect_timeout_s=timeout_s, socket_timeout_s=timeout_s, acks=ReplicaAcks())
        self._timeout_s = 2 * timeout_s  # to connect and to call
        self._batcher: MicroBatcherByLane[str | None, Spending, Any] = MicroBatcherByLane(
            self._spend_all,
            lambda _: 1.0,
            lambda spending: self._servers.slots.node_of(spending.quotas[0].key),
            lambda _: AT_ONCE,
        )

    async def spend(self, quotas: Sequence[Quota], cost: int, window_s: int) -> Refusal | None:
        """Spend the cost from all quotas, or return the first that lacks it; raises StorageError, TimeoutError."""
        async with asyncio.timeout(self._timeout_s):  # also of waiting for other round trips
            reply = await self._batcher.answer_one(Spending(quotas, cost, window_s), Requester(flow=quotas[0].key))
        if reply == 0:
            return None
        place, previous, current, rest_ms = reply
        return Refusal(place - 1, _wait_s(previous, current, rest_ms / 1000, window_s, quotas[place - 1].limit - cost))

    async def _spend_all(self, spendings: Sequence[Spending]) -> list[Any]:
        """Return the reply to each of them, with a StorageError in place of a failed one; raises as `spend`."""
        async with asyncio.timeout(self._timeout_s):
            await self._servers.connect()
            replies = await self._execute([spending.command() for spending in spendings])
            if lost := [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]:
                again = await self._execute([spendings[place].command(has_script=False) for place in lost])
                for place, reply in zip(lost, again, strict=True):
                    replies[place] = reply
        return [storage_error(reply) if isinstance(reply, Exception) else reply for reply in replies]

    async def _execute(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies; one whose keys move to another node fails alone, for as long as they move."""
        return await self._servers.execute_all(commands, return_try_again=True)

    async def close(self) -> None:
        """Close the connections."""
        await self._servers.close()


class LocalCounters:
    """Counters of this process."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}  # key -> number of a window -> what was spent in it

    def spend(self, quotas: Sequence[Quota], cost: int, window_s: int) -> Refusal | None:
        """Spend the cost from all quotas, or return the first that lacks it."""
        now_s = time.monotonic()
        window, rest_s = int(now_s // window_s), window_s - now_s % window_s
        spent = {
            quota.key: {number: self._counts.get(quota.key, {}).get(number, 0) for number in (window - 1, window)}
            for quota in quotas
        }
        for place, (key, limit) in enumerate(quotas):
            previous, current = spent[key].values()
            if math.ceil(previous * rest_s / window_s) + current + cost > limit:
                return Refusal(place, _wait_s(previous, current, rest_s, window_s, limit - cost))
        for counts in spent.values():
            counts[window] += cost
        self._counts |= spent
        return None


def _wait_s(previous: int, current: int, rest_s: float, window_s: int, most: int) -> int:
    """Return the seconds until at most so much is spent, at least 1 and at most one window."""
    if current <= most:  # when less of the previous window counts
        wait_s = rest_s - window_s * (most - current) / previous
    else:  # when this window is the previous one, and less of it counts
        wait_s = rest_s + window_s - window_s * max(0, most) / max(1, current)
    return min(window_s, max(1, math.ceil(wait_s)))
