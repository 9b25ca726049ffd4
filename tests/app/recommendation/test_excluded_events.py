"""Exclusion of items by event types, over HTTP: exactly the items of the events that count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.recommendation import state_reader
from app.settings import Settings
from storage.state.corrections import EventFilter, SeenItems
from tests.app.conftest import ITEMS, WEIGHTS, Client, item_id
from tests.app.recommendation.ranking.event_shop import NAMES, NOW_S, Shop, ids, names, others
from tests.app.support import ALL_ITEMS, SECRET, assert_refused, item_ids, recommend
from tests.storage.oracles.naive_users import NaiveUsers
from tests.storage.redis.servers import RedisServer

DAY_S = 86_400
LENGTHS_S = {None: float("inf"), "1m": 60, "1h": 3_600, "90d": 90 * DAY_S}
AGES_S = [0, 59, 60, 61, 3_600, 3_601, 90 * DAY_S, 90 * DAY_S + 1, 3_000 * DAY_S]
EVERYTHING = {"k": ITEMS, "exclude_seen": "none"}
numbers = count()

posts = st.tuples(
    st.just("post"), names, ids, st.integers(0, 5), st.sampled_from(sorted(WEIGHTS)), st.sampled_from(AGES_S)
)
histories = st.lists(posts | posts | others, min_size=1, max_size=12)
rules = st.fixed_dictionaries(
    {
        "exclude_events": st.lists(st.sampled_from(sorted(WEIGHTS)), min_size=1, unique=True),
        "within": st.sampled_from(list(LENGTHS_S)),
    }
).map(lambda rule: {name: value for name, value in rule.items() if value is not None})


@pytest.fixture(scope="module")
def shop(store_server: RedisServer | None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    directory = tmp_path_factory.mktemp("shop")
    made = Settings(model_dir=model_dir, data_dir=directory / "state", max_seen_events=1_000)
    if store_server is not None:
        made = made.model_copy(update={"redis_url": store_server.url, "archive_dir": directory / "archive"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_reader, "now_us", lambda: NOW_S * 1_000_000)
        client = Client(made)
        yield Shop(client, None if store_server is None else (store_server, directory / "archive"))
        client.close()


def left_out(users: NaiveUsers, user_id: str, rule: Mapping[str, Any]) -> set[str]:
    """The oracle."""
    length_s = LENGTHS_S[rule.get("within")]
    return {
        entry.event.item_id
        for entry in users.log(user_id)
        if not entry.is_undone
        and entry.event.type in rule["exclude_events"]
        and NOW_S - entry.event.timestamp_us / 1e6 <= length_s
    }


@given(histories, rules, rules)
@settings(max_examples=15)
def test_exactly_the_items_of_excluded_events_are_missing(
    shop: Shop, history: list[Any], rule: dict[str, Any], narrower: dict[str, Any]
) -> None:
    users, prefix = NaiveUsers(), f"user-{next(numbers)}"
    for step in history:
        shop.apply(users, prefix, *step)
    client, scenario = shop.client, "/v1/admin/scenarios/rest"
    assert client.request("PUT", scenario, json={**rule, "k": ITEMS, "exclude_seen": "none"}).status_code == 200
    for user_id in (f"{prefix}-{name}" for name in NAMES):
        gone = left_out(users, user_id, rule)
        pins = [{"item_id": one, "place": place} for place, one in enumerate(sorted(gone), 1)]
        query = rule | {"exclude_events": ",".join(rule["exclude_events"])}
        with_both = left_out(users, user_id, narrower) | gone
        for found, expected in (
            (client.recommend(user_id, **EVERYTHING, **query), gone),
            (recommend(client, user_id=user_id, **EVERYTHING, **rule, pin=pins), gone),
            (recommend(client, user_id=user_id, **narrower, scenario="rest"), with_both),
        ):
            assert set(item_ids(found)) == {*ALL_ITEMS} - expected
        counted = recommend(client, user_id=user_id, **EVERYTHING, **rule, debug=True)["debug"]
        assert {"part": "exclude_events", "items": len(gone)} in counted["removed"]
    asked = [{"user_id": f"{prefix}-{name}", **EVERYTHING, **one} for name in NAMES for one in (rule, {}, narrower)]
    for request, found in zip(asked, recommend(client, requests=asked)["results"], strict=True):
        expected = left_out(users, request["user_id"], request) if "exclude_events" in request else set()
        assert set(item_ids(found)) == {*ALL_ITEMS} - expected


class TestBound:
    def test_a_truncated_log_is_reported(self, shop: Shop, start: Any, tmp_path: Path) -> None:
        client = start(tmp_path, max_seen_events=3)
        events = [{"user_id": "long", "item_id": item_id(row), "type": "purchase"} for row in range(5)]
        client.post("/v1/events", json=[*events, *({**one, "user_id": "short"} for one in events[:3])])
        for user_id, gone, limit in (("long", {2, 3, 4}, 3), ("short", {0, 1, 2}, None), ("nobody", set(), None)):
            found = client.recommend(user_id, **EVERYTHING, exclude_events="purchase", within="12h")
            assert set(ALL_ITEMS) - set(item_ids(found)) == set(map(item_id, gone))
            assert found.get("seen_events_limit") == limit
        client.close()


def test_an_unreadable_log_is_an_error(client: Client) -> None:
    client.post("/v1/events", json={"user_id": "ada", "item_id": item_id(1), "type": "purchase"})
    client.close_store()
    assert client.recommend("ada", exclude_seen="all")["source"] == "popular"
    assert_refused(client.get("/v1/users/ada/recommendations", params={"exclude_events": "purchase"}), 503)


def test_excluded_events_apply_before_the_state_is_folded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Popular items, too, must respect the log."""
    client.click("ada", *ALL_ITEMS[:5])

    async def none_yet(_: str, user_ids: list[str], *__: Any, **___: Any) -> list[None]:
        return [None] * len(user_ids)

    seen_items = client.service.store.seen_items

    async def without_state(tenant: str, user_id: str, events: EventFilter, **options: Any) -> SeenItems:
        seen: SeenItems = await seen_items(tenant, user_id, events._replace(state_of=None), **options)
        return seen

    monkeypatch.setattr(client.service.store, "states", none_yet)
    monkeypatch.setattr(client.service.store, "seen_items", without_state)
    for wish in ({"exclude_seen": "all"}, {"exclude_seen": "none", "exclude_events": "click"}):
        found = client.recommend("ada", k=ITEMS, **wish)
        assert (found["source"], set(item_ids(found))) == ("popular", set(ALL_ITEMS[5:]))


