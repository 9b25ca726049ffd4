"""Click-through: positions come from signed recommendation ids, and all processes share the counts."""

from __future__ import annotations

import random
import re
import string
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.events.click_through import stats_of
from app.events.recommendation_ids import MAX_KEPT_HASHES, PLACES, Place, RecommendationIds, _ItemHashes, hash_of
from app.http.auth.keys import add, make
from app.http.routes import model
from app.jobs import generations
from app.recommendation.cost import statistics_charge
from app.schemas.fields import is_id
from app.schemas.operations import Stats
from storage.records import OTHER, NamedGeneration, Tally
from tests.app.conftest import Client
from tests.app.support import assert_refused, bearer
from tests.storage.redis.servers import RedisServer

ITEM_IDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
LETTERS = string.ascii_letters + string.digits + "-_.:@"
TAG = b"gen one\0"
SECRET = bytes(range(32))


def ids_of(secret: bytes = SECRET, tenant: str = "main") -> RecommendationIds:
    ids = RecommendationIds(tenant)
    ids.set_secret(secret)
    return ids


@given(st.lists(ITEM_IDS, max_size=40, unique=True), ITEM_IDS, st.sampled_from(["", "june"]))
def test_an_id_contains_the_positions_of_its_list(items: list[str], other: str, experiment: str) -> None:
    made = ids_of().make(TAG, hash_of(experiment), items)
    assert is_id(made)
    assert len(made) <= 128
    hashes = [crc32(name.encode()) % 2**16 for name in items[:PLACES]]
    for name in [*items, other]:
        wanted = crc32(name.encode()) % 2**16
        expected = Place(TAG[:4], hash_of(experiment), hashes.index(wanted) + 1) if wanted in hashes else None
        assert ids_of().place(made, name) == expected
        assert ids_of(SECRET[::-1]).place(made, name) is None
        assert ids_of(tenant="shop").place(made, name) is None


