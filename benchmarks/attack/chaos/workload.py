"""Clients of the chaos run: they append, read, undo, merge and erase, and retry unanswered requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import count

from uuid_utils import uuid7

from benchmarks.attack.chaos.correction_gate import CorrectionGate
from benchmarks.attack.chaos.operations import EventKey, Operation, OperationKind, OperationLog
from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.retrying_clients import NO_ANSWER, TRANSPORT_ERRORS, HttpConnection

CLIENTS = 12
MERGING_FAMILIES = 30
USERS_OF_A_FAMILY = 4
LISTS = 3  # users at a time whose whole log is read again and again
LIST_LENGTH = 120  # events, after which another user takes the place
PAGE = 1_000
BATCH_SIZES = (1, 1, 1, 5, 20)
GIVE_UP_S = 200.0
PAUSE_S = 0.05  # before the same is sent again, and between operations
CALM_PAUSE_S = 1.0  # between operations while commands, which give way to requests, have to end
OWN_ID = "own-"  # begins an id that is no UUIDv7
COLD_ITEMS = 20  # that no model has learned

WEIGHTS: dict[str, int] = {"events": 60, "list": 14, "again": 8, "undo": 8, "recommend": 6, "merge": 3, "erase": 1}

REFUSALS = (404, 409)


class Workload:
    """Clients that send operations to any of the URLs.

    record        every operation
    answers       how many requests got which answer: what was asked, and an HTTP status, its code in the body, or none
    given_up      what nobody has answered for so long, with nothing in the way
    is_calm       says whether clients pause for longer between operations
    is_disturbed  says whether something is taken away from the service
    """

    def __init__(self, addresses: Sequence[Address], item_ids: Sequence[str], seed: int, gate: CorrectionGate) -> None:
        self.record = OperationLog()
        self.answers: Counter[str] = Counter()
        self.given_up: list[str] = []
        self.is_calm: Callable[[], bool] = lambda: False
        self.is_disturbed: Callable[[], bool] = lambda: False
        self._gate = gate
        self._addresses = addresses
        self._item_ids = [*item_ids, *(f"cold-{number}" for number in range(COLD_ITEMS))]
        self._seed = seed
        self._posted: list[tuple[int, EventKey]] = []  # acknowledged events of families, which may be sent again
        self._numbers = count()
        self._list_lengths: defaultdict[str, int] = defaultdict(int)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Send operations until the run is over and each is answered or given up."""
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self._client(random.Random(self._seed * CLIENTS + number), is_over))

    async def _client(self, rng: random.Random, is_over: Callable[[], bool]) -> None:
        connections = [HttpConnection(address) for address in self._addresses]
        operations = {
            "events": self._post_events,
            "list": self._post_or_read_list,
            "again": self._post_again,
            "undo": self._undo,
            "recommend": self._recommend,
            "merge": self._merge,
            "erase": self._erase,
        }
        while not is_over():
            (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            await operations[kind](rng, connections)
            await asyncio.sleep((CALM_PAUSE_S if self.is_calm() else PAUSE_S) * rng.random())
        for connection in connections:
            connection.close()

    async def _post_events(self, rng: random.Random, connections: Sequence[HttpConnection]) -> None:
        bodies = [self._new_event(rng, _user_of(*_any_user(rng))) for _ in range(rng.choice(BATCH_SIZES))]
        await self._post(rng, connections, bodies)

    async def _post_again(self, rng: random.Random, connections: Sequence[HttpConnection]) -> None:
        if self._posted:
            _, (user_id, event_id) = rng.choice(self._posted)
            item_id = self.record.items[user_id, event_id]
            body: dict[str, object] = {"event_id": event_id, "user_id": user_id, "item_id": item_id}
            await self._post(rng, connections, [body])

    async def _post_or_read_list(self, rng: random.Random, connections: Sequence[HttpConnection]) -> None:
        user_id = self._list_user(rng)
        if rng.random() < 0.5:
            await self._post(
                rng, connections, [self._new_event(rng, user_id, is_plain=True) for _ in range(rng.choice((1, 3)))]
            )
            return
        read = self._begin("read", -1, user_id)
        answer = await self._answered([read], rng, connections, "GET", f"/v1/users/{user_id}/events?limit={PAGE}")
        if answer is not None:
            read.event_ids = [event["event_id"] for event in answer["events"]]
        elif read.outcome == "refused":  # nothing was posted for the user yet
            read.end("done", read.ended_s)

    async def _undo(self, rng: random.Random, connections: Sequence[HttpConnection]) -> None:
        if self._posted:
            family, (user_id, event_id) = rng.choice(self._posted)
            undo = self._begin("undo", family, user_id, [event_id])
            await self._answered([undo], rng, connections, "DELETE", f"/v1/users/{user_id}/events/{event_id}")

    async def _merge(self, rng: random.Random, connections: Sequence[HttpConnection]) -> None:
        if not self._gate.is_open:
            return
        family, number = _any_user(rng)
        user_id = _user_of(family, number)
        visitor = _user_of(family, (number + rng.randrange(1, USERS_OF_A_FAMILY)) % USERS_OF_A_FAMILY)
        merge = self._begin("merge", family, user_id, visitor=visitor)
        with self._gate.correction():
            await self._answered([merge], rng, connections, "POST", f"/v1/users/{user_id}/merge", {"from": visitor})

    async def _erase(self, rng: random.Random, connections: Sequence[HttpConnection]) -> None:
        if not self._gate.is_open:
            return
        family, number = _any_user(rng)
        user_id = _user_of(family, number)
        erase = self._begin("erase", family, user_id)
        with self._gate.correction():
            await self._answered([erase], rng, connections, "DELETE", f"/v1/users/{user_id}")

    async def _recommend(self, rng: random.Random, connections: Sequence[HttpConnection]) -> None:
        path = f"/v1/users/{_user_of(*_any_user(rng))}/recommendations?exclude_seen=all"
        try:
            status, answer = await rng.choice(connections).request("GET", path)
        except TRANSPORT_ERRORS:
            self.answers[f"recommend {NO_ANSWER}"] += 1
        else:
            code = "" if status == 200 else f" {answer['error']['code']}"
            self.answers[f"recommend {status}{code}"] += 1

    async def _post(
        self, rng: random.Random, connections: Sequence[HttpConnection], bodies: Sequence[dict[str, object]]
    ) -> None:
        """Post events of any users; the events of each user are an operation of their own."""
        ids_of: defaultdict[str, list[str]] = defaultdict(list)
        for body in bodies:
            ids_of[str(body["user_id"])].append(str(body["event_id"]))
        appends = [self._begin("append", _family_of(user_id), user_id, ids) for user_id, ids in ids_of.items()]
        answer = await self._answered(appends, rng, connections, "POST", "/v1/events", bodies)
        if answer is None:
            return
        if answer["accepted"] + answer["duplicates"] != len(bodies):
            raise RuntimeError(f"{len(bodies)} events were answered by {answer}")
        self._posted += [
            (append.family, (append.user_id, event_id))
            for append in appends
            if append.family >= 0
            for event_id in append.event_ids
        ]

    async def _answered(
        self,
        operations: Sequence[Operation],
        rng: random.Random,
        connections: Sequence[HttpConnection],
        method: str,
        path: str,
        body: object = None,
    ) -> dict | None:  # type: ignore[type-arg]
        """Retry the request on any process until it succeeds or is refused; record and return the outcome."""
        kind, give_up_s = operations[0].kind, time.monotonic() + GIVE_UP_S
        while time.monotonic() < give_up_s:
            for operation in operations:
                operation.attempts += 1
            try:
                status, answer = await rng.choice(connections).request(method, path, body)
            except TRANSPORT_ERRORS:
                self.answers[f"{kind} {NO_ANSWER}"] += 1
            else:
                code = "" if status < 300 else f" {answer['error']['code']}"
                self.answers[f"{kind} {status}{code}"] += 1
                if status < 300 or status in REFUSALS:
                    for operation in operations:
                        operation.end("done" if status < 300 else "refused", time.monotonic())
                    return answer if status < 300 else None
            await asyncio.sleep(PAUSE_S * rng.uniform(0.5, 1.5))
            if self.is_disturbed():
                give_up_s = time.monotonic() + GIVE_UP_S
        self.given_up.append(f"{method} {path}")
        return None

    def _begin(
        self, kind: OperationKind, family: int, user_id: str, event_ids: Sequence[str] = (), visitor: str = ""
    ) -> Operation:
        operation = Operation(kind, family, user_id, time.monotonic(), event_ids, visitor)
        self.record.operations.append(operation)
        return operation

    def _new_event(self, rng: random.Random, user_id: str, *, is_plain: bool = False) -> dict[str, object]:
        """Create an event: half have a UUIDv7; three quarters have no time, and the others one of the last hour."""
        event_id = str(uuid7()) if rng.random() < 0.5 else f"{OWN_ID}{next(self._numbers)}"
        item_id = rng.choice(self._item_ids)
        self.record.items[user_id, event_id] = item_id
        event: dict[str, object] = {"event_id": event_id, "user_id": user_id, "item_id": item_id}
        return event if is_plain or rng.random() < 0.75 else event | {"timestamp": time.time() - 3_600 * rng.random()}

    def _list_user(self, rng: random.Random) -> str:
        """Choose the user of a list; around a loss use other users, because lost events break a list history."""
        place = f"list-{rng.randrange(LISTS)}-{self._gate.epoch}"
        self._list_lengths[place] += 1
        return f"{place}.{self._list_lengths[place] // LIST_LENGTH}"


def _any_user(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(MERGING_FAMILIES), rng.randrange(USERS_OF_A_FAMILY)


def _user_of(family: int, number: int) -> str:
    return f"user-{family}-{number}"


def _family_of(user_id: str) -> int:
    kind, family, _ = user_id.split("-")
    return int(family) if kind == "user" else -1
