"""A backup of any store restores into any other: the same logs, states and later responses."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from base64 import b64encode
from dataclasses import replace
from errno import ENOSPC, EPERM
from pathlib import Path
from signal import SIGKILL
from stat import S_IMODE
from typing import Any

import pytest
import redis

import storage.maintenance.backup
from storage.errors import StorageError, StorageUnavailable
from storage.maintenance.backup import backup, restore
from storage.protocol import UserStore
from storage.records import ItemEntry
from storage.state.corrections import posted_as
from storage.state.event import Event, Undo
from storage.state.record_encoding import to_json
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.naive_fold import assert_state_is, fold
from tests.storage.oracles.random_events import (
    ODD_IDS,
    START_US,
    as_impression,
    click,
    make_generation,
    make_newer,
)
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import opened as open_redis
from tests.waiting import PATIENCE_S

GENERATION = make_generation()
ROOT = Path(__file__).parents[3]
EARLIER_BACKUPS = Path(__file__).parents[1] / "earlier_backups"
IMPRESSIONS = [as_impression(click("s1"), ["item2", "new", "item5"]), as_impression(click("s2"), ["item3"])]
USERS = ["u", "v", "w", "x", "visitor", "other visitor", "gone"]


async def fill(store: UserStore) -> None:
    for start in range(0, 40, 20):
        await store.append("main", [click(f"e{n}", user, n % 12) for n in range(start, start + 20) for user in USERS])
    for event_id, items in (("s1", ["item1", "item2", "new"]), ("s2", ODD_IDS)):
        await store.append("main", [as_impression(click(event_id, user), items) for user in USERS])
    await store.append("shop", [click(f"e{n}", "u", n) for n in range(3)])
    await store.undo("main", "u", "e7")
    await store.undo("main", "visitor", "e3")
    await store.merge("main", "v", "visitor")
    await store.merge("main", "visitor", "other visitor")
    await store.append("main", [click("late", "visitor", 3)])
    await store.merge("main", "w", "v")
    await store.undo("main", "other visitor", "e5")
    await store.erase("main", "gone")


async def contents_of(store: UserStore) -> dict[str, Any]:
    """All data that a store returns about its users."""
    found: dict[str, Any] = {}
    for tenant, user_id in [*(("main", user) for user in USERS), ("shop", "u")]:
        log = [entry.record for entry in await store.events(tenant, user_id, limit=10_000)]
        found[f"{tenant}/{user_id}"] = (
            [
                (posted_as(event), event.item_id, event.items, event.timestamp_us, event.value)
                for event in log
                if isinstance(event, Event)
            ],
            {event.entry_id for event in log if not isinstance(event, Event)},
            await store.states(tenant, [user_id], GENERATION),
            (await store.seen_items(tenant, user_id)).item_ids,
        )
    return found


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
def test_a_restore_equals_the_backup_even_if_interrupted(
    address: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.maintenance.backup, "BATCH", 30)

    async def law() -> None:
        async with opened(address, GENERATION) as store:
            await fill(store)
            entries = await backup(store, tmp_path / "log.gz")
            expected = await contents_of(store)
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
                assert await contents_of(store) == expected
            again = [click(f"e{n}", user) for n in range(40) for user in USERS if user != "gone"]
            assert all(answer.duplicate for answer in await store.append("main", again))
            await backup(store, tmp_path / "again.gz")
        assert told_by(tmp_path / "again.gz") == told_by(tmp_path / "log.gz")

    asyncio.run(law())


async def test_earlier_versions_refuse_restored_undos(tmp_path: Path) -> None:
    """They would take undos for events."""
    async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
        await store.append("main", [click("e1"), click("e2")])
        await store.undo("main", "u", "e1")
        await backup(store, tmp_path / "log.gz")
    address = new_address("redis-server", tmp_path)
    async with opened(address, GENERATION) as store:
        await restore(store, tmp_path / "log.gz")
    url, prefix = address.removeprefix("redis:").split(" ")
    with redis.Redis.from_url(url) as client:
        assert client.hget(f"{prefix}:meta", "layout") == b"5"


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
def test_a_backup_of_an_earlier_version_is_restored(tmp_path: Path, kind: str) -> None:
    """The file is what 'lisarec backup' wrote when entries of the log had the fields of events only.

    In its SQLite store, "u" and "visitor" had posted the events below, one event of each was undone, and "visitor" had
    become "u". Codes of the item "new", for one generation or two, stood behind the types of events on it.
    """
    clicks = [click(f"e{n}", "u", n, START_US + n) for n in range(6)]
    in_one, in_two = (b"gen one\0", bytes.fromhex("000102031c1d1e1f")), (b"gen two\0", bytes.fromhex("0a0b0c0d"))
    of_user = [*clicks, Event("cold", "u", "new", "click", START_US + 10, None, codes=(in_one, in_two))]
    of_visitor = [
        *(replace(event, event_id=f"visitor/{event.event_id}") for event in clicks),
        Event("visitor/bought", "u", "item3", "buy", START_US + 11, None, 9.5, "r1"),
        Event("visitor/cold", "u", "new", "buy", START_US + 12, None, codes=(in_one,)),
    ]
    counted = [event for event in of_user + of_visitor if event.event_id not in ("e2", "visitor/e3")]
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress((EARLIER_BACKUPS / "version-2-log.jsonl").read_bytes()))

    async def law() -> None:
        async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
            assert await restore(store, path) == 28
            log = [entry.record for entry in await store.events("main", "u")]
            assert [event for event in log if isinstance(event, Event)] == of_user + of_visitor
            undone = {(event.user_id, event.event_id) for event in log if isinstance(event, Undo)}
            assert undone == {("u", "e2"), ("u", "visitor/e3")}
            assert [entry.record for entry in await store.events("main", "visitor")] == log
            for generation in (GENERATION, make_newer()):
                (value,) = await store.states("main", ["visitor"], generation)
                assert_state_is(value, fold(generation, counted))
            assert [entry.record.user_id for entry in await store.events("shop", "u")] == ["u"]
            changes = await store.item_changes("main", 0, 10)
            assert changes.entries[0] == ItemEntry("item1", "Kettle", ("kettles",), available=False)
            assert [(codes.item_id, codes.evidence) for codes in changes.codes] == [("new", 12)]
            assert not await store.merge("main", "u", "visitor")
            resent = [Event("cold", user, "new", "buy", START_US, None) for user in ("u", "visitor")]
            assert all(answer.duplicate for answer in await store.append("main", resent))
            await backup(store, tmp_path / "again.gz")
        async with opened(new_address(kind, tmp_path / "another"), GENERATION) as store:
            await restore(store, tmp_path / "again.gz")
            assert [entry.record for entry in await store.events("main", "u")] == log

    asyncio.run(law())


@pytest.mark.parametrize("version", [5, 6])
@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_impressions_of_an_earlier_version_are_restored(tmp_path: Path, kind: str, version: int) -> None:
    """Until version 5, their items were one text, separated by spaces."""
    texts = [replace(one, item_id=" ".join(one.items), items=()) for one in IMPRESSIONS]
    before = texts if version == 5 else IMPRESSIONS
    lines = [{"lisarec": "log", "version": version}, *(to_json("main", one) for one in [click("e1"), *before])]
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in [*lines, {"entries": 3}]).encode()))
    async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
        assert await restore(store, path) == 3
        log = [entry.record for entry in await store.events("main", "u")]
        assert log == [click("e1"), *IMPRESSIONS]
        (value,) = await store.states("main", ["u"], GENERATION)
        assert_state_is(value, fold(GENERATION, log))


def told_by(path: Path) -> list[str]:
    return sorted(line for line in gzip.open(path, "rt") if "merge" not in line)


async def test_an_incomplete_file_restores_nothing(tmp_path: Path) -> None:
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


def write_backup(path: Path, *lines: Any, entries: int) -> None:
    content = [{"lisarec": "log", "version": 8}, *lines, {"entries": entries}]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in content).encode(), 1))


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
def test_a_restore_needs_bounded_memory(tmp_path: Path, kind: str) -> None:
    vector = b64encode(bytes(4_000)).decode()
    write_backup(tmp_path / "log.gz", *({"item_vector": ["main", f"item{n}", vector]} for n in range(6_000)), entries=0)

    async def law() -> None:
        async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
            tracemalloc.start()
            try:
                await restore(store, tmp_path / "log.gz")
                assert tracemalloc.get_traced_memory()[1] < 12_000_000  # bytes; the vectors have 24,000,000
            finally:
                tracemalloc.stop()
            assert len(await store.vectors.of_items("main", [f"item{n}" for n in range(6_000)])) == 6_000

    asyncio.run(law())


def test_alternating_tenants_are_restored_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is backed up by partition, and each has users of all tenants."""
    tenants = [f"shop{n % 3}" for n in range(600)]
    write_backup(
        tmp_path / "log.gz", *(to_json(tenant, click(f"e{n}")) for n, tenant in enumerate(tenants)), entries=600
    )

    async def law() -> None:
        async with opened(new_address("sqlite", tmp_path / "restored"), GENERATION) as store:
            append, sizes = store.append, []

            async def counted(tenant: str, events: Any) -> Any:
                sizes.append(len(events))
                return await append(tenant, events)

            monkeypatch.setattr(store, "append", counted)
            assert await restore(store, tmp_path / "log.gz") == 600
            assert len(sizes) == 6
            for number in range(3):
                log = [entry.record for entry in await store.events(f"shop{number}", "u", limit=300)]
                assert log == [click(f"e{n}") for n in range(number, 600, 3)]

    asyncio.run(law())