def test_hashes_are_cached_for_the_newest_items() -> None:
    hashes = _ItemHashes()
    for number in range(2 * MAX_KEPT_HASHES // PLACES):
        items = [f"{number}-{place}" for place in range(PLACES)]
        assert hashes.of(items) == b"".join(hashes[item] for item in items)
        assert len(hashes) <= MAX_KEPT_HASHES + PLACES


@given(st.data())
def test_a_forged_id_has_no_positions(data: st.DataObject) -> None:
    made = ids_of().make(TAG, 0, ["a", "b", "c"])
    place = data.draw(st.integers(0, len(made) - 1))
    other = LETTERS.index(made[place]) + data.draw(st.integers(1, len(LETTERS) - 1))
    changed = made[:place] + LETTERS[other % len(LETTERS)] + made[place + 1 :]
    if place < len(made) - 1:  # the last letter has bits that mean nothing
        assert all(ids_of().place(changed, name) is None for name in "abc")
    assert ids_of().place(made[:place], "a") is None


@given(st.text(max_size=130))
def test_any_text_can_be_parsed_as_an_id(text: str) -> None:
    assert ids_of().place(text, "a") is None


def stats(client: Client) -> dict[tuple[str, int], tuple[int, dict[str, int]]]:
    client.runner.run(client.service.signals.sync())
    found = client.get("/v1/stats").json()["places"]
    assert {one["experiment"] for one in found} <= {None}
    return {(one["generation"], one["place"]): (one["shown"], one["events"]) for one in found}


def test_events_count_at_the_position_of_their_item(
    start: Callable[..., Client], tmp_path: Path, redis_server: RedisServer
) -> None:
    """Lists and events of both processes, each event once; forged ids and other items are ignored."""
    settings = {"redis_url": redis_server.url}
    one, other = start(tmp_path, **settings), start(tmp_path, **settings)
    try:
        for client in (one, other):
            client.runner.run(client.service.signals.sync())
        answer = one.recommend("ada", k=3)
        one.recommend("bob", k=25)
        made, items = answer["recommendation_id"], [item["item_id"] for item in answer["items"]]

        def event(event_id: str, item_id: str, **extra: Any) -> dict[str, Any]:
            return {"event_id": event_id, "user_id": "ada", "item_id": item_id, "recommendation_id": made, **extra}

        events = [event("e1", items[2]), event("e2", items[2], type="purchase"), event("e3", items[0])]
        other.post("/v1/events", json=events)
        one.post("/v1/events", json=events)  # sent again
        no_clicks = [
            event("e4", items[1], type="dislike"),
            event("e5", "no-such"),
            event("e6", items[0], recommendation_id=made[:-12] + "A" * 12),
            event("e7", items[0], recommendation_id="r-1"),
        ]
        assert one.post("/v1/events", json=no_clicks).json()["accepted"] == 4
        stats(one)
        found = stats(other)
        assert found[("tiny", 1)] == (2, {"click": 1})
        assert found[("tiny", 2)] == (2, {})
        assert found[("tiny", 3)] == (2, {"click": 1, "purchase": 1})
        assert found[("tiny", 4)] == (1, {})
        assert max(place for _, place in found) == PLACES
        text = other.get("/metrics").text
        assert re.search(r'lisarec_chosen_items_total\{.*generation="tiny",place="3".*type="purchase"\} 1.0', text)
    finally:
        one.close()
        other.close()
    again = start(tmp_path, **settings)
    try:
        again.runner.run(again.service.signals.sync())
        again.post("/v1/events", json=[event("e9", items[1])])
        assert stats(again)[("tiny", 2)] == (2, {"click": 1})
    finally:
        again.close()


@pytest.fixture(params=["sqlite", "redis"])
def any_client(request: pytest.FixtureRequest, start: Callable[..., Client], tmp_path: Path) -> Iterator[Client]:
    url = request.getfixturevalue("redis_server").url if request.param == "redis" else None
    client = start(tmp_path, redis_url=url, max_value=50.0)
    yield client
    client.close()


def test_values_of_events_add_up_at_the_position_of_their_item(any_client: Client) -> None:
    """Each event once, by its value; events without a position or of uncounted types are ignored."""
    client, rng = any_client, random.Random(0)
    client.request("PUT", "/v1/admin/scenarios/home", json={"k": 4})
    client.runner.run(client.service.signals.sync())
    lists = [client.recommend(f"u{n}", **({"scenario": "home"} if n % 2 else {"k": 4})) for n in range(6)]
    events: list[dict[str, Any]] = []
    expected = defaultdict[tuple[str, str | int, str], float](float)
    for number in range(200):
        of, kind, worth = rng.choice(lists), rng.choice(["click", "purchase", "dislike"]), rng.choice([0.0, 0.1, 19.99])
        items = [one["item_id"] for one in of["items"]]
        item = rng.choice([*items, "item-99"])
        event = {"event_id": f"e{number}", "user_id": f"u{number % 7}", "item_id": item, "type": kind}
        event |= {"timestamp": 1_700_000_000.0} | ({"value": worth} if number % 5 else {})
        events.append(event | ({"recommendation_id": of["recommendation_id"]} if number % 9 else {}))
        if number % 5 and number % 9 and worth and kind != "dislike" and item in items:
            expected["place", items.index(item) + 1, kind] += worth
            if "scenario" in of:
                expected["scenario", of["scenario"], kind] += worth
    for batch in (events[:150], events[100:], events[:50]):
        assert client.post("/v1/events", json=batch).status_code == 200
        client.runner.run(client.service.signals.sync())
    client.request("DELETE", "/v1/users/u0/events/e0")  # counted, as its click is
    found = client.get("/v1/stats").json()
    sums = {("place", one["place"], kind): value for one in found["places"] for kind, value in one["value"].items()}
    for one in found["scenarios"]:
        sums |= {("scenario", one["scenario"], kind): value for kind, value in one["value"].items()}
    assert sums == pytest.approx(dict(expected), abs=1e-6)
    logged = [one for user in range(7) for one in client.get(f"/v1/users/u{user}/events?limit=500").json()["events"]]
    assert {one["event_id"]: one for one in logged if "undo" not in one} == {one["event_id"]: one for one in events}


def test_values_of_events_are_capped_by_the_settings(any_client: Client) -> None:
    client = any_client
    event = {"user_id": "ada", "item_id": "item-1"}
    assert client.post("/v1/events", json=[event | {"value": one} for one in (0, 50, 49.99)]).json()["accepted"] == 3
    for value in (50.01, 51, -0.5):
        refused = client.post("/v1/events", json=[event, event | {"value": value}])
        assert_refused(refused, 422)
        assert refused.json()["error"]["details"] == [{"index": 1, "field": "value", "reason": "is not from 0 to 50"}]
    assert len(client.log("ada")) == 3


def test_counts_are_kept_when_flushing_fails(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.runner.run(client.service.signals.sync())
    listed = client.recommend("ada", k=1)
    event = {"user_id": "ada", "item_id": listed["items"][0]["item_id"], "value": 2.5}
    client.post("/v1/events", json=event | {"recommendation_id": listed["recommendation_id"]})
    with monkeypatch.context() as patch:
        patch.setattr(client.service.store, "add_tallies", None)
        with pytest.raises(TypeError):
            client.runner.run(client.service.signals.flush())
    assert stats(client) == {("tiny", 1): (1, {"click": 1})}
    assert client.get("/v1/stats").json()["places"][0]["value"] == {"click": 2.5}


def test_statistics_of_a_dropped_model_are_removed(any_client: Client) -> None:
    client, store = any_client, any_client.service.store
    client.runner.run(store.generations.announce(NamedGeneration("old", b"old one\0"), 0))
    client.runner.run(store.add_tallies("main", {("shown", "old", "", 1): 5, ("scenario-list", "home", "", "full"): 2}))
    client.recommend("ada", k=1)
    assert stats(client) == {("old", 1): (5, {}), ("tiny", 1): (1, {})}
    client.runner.run(generations.drop(client.settings, "old"))
    assert stats(client) == {("tiny", 1): (1, {})}
    assert client.get("/v1/stats").json()["scenarios"][0]["lists"] == 2


def test_series_of_a_dropped_model_are_removed(any_client: Client) -> None:
    client, store = any_client, any_client.service.store
    signals = client.service.signals
    client.runner.run(store.generations.announce(NamedGeneration("old", b"old one\0"), 0))
    client.runner.run(signals.sync())
    made = signals.click_through.ids.make(b"old one\0", 0, ["item-1"])
    client.post("/v1/events", json={"user_id": "ada", "item_id": "item-1", "recommendation_id": made, "value": 2})
    client.recommend("ada", k=1)
    client.runner.run(signals.sync())

    def counted() -> set[tuple[str, str]]:
        lines = client.get("/metrics").text.splitlines()
        found = [re.match(r'lisarec_(shown|chosen)_\w+_total{.*generation="([^"]+)"', line) for line in lines]
        return {(one[1], one[2]) for one in found if one}

    assert counted() == {("shown", "tiny"), ("chosen", "old")}
    client.runner.run(generations.drop(client.settings, "old"))
    client.runner.run(signals.sync())
    assert counted() == {("shown", "tiny")}


def test_a_late_event_does_not_restore_a_dropped_model(any_client: Client) -> None:
    client, store = any_client, any_client.service.store
    client.runner.run(store.generations.announce(NamedGeneration("old", b"old one\0"), 0))
    client.runner.run(client.service.signals.sync())
    made = client.service.signals.click_through.ids.make(b"old one\0", 0, ["item-1"])
    event = {"user_id": "ada", "item_id": "item-1", "recommendation_id": made}
    client.post("/v1/events", json=event)
    assert stats(client) == {("old", 1): (0, {"click": 1})}
    client.runner.run(generations.drop(client.settings, "old"))
    client.runner.run(client.service.signals.sync())
    client.post("/v1/events", json=event)
    assert stats(client) == {(OTHER, 1): (0, {"click": 1})}


def test_statistics_are_charged_by_models_and_block_no_other_request(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[threading.Thread]()

    def summed(tallies: Mapping[Tally, float]) -> Stats:
        threads.append(threading.current_thread())
        return stats_of(tallies)

    monkeypatch.setattr(model, "stats_of", summed)
    text, key = make("main", ["recs:read"], requests_per_minute=60)
    add(tmp_path / "keys", key)
    client = start(tmp_path, keys_file=tmp_path / "keys")
    client.runner.run(client.service.signals.sync())
    assert statistics_charge(1) == 13
    answers = [client.get("/v1/stats", headers=bearer(text)) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]
    assert len(threads) == 4
    assert threading.current_thread() not in threads
    client.close()
