"""`lisarec recommend` writes the list of every user once, equal to the service's, despite kills."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from app.jobs.lists import resumable_parquet, user_lists
from app.jobs.lists.resumable_parquet import ListCounts, ListParts
from app.jobs.lists.user_lists import ListPlan, write_lists
from app.settings import Settings
from storage.errors import StorageUnavailable
from storage.sqlite.database import FILE_NAME
from tests.app.conftest import Client, item_id
from tests.app.support import run_command
from tests.storage.folders.durability import Disk
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import user_of
from tests.waiting import PATIENCE_S

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "integrate" / "email-lists.md"
USERS = [f"user-{number}" for number in range(40)]
DAY_US = 86_400_000_000
BASE_US = 1_700_000_000_000_000


class Killed(BaseException):
    """Simulates kill -9 inside the process: no cleanup runs."""


@pytest.fixture(params=["sqlite", "redis"])
def shop(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[Client]:
    """A service whose users clicked on different days; two of them are merged, and one is erased."""
    redis_url = request.getfixturevalue("redis_server").url if request.param == "redis" else None
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path / "state", redis_url=redis_url))
    for number, user_id in enumerate(USERS):
        events = [
            {
                "user_id": user_id,
                "item_id": item_id((number * 7 + n) % 60),
                "timestamp": (BASE_US + number * DAY_US) / 1e6,
            }
            for n in range(1 + number % 5)
        ]
        assert client.post("/v1/events", json=events).json()["accepted"] == len(events)
    done = [
        client.post(f"/v1/users/{USERS[0]}/merge", json={"from": USERS[1]}),
        client.post(f"/v1/users/{USERS[2]}/merge", json={"from": USERS[39]}),
        client.request("DELETE", f"/v1/users/{USERS[3]}"),
        client.request("PUT", "/v1/items/item-5", json={"available": False}),
        client.request("PUT", "/v1/admin/scenarios/email", json={"k": 4, "max_per_category": 2}),
    ]
    assert all(response.is_success for response in done)
    yield client
    client.close()


KNOWN = set(USERS) - {USERS[1], USERS[39], USERS[3]}


def write(client: Client, out: Path, plan: ListPlan, on_progress: Callable[[int], None] = lambda _: None) -> ListCounts:
    """Write the lists as the command does, beside the service."""
    return asyncio.run(write_lists(client.settings, plan, out, on_progress))


def rows(out: Path) -> dict[str, dict[str, Any]]:
    table = pl.read_parquet(out)
    assert table["user_id"].is_unique().all()
    return {row["user_id"]: row for row in table.iter_rows(named=True)}


def served(client: Client, user_id: str, **wishes: Any) -> Any:
    response = client.post("/v1/recommendations", json={"user_id": user_id, **wishes})
    assert response.status_code == 200, response.text
    return response.json()


class TestLists:
    def test_equal_those_of_the_service(self, shop: Client, tmp_path: Path) -> None:
        out = tmp_path / "lists.parquet"
        counts = write(shop, out, ListPlan({"scenario": "email"}))
        found = rows(out)
        assert found.keys() == KNOWN
        assert counts.users == len(KNOWN)
        for user_id, row in found.items():
            answer = served(shop, user_id, scenario="email")
            assert row["item_ids"] == [item["item_id"] for item in answer["items"]]
            assert row["scores"] == pytest.approx([item["score"] for item in answer["items"]], rel=1e-4, abs=1e-4)
            assert row["titles"] == [item.get("title") for item in answer["items"]]
            assert (row["source"], row["generation"]) == (answer["source"], answer["generation"])
        assert counts.short == sum(len(row["item_ids"]) < 4 for row in found.values())
        (*_, last) = shop.get("/v1/admin/audit").json()["entries"]
        assert (last["action"], last["details"]) == ("export.lists", {"users": len(KNOWN)})
        assert not (tmp_path / "lists.parquet.parts").exists()

    def test_may_be_limited_to_some_users(self, shop: Client, tmp_path: Path) -> None:
        since_us = BASE_US + 20 * DAY_US
        write(shop, tmp_path / "new.parquet", ListPlan({}, since_us))
        assert rows(tmp_path / "new.parquet").keys() == (KNOWN & set(USERS[20:])) | {USERS[2]}  # once also the 39th
        write(shop, tmp_path / "named.parquet", ListPlan({}, user_ids=frozenset({USERS[5], USERS[3], "stranger"})))
        assert rows(tmp_path / "named.parquet").keys() == {USERS[5]}

    def test_may_list_the_users_for_an_item(self, shop: Client, tmp_path: Path) -> None:
        """With the script of the page, ordered by the item's rank."""
        write(shop, tmp_path / "lists.parquet", ListPlan({"k": 20}))
        lists = {user_id: row["item_ids"] for user_id, row in rows(tmp_path / "lists.parquet").items()}
        ((item, _),) = Counter(chain.from_iterable(lists.values())).most_common(1)
        (script,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        script = script.replace('"lunch-box-red"', repr(item))
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=PATIENCE_S)
        found = pl.read_csv(tmp_path / "users.csv").select("place", "user_id").rows()
        expected = sorted((ids.index(item) + 1, user_id) for user_id, ids in lists.items() if item in ids)
        assert found == expected
        assert len({place for place, _ in expected}) > 1

    def test_are_counted_as_shown(self, shop: Client, tmp_path: Path) -> None:
        write(shop, tmp_path / "lists.parquet", ListPlan({"scenario": "email"}))
        stats = shop.get("/v1/stats").json()
        assert sum(one["lists"] for one in stats["scenarios"] if one["scenario"] == "email") == len(KNOWN)

    def test_name_the_scenario_of_an_experiment(self, shop: Client, tmp_path: Path) -> None:
        out = tmp_path / "lists.parquet"
        assert shop.request("PUT", "/v1/admin/scenarios/email-2", json={"k": 7, "exclude_seen": "all"}).is_success
        compared = {"name": "mails", "over": "scenarios", "shares": {"email": 1, "email-2": 1}}
        assert shop.request("PUT", "/v1/admin/experiment", json=compared).is_success
        try:
            counts, found = write(shop, out, ListPlan({"scenario": "email"})), rows(out)
            answers = {user_id: served(shop, user_id, scenario="email") for user_id in found}
        finally:
            shop.request("DELETE", "/v1/admin/experiment")
            shop.request("DELETE", "/v1/admin/scenarios/email-2")
        assert {row["experiment"] for row in found.values()} == {"mails"}
        assert {row["scenario"] for row in found.values()} == {"email", "email-2"}
        for user_id, row in found.items():
            assert row["scenario"] == answers[user_id]["scenario"]
            assert row["short"] == ("short" in answers[user_id])
        assert counts.short == sum(row["short"] for row in found.values())
        plain = tmp_path / "plain.parquet"
        write(shop, plain, ListPlan({}))
        assert {(row["scenario"], row["experiment"]) for row in rows(plain).values()} == {(None, None)}

    def test_resume_after_a_kill(self, shop: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resumable_parquet, "PART_USERS", 8)
        monkeypatch.setattr(user_lists, "USERS_AT_ONCE", 4)
        out, seen = tmp_path / "lists.parquet", list[int]()

        def kill_at(users: int) -> Callable[[int], None]:
            def on_progress(done: int) -> None:
                seen.append(done)
                if done >= users:
                    raise Killed

            return on_progress

        for users in (5, 13, 30):
            with pytest.raises(Killed):
                write(shop, out, ListPlan({}), kill_at(users))
            assert not out.exists()
        assert out.with_name("lists.parquet.parts").stat().st_mode & 0o777 == 0o700
        before = len(seen)
        assert write(shop, out, ListPlan({}), seen.append).users == len(KNOWN)
        assert rows(out).keys() == KNOWN
        assert min(seen[before:]) >= 24  # three parts were whole

    @pytest.mark.parametrize("name", ["000000.parquet", "plan"])
    def test_may_be_named_like_a_part(self, shop: Client, tmp_path: Path, name: str) -> None:
        write(shop, tmp_path / name, ListPlan({}))
        assert rows(tmp_path / name).keys() == KNOWN

    def test_are_never_mixed_with_those_of_other_options(self, shop: Client, tmp_path: Path) -> None:
        out = tmp_path / "lists.parquet"
        ListParts(out, ListPlan({"k": 5}).digest)
        with pytest.raises(ValueError, match="has parts of another export"):
            write(shop, out, ListPlan({"k": 6}))
        write(shop, out, ListPlan({"k": 5}))
        with pytest.raises(ValueError, match="exists already"):
            write(shop, out, ListPlan({"k": 5}))

    def test_of_an_unknown_scenario_are_refused(self, shop: Client, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="did you mean email"):
            write(shop, tmp_path / "lists.parquet", ListPlan({"scenario": "emial"}))


