"""A writer without HTTP: it appends events to the store as the service does, until it is killed.

The fork server runs it as the command `writer STORE_ADDRESS MODEL EVENTS TAKEN`. Each line of EVENTS is a JSON array of
events. The writer appends the number of a line to TAKEN once its events are acknowledged.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from app.catalogue.overrides.item_overrides import ItemOverrides
from app.events.ingest import Ingest
from app.events.live_signals import LiveSignals
from app.events.vocabulary import Vocabulary
from app.observability.metrics import Metrics
from app.serving.served_generation import generation_of
from app.settings import Settings
from benchmarks.harness.ledger import TENANT
from model.artifact import model_directory
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.redis.store import RedisStore
from storage.sqlite.store import SQLiteStore

CONCURRENT_WRITERS = 4  # concurrent, so that the store commits in groups


async def write(store_address: str, model: Path, events: Path, taken: Path) -> None:
    """Append the events of each line, and note its number in TAKEN once they are acknowledged."""
    generations = [generation_of(model_directory.load(model))]
    store: UserStore
    if store_address.startswith("redis://"):
        store = await RedisStore.open(store_address, generations)
    else:
        store = await SQLiteStore.open(Path(store_address), generations)
    settings, metrics = Settings(model_dir=model, tenant=TENANT), Metrics()
    vocabulary = Vocabulary(ItemOverrides(), list, store.ping)  # no pages, so it never queries the store
    ingest = Ingest(store, settings, metrics, LiveSignals(store, TENANT, metrics), vocabulary)
    lines = enumerate(events.read_text().splitlines())
    with taken.open("a", buffering=1) as acknowledged:

        async def lane() -> None:
            for number, line in lines:
                while True:
                    try:
                        await ingest.append(json.loads(line))
                    except StorageError:
                        await asyncio.sleep(0.05)
                    else:
                        break
                acknowledged.write(f"{number}\n")

        await asyncio.gather(*(lane() for _ in range(CONCURRENT_WRITERS)))
    await store.close()


def main(store_address: str, model: str, events: str, taken: str) -> None:
    """Write the events into the store at the address."""
    asyncio.run(write(store_address, Path(model), Path(events), Path(taken)))
