"""Rebuilds a generation repeatedly until killed.

python -m tests.storage.processes.rebuild_forever ADDRESS
"""

from __future__ import annotations

import asyncio
import sys

from storage.maintenance.rebuild import rebuild
from tests.storage.contract.stores import open_store
from tests.storage.oracles.random_events import make_newer


async def main(address: str) -> None:
    store = await open_store(address, [])
    while True:
        await rebuild(store, make_newer())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