class TestRefused:
    def test_an_unknown_type_is_refused_with_the_known_ones(self, shop: Shop) -> None:
        unknown = {"exclude_events": ["purchase", SECRET]}
        asked = {"user_id": "ada", **unknown}
        answers = {
            "exclude_events": shop.client.get("/v1/users/ada/recommendations", params={"exclude_events": SECRET}),
            "requests.1.exclude_events": shop.client.post(
                "/v1/recommendations", json={"requests": [{"user_id": "ada"}, asked]}
            ),
            "settings.exclude_events": shop.client.post(
                "/v1/admin/preview", json={"settings": unknown, "request": {"user_id": "ada"}}
            ),
            "request.exclude_events": shop.client.post("/v1/admin/preview", json={"settings": {}, "request": asked}),
        }
        for field, refused in answers.items():
            assert_refused(refused, 422)
            (detail,) = refused.json()["error"]["details"]
            assert detail["field"] == field
            assert detail["reason"].endswith("known types: click, dislike, impression, purchase")
        assert_refused(shop.client.request("PUT", "/v1/admin/scenarios/wrong", json=unknown), 422)

    @pytest.mark.parametrize(
        "wish",
        [
            {"within": "90d"},
            *(
                {"exclude_events": ["click"], "within": wrong}
                for wrong in ("90", "0d", "d", "1.5h", "-1d", "999999d", 90)
            ),
            {"exclude_events": ["click"] * 21},
            {"exclude_events": ["a b"]},
            {"exclude_events": "click"},
            {"exclude_events": ["click"], "history": ["item-1"], "user_id": None},
        ],
    )
    def test_empty_exclusions_are_refused(self, shop: Shop, wish: dict[str, Any]) -> None:
        assert_refused(shop.client.post("/v1/recommendations", json={"user_id": "ada", **wish}), 422)

    def test_scenarios_stay_valid_when_another_model_lacks_their_types(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings_ = {"exclude_events": ["purchase"], "k": ITEMS, "exclude_seen": "none"}
        assert shop.client.request("PUT", "/v1/admin/scenarios/kept", json=settings_).status_code == 200
        shop.client.post("/v1/events", json={"user_id": "eve", "item_id": item_id(9), "type": "purchase"})
        monkeypatch.setattr(shop.client.service.signals, "event_types", {"click"})
        assert_refused(shop.client.get("/v1/users/eve/recommendations", params={"exclude_events": "purchase"}), 422)
        assert item_id(9) not in item_ids(shop.client.recommend("eve", scenario="kept"))
        assert len(recommend(shop.client, history=[item_id(9)], scenario="kept")["items"]) == ITEMS
