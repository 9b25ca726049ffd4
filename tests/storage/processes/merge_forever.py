"""Creates visitors and merges each into USER; prints each acknowledged step.

python -m tests.storage.processes.merge_forever ADDRESS PREFIX USER
"""

import asyncio
import sys
from itertools import count

from tests.storage.contract.stores import open_store
from tests.storage.oracles.random_events import VISITS, click, make_generation


async def main(address: str, prefix: str, user_id: str) -> None:
    store = await open_store(address, [make_generation()])
    lanes = 3

    async def visit(lane: int) -> None:
        for number in count(lane, lanes):
            visitor = f"{prefix}-{number}"
            await store.append("main", [click(f"e{n}", visitor, item=(number + n) % 12) for n in range(VISITS)])
            print("visited", visitor, flush=True)
            await store.merge("main", user_id, visitor)
            print("merged", visitor, flush=True)

    await asyncio.gather(*(visit(lane) for lane in range(lanes)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
