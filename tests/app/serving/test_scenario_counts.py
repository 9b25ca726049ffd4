"""Click-through by scenario, and experiments between scenarios."""

from __future__ import annotations

from pathlib import Path

from app.events.recommendation_ids import PLACES
from app.observability.metrics import MAX_SCENARIO_SERIES, Metrics
from app.recommendation.experiments import arm_of
from app.schemas.operations import Experiment
from app.settings import Settings
from storage.records import Tally
from tests.app.conftest import ITEMS, Client, categories_of
from tests.app.serving.scenario_shop import PREVIEW, URL, Shop, answer
from tests.app.support import assert_refused

TEA = [row for row in range(ITEMS) if "tea" in categories_of(row)]


def test_lists_and_clicks_are_counted_by_scenario(client: Client) -> None:
    for name, settings_ in {"full": {}, "short": {"categories": ["tea"]}, "empty": {"filter": "false"}}.items():
        assert client.request("PUT", f"{URL}/{name}", json=settings_).status_code == 200
    client.runner.run(client.service.signals.sync())
    for name, k in [("full", 3), ("full", 3), ("short", ITEMS), ("short", 1), ("empty", 3)]:
        answered = answer(client, scenario=name, k=k)
        for kind in ("click", "purchase")[: 2 if name == "full" else 1]:
            item = answered["items"][-1]["item_id"] if answered["items"] else "item-1"
            event = {"user_id": "bob", "item_id": item, "type": kind} | ({"value": 12.5} if kind == "purchase" else {})
            client.post("/v1/events", json=event | {"recommendation_id": answered["recommendation_id"]})
    first = answer(client, scenario="full", k=ITEMS - 2, cursor="")
    assert len(answer(client, scenario="full", k=3, cursor=first["cursor"])["items"]) == 1  # no list of its own
    found = client.get("/v1/stats").json()["scenarios"]
    assert [list(one.values()) for one in found] == [
        ["empty", None, 1, 0, 1, 0, {}, {}],
        ["full", None, 3, 0, 0, 0, {"click": 2, "purchase": 2}, {"purchase": 25.0}],
        ["short", None, 2, 1, 0, 0, {"click": 1 + (len(TEA) < PLACES)}, {}],
    ]
    text = client.get("/metrics").text
    for line in (
        'lisarec_scenario_lists_total{outcome="full",scenario="full",tenant="main"} 3.0',
        'lisarec_scenario_lists_total{outcome="short",scenario="short",tenant="main"} 1.0',
        'lisarec_scenario_lists_total{outcome="empty",scenario="empty",tenant="main"} 1.0',
        'lisarec_scenario_events_total{scenario="full",tenant="main",type="purchase"} 2.0',
        'lisarec_scenario_value_total{scenario="full",tenant="main",type="purchase"} 25.0',
    ):
        assert line in text


def test_a_preview_is_not_counted(client: Client) -> None:
    client.request("PUT", f"{URL}/home", json={"k": 3})
    for settings_ in ({"scenario": "home", "settings": {}}, {"settings": {"filter": "false"}}):
        for wishes in ({}, {"cursor": ""}, {"scenario": "home"}):
            request = {"user_id": "ada", **wishes}
            assert client.post(PREVIEW, json={**settings_, "request": request}).status_code == 200
    client.runner.run(client.service.signals.sync())
    assert client.get("/v1/stats").json() == {"places": [], "scenarios": []}
    assert "lisarec_recommendations_total{" not in client.get("/metrics").text


def test_an_experiment_splits_users_between_scenarios(shop: Shop) -> None:
    shop.put("home", k=1)
    shop.put("home-2", k=2)
    shop.put("other", k=3)
    compared = {"name": "sizes", "over": "scenarios", "shares": {"home": 1, "home-2": 1}}
    unknown = {**compared, "shares": {"home": 1, "hom": 1}}
    assert_refused(shop.first.request("PUT", "/v1/admin/experiment", json=unknown), 404)
    put = shop.first.request("PUT", "/v1/admin/experiment", json=compared)
    assert (put.status_code, put.json()) == (200, {"experiment": compared})
    for client in (shop.first, shop.other):
        client.runner.run(client.service.signals.sync())
    shop.other.runner.run(shop.other.service.switcher.poll())
    users = [f"u{n}" for n in range(30)]
    arms = {user: arm_of(Experiment.model_validate(compared), user) for user in users}
    assert {*arms.values()} == {"home", "home-2"}
    for client in (shop.first, shop.other):
        for named in ("home", "home-2"):
            requests = [{"user_id": user, "scenario": named} for user in users]
            results = client.post("/v1/recommendations", json={"requests": requests}).json()["results"]
            assert [one["scenario"] for one in results] == [*arms.values()]
            assert [len(one["items"]) for one in results] == [1 if arm == "home" else 2 for arm in arms.values()]
            assert {one["experiment"] for one in results} == {"sizes"}
        for request in ({"user_id": "u1", "scenario": "other"}, {"history": [], "scenario": "home"}, {"user_id": "u1"}):
            found = client.post("/v1/recommendations", json=request).json()
            assert "experiment" not in found
            assert found.get("scenario") == request.get("scenario")
    user = next(user for user in users if arms[user] == "home-2")
    chosen = answer(shop.first, user_id=user, scenario="home")
    event = {"user_id": user, "item_id": chosen["items"][1]["item_id"]}
    shop.first.post("/v1/events", json=event | {"recommendation_id": chosen["recommendation_id"]})
    shop.other.runner.run(shop.other.service.signals.flush())
    found = shop.first.get("/v1/stats").json()["scenarios"]
    (of_arm,) = [one for one in found if (one["scenario"], one["experiment"]) == ("home-2", "sizes")]
    assert of_arm["events"] == {"click": 1}
    assert of_arm["lists"] == 4 * [*arms.values()].count("home-2") + 1
    shop.first.request("DELETE", f"{URL}/home-2")
    assert answer(shop.first, user_id=user, scenario="home")["scenario"] == "home"
    shop.first.request("DELETE", "/v1/admin/experiment")
    assert "experiment" not in answer(shop.first, user_id=user, scenario="home")


