"""Sealed states: modified, truncated, foreign and expired ones are refused; and their cost compared with users.

    python -m benchmarks.attack.sealed_states --model models/NAME --states 100000

Exit status 1 where any is not refused as an invalid sealed state, or an expired one, or where the list differs.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import httpx
import typer

from app.http.auth.seal_keys import SealKeyring, rotate
from app.http.auth.sealed_states import CHARACTERS, DAY_S, StateSealer
from benchmarks.harness.service_process import running_service
from benchmarks.machine import cpu

LIST, EVENTS = "/v1/portable/recommendations", "/v1/portable/events"
AT_ONCE, TIMED = 16, 300
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
REFUSED = {(422, "invalid_sealed_state"), (422, "sealed_state_expired")}


@contextmanager
def sealing_service(model: Path) -> Iterator[tuple[str, Path]]:
    """Serve the model on an empty store; yields the URL and the file of the seal keys."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "seal_keys"
        rotate(file)
        with running_service(model, environment=os.environ | {"LISAREC_SEAL_KEYS_FILE": str(file)}) as url:
            yield url, file


def wrong_states(good: str, file: Path, count: int, seed: int = 0) -> Iterator[str]:
    """Yield states that a service with the keys of the valid one must refuse."""
    draw, own = random.Random(seed), StateSealer(SealKeyring(file), 30)
    rotate(file.with_name("others"))
    foreign = StateSealer(SealKeyring(file.with_name("others")), 30)
    state = own.open(good, "main", "")
    with patch("app.http.auth.sealed_states.StateSealer._now_s", lambda _: int(time.time()) - 31 * DAY_S):
        expired = own.seal(state, "main", "").text
    elsewhere = [
        own.seal(state, "books", "").text,
        own.seal(state, "main", "app").text,
        foreign.seal(state, "main", "").text,
    ]
    for _ in range(count):
        at, kind = draw.randrange(CHARACTERS), draw.randrange(8)
        if kind < 4:
            other = draw.choice(ALPHABET.replace(good[at], ""))
            yield good[:at] + other + good[at + 1 :]
        elif kind == 4:
            yield good[:at]
        elif kind == 5:
            yield "".join(draw.choices(ALPHABET, k=CHARACTERS))
        else:
            yield expired if kind == 6 else draw.choice(elsewhere)


async def refusals(url: str, states: Iterator[str]) -> Counter[tuple[int, str]]:
    """Send the states; count the responses by status and code."""
    counts: Counter[tuple[int, str]] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def send() -> None:
            for state in states:
                answer = await client.post(LIST, json={"state": state})
                code = "ok" if answer.is_success else answer.json()["error"]["code"]
                counts[answer.status_code, code] += 1

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    return counts


def timings(client: httpx.Client, state: str, item_id: str) -> tuple[dict[str, float], bool]:
    """Return the median seconds of each call, and whether the lists for state and user are equal.

    state  folded from the same events as that of the user "ada"; the timed events are others'
    """
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "a list for a user": ("/v1/recommendations", {"user_id": "ada"}),
        "a list for a state": ("/v1/recommendations", {"state": state}),
        "an event of a user": ("/v1/events", {"user_id": "eve", "item_id": item_id}),
        "an event of a state": (EVENTS, {"state": state, "events": [{"item_id": item_id}]}),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    answers: dict[str, Any] = {}
    for _ in range(TIMED):
        for name, (path, body) in calls.items():
            begin_s = time.perf_counter()
            answers[name] = client.post(path, json=body).raise_for_status().json()
            took[name].append(time.perf_counter() - begin_s)
    of_user, of_state, *_ = answers.values()
    return {name: statistics.median(one) for name, one in took.items()}, of_user["items"] == of_state["items"]


def run(model: Path, states: int) -> bool:
    """Print refusals and the cost of a state; return whether everything is as required."""
    with sealing_service(model) as (url, file), httpx.Client(base_url=url, timeout=60) as client:
        popular = client.get("/v1/items/popular", params={"k": 20}).json()["items"]
        events = [{"event_id": f"e-{n}", "item_id": item["item_id"]} for n, item in enumerate(popular)]
        good = client.post(EVENTS, json={"events": events}).json()["state"]
        client.post("/v1/events", json=[{**event, "user_id": "ada"} for event in events]).raise_for_status()
        took, is_same = timings(client, good, popular[0]["item_id"])
        plain_s = took["a list for a user"]
        counts = asyncio.run(refusals(url, wrong_states(good, file, states)))
        print(cpu())
        for name, median_s in took.items():
            print(f"{name:<20} {1e3 * median_s:.2f} ms {median_s / plain_s - 1:+.0%}")
        print(f"the lists are {'the same' if is_same else 'DIFFERENT'}")
        for (status, code), count in counts.most_common():
            print(f"{count:>9,}  {status} {code}")
        return is_same and counts.keys() <= REFUSED and counts.total() == states


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    states: Annotated[int, typer.Option(min=1, help="Wrong states that are sent.")] = 100_000,
) -> None:
    """Send invalid states; exit with 1 if one is accepted."""
    raise typer.Exit(not run(model, states))


if __name__ == "__main__":
    typer.run(main)
