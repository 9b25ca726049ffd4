"""Tenants with data of every kind that a store keeps."""

from __future__ import annotations

from storage.items.audit import AuditEntry, KeysSeen
from storage.items.trends import Visit
from storage.items.vectors import encode
from storage.protocol import UserStore
from storage.records import ItemCodes, ItemEntry, NamedGeneration
from tests.storage.oracles.random_events import click, make_generation

GENERATION = make_generation()
USERS = [f"user-{number}" for number in range(150)]


async def fill(store: UserStore, tenant: str) -> None:
    for begin in range(0, len(USERS), 50):
        await store.append(tenant, [click(f"e{n}", user) for user in USERS[begin : begin + 50] for n in range(3)])
    await store.merge(tenant, "user-0", "user-1")
    await store.append(tenant, [click("late", "user-1")])
    await store.properties.put_of_user(tenant, "user-2", {"member": True})
    await store.properties.put_of_user(tenant, "only-properties", {"member": True})


async def fill_items(store: UserStore, tenant: str, items: int) -> None:
    """Fill all data that a tenant has besides users."""
    ids = [f"item-{number}" for number in range(items)]
    vector = encode([1.0, 2.0, 3.0])
    await store.put_items(tenant, [ItemEntry(one, "Kettle", ("water",), True, {"price": 9.5}, vector) for one in ids])
    await store.put_item_codes(tenant, [ItemCodes(ids[0], GENERATION.tag, 3, 0.5, bytes(8), bytes(8))])
    await store.scenarios.add(tenant, "front", "{}", believed="")
    await store.add_visits(tenant, [Visit(one, b"1234", 1.0) for one in ids])
    await store.orders.add(tenant, {"": 1.0, **dict.fromkeys(ids, 1.0)})
    await store.add_tallies(tenant, {("shown", number): 1.0 for number in range(items)})
    await store.generations.announce(NamedGeneration("may", GENERATION.tag), 30)
    await store.generations.activate(NamedGeneration("may", GENERATION.tag))
    await store.generations.set_experiment("{}")
    seen = KeysSeen("", '["0a1b"]')
    assert await store.audit.append(tenant, [AuditEntry.now("keys file", "key.add", "0a1b")], seen)
