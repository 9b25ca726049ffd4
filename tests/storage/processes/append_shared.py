"""Appends an overlapping share of common events, most of them of two hot users.

python -m tests.storage.processes.append_shared ADDRESS PROCESS PROCESSES EVENTS

Every tenth event is sent by all processes and every eleventh twice by its own; events go in batches of 1 to 20,
several at once. What fails is sent again until it is acknowledged. Prints how many events were no duplicates.
"""

from __future__ import annotations

import asyncio
import random
import sys

from storage.errors import StorageUnavailable
from storage.state.event import Event
from tests.storage.contract.stores import open_store
from tests.storage.oracles.random_events import make_generation, shared_event

LANES = 4


def share(process: int, processes: int, events: int) -> list[Event]:
    numbers = [number for number in range(events) if number % processes == process or number % 10 == 0]
    numbers += numbers[::11]
    random.Random(process).shuffle(numbers)
    return [shared_event(number) for number in numbers]


async def main(address: str, process: int, processes: int, events: int) -> None:
    store = await open_store(address, [make_generation()])
    waiting, sizes = share(process, processes, events), random.Random(process)
    counted = 0

    async def send_batches() -> None:
        nonlocal counted
        while waiting:
            size = sizes.choice((1, 1, 3, 20))
            batch = [waiting.pop() for _ in range(min(size, len(waiting)))]
            while True:
                try:
                    answers = await store.append("main", batch)
                except StorageUnavailable:
                    await asyncio.sleep(0.05)
                else:
                    counted += sum(not answer.duplicate for answer in answers)
                    break

    await asyncio.gather(*(send_batches() for _ in range(LANES)))
    await store.close()
    print(counted)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