def test_a_removed_arm_leaves_requests_with_its_parameters_valid(shop: Shop) -> None:
    shop.put("cheap", params={"max_price": {"type": "number", "default": 2}})
    shop.put("cheap-2", params={"floor": {"type": "number", "default": 0}})
    compared = {"name": "removed", "over": "scenarios", "shares": {"cheap": 1, "cheap-2": 1}}
    assert shop.first.request("PUT", "/v1/admin/experiment", json=compared).status_code == 200
    shop.first.request("DELETE", f"{URL}/cheap-2")
    for number in range(10):
        user = {"user_id": f"u{number}", "scenario": "cheap"}
        assert answer(shop.first, **user, params={"max_price": 1, "floor": 1})["scenario"] == "cheap"
    shop.first.request("DELETE", "/v1/admin/experiment")
    refused = shop.first.post("/v1/recommendations", json={**user, "params": {"floor": 1}})
    assert_refused(refused, 422)


def test_arms_must_declare_the_same_required_parameters(shop: Shop) -> None:
    required = {"brand": {"type": "text"}}
    shop.put("plain")
    shop.put("of-brand", params=required)
    shop.put("of-brand-2", params={"brand": {"type": "text", "default": ""}})
    shop.put("of-brands", params={"brand": {"type": "set", "default": []}})
    for arms, status in (
        (("plain", "of-brand"), 422),
        (("of-brands", "of-brand"), 422),
        (("of-brand-2", "of-brand"), 200),
    ):
        body = {"name": "brands", "over": "scenarios", "shares": dict.fromkeys(arms, 1)}
        response = shop.first.request("PUT", "/v1/admin/experiment", json=body)
        assert response.status_code == status
        if status == 422:
            (detail,) = response.json()["error"]["details"]
            assert detail["reason"].startswith(
                f"of-brand requires the parameter brand, which {arms[0]} does not declare"
            )
    shop.first.request("DELETE", "/v1/admin/experiment")


def test_a_new_process_attributes_lists_of_an_ended_experiment(
    store_url: str | None, model_dir: Path, tmp_path: Path
) -> None:
    settings = Settings(model_dir=model_dir, data_dir=tmp_path, redis_url=store_url)
    client = Client(settings)
    try:
        client.runner.run(client.service.signals.sync())
        for name in ("early", "late"):
            client.request("PUT", f"{URL}/{name}", json={"k": 3})
        compared = {"name": "ended", "over": "scenarios", "shares": {"early": 1, "late": 1}}
        assert client.request("PUT", "/v1/admin/experiment", json=compared).status_code == 200
        chosen = answer(client, scenario="early")
        assert client.request("DELETE", "/v1/admin/experiment").status_code == 200
    finally:
        client.close()
    later = Client(settings)
    try:
        later.runner.run(later.service.signals.sync())
        event = {"user_id": "ada", "item_id": chosen["items"][0]["item_id"]}
        later.post("/v1/events", json=event | {"recommendation_id": chosen["recommendation_id"]})
        found = later.get("/v1/stats").json()["scenarios"]
        (of_arm,) = [one for one in found if one["experiment"] == "ended"]
        assert (of_arm["lists"], of_arm["events"]) == (1, {"click": 1})
    finally:
        later.close()


def test_the_number_of_series_by_scenario_is_limited() -> None:
    metrics = Metrics()
    tallies: dict[Tally, float] = {("scenario-list", f"s{n}", "", "full"): 1 for n in range(3 * MAX_SCENARIO_SERIES)}
    metrics.recommendations.count_places("main", tallies)
    metrics.recommendations.count_places("main", tallies)
    text = metrics.exposition().decode()
    assert text.count("lisarec_scenario_lists_total{") == MAX_SCENARIO_SERIES + 1
    assert f'scenario="other",tenant="main"}} {4 * MAX_SCENARIO_SERIES}.0' in text
