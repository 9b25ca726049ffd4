"""A/B experiments: stable assignment, equal in all processes; responses, counts, start and end without a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.recommendation.experiments import arm_of
from app.schemas.operations import Experiment
from app.settings import Settings
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import SECRET, assert_refused, run_command
from tests.storage.oracles.naive_fold import assert_state_is
from tests.storage.oracles.naive_fold import fold as naive_fold
from tests.storage.redis.servers import RedisServer

USERS = [f"u{n}" for n in range(40)]
JUNE = {"name": "june", "shares": {"may": 1, "june": 1}}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for seed, name in enumerate(("may", "june")):
        write_model(tmp_path / "models" / name, seed)
    return tmp_path / "models"


@pytest.fixture
def begin(models: Path, tmp_path: Path) -> Callable[..., Client]:
    """Start a service; the caller closes it."""
    return lambda **settings: Client(Settings(model_dir=models / "may", data_dir=tmp_path / "state", **settings))


def generations(client: Client, users: list[str] = USERS) -> dict[str, str]:
    return {user_id: client.recommend(user_id)["generation"] for user_id in users}


def test_users_are_assigned_by_shares_and_stay_in_their_arm() -> None:
    """A growing share only adds users; another experiment name reshuffles them."""
    users = [f"u{n}" for n in range(4000)]

    def arms(name: str, *shares: float) -> dict[str, str]:
        experiment = Experiment(name=name, shares=dict(zip("abc", shares, strict=False)))
        return {user_id: arm_of(experiment, user_id) for user_id in users}

    counts = Counter(arms("x", 5, 3, 2).values())
    assert counts["a"] == pytest.approx(2000, abs=160)
    assert counts["b"] == pytest.approx(1200, abs=150)
    small, large = arms("x", 1, 9), arms("x", 2, 8)
    assert {user_id for user_id, arm in small.items() if arm == "a"} < {
        user_id for user_id, arm in large.items() if arm == "a"
    }
    in_other_order = Experiment(name="x", shares={"b": 8, "a": 2})
    assert {user_id: arm_of(in_other_order, user_id) for user_id in users} == large
    halves, others = arms("x", 1, 1), arms("y", 1, 1)
    assert sum(halves[user_id] == others[user_id] for user_id in users) == pytest.approx(2000, abs=160)


def test_every_process_follows_an_experiment_until_it_ends(
    begin: Callable[..., Client], redis_server: RedisServer
) -> None:
    settings = {"redis_url": redis_server.url}
    one, other = begin(**settings), begin(**settings)
    try:
        assert set(generations(one).values()) == {"may"}
        assert "experiment" not in one.recommend("u0")
        answer = one.request("PUT", "/v1/admin/experiment", json=JUNE)
        assert (answer.status_code, answer.json()) == (200, {"experiment": JUNE})
        arms = generations(one)
        assert set(arms.values()) == {"may", "june"}
        assert one.recommend("u0")["experiment"] == "june"
        other.runner.run(other.service.switcher.poll())
        assert generations(other) == arms
        assert other.get("/v1/admin/experiment").json() == {"experiment": JUNE}

        batch = {"requests": [{"user_id": user_id} for user_id in USERS] + [{"history": [item_id(1)]}]}
        results = one.post("/v1/recommendations", json=batch).json()["results"]
        assert [result["generation"] for result in results] == [*arms.values(), "may"]
        assert "experiment" not in results[-1]

        one.click("u0", item_id(1), item_id(2))
        other.click("u0", item_id(3))
        for client in (one, other):
            for serving in client.service.switcher.served():
                (value,) = client.runner.run(client.service.store.states("main", ["u0"], serving.generation))
                assert_state_is(value, naive_fold(serving.generation, client.log("u0")))
    finally:
        other.close()
    other = begin(**settings)
    try:
        assert generations(other) == arms
        assert other.request("DELETE", "/v1/admin/experiment").json() == {"experiment": None}
        one.runner.run(one.service.switcher.poll())
        for client in (one, other):
            assert set(generations(client).values()) == {"may"}
    finally:
        one.close()
        other.close()


def test_clicks_are_counted_by_arm(begin: Callable[..., Client]) -> None:
    client = begin()
    try:
        assert client.request("PUT", "/v1/admin/experiment", json=JUNE).status_code == 200
        client.runner.run(client.service.signals.sync())
        arms = generations(client)
        for user_id in USERS[:10]:
            answer = client.recommend(user_id, k=2)
            event = {"user_id": user_id, "item_id": answer["items"][1]["item_id"]}
            client.post("/v1/events", json=event | {"recommendation_id": answer["recommendation_id"]})
        found = client.get("/v1/stats").json()["places"]
        of_arms = Counter(arms[user_id] for user_id in USERS[:10])
        second = {one["generation"]: one for one in found if one["place"] == 2}
        assert {name: one["events"] for name, one in second.items()} == {
            name: {"click": count} for name, count in of_arms.items()
        }
        assert {one["experiment"] for one in found} == {"june"}
        shown = Counter(arms.values())
        assert {name: one["shown"] for name, one in second.items()} == dict(shown + of_arms)
    finally:
        client.close()


def test_an_experiment_of_an_earlier_version_continues(begin: Callable[..., Client]) -> None:
    client = begin()
    try:
        text = Experiment.model_validate(JUNE | {"name": "other"}).model_dump_json()
        client.runner.run(client.service.store.generations.set_experiment(text))
        client.runner.run(client.service.switcher.poll())
        assert client.recommend("u0")["experiment"] == "other"
    finally:
        client.close()


def test_another_model_may_become_active_during_an_experiment(begin: Callable[..., Client], models: Path) -> None:
    write_model(models / "july", 9)
    client = begin()
    try:
        client.request("PUT", "/v1/admin/experiment", json=JUNE)
        arms = generations(client)
        assert client.post("/v1/admin/generations/july/activate").status_code == 200
        assert generations(client) == arms
        history = {"history": [item_id(1)]}
        assert client.post("/v1/recommendations", json=history).json()["generation"] == "july"
        assert client.get(f"/v1/items/{item_id(1)}/similar").json()["generation"] == "july"
    finally:
        client.close()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "june", "shares": {"may": 1}}, 422),
        ({"name": "june", "shares": {"may": 1, "june": 0}}, 422),
        ({"name": "june", "shares": {"may": 1, "june": -1}}, 422),
        ({"name": "a b", "shares": {"may": 1, "june": 1}}, 422),
        ({"name": "other", "shares": {"may": 1, "june": 1}}, 422),
        ({"name": "june", "shares": {"may": 1, "a/b": 1}}, 422),
        ({"name": "june", "shares": {"may": 1, SECRET: 0}}, 422),
        ({"name": "june", "shares": {"may": 1, f"{SECRET} {SECRET}": 1}}, 422),
        ({"name": "june", "shares": {"may": 1, "june": True}}, 422),
        ({"name": "june", "shares": {"may": 1, "june": "1"}}, 422),
        ({"name": "june", "shares": {"may": 1, "june": 1e7}}, 422),
        ({"name": "june", "shares": {f"{SECRET}{n}": 1 for n in range(9)}}, 422),
        ({"shares": {"may": 1, "june": 1}}, 422),
        ([], 422),
        ({"name": "june", "shares": {"may": 1, "august": 1}}, 404),
    ],
)
def test_invalid_experiments_change_nothing(begin: Callable[..., Client], body: Any, status: int) -> None:
    client = begin()
    try:
        assert_refused(client.request("PUT", "/v1/admin/experiment", json=body), status)
        assert client.get("/v1/admin/experiment").json() == {"experiment": None}
        assert "experiment" not in client.recommend("u0")
    finally:
        client.close()


def test_the_command_starts_and_ends_an_experiment(
    begin: Callable[..., Client], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = begin()
    place = ["--data-dir", str(tmp_path / "state"), "--models-dir", str(models)]

    def run(*arguments: str) -> int:
        status = run_command("experiment", *arguments, *place)
        client.runner.run(client.service.switcher.poll())
        return status

    try:
        assert run("june", "may=1", "june=1") == 0
        assert "june" in capsys.readouterr().out
        assert set(generations(client).values()) == {"may", "june"}
        for wrong in (
            "june",
            "other may=1 june=1",
            "june may=1 june=x",
            "june may june",
            "",
            "june may=1 june=1 --end",
        ):
            assert run(*wrong.split()) == 2
        assert run("june", "may=1", "august=1") == 1
        assert set(generations(client).values()) == {"may", "june"}
        assert run("--end") == 0
        assert set(generations(client).values()) == {"may"}
    finally:
        client.close()
