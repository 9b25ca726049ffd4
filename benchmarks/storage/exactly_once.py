"""Check that each event counts exactly once when it is posted through several replicas on one Redis.

Concurrent senders post batches of overlapping shares of the events through HAProxy. Every tenth event is sent a second
time, half of the events are of a few hot users, and a fifth arrives late. At the end each user's log must contain each
event once, and the stored state must be the fold of that log; otherwise the command exits with 1.

    python -m benchmarks.storage.exactly_once --model models/ml-1m                      # the server on the PATH
    python -m benchmarks.storage.exactly_once --model models/ml-1m --server BINARY      # another Redis or Valkey
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from uuid_utils import uuid7

from app.serving.served_generation import generation_of
from benchmarks.harness.ledger import is_fold
from benchmarks.harness.topology import program, topology
from model.artifact import model_directory
from storage.redis.store import RedisStore
from storage.state.event import Event
from storage.state.generation import Generation

HOT_USERS = 10
HOT_SHARE = 0.5
COLD_USERS = 2_000
BATCH_SIZES = (1, 10, 100)
SENDERS = 16
NOW_S = 1_750_000_000

console = Console()
EventJson = dict[str, str | int]


def events_to_send(events: int, item_ids: Sequence[str]) -> list[EventJson]:
    """Return distinct events: half are of hot users, and a fifth have a timestamp up to an hour earlier."""
    rng = random.Random(0)

    def event(number: int) -> EventJson:
        hot = rng.random() < HOT_SHARE
        user_id = f"hot-{rng.randrange(HOT_USERS)}" if hot else f"cold-{rng.randrange(COLD_USERS)}"
        late_s = rng.randrange(3_600) if rng.random() < 0.2 else 0
        event_id = str(uuid7()) if number % 2 else f"own-{number}"
        timestamp = NOW_S + number - late_s
        return {"event_id": event_id, "user_id": user_id, "item_id": rng.choice(item_ids), "timestamp": timestamp}

    return [event(number) for number in range(events)]


async def post_all(url: str, events: list[EventJson]) -> tuple[int, int]:
    """Post each event, and every tenth a second time; return how many were accepted, and how many were duplicates."""
    shares: list[list[EventJson]] = [[] for _ in range(SENDERS)]
    for number, event in enumerate(events):
        shares[number % SENDERS].append(event)
        if number % 10 == 0:
            shares[(number // 10) % SENDERS].append(event)
    accepted = duplicates = 0

    async def send(client: httpx.AsyncClient, share: list[EventJson], rng: random.Random) -> None:
        nonlocal accepted, duplicates
        while share:
            size = rng.choice(BATCH_SIZES)
            batch = share[-size:]
            answer = await client.post("/v1/events", json=batch)
            if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # busy; the ids make a retry safe
                await asyncio.sleep(0.05)
                continue
            answer.raise_for_status()
            del share[-size:]
            accepted += answer.json()["accepted"]
            duplicates += answer.json()["duplicates"]

    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as senders:
        for number, share in enumerate(shares):
            senders.create_task(send(client, share, random.Random(number)))
    return accepted, duplicates


async def wrong_users(redis_url: str, generation: Generation, events: list[EventJson]) -> list[str]:
    """Return the users whose log is not exactly their events, or whose state is not the fold of their log."""
    expected: dict[str, set[str]] = defaultdict(set)
    for event in events:
        expected[str(event["user_id"])].add(str(event["event_id"]))
    store = await RedisStore.open(redis_url, [generation])
    try:
        return [user_id for user_id, ids in expected.items() if not await is_right(store, generation, user_id, ids)]
    finally:
        await store.close()


async def is_right(store: RedisStore, generation: Generation, user_id: str, ids: set[str]) -> bool:
    """Return whether the log contains exactly these ids, each once, and the state is its fold."""
    entries = await store.events("main", user_id, limit=10**7)
    log = [entry.record for entry in entries if isinstance(entry.record, Event)]
    (value,) = await store.states("main", [user_id], generation)
    return len(log) == len(ids) and {event.event_id for event in log} == ids and is_fold(generation, value, log)


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    events: Annotated[int, typer.Option(min=100, help="Distinct events.")] = 100_000,
    replicas: Annotated[int, typer.Option(min=1)] = 4,
    server: Annotated[str | None, typer.Option(help="Binary of the Redis or Valkey server.")] = None,
) -> None:
    """Post the events through the replicas, and check the stored ones."""
    trained = model_directory.load(model)
    sent = events_to_send(events, trained.items.ids)
    with topology(model, replicas, server=server) as running:
        begin_s = time.monotonic()
        accepted, duplicates = asyncio.run(post_all(running.url, sent))
        elapsed_s = time.monotonic() - begin_s
        wrong = asyncio.run(wrong_users(str(running.redis_url), generation_of(trained), sent))
    binary = server or program("redis-server", "valkey-server")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    console.print(" ".join(version.split()[:3]), highlight=False)
    console.print(
        f"{accepted:,} accepted, {duplicates:,} duplicates, {(accepted + duplicates) / elapsed_s:,.0f} events/s"
    )
    console.print(f"users whose log or state is wrong: {len(wrong)} of {len({event['user_id'] for event in sent}):,}")
    if wrong or accepted != events:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