def test_the_file_is_synced_before_its_parts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, out = Disk(monkeypatch), tmp_path / "lists.parquet"
    remove, lost = shutil.rmtree, list[list[Path]]()

    def checked(directory: Path) -> None:
        lost.append(disk.lost(out))
        remove(directory)

    monkeypatch.setattr(shutil, "rmtree", checked)
    ListParts(out, ListPlan({}).digest).finish()
    assert (lost, disk.torn) == ([[]], [])


def test_an_unavailable_store_is_waited_for(
    model_dir: Path, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No user gets the list of an unknown user."""
    monkeypatch.setattr(user_lists, "USERS_AT_ONCE", 4)
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path, redis_url=redis_server.url))
    for number, user_id in enumerate(USERS):
        client.click(user_id, item_id(number % 30), item_id(number % 30 + 20))
    expected = {user_id: [item["item_id"] for item in served(client, user_id)["items"]] for user_id in USERS}
    client.close()
    away = False

    def on_progress(done: int) -> None:
        nonlocal away
        if done and not away:
            away = True
            redis_server.kill()

    async def write_beside_an_outage() -> ListCounts:
        writing = asyncio.create_task(
            write_lists(client.settings, ListPlan({}), tmp_path / "lists.parquet", on_progress)
        )
        while not away:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(redis_server.start)
        return await writing

    assert asyncio.run(write_beside_an_outage()).users == len(USERS)
    assert {user_id: row["item_ids"] for user_id, row in rows(tmp_path / "lists.parquet").items()} == expected


def delete_index(server: RedisServer, user_id: str) -> None:
    server.client.delete(user_of(server.url, user_id).id_index)


def break_head(server: RedisServer, user_id: str) -> None:
    server.client.set(user_of(server.url, user_id).head, "not a head")


@pytest.mark.parametrize(
    ("damage", "wishes", "reason"),
    [
        (break_head, {}, "a user's head is damaged"),
        (break_head, {"exclude_seen": "all"}, "a user's head is damaged"),
        (delete_index, {"exclude_seen": "all"}, "Redis failed: a user has no index"),
        (delete_index, {"exclude_events": ["purchase"]}, "Redis failed: a user has no index"),
    ],
)
def test_damaged_users_are_skipped(
    model_dir: Path,
    redis_server: RedisServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[RedisServer, str], None],
    wishes: dict[str, Any],
    reason: str,
) -> None:
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path, redis_url=redis_server.url))
    for number, user_id in enumerate(USERS):
        client.click(user_id, item_id(number))
    damaged = {USERS[0], USERS[17]}
    expected = {user_id: served(client, user_id, **wishes)["items"] for user_id in USERS if user_id not in damaged}
    for user_id in damaged:
        damage(redis_server, user_id)
    out = tmp_path / "lists.parquet"
    making = write_lists(client.settings, ListPlan(wishes), out, lambda _: None)
    counts = asyncio.run(asyncio.wait_for(making, PATIENCE_S))
    client.close()
    assert counts == ListCounts(users=len(expected), damaged=len(damaged))
    found = rows(out)
    assert {user_id: row["item_ids"] for user_id, row in found.items()} == {
        user_id: [item["item_id"] for item in items] for user_id, items in expected.items()
    }
    assert f"2 users get no list: {reason}" in caplog.text
    assert not any(user_id in caplog.text for user_id in damaged)


def test_a_damaged_file_ends_the_command(model_dir: Path, tmp_path: Path) -> None:
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path))
    client.click(USERS[0], item_id(0))
    client.close()
    path = tmp_path / FILE_NAME
    with path.open("r+b") as file, closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'log'").fetchone()
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    making = write_lists(client.settings, ListPlan({}), tmp_path / "lists.parquet", lambda _: None)
    with pytest.raises(StorageUnavailable, match="malformed"):
        asyncio.run(asyncio.wait_for(making, PATIENCE_S))


def test_the_command(shop: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lists.parquet"
    redis_url = shop.settings.redis_url
    store = ["--redis-url", redis_url] if redis_url else ["--data-dir", str(shop.settings.data_dir)]
    command = ["recommend", *store, "--model", str(shop.model_dir), "--users", "all", "--out", str(out)]
    for wrong, problem in (
        (["--params", "{"], "not valid JSON"),
        (["--k", "100000"], "k: "),
        (["--since", "soon"], "not a valid date or time"),
    ):
        assert run_command(*command, *wrong) == 2
        assert problem in capsys.readouterr().err
    assert run_command(*command, "--scenario", "email", "--k", "3") == 0
    assert f"recommendations for {len(KNOWN)} users" in capsys.readouterr().out
    assert out.stat().st_mode & 0o777 == 0o600
    assert {len(row["item_ids"]) for row in rows(out).values()} <= {0, 1, 2, 3}
    named = tmp_path / "named.txt"
    named.write_text("\n".join([USERS[5], "", USERS[3], "stranger"]))  # the second one was merged
    options = {"--users": str(named), "--out": str(tmp_path / "named.parquet")}
    assert run_command(*command[:-4], *(word for option in options.items() for word in option)) == 0
    printed = capsys.readouterr().out
    assert "recommendations for 1 users" in printed
    assert f"; 2 users of {str(named)!r} have no list: no events, or merged, or erased" in printed
