"""Appends one click after another, and prints each id once it is acknowledged.

python -m tests.storage.processes.append_forever ADDRESS PREFIX USER [COUNT]
"""

import asyncio
import sys

from tests.storage.contract.stores import open_store
from tests.storage.oracles.random_events import click, make_generation


async def main(address: str, prefix: str, user_id: str, count: int) -> None:
    store = await open_store(address, [make_generation()])
    lanes = 4  # several waiters at once, so that groups form

    async def append(lane: int) -> None:
        for number in range(lane, count, lanes):
            event_id = f"{prefix}-{number}"
            await store.append("main", [click(event_id, user_id, item=number % 12)])
            print(event_id, flush=True)

    await asyncio.gather(*(append(lane) for lane in range(lanes)))
    await store.close()


if __name__ == "__main__":
    address, prefix, user_id, *counts = sys.argv[1:]
    asyncio.run(main(address, prefix, user_id, int(counts[0]) if counts else 10**9))
