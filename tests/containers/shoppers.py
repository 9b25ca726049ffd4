"""Clients of a deployment that record acknowledged events, and compare them with the logs."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager

ITEMS = 120
USERS = 600
CLIENTS = 6
FEW_CLIENTS = 2  # who leave the processors to a training
PAUSE_S = 0.03
ANSWER_WITHIN_S = 35.0
READ_WITHIN_S = 120.0
OK = 200


class Shoppers:
    """Threads that post events and ask for recommendations; what follows an item is mostly the same other one.

    answers       how many requests of a kind had an outcome: "events 200", "events 503 overloaded", "events OSError"
    sources       what recommendations came from
    acknowledged  ids of the events that were answered with 200, by user
    compared      how many of them were lost, and how many doubled, when they were last compared
    """

    def __init__(self, port: int, key: str) -> None:
        self.answers: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.acknowledged: defaultdict[str, set[str]] = defaultdict(set)
        self.compared = (0, 0)
        self._port = port
        self._head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._lock = threading.Lock()
        self._generations = 0

    @contextmanager
    def shop(self, clients: int = CLIENTS) -> Iterator[Counter[str]]:
        """Send requests within the block; yields their outcomes, which are complete afterwards."""
        ended, outcomes = threading.Event(), Counter[str]()
        self._generations += 1
        seeds = range(self._generations * 1000, self._generations * 1000 + clients)
        threads = [threading.Thread(target=self._run, args=(seed, ended, outcomes)) for seed in seeds]
        for thread in threads:
            thread.start()
        try:
            yield outcomes
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            self.answers.update(outcomes)

    def shop_for(self, seconds: float) -> Counter[str]:
        """Send requests for this many seconds; return their outcomes."""
        with self.shop() as outcomes:
            time.sleep(seconds)
        return outcomes

    @property
    def events(self) -> int:
        """Number of acknowledged events."""
        return sum(map(len, self.acknowledged.values()))

    def compare(self) -> tuple[int, int]:
        """Number of acknowledged events that the logs lack, and of duplicate ids in them."""
        lost = doubled = 0
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_WITHIN_S)) as connection:
            for user, wanted in self.acknowledged.items():
                found = Counter(self._logged(connection, user))
                lost += len(wanted - found.keys())
                doubled += sum(count > 1 for count in found.values())
        self.compared = lost, doubled
        return self.compared

    def _logged(self, connection: http.client.HTTPConnection, user: str) -> Iterator[str]:
        after: str | None = ""
        while after is not None:
            status, body = self._page(connection, f"/v1/users/{user}/events?limit=1000{after}")
            if status == http.HTTPStatus.NOT_FOUND:
                return
            assert status == OK, body
            page = json.loads(body)
            yield from (event["event_id"] for event in page["events"])
            after = page["next"] and f"&after={page['next']}"

    def _page(self, connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
        """Read a page of a log; retry while the store times out, as on a busy machine."""
        give_up_at_s = time.monotonic() + READ_WITHIN_S
        while True:
            status, body = self._request(connection, "GET", path)
            if status != http.HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > give_up_at_s:
                return status, body
            time.sleep(PAUSE_S)

    def _run(self, seed: int, ended: threading.Event, outcomes: Counter[str]) -> None:
        chance, at = random.Random(seed), dict[str, int]()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_WITHIN_S)
        while not ended.wait(PAUSE_S):
            user = f"u{chance.randrange(USERS)}"
            events = []
            for _ in range(chance.choice([0, 0, 1, 1, 5, 10])):
                follows = (at.get(user, seed) * 7 + 1) % ITEMS
                at[user] = follows if chance.random() < 0.85 else chance.randrange(ITEMS)
                events.append({"event_id": str(uuid.uuid4()), "user_id": user, "item_id": f"i{at[user]}"})
            outcome, body = self._send(connection, user, events)
            with self._lock:
                code = "" if outcome == OK else error_code(body)
                outcomes[f"{'events' if events else 'recommendations'} {outcome}{code}"] += 1
                if outcome == OK and events:
                    self.acknowledged[user].update(event["event_id"] for event in events)
                elif outcome == OK:
                    self.sources[json.loads(body)["source"]] += 1
            if chance.random() < 0.2:
                connection.close()  # the next request opens it again
        connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, user: str, events: list[dict[str, str]]
    ) -> tuple[int | str, bytes]:
        try:
            if events:
                return self._request(connection, "POST", "/v1/events", events)
            return self._request(connection, "GET", f"/v1/users/{user}/recommendations?k=5")
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            return type(exc).__name__, b""

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> tuple[int, bytes]:
        connection.request(method, path, None if body is None else json.dumps(body), self._head)
        answer = connection.getresponse()
        return answer.status, answer.read()


def error_code(body: bytes) -> str:
    """Code of an error response after a space; empty for other responses."""
    try:
        return f" {json.loads(body)['error']['code']}"
    except (ValueError, KeyError):
        return ""


def failed(outcomes: Counter[str]) -> dict[str, int]:
    """Outcomes other than success."""
    return {name: count for name, count in outcomes.items() if not name.endswith(f" {OK}")}


def failed_otherwise(outcomes: Counter[str]) -> dict[str, int]:
    """Failed outcomes except documented refusals while the store is unavailable."""
    return {name: count for name, count in failed(outcomes).items() if not name.startswith("events 503 storage_")}
