"""Scenarios over HTTP: lists equal those of the explicit settings, and requests may narrow but not widen them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.auth import keys
from app.schemas.recommendations import RecommendationRequest
from app.schemas.scenarios import MAX_SCENARIOS, ScenarioSettings
from app.settings import Settings
from storage.records import MAX_SCENARIO_VERSIONS
from tests.app.catalogue.expressions.oracle import numbers
from tests.app.conftest import CATEGORIES, ITEMS, Client, categories_of, item_id, write_model
from tests.app.service_process import Process
from tests.app.serving.scenario_shop import PREVIEW, SEEN_RULES, URL, Shop, answer, listed, narrowing, pins
from tests.app.support import SECRET, assert_refused, bearer, item_ids, run_command
from tests.storage.redis.servers import new_server
from tests.waiting import wait_until

DECLARED = {"max": {"type": "number"}, "brands": {"type": "set"}, "sizes": {"type": "numbers", "default": [2.5]}}
PARAMS = {"max": 2.0, "brands": ["a", "ab"], "sizes": [2.5]}
EVERY = {"user_id": "ada", "k": ITEMS, "exclude_seen": "none"}
OF_A_REQUEST = {
    *("scenario", "current_item", "cursor", "because", "explain", "debug", "user_id", "history", "state", "candidates"),
    "basket",
}

all_settings = st.fixed_dictionaries(
    {},
    optional={
        **narrowing,
        "diversity": st.sampled_from([0.0, 0.5]),
        "boost": st.dictionaries(st.sampled_from(CATEGORIES), st.sampled_from([-1.0, 2.0]), max_size=2)
        | st.lists(numbers.map(lambda pair: pair.ours), min_size=1, max_size=2),
        "pin": pins,
    },
)
wishes = st.fixed_dictionaries({}, optional=narrowing)


def test_a_scenario_has_every_field_that_is_not_specific_to_a_request() -> None:
    of_both = RecommendationRequest.model_fields.keys() - OF_A_REQUEST
    assert ScenarioSettings.model_fields.keys() == of_both | {"fallback"}


@given(all_settings)
@settings(max_examples=40)
def test_a_list_equals_that_of_the_explicit_settings(shop: Shop, spelled: Mapping[str, Any]) -> None:
    shop.put("page", **spelled, params=DECLARED)
    given_params = {name: value for name, value in PARAMS.items() if name != "sizes"}
    for client in (shop.first, shop.other):
        of_scenario = answer(client, scenario="page", params=given_params)
        assert listed(of_scenario) == listed(answer(client, **spelled, params=PARAMS))
        assert of_scenario["scenario"] == "page"


@given(all_settings, wishes)
@settings(max_examples=40)
def test_a_request_narrows_what_its_scenario_allows(
    shop: Shop, spelled: Mapping[str, Any], wished: Mapping[str, Any]
) -> None:
    """Exactly the items that both allow; fixed settings stay."""
    shop.put("page", **{**spelled, "k": ITEMS}, params=DECLARED)
    seen_rule = {key: rule for key, rule in wished.items() if key == "exclude_seen"}  # in the place of the default
    every = {**seen_rule, **spelled, "k": ITEMS, "params": PARAMS}
    shown = set(item_ids(answer(shop.first, scenario="page", params=PARAMS, **wished)))
    if not (spelled.keys() | wished.keys()) & {"max_per_category", "max_per"}:
        both = set(item_ids(answer(shop.first, **every)))
        pinned_items = spelled.get("pin", [])  # which may be of the page's own item, that other lists leave out
        both &= set(
            item_ids(answer(shop.first, **{**EVERY, **wished, "k": ITEMS, "params": PARAMS, "pin": pinned_items}))
        )
        assert len(shown) == min(len(both), wished.get("k", ITEMS))
        assert shown <= both
    stricter = max(spelled.get("exclude_seen", "none"), wished.get("exclude_seen", "none"), key=SEEN_RULES.index)
    unseen = {"item-3", "item-4", "item-9"} if stricter != "none" else set()
    pinned = {pin["item_id"] for pin in spelled.get("pin", ())}
    assert not (shown - pinned) & unseen
    assert not shown & {*spelled.get("exclude", ()), *wished.get("exclude", ())}
    limits = [one["max_per_category"] for one in (spelled, wished) if "max_per_category" in one]
    if limits and not pinned:
        of_items = [category for name in shown for category in categories_of(int(name.removeprefix("item-")))]
        assert max(map(of_items.count, of_items), default=0) <= min(limits)


@pytest.mark.parametrize("form", ["get", "post", "batch", "similar"])
def test_every_kind_of_request_takes_a_scenario(shop: Shop, form: str) -> None:
    shop.put("cheap", filter="item.price < params.max", k=4, params={"max": {"type": "number", "default": 2}})
    cases: list[tuple[dict[str, float], float]] = [({}, 2.0), ({"max": 1}, 1.0)]
    for params, dearest in cases:
        if form == "get":
            found = shop.other.recommend("ada", scenario="cheap", params=json.dumps(params))
        elif form == "similar":
            query = {"scenario": "cheap", "params": json.dumps(params)}
            found = shop.other.get(f"/v1/items/{item_id(30)}/similar", params=query).json()
        else:
            request = {"history": [item_id(30)], "scenario": "cheap", "params": params}
            body = {"requests": [request, {"user_id": "ada"}]} if form == "batch" else request
            response = shop.other.post("/v1/recommendations", json=body).json()
            found = response["results"][0] if form == "batch" else response
        assert len(found["items"]) == 4
        assert all(int(name.removeprefix("item-")) / 10 < dearest for name in item_ids(found))


def test_a_request_cannot_widen_its_scenario(shop: Shop) -> None:
    shop.put("fixed", k=3, diversity=0.5, boost="item.price", pin=[], filter="item.price < params.max", params=DECLARED)
    good: dict[str, Any] = {"user_id": "ada", "scenario": "fixed", "params": {"max": 2, "brands": []}}
    assert len(answer(shop.first, **{**good, "k": 10})["items"]) == 3
    assert answer(shop.first, **{**good, "diversity": 0.5, "boost": ["item.price"]})["scenario"] == "fixed"
    wrong: dict[str, dict[str, Any]] = {
        "diversity": {"diversity": 0.1},
        "boost": {"boost": {"tea": 1}},
        "pin": {"pin": [{"item_id": "item-1", "place": 1}]},
    }
    for field, change in wrong.items():
        response = shop.first.post("/v1/recommendations", json={**good, **change})
        assert_refused(response, 422)
        assert response.json()["error"]["details"][0]["field"] == field
    faults: dict[str, dict[str, Any]] = {
        "lacks max, a number": {},
        "must have max, a number": {"max": SECRET, "brands": []},
        "must have sizes, a numbers": {"max": 1, "brands": [], "sizes": [SECRET]},
        "lacks brands, a set": {"max": 1},
    }
    for reason, given_params in faults.items():
        response = shop.first.post("/v1/recommendations", json={"requests": [good, {**good, "params": given_params}]})
        assert_refused(response, 422)
        details = response.json()["error"]["details"]
        assert ("requests.1.params", reason) in [(one["field"], one["reason"]) for one in details]
    for name, hint in {"fixd": "fixed", SECRET: "existing names"}.items():
        response = shop.first.post("/v1/recommendations", json={**good, "scenario": name})
        assert_refused(response, 422)
        (detail,) = response.json()["error"]["details"]
        assert (detail["field"], hint in detail["reason"]) == ("scenario", True)
    broken_out = {**good, "filter": "true) || (true"}
    assert_refused(shop.first.post("/v1/recommendations", json=broken_out), 422)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"filter": f"item.{SECRET} < 1.0"}, ""),
        ({"filter": "item.price < params.undeclared"}, "filter"),
        ({"filter": "item.price"}, "filter"),
        ({"filter": "true", "fallback": "item.price"}, "fallback"),
        ({"fallback": "true"}, ""),
        ({"boost": ["1.0", "item.brand"]}, "boost"),
        ({"boost": {"tea": 30}}, "boost"),
        ({"max_per": {"price": 2}}, "max_per"),
        ({"max_per": {"colour": 2}}, "max_per"),
        ({"objective": {"property": "brand"}}, "objective"),
        ({"objective": {"property": "colour"}}, "objective"),
        ({"objective": {"property": "price", "strength": 2}}, "objective"),
        ({"k": 0}, "k"),
        ({"user_id": "ada"}, ""),
        ({"params": {"max": {"type": "number", "default": SECRET}}}, "params"),
        ({"params": {f"{SECRET} ": {"type": "number"}}}, "params"),
        ({"params": {SECRET: {"type": SECRET}}}, "params"),
        ({"params": {SECRET: {"type": "number", SECRET: 1}}}, "params"),
        ({"params": [SECRET]}, "params"),
        ({"params": {"most": {"type": "text", "min": 1}}}, "params"),
        ({"params": {"most": {"type": "numbers", "max": 1}}}, "params"),
        ({"params": {"most": {"type": "number", "min": 2, "max": 1}}}, "params"),
        ({"params": {"most": {"type": "number", "max": 1, "default": 2}}}, "params"),
        ({"params": {"most": {"type": "number", "max": SECRET}}}, "params"),
        ({"params": {f"a{n}": {"type": "text", "default": "x" * 1024} for n in range(10)}}, "params"),
        ({"exclude": [f"item-{n:0100}" for n in range(200)]}, ""),
        ([], ""),
    ],
)
def test_invalid_scenarios_change_nothing(shop: Shop, body: Any, field: str) -> None:
    before = shop.put("kept", k=2)
    response = shop.first.request("PUT", f"{URL}/kept", json=body)
    if SECRET not in str(body.get("filter") if isinstance(body, dict) else ""):
        assert_refused(response, 422)
    assert response.status_code == 422
    assert field in str(response.json()["error"]["details"])
    assert shop.first.get(f"{URL}/kept").json() == before


def test_versions_name_the_author_and_can_be_restored(shop: Shop) -> None:
    put = [shop.put("home", k=number, filter=f"item.price < {number}.0") for number in (3, 4, 5)]
    assert [one["version"] for one in put] == [1, 2, 3]
    assert shop.put("home", k=5, filter="item.price < 5.0") == put[-1]  # nothing changes
    assert shop.other.get(f"{URL}/home/versions").json()["versions"] == put[::-1]
    of_first = shop.other.post(PREVIEW, json={"settings": put[0]["settings"], "request": {"user_id": "ada"}})
    rolled = shop.other.post(f"{URL}/home/rollback", json={"version": 1}).json()
    assert (rolled["version"], rolled["settings"]) == (4, put[0]["settings"])
    shop.first.runner.run(shop.first.service.scenarios.follow())
    for client in (shop.first, shop.other):
        assert listed(answer(client, scenario="home")) == listed(of_first.json())
    assert_refused(shop.first.post(f"{URL}/home/rollback", json={"version": 9}), 404)
    assert_refused(shop.first.post(f"{URL}/nowhere/rollback", json={"version": 1}), 404)
    removed = shop.first.request("DELETE", f"{URL}/home").json()
    assert (removed["version"], removed["settings"]) == (5, None)
    assert "home" not in [one["name"] for one in shop.other.get(URL).json()["scenarios"]]
    for method, path in {("GET", "home"), ("DELETE", "nowhere"), ("GET", "nowhere"), ("GET", "nowhere/versions")}:
        assert_refused(shop.first.request(method, f"{URL}/{path}"), 404)
    refused = shop.first.post("/v1/recommendations", json={"user_id": "ada", "scenario": "home"})
    assert_refused(refused, 422)
    back = shop.first.post(f"{URL}/home/rollback", json={"version": 4}).json()
    assert (back["version"], back["settings"]) == (6, put[0]["settings"])
    assert len(answer(shop.first, scenario="home")["items"]) == 3
    assert shop.first.post(f"{URL}/home/rollback", json={}).json()["settings"] is None
    assert shop.first.request("DELETE", f"{URL}/home").json()["version"] == 7


def test_a_version_with_a_deleted_property_cannot_be_restored(shop: Shop) -> None:
    assert shop.first.request("PUT", "/v1/admin/properties", json={"items": {"season": "text"}}).status_code == 200
    shop.put("seasonal", filter='item.season == "winter"')
    current = shop.put("seasonal", k=3)
    assert shop.first.request("PUT", "/v1/admin/properties", json={"items": {"season": None}}).status_code == 200
    for wanted in ({"version": 1}, {}):
        refused = shop.other.post(f"{URL}/seasonal/rollback", json=wanted)
        assert_refused(refused, 422)
        assert "item.season" in refused.text
    assert shop.first.get(f"{URL}/seasonal").json() == current
    assert len(answer(shop.first, scenario="seasonal")["items"]) == 3


def test_a_scenario_of_an_incompatible_release_is_not_found(shop: Shop) -> None:
    store = shop.first.service.store.scenarios
    believed = shop.first.runner.run(store.scenarios("main")).revision
    assert shop.first.runner.run(store.add("main", "later", '{"version": "later"}', believed=believed))
    for method, path in (("GET", "later"), ("GET", "later/versions"), ("POST", "later/rollback")):
        refused = shop.first.request(method, f"{URL}/{path}", **({"json": {}} if method == "POST" else {}))
        assert_refused(refused, 404)


def test_a_preview_equals_the_served_list_and_saves_nothing(shop: Shop) -> None:
    unsaved = {"filter": "item.price < params.max", "k": 5, "params": {"max": {"type": "number"}}}
    wanted = {"user_id": "ada", "params": {"max": 3}}
    found = shop.first.post(PREVIEW, json={"settings": unsaved, "request": wanted})
    assert found.status_code == 200, found.text
    assert shop.first.get(f"{URL}/unsaved").status_code == 404
    shop.put("unsaved", **unsaved)
    assert listed(found.json()) == listed(answer(shop.first, scenario="unsaved", params={"max": 3}))
    for body, field in (
        ({"settings": {"filter": "item.prise > 1.0"}, "request": wanted}, "settings.filter"),
        ({"settings": unsaved, "request": {"user_id": "ada"}}, "request.params"),
        ({"settings": unsaved}, "request"),
    ):
        response = shop.first.post(PREVIEW, json=body)
        assert response.status_code == 422
        assert response.json()["error"]["details"][0]["field"] == field


def test_a_preview_may_override_settings_of_a_saved_scenario(shop: Shop) -> None:
    kept = {"filter": "item.price < params.max", "k": 5, "params": {"max": {"type": "number"}}, "boost": ["item.price"]}
    shop.put("kept", **kept)
    wanted = {"user_id": "ada", "params": {"max": 3}}
    changes: list[dict[str, Any]] = [{}, {"k": 3}, {"boost": {}}, {"fallback": "true", "k": 40}]
    for changed in changes:
        by_name = shop.first.post(PREVIEW, json={"scenario": "kept", "settings": changed, "request": wanted})
        spelled = shop.first.post(PREVIEW, json={"settings": kept | changed, "request": wanted})
        assert listed(by_name.json()) == listed(spelled.json())
    assert shop.first.get(f"{URL}/kept").json()["settings"] == kept
    of_none = {"scenario": "none", "settings": {}, "request": wanted}
    assert_refused(shop.first.post(PREVIEW, json=of_none), 404)


def test_scenarios_and_versions_are_limited_and_removed_ones_make_room(client: Client) -> None:
    def put(name: str, **settings: Any) -> int:
        return client.request("PUT", f"{URL}/{name}", json=settings).status_code

    assert [put(f"s{number}") for number in range(MAX_SCENARIOS)] == [200] * MAX_SCENARIOS
    assert_refused(client.request("PUT", f"{URL}/more", json={}), 422)
    assert put("s0", k=3) == 200
    for name in ("s7", "s3"):
        assert client.request("DELETE", f"{URL}/{name}").status_code == 200
    assert put("more") == 200
    assert client.get(f"{URL}/s7/versions").status_code == 404
    assert client.post(f"{URL}/s3/rollback", json={"version": 1}).status_code == 200
    assert put("another") == 422
    for number in range(1, MAX_SCENARIO_VERSIONS + 3):
        assert put("s0", k=number) == 200
    versions = client.get(f"{URL}/s0/versions").json()["versions"]
    assert [one["version"] for one in versions] == [*range(MAX_SCENARIO_VERSIONS + 4, 4, -1)]
    assert len(client.get(URL).json()["scenarios"]) == MAX_SCENARIOS


def test_scenarios_belong_to_their_tenant_and_versions_name_the_key(model_dir: Path, tmp_path: Path) -> None:
    made = {}
    for tenant in ("shop", "books"):
        text, key = keys.make(tenant, ["admin", "recs:read"], note="Ada" if tenant == "shop" else "")
        keys.add(tmp_path / "keys", key)
        made[tenant] = (bearer(text), key)
    books_dir = write_model(tmp_path / "models" / "books" / "tiny")
    place: dict[str, Any] = {"data_dir": tmp_path / "state", "keys_file": tmp_path / "keys"}
    client = Client(Settings(model_dir=model_dir, tenant="shop", tenants={"books": books_dir}, **place))
    try:
        (shop, shop_key), (books, books_key) = made["shop"], made["books"]
        put = client.request("PUT", f"{URL}/page", json={"k": 3}, headers=shop).json()
        assert put["changed_by"] == f"{shop_key.id} (Ada)"
        assert client.get(URL, headers=books).json() == {"scenarios": []}
        assert client.get(f"{URL}/page/versions", headers=books).status_code == 404
        asked = {"user_id": "ada", "scenario": "page"}
        for headers, status in ((shop, 200), (books, 422)):
            assert client.post("/v1/recommendations", json=asked, headers=headers).status_code == status
        put = client.request("PUT", f"{URL}/page", json={"k": 4}, headers=books).json()
        assert (put["version"], put["changed_by"]) == (1, books_key.id)
        assert client.get(f"{URL}/page", headers=shop).json()["settings"] == {"k": 3}
    finally:
        client.close()


@pytest.fixture(params=["sqlite", "redis"])
def processes(
    request: pytest.FixtureRequest, launch: Callable[..., Process], tmp_path: Path
) -> Iterator[tuple[Process, Process]]:
    server = new_server("redis-server") if request.param == "redis" else None
    place = {"redis_url": server.url} if server else {}
    yield launch(**place), launch(**place)
    if server:
        server.stop()


def test_processes_follow_changes_and_concurrent_ones_are_kept(processes: tuple[Process, Process]) -> None:
    one, other = (f"{process.url}{URL}" for process in processes)
    with httpx.Client() as http:
        assert http.put(f"{one}/page", json={"k": 1}).status_code == 200

        def shown() -> int | None:
            asked = {"user_id": "ada", "scenario": "page"}
            response = http.post(f"{processes[1].url}/v1/recommendations", json=asked)
            return len(response.json()["items"]) if response.is_success else None

        wait_until(lambda: shown() == 1)
        http.put(f"{one}/page", json={"k": 2})
        wait_until(lambda: shown() == 2)
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda k: http.put(f"{(one, other)[k % 2]}/page", json={"k": k}).json(), range(3, 23))]
        assert sorted(version["version"] for version in found) == [*range(3, 23)]
        kept = http.get(f"{other}/page/versions").json()["versions"]
        assert kept[:20] == sorted(found, key=lambda version: -version["version"])
        http.delete(f"{one}/page")
        wait_until(lambda: shown() is None)


def test_the_compare_command_compares_scenarios(
    start: Callable[..., Client], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = start(tmp_path / "state")
    for name in ("home", "home-2", "gone"):
        client.request("PUT", f"{URL}/{name}", json={"k": 3})
    client.request("DELETE", f"{URL}/gone")

    def run(*words: str) -> tuple[object, str]:
        return run_command("experiment", *words, "--data-dir", tmp_path / "state"), capsys.readouterr().err

    assert run("prices", "home=1", "home-2=3", "--over", "scenarios")[0] in (0, None)
    client.runner.run(client.service.switcher.poll())
    begun = {"name": "prices", "over": "scenarios", "shares": {"home": 1.0, "home-2": 3.0}}
    assert client.get("/v1/admin/experiment").json() == {"experiment": begun}
    code, told = run("prices", "home=1", "gone=1", "--over", "scenarios")
    assert (code, "unknown scenario 'gone'; existing scenarios: home, home-2" in told) == (1, True)
    client.request("PUT", f"{URL}/home", json={"k": 3, "params": {"brand": {"type": "text"}}})
    code, told = run("prices", "home=1", "home-2=1", "--over", "scenarios")
    assert (code, "home requires the parameter brand, which home-2 does not declare" in told) == (1, True)
    assert run("--end")[0] in (0, None)
    client.runner.run(client.service.switcher.poll())
    assert client.get("/v1/admin/experiment").json() == {"experiment": None}
    client.close()


def test_a_backup_restores_scenarios(
    start: Callable[..., Client], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = start(tmp_path / "state")
    for k in (2, 3):
        client.request("PUT", f"{URL}/page", json={"k": k, "params": {"max": {"type": "number", "default": 1}}})
    before = client.get(f"{URL}/page/versions").json()
    client.close()
    file = str(tmp_path / "all.gz")
    for command in (
        ["backup", "--out", file, "--data-dir", str(tmp_path / "state")],
        ["restore", file, "--model", str(client.model_dir), "--data-dir", str(tmp_path / "restored")],
    ):
        assert run_command(*command) == 0, capsys.readouterr()
    client = start(tmp_path / "restored")
    try:
        assert client.get(f"{URL}/page/versions").json() == before
        assert len(answer(client, scenario="page")["items"]) == 3
    finally:
        client.close()
