"""Usage counts of items in every store, against counting by hand."""

from collections import defaultdict
from dataclasses import replace

import pytest

from storage.errors import StorageUnavailable
from tests.storage.contract.stores import ARCHIVED, opened
from tests.storage.oracles.random_events import click, make_generation

GENERATION = make_generation()
TYPES = frozenset({"click", "buy"})


class Users:
    """Users of each item, counted by hand."""

    def __init__(self) -> None:
        self._by_item: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, *pairs: tuple[str, str]) -> None:
        for user_id, item_id in pairs:
            self._by_item[item_id].append(user_id)

    def remove(self, user_id: str, item_id: str) -> None:
        self._by_item[item_id].remove(user_id)

    def agree_with(self, counts: dict[str, int], *, is_archived: bool) -> bool:
        """Whether counts match; users with events in archive and tail may count twice."""
        users = {item_id: len(set(own)) for item_id, own in self._by_item.items() if own}
        most = {item_id: min(2 * count, len(self._by_item[item_id])) for item_id, count in users.items()}
        if not is_archived:
            return counts == users
        return counts.keys() == users.keys() and all(users[name] <= counts[name] <= most[name] for name in users)


async def test_counts_respect_undos_merges_and_erasures(address: str) -> None:
    """Each user once per tenant and type, without erased, undone and copied events."""
    is_archived = address.startswith(ARCHIVED)
    async with opened(address, GENERATION) as store:
        assert await store.item_counts("main", TYPES) == {}
        events = [click(f"e{n}", user_id, (n * n + len(user_id)) % 7) for n in range(40) for user_id in ("a", "bb")]
        events[3] = replace(events[3], type="buy", item_id="no model knows it")
        events[5] = replace(events[5], type="dislike")
        await store.append("main", [*events, events[0]])
        await store.append("main", [events[1]])
        await store.append("main", [click("x", "gone", 8), click("y", "visitor", 2), click("z", "visitor", 9)])
        await store.append("shop", [click("e1", "a", 4)])
        expected = Users()
        expected.add(*((event.user_id, event.item_id) for event in events if event.type in TYPES))
        expected.add(("gone", "item8"), ("visitor", "item2"), ("visitor", "item9"))
        assert expected.agree_with(await store.item_counts("main", TYPES), is_archived=is_archived)
        assert await store.item_counts("shop", TYPES) == {"item4": 1}

        await store.erase("main", "gone")
        await store.undo("main", "a", events[10].event_id)
        await store.merge("main", "bb", "visitor")
        await store.append("main", [click("last", user_id, 5) for user_id in "acdefgh"])
        expected.remove("gone", "item8")
        expected.remove("a", events[10].item_id)
        expected.remove("visitor", "item2")
        expected.remove("visitor", "item9")
        expected.add(("bb", "item2"), ("bb", "item9"), *((user_id, "item5") for user_id in "acdefgh"))
        assert expected.agree_with(await store.item_counts("main", TYPES), is_archived=is_archived)
    async with opened(address, GENERATION) as again:
        assert expected.agree_with(await again.item_counts("main", TYPES), is_archived=is_archived)
    with pytest.raises(StorageUnavailable):
        await again.item_counts("main", TYPES)


async def test_an_erased_user_who_returns_counts_only_with_new_events(address: str) -> None:
    async with opened(address, GENERATION) as store:
        await store.append("main", [click("before", "back", 1)])
        await store.erase("main", "back")
        await store.append("main", [click("after", "back", 2)])
        assert await store.item_counts("main", TYPES) == {"item2": 1}
