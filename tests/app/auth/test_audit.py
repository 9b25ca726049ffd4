"""The audit log over HTTP and on the command line: who did what, in order, without user ids."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from app.http.auth.keys import Key, add, make, remove
from app.serving.switcher import LIVE_FOR_S
from app.settings import Settings
from storage.errors import StorageUnavailable
from storage.records import NamedGeneration
from storage.sqlite.database import FILE_NAME
from storage.sqlite.items.audit import SQLiteAudit
from storage.sqlite.store import SQLiteStore
from tests.app.conftest import Client, write_model
from tests.app.support import assert_refused, bearer, run_command
from tests.waiting import wait_until


class AuditedShop:
    """A service with the models `may` and `june`, and a key with all scopes."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.keys_file = directory, directory / "keys"
        for seed, name in enumerate(("may", "june")):
            write_model(directory / "models" / name, seed)
        self.text, self.key = self.add_key("admin", "users:admin", "events:write", "recs:read")
        self.settings = Settings(
            model_dir=directory / "models" / "may", data_dir=directory / "state", keys_file=self.keys_file
        )
        self.client = Client(self.settings)

    def add_key(self, *scopes: Any) -> tuple[str, Key]:
        text, key = make("main", scopes)
        add(self.keys_file, key)
        return text, key

    def call(self, method: str, path: str, body: object = None) -> Any:
        options = {} if body is None else {"json": body}
        answer = self.client.request(method, path, headers=bearer(self.text), **options)
        assert answer.is_success, answer.text
        return answer.json()

    def log(self, **params: int) -> Any:
        query = "&".join(f"{name}={value}" for name, value in params.items())
        return self.call("GET", f"/v1/admin/audit?{query}")

    def actions(self) -> list[tuple[str, str, str]]:
        return [(one["actor"], one["action"], one["subject"]) for one in self.log()["entries"]]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[AuditedShop]:
    shop = AuditedShop(tmp_path)
    yield shop
    shop.client.close()


