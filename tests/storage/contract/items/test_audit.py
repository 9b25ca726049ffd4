"""Audit logs of every store: append-only, equal in every process, and part of backups."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.items.audit import AuditEntry, KeysSeen, NumberedEntry, user_mark
from storage.maintenance.backup import backup, restore
from storage.sqlite.database import FILE_NAME
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.random_events import click, fresh_user, make_generation

GENERATION = make_generation()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ENTRIES = st.builds(
    AuditEntry,
    st.integers(0, 2**53),
    TEXTS,
    TEXTS,
    TEXTS,
    st.dictionaries(TEXTS, st.none() | st.integers(0, 9) | TEXTS | st.lists(TEXTS, max_size=2), max_size=2),
)
laws = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbered(entries: list[AuditEntry]) -> list[NumberedEntry]:
    return [NumberedEntry(number, entry) for number, entry in enumerate(entries, 1)]


@laws
@given(st.lists(st.lists(ENTRIES, max_size=3), max_size=4), st.integers(1, 4))
def test_entries_are_read_in_order_page_by_page(address: str, batches: list[list[AuditEntry]], limit: int) -> None:
    async def law() -> None:
        tenant, expected = fresh_user(), list[AuditEntry]()
        async with opened(address, tenant=tenant) as store, opened(address, tenant=tenant) as other:
            for number, batch in enumerate(batches):
                assert await (store, other)[number % 2].audit.append(tenant, batch)
                expected += batch
            found: list[NumberedEntry] = []
            while page := await store.audit.entries(tenant, after=len(found), limit=limit):
                assert len(page) <= limit
                found += page
            assert found == numbered(expected)
            assert await other.audit.entries(f"{tenant}-other") == []

    asyncio.run(law())


async def test_a_change_of_known_keys_is_recorded_once(address: str) -> None:
    """One of the processes that see the change appends the entry."""
    tenant = fresh_user()
    async with opened(address, tenant=tenant) as store, opened(address, tenant=tenant) as other:
        assert await store.audit.keys_seen(tenant) == ""
        entry = AuditEntry.now("keys file", "key.add", "0a1b")
        seen = KeysSeen("", '["0a1b"]')
        both = await asyncio.gather(*(one.audit.append(tenant, [entry], seen) for one in (store, other)))
        assert sorted(both) == [False, True]
        assert await other.audit.keys_seen(tenant) == '["0a1b"]'
        assert await store.audit.entries(tenant) == numbered([entry])
        assert not await store.audit.append(tenant, [entry], KeysSeen("[]", ""))
        assert await store.audit.append(tenant, [], KeysSeen('["0a1b"]', "[]"))
        assert await store.audit.entries(tenant) == numbered([entry])


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_a_backup_has_them_and_restores_each_once(address: str, tmp_path: Path, kind: str) -> None:
    tenant = fresh_user()
    entries = [AuditEntry(n, "key", "model.activate", f"m{n}", {"tag": "a" * 16}) for n in range(5)]
    async with opened(address, GENERATION, tenant=tenant) as store:
        await store.append(tenant, [click("e1")])
        await store.audit.append(tenant, entries)
        assert tenant in await store.tenants()
        await backup(store, tmp_path / "log.gz")
    async with opened(new_address(kind, tmp_path / "restored"), GENERATION, tenant=tenant) as store:
        for is_again in (False, True):
            await restore(store, tmp_path / "log.gz", resume=is_again)
            assert await store.audit.entries(tenant) == numbered(entries)


@pytest.mark.parametrize("statement", ["UPDATE audit SET entry = '[]'", "DELETE FROM audit"])
def test_the_embedded_store_refuses_to_change_an_entry(tmp_path: Path, statement: str) -> None:
    async def law() -> None:
        async with opened(new_address("sqlite", tmp_path)) as store:
            await store.audit.append("main", [AuditEntry.now("", "experiment.end")])

    asyncio.run(law())
    with (
        closing(sqlite3.connect(tmp_path / FILE_NAME)) as db,
        pytest.raises(sqlite3.IntegrityError, match="only grows"),
    ):
        db.execute(statement)


def test_user_marks_are_keyed_by_tenant_and_secret() -> None:
    marks = {
        user_mark(secret, tenant, user)
        for secret in (b"a" * 32, b"b" * 32)
        for tenant in ("main", "books")
        for user in ("ada", "bob")
    }
    assert len(marks) == 8
    assert all(mark.startswith("user:") and "ada" not in mark and "bob" not in mark for mark in marks)
    assert user_mark(b"a" * 32, "main", "ada") in marks