async def test_accepting_a_loss_needs_a_complete_file_and_an_empty_store(
    any_server: RedisServer, tmp_path: Path
) -> None:
    """Otherwise events that services remember could still return."""
    path, torn = tmp_path / "log.gz", tmp_path / "torn.gz"

    def has_accepted() -> bool:
        return bool(any_server.client.hexists("lisarec:meta", "accepted"))

    async with open_redis(any_server.url) as store:
        await store.append("main", [click("e")])
        await backup(store, path)
        torn.write_bytes(path.read_bytes()[:-20])
        await restore(store, path, resume=True)
        assert not has_accepted()
        any_server.restart_with(None)
    async with open_redis(any_server.url) as store:
        for resume in (False, True):
            with pytest.raises(StorageError, match="torn"):
                await restore(store, torn, resume=resume)
        assert not has_accepted()
        assert await restore(store, path) == 1
        assert has_accepted()


@pytest.mark.parametrize("has_links", [True, False])
def test_overlapping_backups_write_one_private_file(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "backups" / "log.gz"
    path.parent.mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(EPERM, "not on this disk")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)

    async def law() -> None:
        async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
            await fill(store)
            ends = await asyncio.gather(backup(store, path), backup(store, path), return_exceptions=True)
            assert {type(end) for end in ends} == {FileExistsError, int}
        assert list(path.parent.iterdir()) == [path]
        assert S_IMODE(path.stat().st_mode) == 0o600
        async with opened(new_address("sqlite", tmp_path / "two"), GENERATION) as store:
            assert await restore(store, path) in ends

    asyncio.run(law())


