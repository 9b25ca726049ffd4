"""What every store says of how often items were used, against counting by hand."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from storage.errors import StorageUnavailable
from tests.storage.contract.stores import opened
from tests.storage.oracles.random_events import click, make_generation

GENERATION = make_generation()
TYPES = frozenset({"click", "buy"})


def test_counts_are_of_the_events_that_count(address: str) -> None:
    """Each once, of one tenant and of these types; without who was erased, what was taken back, or copies."""

    async def law() -> None:
        async with opened(address, GENERATION) as store:
            assert await store.item_counts("main", TYPES) == {}
            events = [click(f"e{n}", user_id, (n * n + len(user_id)) % 7) for n in range(40) for user_id in ("a", "bb")]
            events[3] = replace(events[3], type="buy", item_id="no model knows it")
            events[5] = replace(events[5], type="dislike")
            await store.append("main", [*events, events[0]])
            await store.append("main", [events[1]])
            await store.append("main", [click("x", "gone", 1), click("y", "visitor", 2), click("z", "visitor", 3)])
            await store.append("shop", [click("e1", "a", 4)])
            expected = Counter(event.item_id for event in events if event.type in TYPES)
            assert await store.item_counts("main", TYPES) == expected + Counter(["item1", "item2", "item3"])
            assert await store.item_counts("shop", TYPES) == {"item4": 1}

            await store.erase("main", "gone")
            await store.undo("main", "a", events[10].event_id)
            await store.merge("main", "bb", "visitor")
            await store.append("main", [click("last", user_id, 5) for user_id in "acdefgh"])
            expected -= Counter([events[10].item_id])
            expected += Counter(["item2", "item3", *["item5"] * 7])
            assert await store.item_counts("main", TYPES) == expected
        async with opened(address, GENERATION) as again:
            assert await again.item_counts("main", TYPES) == expected
        with pytest.raises(StorageUnavailable):
            await again.item_counts("main", TYPES)

    asyncio.run(law())
