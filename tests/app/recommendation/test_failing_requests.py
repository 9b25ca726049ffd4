"""Requests that cannot be answered fail alone in their batch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from app.recommendation.ranking.query_builder import QueryBuilder
from app.schemas.properties import refusal
from app.schemas.recommendations import RecommendationRequest
from storage.errors import StorageUnavailable
from tests.app.conftest import Client
from tests.app.support import recommend

HALF_A_PAIR = "\ud800"  # of surrogates: a text in JSON that no UTF-8 has


@pytest.mark.parametrize(
    ("method", "url", "body", "field"),
    [
        ("POST", "/v1/recommendations", {"user_id": "eve", "boost": {HALF_A_PAIR: 0.5}}, "boost"),
        ("POST", "/v1/recommendations", {"user_id": "eve", "params": {"x": HALF_A_PAIR}}, "params"),
        ("POST", "/v1/recommendations", {"user_id": "eve", "params": {"x": ["a", HALF_A_PAIR]}}, "params"),
        ("PUT", "/v1/admin/scenarios/home", {"boost": {HALF_A_PAIR: 0.5}}, "boost"),
        ("PUT", "/v1/admin/scenarios/home", {"params": {"x": {"default": HALF_A_PAIR}}}, "params"),
    ],
)
def test_lone_surrogates_are_refused(client: Client, method: str, url: str, body: dict[str, Any], field: str) -> None:
    answer = client.request(method, url, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert field in str(answer.json()["error"]["details"])


def test_errors_name_values_at_any_depth() -> None:
    value: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        value = [value]
    assert refusal("x", "list", value, "number") == "x is a number, and a value of many levels is a list"


def test_an_unreadable_log_gives_the_list_of_an_unknown_user(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.click("ada", "item-1", "item-2")

    async def fail(*_: Any, **__: Any) -> None:
        raise StorageUnavailable("the log cannot be read")

    monkeypatch.setattr(client.service.store, "seen_items", fail)
    found = recommend(client, user_id="ada", exclude_seen="all")
    assert found["source"] == "popular"
    assert found["items"] == recommend(client, user_id="nobody")["items"]
    assert recommend(client, user_id="ada")["source"] == "personalised"


def test_a_request_that_cannot_be_ranked_fails_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batches = QueryBuilder.build, list[int]()

    def break_for_eve(builder: QueryBuilder, requests: Sequence[RecommendationRequest], *read: Any) -> Any:
        batches.append(len(requests))
        if any(request.user_id == "eve" for request in requests):
            raise ZeroDivisionError
        return build(builder, requests, *read)

    monkeypatch.setattr(QueryBuilder, "build", break_for_eve)

    async def law() -> None:
        recommend = client.service.switcher.recommender.recommend
        users = ["ada", "eve", "bob", "cid"]
        asked = [recommend([RecommendationRequest(user_id=user)]) for user in users]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert max(batches) > 1
        for user, answer in zip(users, found, strict=True):
            if user == "eve":
                assert isinstance(answer, ZeroDivisionError)
            else:
                assert isinstance(answer, list)
                assert [one["user_id"] for one in answer] == [user]

    client.runner.run(law())
