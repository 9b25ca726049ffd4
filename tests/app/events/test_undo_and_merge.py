"""Undo and merge over HTTP, and their effect on a model that is trained on the archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cli.main import main
from model.artifact.model_directory import load
from model.data.arrays import MappedArrays
from model.data.readers import read_interactions
from model.lisa.histogram import history_histogram
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.archiver.sqlite_source import SQLiteSource
from tests.app.conftest import SHAPE, Client, item_id
from tests.model.data.same_interactions import require_same


@pytest.fixture(params=["sqlite", "redis"])
def any_client(request: pytest.FixtureRequest, start: Callable[..., Client], tmp_path: Path) -> Iterator[Client]:
    """A service without users on each store; its archive is at tmp_path / "archive"."""
    options: dict[str, Any] = {"archive_dir": tmp_path / "archive"}
    if request.param == "redis":
        options["redis_url"] = request.getfixturevalue("redis_server").url
    client = start(tmp_path / "state", **options)
    yield client
    client.close()


def post(client: Client, user_id: str, *rows: int, prefix: str = "e") -> Any:
    events = [
        {"event_id": f"{prefix}{row}", "user_id": user_id, "item_id": item_id(row), "timestamp": 1_700_000_000 + row}
        for row in rows
    ]
    return client.post("/v1/events", json=events).json()


def undo(client: Client, user_id: str, event_id: str) -> Any:
    return client.request("DELETE", f"/v1/users/{user_id}/events/{event_id}")


def merge(client: Client, user_id: str, visitor: object) -> Any:
    return client.post(f"/v1/users/{user_id}/merge", json={"from": visitor})


def turn(client: Client) -> int:
    """Archive and trim everything."""
    url, archive = client.settings.redis_url, client.settings.archive
    assert archive is not None
    opened = SQLiteSource.open(client.settings.data_dir) if url is None else RedisSource.open(url)
    with opened as log, ArchiveWriter.open(archive) as writer:
        return archive_log(
            log, writer, datetime.now(UTC) + timedelta(seconds=1), keep_tail_s=0, keep_days=None
        ).archived


def assert_history_is(client: Client, user_id: str, *rows: int) -> None:
    """Assert that the state equals that of these items in this order, as the model counts them."""
    user = client.get(f"/v1/users/{user_id}").json()
    codes = load(client.model_dir).history_codes[list(rows)]
    expected = history_histogram(codes, SHAPE.decay_rates, SHAPE.history_codewords)
    np.testing.assert_allclose(user["histogram"], expected, rtol=1e-5, atol=1e-12)
    assert user["event_count"] == len(rows)
    assert user["recent_items"] == [item_id(row) for row in dict.fromkeys(rows[::-1])]


def test_an_undone_event_leaves_no_trace_except_its_id(any_client: Client) -> None:
    post(any_client, "ada", 1, 2, 3, 4)
    for changed in (True, False):
        response = undo(any_client, "ada", "e2")
        assert (response.status_code, response.json()) == (
            200,
            {"user_id": "ada", "event_id": "e2", "changed": changed},
        )
        assert_history_is(any_client, "ada", 1, 3, 4)
    assert undo(any_client, "ada", "e4").status_code == 200
    assert any_client.get("/v1/users/ada").json()["last_item_id"] == item_id(3)
    assert post(any_client, "ada", 2) == {
        "accepted": 0,
        "duplicates": 1,
        "unknown_items": 0,
        "unknown_types": 0,
        "refused": 0,
    }
    assert_history_is(any_client, "ada", 1, 3)
    for rule in ("recent", "all"):
        answer = any_client.recommend("ada", k=60, exclude_seen=rule)
        shown = {item["item_id"] for item in answer["items"]}
        assert {item_id(1), item_id(2), item_id(3), item_id(4)} - shown == {item_id(1), item_id(3)}
    log = any_client.get("/v1/users/ada/events").json()["events"]
    assert [entry.get("event_id") or entry["undo"] for entry in log] == ["e1", "e2", "e3", "e4", "e2", "e4"]


def test_undoing_an_unknown_event_returns_404(any_client: Client) -> None:
    post(any_client, "ada", 1)
    for user_id, event_id in (("ada", "e2"), ("bob", "e1")):
        response = undo(any_client, user_id, event_id)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "event_not_found")
    assert undo(any_client, "ada", "a%C2%85b").status_code == 422
    assert any_client.get("/v1/users/bob").status_code == 404
    assert_history_is(any_client, "ada", 1)


def test_a_user_without_remaining_events_gets_popular_items(any_client: Client) -> None:
    post(any_client, "ada", 1)
    undo(any_client, "ada", "e1")
    assert any_client.get("/v1/users/ada").json()["event_count"] == 0
    assert any_client.recommend("ada")["source"] == "popular"


def test_a_merge_moves_past_and_future_events_to_the_user(any_client: Client) -> None:
    post(any_client, "ada", 1, 2)
    post(any_client, "visitor", 2, 3, 4)
    undo(any_client, "visitor", "e3")
    for changed in (True, False):
        response = merge(any_client, "ada", "visitor")
        assert (response.status_code, response.json()) == (
            200,
            {"user_id": "ada", "from": "visitor", "changed": changed},
        )
        for user_id in ("ada", "visitor"):
            assert_history_is(any_client, user_id, 1, 2, 2, 4)
    assert post(any_client, "visitor", 2, 3, 4) == {
        "accepted": 0,
        "duplicates": 3,
        "unknown_items": 0,
        "unknown_types": 0,
        "refused": 0,
    }
    assert post(any_client, "visitor", 5) == {
        "accepted": 1,
        "duplicates": 0,
        "unknown_items": 0,
        "unknown_types": 0,
        "refused": 0,
    }
    assert "see the user's log" in undo(any_client, "ada", "e4").json()["error"]["message"]  # which names the visitor
    assert undo(any_client, "visitor", "e4").json()["changed"]
    assert undo(any_client, "ada", "e1").json()["changed"]
    assert_history_is(any_client, "ada", 2, 2, 5)
    log = any_client.get("/v1/users/ada/events").json()["events"]
    assert {(entry["user_id"], entry["event_id"]) for entry in log if "event_id" in entry} == {
        *(("ada", f"e{n}") for n in (1, 2)),
        *(("visitor", f"e{n}") for n in (2, 3, 4, 5)),
    }
    any_client.request("DELETE", "/v1/users/visitor")
    for user_id in ("ada", "visitor"):
        assert any_client.get(f"/v1/users/{user_id}").status_code == 404


def test_contradicting_merges_are_refused(any_client: Client) -> None:
    post(any_client, "a", 1)
    post(any_client, "b", 2)
    assert merge(any_client, "b", "a").status_code == 200
    for user_id, visitor in (("a", "b"), ("c", "a")):
        response = merge(any_client, user_id, visitor)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "merge_refused")
    assert merge(any_client, "c", "b").status_code == 200  # a chain
    assert merge(any_client, "c", "a").json()["changed"] is False
    for user_id in "abc":
        assert_history_is(any_client, user_id, 2, 1)
    assert merge(any_client, "new", "nobody").json()["changed"]
    post(any_client, "nobody", 7)
    assert_history_is(any_client, "new", 7)


@pytest.mark.parametrize("body", [{"from": "ada"}, {"from": 7}, {"from": "a\x85"}, {}, [], {"from": "b", "to": "c"}, 5])
def test_invalid_merges_are_refused(shared_client: Client, body: object) -> None:
    response = shared_client.post("/v1/users/ada/merge", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


def test_training_respects_undos_and_merges_of_archived_events(any_client: Client) -> None:
    post(any_client, "ada", 1, 2, 3)
    post(any_client, "visitor", 4, 5)
    post(any_client, "bob", 6, 7)
    assert turn(any_client) == 7
    undo(any_client, "ada", "e2")
    assert undo(any_client, "bob", "e8").status_code == 404
    merge(any_client, "ada", "visitor")
    undo(any_client, "visitor", "e5")
    post(any_client, "visitor", 8)
    for _ in range(2):
        assert_history_is(any_client, "ada", 1, 3, 4, 8)
        assert post(any_client, "visitor", 4, 5)["duplicates"] == 2
        assert not undo(any_client, "ada", "e2").json()["changed"]
        turn(any_client)
    directory = any_client.settings.archive_dir
    assert isinstance(directory, Path)
    found = read_interactions(directory)
    require_same(found, read_interactions(directory, MappedArrays(directory.parent / "work", 2)))
    rows = {
        user_id: [found.item_ids[item] for item in found.item[found.user == user]]
        for user, user_id in enumerate(found.user_ids)
    }
    assert rows == {"ada": [item_id(row) for row in (1, 3, 4, 8)], "bob": [item_id(row) for row in (6, 7)]}
    any_client.request("DELETE", "/v1/users/ada")
    turn(any_client)
    assert read_interactions(directory).user_ids == ["bob"]


def test_an_unavailable_store_returns_503(client: Client) -> None:
    client.close_store()
    for response in (undo(client, "ada", "e1"), merge(client, "ada", "visitor")):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "storage_unavailable")


def test_a_backup_is_restored_into_another_store_by_commands(
    any_client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post(any_client, "ada", 1, 2, 3)
    post(any_client, "visitor", 4, 5)
    undo(any_client, "ada", "e2")
    merge(any_client, "ada", "visitor")
    url, file, copy = any_client.settings.redis_url, tmp_path / "log.gz", tmp_path / "copy"
    place = ["--data-dir", str(any_client.settings.data_dir)] if url is None else ["--redis-url", url]
    back_up = ["backup", "--out", str(file), *place]
    restore = ["restore", str(file), "--model", str(any_client.settings.model_dir), "--data-dir", str(copy)]
    main_of_process(*back_up)
    main_of_process(*restore)
    assert f"Next: 'lisarec serve --model {any_client.settings.model_dir} --data-dir {copy}'" in capsys.readouterr().out
    other = Client(any_client.settings.model_copy(update={"data_dir": copy, "redis_url": None}))
    assert other.get("/v1/users/visitor").json() == any_client.get("/v1/users/visitor").json()
    assert_history_is(other, "ada", 1, 3, 4, 5)
    assert post(other, "visitor", 4)["duplicates"] == 1
    other.close()
    for refused in (back_up, restore):
        with pytest.raises(SystemExit):
            main_of_process(*refused)
    main_of_process(*restore, "--resume")


def main_of_process(*arguments: str) -> None:
    """Run the command in a thread with an event loop of its own; raises its nonzero exit code."""
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(main, list(arguments)).result()
        except SystemExit as exc:
            if exc.code:
                raise