def test_operators_actions_are_logged_with_their_key_and_without_user_ids(
    shop: AuditedShop, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = datetime.now(UTC) - timedelta(seconds=1)
    wait_until(lambda: shop.log()["entries"])  # the key itself
    shop.call("POST", "/v1/admin/generations/june/activate")
    shop.call("PUT", "/v1/admin/experiment", {"name": "which", "shares": {"may": 1, "june": 1}})
    shop.call("DELETE", "/v1/admin/experiment")
    shop.call("PUT", "/v1/admin/scenarios/home", {"k": 5})
    shop.call("PUT", "/v1/admin/scenarios/home", {"k": 6})
    shop.call("POST", "/v1/admin/scenarios/home/rollback", {"version": 1})
    shop.call("DELETE", "/v1/admin/scenarios/home")
    shop.call("POST", "/v1/events", {"event_id": "e", "user_id": "visitor-7", "item_id": "item-1"})
    for _ in range(2):  # the second one changes nothing
        shop.call("POST", "/v1/users/ada-l/merge", {"from": "visitor-7"})
    shop.call("DELETE", "/v1/users/ada-l")
    who = shop.key.id
    log = shop.log()
    entries = log["entries"]
    assert log["next"] is None
    assert [one["number"] for one in entries] == [*range(1, len(entries) + 1)]
    assert [(one["actor"], one["action"]) for one in entries] == [
        ("keys file", "key.add"),
        (who, "model.activate"),
        (who, "experiment.start"),
        (who, "experiment.end"),
        (who, "scenario.put"),
        (who, "scenario.put"),
        (who, "scenario.roll_back"),
        (who, "scenario.remove"),
        (who, "user.merge"),
        (who, "user.merge"),
        (who, "user.erase"),
    ]
    assert [one["subject"] for one in entries[:8]] == [who, "june", "which", "", *["home"] * 4]
    assert entries[0]["details"]["scopes"] == [*shop.key.scopes]
    assert entries[1]["details"]["previous"] == "may"
    assert entries[2]["details"] == {"over": "models", "shares": {"may": 1, "june": 1}}
    assert entries[6]["details"] == {"to": 1, "version": 3}
    visitor = entries[8]["details"]["visitor"]
    assert entries[8]["subject"] == entries[9]["subject"] == entries[10]["subject"] != visitor
    assert [one["details"] for one in entries[8:10]] == [{"visitor": visitor, "changed": it} for it in (True, False)]
    assert all(begun <= datetime.fromisoformat(one["time"]) <= datetime.now(UTC) for one in entries)
    assert "ada-l" not in json.dumps(log)
    assert "visitor-7" not in json.dumps(log)
    first = shop.log(limit=4)
    assert first == {"entries": entries[:4], "next": 4}
    assert shop.log(after=4, limit=100) == {"entries": entries[4:], "next": None}

    place = ("--data-dir", str(shop.directory / "state"))
    assert printed(capsys, "audit", *place) == entries
    assert printed(capsys, "audit", *place, "--user", "visitor-7") == entries[8:10]
    assert printed(capsys, "audit", *place, "--user", "ada-l") == entries[8:]
    assert printed(capsys, "audit", *place, "--user", "nobody") == []


def test_commands_are_logged(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--data-dir", str(shop.directory / "state"))
    models = ("--models-dir", str(shop.directory / "models"))
    shop.call("POST", "/v1/events", {"event_id": "e", "user_id": "ada", "item_id": "item-1"})
    for command in (
        ["activate", "june", *place, *models],
        ["experiment", "which", "may=1", "june=1", *place, *models],
        ["experiment", "--end", *place, *models],
        ["backup", "--out", str(shop.directory / "log.gz"), *place],
    ):
        run(*command)
    capsys.readouterr()
    done = [one for one in printed(capsys, "audit", *place) if one["actor"] == "command line"]
    assert [one["action"] for one in done] == ["model.activate", "experiment.start", "experiment.end", "export.backup"]
    assert done[3]["details"] == {"entries": 1}


def test_a_generation_is_dropped_only_after_the_audit_entry(
    shop: AuditedShop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("--data-dir", str(shop.directory / "state"))
    store, runner = shop.client.service.store, shop.client.runner
    runner.run(store.generations.announce(NamedGeneration("old", b"old one\0"), 0))
    with monkeypatch.context() as failing:
        failing.setattr(SQLiteAudit, "append", full)
        assert run_command("drop", "old", *place) == 1
    run("drop", "old", *place)
    assert [one.named.name for one in runner.run(store.generations.known())] == ["may"]
    capsys.readouterr()
    done = [one for one in printed(capsys, "audit", *place) if one["actor"] == "command line"]
    assert [(one["action"], one["subject"]) for one in done] == [("model.drop", "old")]


def test_changes_of_keys_are_logged_once_by_all_processes(shop: AuditedShop) -> None:
    other = Client(shop.settings)
    try:
        text, second = shop.add_key("recs:read")
        made = ("keys file", "key.add", second.id)

        def has_noted(entry: tuple[str, str, str]) -> bool:
            other.get("/healthz")
            return entry in shop.actions()

        wait_until(lambda: has_noted(made))
        remove(shop.keys_file, second.id)
        wait_until(lambda: has_noted(("keys file", "key.remove", second.id)))
        wait_until(lambda: other.get("/v1/model", headers=bearer(text)).status_code == 401)
    finally:
        other.close()
    shop.client.close()
    _, third = shop.add_key("recs:read")  # while nobody serves
    shop.client = Client(shop.settings)
    wait_until(lambda: ("keys file", "key.add", third.id) in shop.actions())
    assert len(shop.actions()) == len({*shop.actions()}) == 4


def test_only_admins_read_the_log_and_queries_are_bounded(shop: AuditedShop) -> None:
    text, _ = shop.add_key("users:admin")

    def status() -> int:
        return shop.client.get("/v1/admin/audit", headers=bearer(text)).status_code

    wait_until(lambda: status() != 401)
    assert status() == 403
    for query in ("limit=1001", "after=-1", "after=x", "from=1"):
        assert_refused(shop.client.get(f"/v1/admin/audit?{query}", headers=bearer(shop.text)), 422)


def test_an_action_that_cannot_be_logged_is_reported_as_failed(
    shop: AuditedShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated call completes the action and logs it, even if nothing is left to do."""
    shop.call("POST", "/v1/events", {"event_id": "e", "user_id": "visitor-7", "item_id": "item-1"})
    calls: list[tuple[str, str, str, object]] = [
        ("model.activate", "POST", "/v1/admin/generations/june/activate", None),
        ("experiment.start", "PUT", "/v1/admin/experiment", {"name": "which", "shares": {"may": 1, "june": 1}}),
        ("experiment.end", "DELETE", "/v1/admin/experiment", None),
        ("scenario.put", "PUT", "/v1/admin/scenarios/home", {"k": 5}),
        ("scenario.roll_back", "POST", "/v1/admin/scenarios/home/rollback", {"version": 1}),
        ("scenario.remove", "DELETE", "/v1/admin/scenarios/home", None),
        ("user.merge", "POST", "/v1/users/ada/merge", {"from": "visitor-7"}),
        ("user.erase", "DELETE", "/v1/users/ada", None),
    ]
    for action, method, path, body in calls:
        with monkeypatch.context() as failing:
            failing.setattr(shop.client.service.store.audit, "append", full)
            answer = shop.client.request(method, path, headers=bearer(shop.text), json=body)
            assert_refused(answer, 503)
        before = len(shop.log()["entries"])
        shop.call(method, path, body)
        assert [one["action"] for one in shop.log()["entries"][before:]] == [action]
    assert (shop.directory / "state" / FILE_NAME).exists()


async def full(*_: object) -> bool:
    raise StorageUnavailable("full", "disk_full")


def run(*command: str) -> None:
    assert run_command(*command) == 0


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> list[Any]:
    run(*command)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def kill(*_: object) -> None:
    raise StorageUnavailable("killed")


def test_a_tenant_that_is_served_cannot_be_erased(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(Settings(model_dir=write_model(tmp_path / "models" / "may"), data_dir=tmp_path / "state"))
    client.click("ann", "item-1")
    command = ("erase-tenant", "main", "--data-dir", tmp_path / "state", "--yes")
    assert run_command(*command) == 1
    assert "restart the services without it" in capsys.readouterr().err
    client.close()
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + LIVE_FOR_S)
    monkeypatch.setattr("sys.stdin", StringIO("no\n"))
    assert run_command(*command[:-1]) == 1
    assert run_command(*command) == 0
    assert "main is erased, with 1 users" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(SQLiteStore, "erase_tenant", kill)
        assert run_command(*command) == 1
    assert run_command(*command) == 0
    assert "main is erased, with 0 users" in capsys.readouterr().out
    assert run_command("audit", "--data-dir", tmp_path / "state") == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    begun: tuple[str, dict[str, int]] = ("tenant.erase", {})
    erased = [("tenant.erased", {"users": number}) for number in (1, 0)]
    assert [(one["action"], one["details"]) for one in entries] == [begun, erased[0], begun, begun, erased[1]]
