"""Clients and a producer outside of the hosts for each third of the users, and the longest times without a response."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, islice, pairwise

from redis.crc import key_slot

from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.ledger import TENANT, Ledger
from benchmarks.harness.redis_cluster import slots_of
from benchmarks.harness.retrying_clients import NO_ANSWER, TRANSPORT_ERRORS, HttpConnection
from benchmarks.machines.topic import Topic
from storage.redis.layout.keys import Keyspace
from storage.redis.store import PARTITIONS

USERS = 40  # of each third
SENDERS = 2  # of each third
PAUSE_S = 0.1  # between two requests of a client
ANSWER_WITHIN_S = 2.0  # then a client takes a new connection
BATCH_SIZES = (1, 1, 5)

KINDS = EVENTS, LISTS, RECORDS = "events", "recommendations", "records"


class Load:
    """Clients that post events until acknowledged, clients that request lists, and a producer.

    A record is acknowledged when its offset is committed. The users of each third have a partition of the topic.

    answers  how many requests got which answer, and how many records are acknowledged
    """

    def __init__(self, address: Address, topic: Topic, item_ids: Sequence[str], thirds: int, seed: int) -> None:
        self.ledger = Ledger(item_ids, seed)
        self.answers: Counter[str] = Counter()
        self.is_over = False
        self._address = address
        self._topic = topic
        self._users = [list(islice(users_of(third, thirds), USERS)) for third in range(thirds)]
        self._answered_s: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self._seed = seed

    async def run(self) -> None:
        """Send until the run is over and every event is acknowledged."""
        async with asyncio.TaskGroup() as clients:
            for third in range(len(self._users)):
                for number in range(SENDERS):
                    clients.create_task(self._post(third, random.Random(f"{self._seed} {third} {number}")))
                clients.create_task(self._ask(third, random.Random(f"{self._seed} {third}")))
            clients.create_task(self._produce(random.Random(self._seed)))

    def longest_wait_s(self, kind: str, begin_s: float) -> float:
        """Return the longest time without any response to a third of the users, since that monotonic time."""
        now_s = time.monotonic()
        waits = [0.0]
        for third in range(len(self._users)):
            times = [begin_s, *(at_s for at_s in self._answered_s[kind, third] if at_s > begin_s), now_s]
            waits += [later - earlier for earlier, later in pairwise(times)]
        return max(waits)

    def is_answered_since(self, begin_s: float, kinds: Sequence[str]) -> bool:
        """Return whether every third of the users got responses to each of these kinds of requests."""
        return all(
            (times := self._answered_s[kind, third]) and times[-1] > begin_s
            for kind in kinds
            for third in range(len(self._users))
        )

    async def _post(self, third: int, rng: random.Random) -> None:
        connection = HttpConnection(self._address, ANSWER_WITHIN_S)
        while not self.is_over:
            users = (rng.choice(self._users[third]) for _ in range(rng.choice(BATCH_SIZES)))
            numbers = [self.ledger.new(user_id, time.time()) for user_id in users]
            bodies = [self.ledger.body(number) for number in numbers]
            while not await self._is_answered(EVENTS, third, connection, ("POST", "/v1/events", bodies)):
                await asyncio.sleep(PAUSE_S)
            self.ledger.acknowledge(numbers)
            await asyncio.sleep(PAUSE_S)
        connection.close()

    async def _ask(self, third: int, rng: random.Random) -> None:
        connection = HttpConnection(self._address, ANSWER_WITHIN_S)
        while not self.is_over:
            path = f"/v1/users/{rng.choice(self._users[third])}/recommendations"
            await self._is_answered(LISTS, third, connection, ("GET", path, None))
            await asyncio.sleep(PAUSE_S)
        connection.close()

    async def _produce(self, rng: random.Random) -> None:
        while not self.is_over or self._topic.is_behind:
            if not self.is_over:
                for third, users in enumerate(self._users):
                    number = self.ledger.new(rng.choice(users), time.time())
                    self._topic.produce(third, number, self.ledger.body(number))
            for third, numbers in enumerate(await asyncio.to_thread(self._topic.newly_committed)):
                if numbers:
                    self.ledger.acknowledge(numbers)
                    self.answers[f"{RECORDS} committed"] += len(numbers)
                    self._answered_s[RECORDS, third].append(time.monotonic())
            await asyncio.sleep(PAUSE_S)

    async def _is_answered(
        self, kind: str, third: int, connection: HttpConnection, request: tuple[str, str, object]
    ) -> bool:
        try:
            status, answer = await connection.request(*request)
        except TRANSPORT_ERRORS:
            self.answers[f"{kind} {NO_ANSWER}"] += 1
            return False
        if status != 200:
            self.answers[f"{kind} {status} {answer['error']['code']}"] += 1
            return False
        self.answers[f"{kind} 200" if kind == EVENTS else f"{kind} from {answer['source']}"] += 1
        self._answered_s[kind, third].append(time.monotonic())
        return True


def users_of(third: int, thirds: int) -> Iterator[str]:
    """Yield users whose logs are in slots of the nth primary."""
    keys, slots = Keyspace("lisarec", PARTITIONS), slots_of(third, thirds)
    users = (f"user-{number}" for number in count())
    return (user_id for user_id in users if key_slot(keys.user(TENANT, user_id).head.encode()) in slots)
