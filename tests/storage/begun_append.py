"""An append that is under way, for tests of what comes after it."""

import asyncio

from storage.protocol import UserStore
from storage.records import MAIN_TENANT, AppendResult
from storage.state.event import Event
from tests.waiting import until


async def begun(store: UserStore, event: Event) -> asyncio.Task[list[AppendResult]]:
    """An append that has left the queue, so that whatever comes after it waits for it there."""
    append = asyncio.ensure_future(store.append(MAIN_TENANT, [event]))
    await asyncio.sleep(0)  # it is in the queue
    await until(lambda: store.waiting == 0)
    return append
