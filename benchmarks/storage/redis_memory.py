"""Measure the memory of a user in Redis: the state, compared with a list of the user's items, by length of the history.

python -m benchmarks.storage.redis_memory --model models/ml-1m
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import redis
import typer
from rich.console import Console
from rich.table import Table
from uuid_utils import uuid7

from app.serving.served_generation import generation_of
from benchmarks.harness.topology import redis_server
from model.artifact import model_directory
from storage.redis.layout.keys import Keyspace
from storage.redis.store import PARTITIONS, RedisStore
from storage.state.event import Event
from storage.state.generation import Generation

LENGTHS = (1, 10, 100, 1_000, 10_000)
BATCH = 1_000
PREFIX, TENANT = "lisarec", "main"

console = Console()


async def fill(url: str, generation: Generation, item_ids: Sequence[str]) -> None:
    """Append the events of one user for each length of history."""
    store = await RedisStore.open(url, [generation], prefix=PREFIX)
    try:
        for length in LENGTHS:
            events = [
                Event(str(uuid7()), str(length), item_ids[n * 7919 % len(item_ids)], "click", n * 1_000_000, None)
                for n in range(length)
            ]
            for begin in range(0, length, BATCH):
                await store.append(TENANT, events[begin : begin + BATCH])
    finally:
        await store.close()


def main(model: Annotated[Path, typer.Option(help="Model directory.")]) -> None:
    """Print the bytes of a user in Redis for each length of history."""
    trained = model_directory.load(model)
    generation, item_ids = generation_of(trained), trained.items.ids
    table = Table("events of the user", "state", "a list of all of them", "log and its index, until archived")
    with TemporaryDirectory() as directory, redis_server(Path(directory)) as url:
        asyncio.run(fill(url, generation, item_ids))
        client = redis.Redis.from_url(url)
        for length in LENGTHS:
            user = Keyspace(PREFIX, PARTITIONS).user(TENANT, str(length))
            (state,) = user.states([generation])
            client.rpush(f"ids:{length}", *(item_ids[n * 7919 % len(item_ids)] for n in range(length)))
            sizes: list[Any] = [
                client.memory_usage(key, samples=0) for key in (state, f"ids:{length}", user.log, user.id_index)
            ]
            of_state, of_list, *of_log = sizes
            table.add_row(f"{length:,}", *(f"{size:,} B" for size in (of_state, of_list, sum(of_log))))
        version = client.info("server")["redis_version"]
    table.title = f"MEMORY USAGE, Redis {version}"
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
