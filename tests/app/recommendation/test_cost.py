"""Costs of calls: known in advance, bounded, and charged to the key's rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import TooCostly
from app.http.auth.keys import SCOPES, add, make
from app.recommendation.cost import (
    ARCHIVED_FILE,
    FEW_CATEGORIES,
    LIGHT,
    PARTS,
    PLAIN,
    SCENARIOS,
    charge_for,
    cost_of,
    is_light,
    parts_of,
    search_charge,
)
from app.recommendation.scenarios import with_settings
from app.schemas.items import SearchQuery
from app.schemas.recommendations import MAX_REQUESTS, PersonalSearch, RecommendationRequest
from app.schemas.scenarios import ScenarioSettings
from app.settings import Settings
from tests.app.conftest import Client, write_model
from tests.app.support import assert_refused, bearer
from tests.storage.archive.archived_redis import turn
from tests.storage.redis.servers import RedisServer

MOST = Settings().max_cost
HEAVIEST = {"user_id": "ada", "k": 1_000, "explain": True}


def request(**fields: Any) -> RecommendationRequest:
    return RecommendationRequest.model_validate({"user_id": "ada", **fields})


def archiving(redis_server: RedisServer, directory: Path, **settings: int) -> tuple[Client, str]:
    """A service with an archive, a log of three events, and the key that posted them."""
    text, key = make("main", SCOPES, requests_per_minute=100)
    add(directory / "keys", key)
    model_dir, archive = write_model(directory / "models" / "tiny"), directory / "archive"
    client = Client(
        Settings(
            model_dir=model_dir,
            redis_url=redis_server.url,
            archive_dir=archive,
            keys_file=directory / "keys",
            **settings,  # type: ignore[arg-type]
        )
    )
    post_log(client, text, "ada", 3)
    return client, text


class TestCost:
    @pytest.mark.parametrize(
        "fields",
        [
            {"mode": "repeat"},
            {"mode": "repeat", "exclude_seen": "all", "k": 500},
            {"exclude_seen": "all", "exclude_events": ["purchase"], "within": "90d"},
            {"mode": "repeat", "exclude": ["item-1"] * 100},
        ],
    )
    def test_of_a_request_that_reads_a_log_is_the_sum_of_its_parts(self, fields: dict[str, Any]) -> None:
        asked = request(**fields)
        assert cost_of(asked) == pytest.approx(PLAIN + sum(parts_of(asked).values()))

    @pytest.mark.parametrize(
        "fields",
        [
            {"mode": "repeat", "exclude_seen": "all", "exclude_events": ["purchase"]},
            {"categories": ["a"], "categories_all": ["b"], "categories_none": ["c", "d"], "exclude": ["item-1"]},
            {"filter": "item.price < 5.0", "debug": True, "params": {"size": "l"}, "objective": {"property": "margin"}},
            {"boost": {"a": 0.5}, "max_per": {"brand": 2}, "max_per_category": 1, "explain": True, "diversity": 0.5},
            {"cursor": "", "pin": [{"item_id": "item-1", "place": 1}], "candidates": ["item-1"], "basket": ["item-2"]},
            {"rotation": 0.5, "boost": ["item.margin"]},
            {"categories_none": ["a"]},
            {"categories_all": ["a"]},
        ],
    )
    def test_omits_only_free_parts(self, fields: dict[str, Any]) -> None:
        asked = request(**fields)
        every = {field: cost for field, of in PARTS.items() if (cost := of(asked))}
        assert {field: cost for field, cost in parts_of(asked).items() if cost} == every
        assert every.keys() >= fields.keys() - {"cursor"}

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"filter": "item.price < 5.0", "fallback": "true", "max_per": {"brand": 2}, "max_per_category": 1},
            {"categories": ["a"], "categories_all": ["b"], "categories_none": ["c"], "exclude": ["item-1"]},
            {"exclude_events": ["purchase"], "within": "90d", "boost": ["item.margin"], "diversity": 0.5},
            {"mode": "repeat", "exclude_seen": "all", "pin": [{"item_id": "item-1", "place": 1}], "k": 5},
            {
                "objective": {"property": "margin"},
                "diversity": 0.5,
                "params": {"size": {"type": "text", "default": "l"}},
            },
        ],
    )
    def test_of_scenarios_and_searches_omits_only_free_parts(self, settings: dict[str, Any]) -> None:
        stored = ScenarioSettings.model_validate(settings)
        wishes: list[dict[str, Any]] = [{}, {"debug": True}, {"filter": "true", "categories": ["d"], "explain": True}]
        search = PersonalSearch(user_id="ada", text="tea")
        for asked in (search, *(with_settings(request(**fields), stored) for fields in wishes)):
            every = {field: cost for field, of in PARTS.items() if (cost := of(asked))}
            assert {field: cost for field, cost in parts_of(asked).items() if cost} == every

    def test_has_a_part_for_every_field_that_is_not_free(self) -> None:
        free = {"user_id", "scenario", "current_item", "because", "within", "basket_only", "rotation_days"}
        assert RecommendationRequest.model_fields.keys() - PARTS == free

    def test_of_a_plain_request_is_1(self) -> None:
        wishes: list[dict[str, Any]] = [
            {},
            {"k": 10},
            {"exclude_seen": "recent"},
            {"exclude": [], "categories": []},
            {"because": ""},
        ]
        for fields in wishes:
            assert cost_of(request(**fields)) == pytest.approx(1.0, abs=0.05)
            assert charge_for([request(**fields)], MOST) == 1

    @given(
        k=st.integers(1, 1_000),
        ids=st.integers(0, 50),
        explain=st.booleans(),
        diversity=st.sampled_from([0.0, 0.5]),
    )
    def test_grows_with_every_part_and_is_their_sum(self, k: int, ids: int, explain: bool, diversity: float) -> None:
        fields: dict[str, Any] = {"k": k, "exclude": ["a"] * ids, "explain": explain, "diversity": diversity}
        cost = cost_of(request(**fields))
        assert cost == pytest.approx(1.0 + sum(parts_of(request(**fields)).values()), abs=0.05)
        for more in ({"k": k + 1} if k < 1_000 else {}, {"exclude": ["a"] * (ids + 1)}, {"explain": True}):
            assert cost_of(request(**fields | more)) >= cost

    def test_of_a_call_is_bounded_and_the_refusal_names_the_costliest_part(self) -> None:
        assert charge_for([request()] * MAX_REQUESTS, MOST) == MAX_REQUESTS
        assert charge_for([request()], MOST, [0, 100, 600]) == 6
        with pytest.raises(TooCostly, match=f"the limit is {MOST}") as refusal:
            charge_for([request(k=1_000, explain=True)] * MAX_REQUESTS, MOST)
        assert [detail.field for detail in refusal.value.details] == ["explain", "k", "requests"]
        assert refusal.value.details[0].reason == "costs 2,500"


@pytest.mark.parametrize("count", [FEW_CATEGORIES, FEW_CATEGORIES + 1])
@pytest.mark.parametrize("field", ["categories", "categories_all", "categories_none"])
def test_requests_with_many_categories_are_not_batched_with_light_ones(field: str, count: int) -> None:
    asked = request(**{field: [f"label {n}" for n in range(count)]})
    assert cost_of(asked) < LIGHT
    assert is_light(asked, cost_of(asked)) == (count <= FEW_CATEGORIES)


def test_category_boosts_are_not_batched_with_light_requests() -> None:
    """A boost for a user without a history scans all items."""
    asked = request(boost={"tea": 20})
    assert not is_light(asked, cost_of(asked))
    assert is_light(request(boost={}), cost_of(request(boost={})))


class TestSearchCharge:
    @pytest.mark.parametrize(
        ("query", "words", "charges"),
        [
            ({"query": "e"}, 1, [1, 1, 2, 11, 101]),
            ({"query": "green tea pot"}, 3, [3, 3, 6, 33, 303]),
            ({"query": "e", "limit": 1_000}, 1, [21, 21, 22, 31, 121]),
            ({"query": "e", "user_id": "ada"}, 1, [3, 3, 4, 13, 103]),
            ({"limit": 100}, 0, [3, 3, 3, 3, 3]),
        ],
    )
    def test_grows_with_words_and_items(self, query: dict[str, Any], words: int, charges: list[int]) -> None:
        catalogues = [60, 99_999, 100_000, 1_000_000, 10_000_000]
        assert [search_charge(SearchQuery(**query), words, items, MOST) for items in catalogues] == charges

    def test_counts_cold_items(self, guarded: tuple[Client, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
        client, texts = guarded
        monkeypatch.setattr("app.recommendation.cost.SEARCHED_ITEMS", 20)
        of_model = len(client.service.catalogue)
        unlearned = [{"item_id": f"unlearned-{n}", "title": "Pot"} for n in range(40)]
        assert client.post("/v1/items", json=unlearned, headers=bearer(texts["free"])).status_code == 200
        answer = client.get("/v1/items?query=pot&limit=1", headers=bearer(texts["searches"]))
        assert answer.json()["items"][0]["title"] == "Pot"
        assert left(client, texts["searches"]) == 100 - (1 + (of_model + 40) // 20)


def post_log(client: Client, key: str, user_id: str, events: int) -> None:
    for start in range(0, events, 1_000):
        numbers = range(start, min(events, start + 1_000))
        body = [{"event_id": f"{user_id}-{n}", "user_id": user_id, "item_id": f"item-{n % 60}"} for n in numbers]
        assert client.post("/v1/events", json=body, headers=bearer(key)).json()["accepted"] == len(body)


def left(client: Client, key: str) -> int:
    """Spend the remaining quota of the key one request at a time; return its size."""
    statuses = (client.get("/v1/items/popular", headers=bearer(key)).status_code for _ in range(101))
    return list(takewhile(lambda status: status == 200, statuses)).count(200)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, dict[str, str]]]:
    """A service and the texts of its keys: one without a rate, and others with different rates."""
    directory = tmp_path_factory.mktemp("guarded")
    texts = {}
    rates = {"free": None, "small": 20} | dict.fromkeys(
        ("exact", "lists", "logs", "seen", "corrects", "operates", "searches", "puts", "rolls back"), 100
    )
    for name, rate in rates.items():
        texts[name], key = make("main", SCOPES, requests_per_minute=rate)
        add(directory / "keys", key)
    model_dir = write_model(directory / "models" / "tiny")
    client = Client(Settings(model_dir=model_dir, data_dir=directory, keys_file=directory / "keys"))
    yield client, texts
    client.close()


class TestCall:
    def test_that_is_too_costly_is_refused_with_the_option_to_lower(
        self, guarded: tuple[Client, dict[str, str]]
    ) -> None:
        """This call costs as much as 2,600 plain requests."""
        client, texts = guarded
        refused = client.post("/v1/recommendations", json={"requests": [HEAVIEST] * 100}, headers=bearer(texts["free"]))
        assert_refused(refused, 422)
        error = refused.json()["error"]
        assert error["code"] == "too_costly"
        assert "reduce the largest part, or split it" in error["message"]
        assert error["details"][0] == {"index": None, "field": "explain", "reason": "costs 2,500"}
        assert client.post("/v1/recommendations", json=HEAVIEST, headers=bearer(texts["free"])).status_code == 200

    def test_that_costs_more_than_the_rate_of_the_key_is_refused_as_such(
        self, guarded: tuple[Client, dict[str, str]]
    ) -> None:
        client, texts = guarded
        for answer in (
            client.post("/v1/recommendations", json=HEAVIEST, headers=bearer(texts["small"])),
            client.get("/v1/items/item-1/similar?k=1000&explain=true", headers=bearer(texts["small"])),
        ):
            assert_refused(answer, 422)
            assert answer.json()["error"]["code"] == "too_costly"
            assert "this key is 20 per minute" in answer.json()["error"]["message"]

    def test_counts_against_the_rate_as_many_plain_requests_as_it_costs(
        self, guarded: tuple[Client, dict[str, str]]
    ) -> None:
        client, texts = guarded
        headers = bearer(texts["exact"])
        half = {"requests": [{"user_id": "ada"}] * 50}
        assert client.post("/v1/recommendations", json=half, headers=headers).status_code == 200
        assert client.get("/v1/users/ada/recommendations?k=1000", headers=headers).status_code == 200  # 5
        assert client.post("/v1/recommendations", json=half, headers=headers).status_code == 429
        rest = {"requests": [{"user_id": "ada"}] * 44}  # one went with the refused call
        assert client.post("/v1/recommendations", json=rest, headers=headers).status_code == 200
        assert client.get("/v1/users/ada/recommendations", headers=headers).status_code == 429

    def test_that_rolls_back_a_scenario_costs_the_same_as_its_put(self, guarded: tuple[Client, dict[str, str]]) -> None:
        client, texts = guarded
        url, large = "/v1/admin/scenarios/home", {"filter": "true" + " && true" * 200}

        def put(key: str, settings: dict[str, Any]) -> None:
            assert client.request("PUT", url, json=settings, headers=bearer(texts[key])).status_code == 200

        put("free", large)
        put("free", {})
        assert client.post(f"{url}/rollback", json={}, headers=bearer(texts["rolls back"])).status_code == 200
        put("puts", {**large, "k": 3})
        rest = left(client, texts["puts"])
        assert rest < 100 - SCENARIOS
        assert left(client, texts["rolls back"]) == rest

    def test_of_lists_logs_and_items_costs_by_its_length(self, guarded: tuple[Client, dict[str, str]]) -> None:
        client, texts = guarded
        headers = bearer(texts["lists"])
        client.post("/v1/events", json={"event_id": "a", "user_id": "ada", "item_id": "item-1"}, headers=headers)  # 1
        items: list[dict[str, Any]] = [{"item_id": f"item-{n}", "available": True} for n in range(50)]
        items[0]["vector"] = items[1]["vector"] = [1.0] * 1_000
        assert client.post("/v1/items", json=items, headers=headers).status_code == 200  # 5
        user = {"properties": {"member": True}}
        assert client.request("PUT", "/v1/users/ada/properties", json=user, headers=headers).status_code == 200  # 5
        for path in (
            "/v1/items/popular?k=1000",  # 5
            f"/v1/items/trending?k=1000&{'&'.join(['categories=tea'] * 300)}",  # 8
            "/v1/items?limit=1000",  # 21
            "/v1/items?limit=1&query=a+b+c",  # 3
            "/v1/items?limit=100&user_id=ada",  # 5
            "/v1/users/ada/events?limit=1000",  # 11
            "/v1/items/popular",  # 1
        ):
            assert client.get(path, headers=headers).status_code == 200, path
        rest = {"requests": [{"user_id": "ada"}] * (100 - 65)}
        assert client.post("/v1/recommendations", json=rest, headers=headers).status_code == 200
        assert client.get("/v1/items/popular", headers=headers).status_code == 429

    def test_that_reads_logs_costs_by_their_length(self, guarded: tuple[Client, dict[str, str]]) -> None:
        """A batch may read 98 logs of 10,000 entries each."""
        client, texts = guarded
        post_log(client, texts["free"], "long", 2_100)
        post_log(client, texts["free"], "short", 100)
        asked = [{"user_id": "long", "exclude_seen": "all"}, {"user_id": "short", "exclude_seen": "all"}]
        answer = client.post("/v1/recommendations", json={"requests": asked}, headers=bearer(texts["seen"]))
        assert answer.status_code == 200
        assert left(client, texts["seen"]) == 100 - (2 + 2 + 20)

    def test_that_reads_too_long_logs_is_refused_with_the_reason(
        self, guarded: tuple[Client, dict[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, texts = guarded
        users = [f"reader-{n}" for n in range(12)]
        for user in users:
            post_log(client, texts["free"], user, 2_000)
        body = {"requests": [{"user_id": user, "exclude_seen": "all"} for user in users]}
        reads: list[str] = []
        monkeypatch.setattr(client.service.store, "seen_items", lambda _, user_id, *__, **___: reads.append(user_id))
        refused = client.post("/v1/recommendations", json=body, headers=bearer(texts["free"]))
        assert_refused(refused, 422)
        error = refused.json()["error"]
        assert error["code"] == "too_costly"
        assert error["details"][0] == {"index": None, "field": "exclude_seen", "reason": "costs 240"}
        assert reads == []

    def test_asks_for_log_lengths_only_if_they_matter(
        self, guarded: tuple[Client, dict[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, texts = guarded
        asked: list[list[str]] = []
        log_lengths = client.service.store.log_lengths

        async def noted(tenant: str, user_ids: Sequence[str], *, limit: int) -> list[int]:
            asked.append([*user_ids])
            lengths: list[int] = await log_lengths(tenant, user_ids, limit=limit)
            return lengths

        monkeypatch.setattr(client.service.store, "log_lengths", noted)
        for key, users, are_asked in (
            ("free", ["ada"], False),
            ("free", ["ada", "ben"], True),
            ("logs", ["ada"], True),
        ):
            body = {"requests": [{"user_id": user, "exclude_seen": "all"} for user in users]}
            assert client.post("/v1/recommendations", json=body, headers=bearer(texts[key])).status_code == 200
            assert asked == ([users] if are_asked else [])
            asked.clear()

    def test_that_corrects_a_log_costs_by_its_length(self, guarded: tuple[Client, dict[str, str]]) -> None:
        client, texts = guarded
        free, headers = texts["free"], bearer(texts["corrects"])
        for user in ("ann", "visitor"):
            post_log(client, free, user, 250)
        assert client.request("DELETE", "/v1/users/ann/events/ann-3", headers=headers).json()["changed"]  # 11
        body = {"from": "visitor"}
        assert client.post("/v1/users/ann/merge", json=body, headers=headers).json()["changed"]  # 251 and 250: 42
        assert client.request("DELETE", "/v1/users/nobody", headers=headers).status_code == 202  # 1
        assert client.request("DELETE", "/v1/users/ann", headers=headers).status_code == 202  # 501: 21
        assert left(client, texts["corrects"]) == 100 - 75

    def test_that_reads_an_archived_log_costs_by_its_files(self, redis_server: RedisServer, tmp_path: Path) -> None:
        """Reading a file takes as long as five plain requests."""
        client, text = archiving(redis_server, tmp_path)
        turn(redis_server, tmp_path / "archive")  # the newest entry stays
        page = client.get("/v1/users/ada/events?limit=1", headers=bearer(text)).json()
        rest = client.get(f"/v1/users/ada/events?after={page['next'] + 1}", headers=bearer(text)).json()
        assert [event["event_id"] for event in page["events"] + rest["events"]] == ["ada-0", "ada-2"]
        assert left(client, text) == 100 - (3 + 1 + ARCHIVED_FILE + 2)
        client.close()

    def test_that_excludes_archived_events_costs_by_their_files(
        self, redis_server: RedisServer, tmp_path: Path
    ) -> None:
        """The charge for entries is capped, but a log may have any number of files."""
        client, text = archiving(redis_server, tmp_path, max_seen_events=100)
        turn(redis_server, tmp_path / "archive")
        body = {"user_id": "ada", "exclude_seen": "all"}
        assert client.post("/v1/recommendations", json=body, headers=bearer(text)).status_code == 200
        assert left(client, text) == 100 - (3 + 2 + ARCHIVED_FILE)
        client.close()

    def test_of_an_operator_costs_at_most_half_of_a_minute(self, guarded: tuple[Client, dict[str, str]]) -> None:
        client, texts = guarded
        headers = bearer(texts["operates"])
        activated = client.post("/v1/admin/generations/tiny/activate", headers=headers)
        assert activated.status_code == 200
        assert left(client, texts["operates"]) == 50
