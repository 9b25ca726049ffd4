"""A back-up of any store fills any other one: same logs, same states, same answers from then on."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path
from typing import Any

import pytest
import redis

import storage.backup
from storage.backup import backup, restore
from storage.errors import StorageError, StorageUnavailable
from storage.protocol import UserStore
from storage.state.corrections import is_correction, posted_as
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.random_events import click, make_generation

GENERATION = make_generation()
USERS = ["u", "v", "w", "x", "visitor", "other visitor", "gone"]


async def fill(store: UserStore) -> None:
    for start in range(0, 40, 20):
        await store.append("main", [click(f"e{n}", user, n % 12) for n in range(start, start + 20) for user in USERS])
    await store.append("shop", [click(f"e{n}", "u", n) for n in range(3)])
    await store.undo("main", "u", "e7")
    await store.undo("main", "visitor", "e3")
    await store.merge("main", "v", "visitor")
    await store.merge("main", "visitor", "other visitor")
    await store.append("main", [click("late", "visitor", 3)])
    await store.merge("main", "w", "v")
    await store.undo("main", "other visitor", "e5")
    await store.erase("main", "gone")


async def told(store: UserStore) -> dict[str, Any]:
    """All that a store says of its users."""
    found: dict[str, Any] = {}
    for tenant, user_id in [*(("main", user) for user in USERS), ("shop", "u")]:
        log = [entry.event for entry in await store.events(tenant, user_id, limit=10_000)]
        found[f"{tenant}/{user_id}"] = (
            [
                (posted_as(event), event.item_id, event.timestamp_us, event.value)
                for event in log
                if event.type == "click"
            ],
            {event.event_id for event in log if is_correction(event)},
            await store.states(tenant, [user_id], GENERATION),
            await store.seen_items(tenant, user_id),
        )
    return found


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
def test_what_is_restored_is_what_was_backed_up_also_when_it_was_interrupted(
    address: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.backup, "BATCH", 30)

    async def law() -> None:
        async with opened(address, GENERATION) as store:
            await fill(store)
            entries = await backup(store, tmp_path / "log.gz")
            expected = await told(store)
        async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
            append, calls = store.append, 0

            async def append_and_die(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 4:
                    raise StorageUnavailable("killed")
                return await append(*args)

            monkeypatch.setattr(store, "append", append_and_die)
            with pytest.raises(StorageUnavailable):
                await restore(store, tmp_path / "log.gz")
            with pytest.raises(StorageError, match="empty"):
                await restore(store, tmp_path / "log.gz")
            for _ in range(2):
                assert await restore(store, tmp_path / "log.gz", resume=True) == entries
                assert await told(store) == expected
            again = [click(f"e{n}", user) for n in range(40) for user in USERS if user != "gone"]
            assert all(answer.duplicate for answer in await store.append("main", again))
            await backup(store, tmp_path / "again.gz")
        assert told_by(tmp_path / "again.gz") == told_by(tmp_path / "log.gz")

    asyncio.run(law())


def test_an_older_lisarec_cannot_be_started_over_restored_undos(tmp_path: Path) -> None:
    """It would take them for events."""

    async def law() -> None:
        async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
            await store.append("main", [click("e1"), click("e2")])
            await store.undo("main", "u", "e1")
            await backup(store, tmp_path / "log.gz")
        address = new_address("redis-server", tmp_path)
        async with opened(address, GENERATION) as store:
            await restore(store, tmp_path / "log.gz")
        url, prefix = address.removeprefix("redis:").split(" ")
        with redis.Redis.from_url(url) as client:
            assert client.hget(f"{prefix}:meta", "layout") == b"4"

    asyncio.run(law())


def told_by(path: Path) -> list[str]:
    return sorted(line for line in gzip.open(path, "rt") if "!into" not in line)


def test_a_file_that_is_no_whole_backup_restores_nothing(tmp_path: Path) -> None:
    async def law() -> None:
        path, torn = tmp_path / "log.gz", tmp_path / "torn.gz"
        async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
            await fill(store)
            await backup(store, path)
        lines = gzip.decompress(path.read_bytes()).splitlines(True)
        whole = path.read_bytes()
        bad = [
            b"",
            b"no gzip",
            whole[:-20],
            *map(gzip.compress, (b"".join(lines[:-1]), b"".join(lines[:3] + lines[-1:]))),
        ]
        async with opened(new_address("sqlite", tmp_path / "two"), GENERATION) as store:
            for content in [*bad, gzip.compress(b"{}\n"), gzip.compress(lines[0] + b"[1]\n")]:
                torn.write_bytes(content)
                with pytest.raises(StorageError, match="torn"):
                    await restore(store, torn)
                assert [page.entries for page in [page async for page in store.log()]] == [[]]

    asyncio.run(law())
