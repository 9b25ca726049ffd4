"""`lisarec compare`: aggregation by user and arm, and coverage of the confidence intervals."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.jobs.reports.experiment_outcomes import Measure, Outcomes, StartedExperiment
from app.jobs.reports.experiment_result import FEWEST_USERS, difference, results_of, warnings_of
from app.schemas.operations import Experiment
from app.settings import Settings
from benchmarks.quality.experiments import Simulated, count
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import run_command

USERS = [f"u{n}" for n in range(24)]
URL = "/v1/admin/experiment"
ARMS = {"name": "sizes", "over": "scenarios", "shares": {"home": 1, "home-2": 1}}


@pytest.fixture
def client(store_url: str | None, model_dir: Path, tmp_path: Path) -> Iterator[Client]:
    write_model(tmp_path / "june", 1)
    client = Client(Settings(model_dir=model_dir, models_dir=tmp_path, data_dir=tmp_path, redis_url=store_url))
    client.runner.run(client.service.signals.sync())
    for name in ARMS["shares"]:
        assert client.request("PUT", f"/v1/admin/scenarios/{name}", json={"k": 3}).status_code == 200
    yield client
    client.close()


def begin(client: Client, **changes: Any) -> None:
    assert client.request("PUT", URL, json=ARMS | changes).status_code == 200
    client.runner.run(client.service.switcher.poll())  # announces models
    client.runner.run(client.service.signals.sync())


def compare(client: Client, *arguments: str) -> tuple[int, Any]:
    """Run the command; return its status and its totals by arm and measure."""
    file, redis_url = client.settings.data_dir / "result.json", client.settings.redis_url
    store = ["--data-dir", client.settings.data_dir] if redis_url is None else ["--redis-url", redis_url]
    status = run_command("compare", *arguments, *store, "--json", file)
    numbers = json.loads(file.read_text()) if status == 0 else {}
    totals = {
        (one["measure"]["event"], one["measure"]["of"], one["arm"]): one["total"] for one in numbers.get("results", [])
    }
    return status, numbers | {"totals": totals}


def listed(client: Client, user_id: str, **wishes: Any) -> Any:
    return client.post("/v1/recommendations", json={"user_id": user_id, "scenario": "home", **wishes}).json()


def post(client: Client, user_id: str, answer: Any, **about: Any) -> None:
    event = {"user_id": user_id, "item_id": answer["items"][0]["item_id"]}
    event |= {"recommendation_id": answer["recommendation_id"], **about}
    assert client.post("/v1/events", json=event).status_code == 200


def test_events_are_attributed_to_the_arm_of_their_list(client: Client) -> None:
    """Undone events, forged lists and other items do not count; those of a merged visitor count once."""
    before = listed(client, "u0")
    begin(client)
    post(client, "u0", before)  # of no experiment
    users, sums = defaultdict[tuple[str, str], set[str]](set), defaultdict[tuple[str, str, str], float](float)
    for number, user_id in enumerate(USERS):
        answer = listed(client, user_id)
        arm, owner = answer["scenario"], "u0" if user_id == "u1" else user_id
        for place in range(number % 4):
            post(client, user_id, answer, item_id=answer["items"][place % 3]["item_id"])
            users["click", arm].add(owner)
            sums["click", "events", arm] += 1
        if number % 3 == 0:
            post(client, user_id, answer, type="purchase", value=2.5 * number, event_id="bought")
            users["purchase", arm].add(owner)
            sums["purchase", "events", arm] += 1
            sums["purchase", "value", arm] += 2.5 * number
        post(client, user_id, answer, type="purchase", value=99.0, event_id="undone")
        assert client.request("DELETE", f"/v1/users/{user_id}/events/undone").status_code == 200
        post(client, user_id, answer, recommendation_id=answer["recommendation_id"][:-4] + "AAAA")
        post(client, user_id, answer, item_id="item-none")
    assert client.post("/v1/users/u0/merge", json={"from": "u1"}).status_code == 200
    client.runner.run(client.service.signals.flush())
    status, found = compare(client)
    expected = {key: total for key, total in sums.items() if total}
    expected |= {(kind, "users", arm): len(of) for (kind, arm), of in users.items()}
    assert (status, found["totals"]) == (0, pytest.approx(expected))
    counted = client.get("/v1/stats").json()["scenarios"]
    (of_arm,) = [one for one in counted if (one["scenario"], one["experiment"]) == ("home", "sizes")]
    assert found["lists"]["home"] == of_arm["lists"]
    clicks = found["results"][0]
    assert (clicks["arm"], clicks["measure"]) == ("home", {"event": "click", "of": "events"})
    assert clicks["per_list"] == of_arm["events"]["click"] / of_arm["lists"]


def test_lists_before_a_change_of_shares_are_ignored(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    users = [f"changed-{n}" for n in range(9)]
    begin(client, name="changed")
    old = {user_id: listed(client, user_id) for user_id in users}
    begin(client, name="changed", shares={"home": 1, "home-2": 3})
    for user_id in users:
        post(client, user_id, old[user_id])
        post(client, user_id, listed(client, user_id), type="purchase")
    assert client.request("DELETE", URL).status_code == 200
    begin(client, name="later")
    status, found = compare(client, "changed")
    assert status == 0
    assert {kind for kind, _, _ in found["totals"]} == {"purchase"}
    assert found["since"] is not None
    assert (compare(client, "unknown")[0], compare(client)[1]["name"]) == (1, "later")
    assert "no event has the recommendation_id of one of the experiment's lists" in capsys.readouterr().out


def test_models_are_compared(client: Client) -> None:
    arms = {client.model_dir.name: 1, "june": 2}
    write_model(client.settings.data_dir / client.model_dir.name)
    begin(client, name="models", over="models", shares=arms)
    expected = Counter[str]()
    for number in range(20):
        user_id = f"models-{number}"
        answer = client.recommend(user_id)
        expected[answer["generation"]] += 1
        shown = [item["item_id"] for item in answer["items"]]
        client.post(
            "/v1/events",
            json={"user_id": user_id, "type": "impression", "items": shown}
            | {"recommendation_id": answer["recommendation_id"]},
        )
        post(client, user_id, answer)
    client.runner.run(client.service.signals.flush())
    status, found = compare(client)
    assert (status, found["users_with_impression"]) == (0, dict(expected))
    assert found["lists"] == dict(expected)
    assert [one["per_list"] for one in found["results"] if one["measure"]["of"] == "events"] == [1, 1]
    assert found["totals"] == {("click", of, arm): expected[arm] for of in ("events", "users") for arm in arms}


def test_copies_of_one_model_cannot_be_compared(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "copy"):
        write_model(client.settings.data_dir / name, 2)
    begin(client, name="copies", over="models", shares={"one": 1, "copy": 1})
    assert compare(client)[0] == 1
    assert "is a copy of another one" in capsys.readouterr().err


def test_users_of_other_tenants_with_the_same_id_are_ignored(client: Client) -> None:
    begin(client, name="tenants")
    other = Client(client.settings.model_copy(update={"tenant": "neighbour"}))
    try:
        for one in (other, client):
            one.click("same", item_id(1))
        assert other.post("/v1/users/else/merge", json={"from": "same"}).status_code == 200
        post(client, "same", listed(client, "same"))
    finally:
        other.close()
    status, found = compare(client)
    assert (status, sum(found["totals"].values())) == (0, 2)  # one event of one user


@pytest.mark.parametrize("kind", [Simulated(2_000), Simulated(4_000, share=0.3, effect=0.5)])
def test_intervals_cover_the_truth_in_95_percent_of_simulations(kind: Simulated) -> None:
    """Lists of a user are correlated, so intervals over lists cover less; daily peeking finds too much."""
    counted = count(kind, 300, seed=0)["clicks"]
    assert counted["judged"] > 250
    assert counted["held"] / counted["judged"] == pytest.approx(0.95, abs=0.035)
    assert counted["held by lists"] / 300 < 0.92
    if not kind.effect:
        assert counted["found"] / counted["judged"] > 0.08
        assert counted["decided"] / counted["judged"] <= 0.05


def outcomes(sums: dict[str, list[float]], **others: Any) -> Outcomes:
    started = StartedExperiment(Experiment.model_validate(ARMS), 0)
    about: dict[str, Any] = {"reached": {}, "lists": {}, "per_list": {}, **others}
    return Outcomes(started, {Measure("click", "events"): sums}, **about)


def test_a_few_heavy_users_do_not_decide() -> None:
    light, heavy = [1.0] * FEWEST_USERS, [1.0] * FEWEST_USERS + [500.0]
    assert difference(light, light, 1) is not None
    assert difference(light, heavy, 1) is None
    assert difference(light, [], 1) is None
    (_, other) = results_of(outcomes({"home": light, "home-2": heavy}))
    assert "an arm has 1 of equal weight" in other.verdict
    (_, other) = results_of(outcomes({"home": light * 4, "home-2": light * 8}))
    assert other.verdict == "decided, more than the control"


@pytest.mark.parametrize(
    ("others", "warned"),
    [
        ({"reached": {"home": 5_000, "home-2": 5_100}}, []),
        ({"reached": {"home": 5_000, "home-2": 4_500}}, ["home", "home-2"]),
        ({"lists": {"home": 30_000, "home-2": 31_000}}, []),
        ({"lists": {"home": 30_000, "home-2": 20_000}}, ["home-2"]),
        ({"lists": {"home": 30_000}}, ["home-2"]),
    ],
)
def test_a_sample_ratio_mismatch_is_warned_of(others: dict[str, Any], warned: list[str]) -> None:
    found = warnings_of(outcomes({"home": [1.0] * 1_000, "home-2": [1.0] * 1_000}, **others))
    assert [one.split()[0] for one in found] == warned


@pytest.mark.parametrize("missing", ARMS["shares"])
def test_an_arm_without_lists_or_events_is_warned_of(missing: str) -> None:
    (other,) = {*ARMS["shares"]} - {missing}
    found = warnings_of(outcomes({other: [1.0] * 1_000}, lists={other: 30_000}))
    assert [one.split()[0] for one in found] == [missing]


def test_few_users_cause_no_sample_ratio_mismatch_warning() -> None:
    """With 1 of 100 users, 4 of 50 are more than 4 standard deviations off, by chance in one of 600 experiments."""
    small = StartedExperiment(Experiment(name="small", over="scenarios", shares={"home": 99, "home-2": 1}), 0)
    assert warnings_of(replace(outcomes({}, reached={"home": 46, "home-2": 4}), started=small)) == []
    assert len(warnings_of(replace(outcomes({}, reached={"home": 40, "home-2": 10}), started=small))) == 2