def test_a_killed_backup_is_absent_or_complete(tmp_path: Path) -> None:
    path, address = tmp_path / "log.gz", new_address("sqlite", tmp_path / "one")

    async def append() -> None:
        async with opened(address, GENERATION) as store:
            await store.append("main", [click("e")])

    async def restored() -> int:
        async with opened(new_address("sqlite", tmp_path / f"restored {step}"), GENERATION) as store:
            return await restore(store, path)

    asyncio.run(append())
    for step in range(10):
        command = [sys.executable, "-m", "tests.storage.processes.backup_and_die", address, str(path), str(step)]
        if not (status := subprocess.run(command, cwd=ROOT, timeout=PATIENCE_S).returncode):
            break
        assert status == -SIGKILL
        if path.exists():
            assert asyncio.run(restored()) == 1
            path.unlink()
    assert step > 0
    assert asyncio.run(restored()) == 1


async def test_a_finished_backup_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is synced before the rename, and the rename before the call returns."""
    path, fsync, synced = tmp_path / "backups" / "log.gz", os.fsync, []
    path.parent.mkdir()

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, path.exists()))

    async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", recorded)
            await backup(store, path)
    assert synced == [(path.stat().st_ino, False), (path.parent.stat().st_ino, True)]


async def test_a_failed_backup_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "backups" / "log.gz"
    path.parent.mkdir()

    def fail(_: int) -> None:
        raise OSError(ENOSPC, "the disk is full")

    async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
        await store.append("main", [click("e")])
        with pytest.raises(OSError, match="the disk is full") as failure:
            await backup(store, path, fail)
    assert failure.value.filename == str(path)
    assert list(path.parent.iterdir()) == []


async def test_events_of_each_tenant_are_folded_for_its_own_model(address: str, tmp_path: Path) -> None:
    own = {"main": GENERATION, "shop": make_newer()}
    async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
        await fill(store)
        await store.merge("shop", "w", "v")
        await backup(store, tmp_path / "log.gz")
    async with opened(address, GENERATION) as store:
        await restore(store, tmp_path / "log.gz", own)
    for tenant, generation in own.items():
        async with opened(address, tenant=tenant) as store:
            for tag in {one.tag for one in own.values()}:
                saved = [state async for states in store.generations.states(tag) for state in states]
                assert bool(saved) == (tag == generation.tag)
