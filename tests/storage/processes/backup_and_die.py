"""Backs up a store, and is killed before step STEP of those that rename files.

python -m tests.storage.processes.backup_and_die ADDRESS FILE STEP
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from storage.maintenance.backup import backup
from tests.storage.contract.stores import opened

STEPS = ("os.link", "os.rename", "os.remove")


async def main(address: str, file: Path, step: int) -> None:
    left = step

    def die(event: str, _: object) -> None:
        nonlocal left
        if event in STEPS:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    async with opened(address) as store:
        sys.addaudithook(die)
        await backup(store, file)
        left = -1


if __name__ == "__main__":
    address, file, step = sys.argv[1:]
    asyncio.run(main(address, Path(file), int(step)))
