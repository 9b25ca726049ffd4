"""Expressions over HTTP equal CEL's own evaluator item by item, while properties change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.serving.lifespan import _follow_time, in_background
from app.settings import Settings
from tests.app.catalogue.expressions.oracle import (
    NOW,
    NUMBERS,
    ORACLE,
    TEXTS,
    Pair,
    conditions,
    evaluate_one,
    moments,
    numbers,
    optional,
)
from tests.app.conftest import ITEMS, Client, categories_of, item_id
from tests.waiting import PATIENCE_S

LABELS = [text for text in TEXTS if text]
TYPES = {"price": "number", "margin": "number", "brand": "text", "new": "boolean"}
EVERY = {"user_id": "ada", "k": ITEMS, "exclude_seen": "none"}

changes = st.lists(
    st.tuples(
        st.integers(0, ITEMS - 1),
        st.fixed_dictionaries(
            {
                "item.price": optional(st.sampled_from(NUMBERS)),
                "item.margin": optional(st.sampled_from(NUMBERS)),
                "item.brand": optional(st.sampled_from(TEXTS)),
                "item.categories": st.lists(st.sampled_from(LABELS), unique=True, max_size=4),
                "item.new": optional(st.booleans()),
                "item.published_at": optional(moments),
            }
        ),
    ),
    max_size=10,
)
params = st.fixed_dictionaries(
    {
        "params.max": st.sampled_from(NUMBERS),
        "params.brands": st.lists(st.sampled_from(TEXTS), max_size=3),
        "params.sizes": st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=3),
    }
)


class Shop(NamedTuple):
    """Two services over one store, and the data of their items."""

    first: Client
    other: Client
    items: list[dict[str, Any]]

    def apply(self, found: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Change items through the first service; the other one reads the changes."""
        posted = []
        for row, values in found:
            self.items[row] = dict(values)
            published = values["item.published_at"]
            posted.append(
                {
                    "item_id": item_id(row),
                    "categories": values["item.categories"],
                    "published_at": None if published is None else published.isoformat(),
                    "properties": {name: values[f"item.{name}"] for name in TYPES},
                }
            )
        if posted:
            assert self.first.post("/v1/items", json=posted).status_code == 200
        self.other.runner.run(self.other.service.switcher.poll())

    def answer(self, client: Client, **wishes: Any) -> dict[str, float]:
        """Return the items that are shown, and their scores."""
        response = client.post("/v1/recommendations", json={**EVERY, **wishes})
        assert response.status_code == 200, response.text
        return {item["item_id"]: item["score"] for item in response.json()["items"]}


@pytest.fixture(scope="module")
def shop(store_url: str | None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    data_dir = tmp_path_factory.mktemp("state")
    made = Settings(model_dir=model_dir, data_dir=data_dir, redis_url=store_url)
    first, other = Client(made), Client(made)
    first.click("ada", "item-3", "item-4", "item-9")
    assert first.request("PUT", "/v1/admin/properties", json={"items": TYPES}).status_code == 200
    first.runner.run(first.service.switcher.poll())
    nothing = dict.fromkeys([f"item.{name}" for name in (*TYPES, "published_at")])
    items: list[dict[str, Any]] = [{**nothing, "item.categories": list(categories_of(row))} for row in range(ITEMS)]
    with patch("app.catalogue.filter_expressions._now_s", lambda: int(NOW.timestamp())):
        yield Shop(first, other, items)
    first.close()
    other.close()


def scalars(shop: Shop, current: int, given_params: Mapping[str, Any]) -> dict[str, Any]:
    return {"current.brand": shop.items[current]["item.brand"], **given_params}


def wishes(current: int, given_params: Mapping[str, Any]) -> dict[str, Any]:
    of_request = {name.removeprefix("params."): value for name, value in given_params.items()}
    return {"current_item": item_id(current), "params": of_request}


@given(conditions, changes, params, st.integers(0, ITEMS - 1))
@settings(max_examples=60)
def test_a_filter_returns_the_items_for_which_it_is_true(
    shop: Shop,
    expression: Pair,
    found: Sequence[tuple[int, Mapping[str, Any]]],
    given_params: Mapping[str, Any],
    current: int,
) -> None:
    shop.apply(found)
    shared, oracle = scalars(shop, current, given_params), ORACLE.compile(expression.oracle)
    wanted = {item_id(row) for row, item in enumerate(shop.items) if evaluate_one(oracle, item, shared) is True}
    for client in (shop.first, shop.other):
        answer = shop.answer(client, filter=expression.ours, **wishes(current, given_params))
        assert answer.keys() == wanted - {item_id(current)}


@given(numbers, changes, params)
@settings(max_examples=30)
def test_a_boost_adds_its_value(
    shop: Shop, expression: Pair, found: Sequence[tuple[int, Mapping[str, Any]]], given_params: Mapping[str, Any]
) -> None:
    shop.apply(found)
    shared, oracle = scalars(shop, 0, given_params), ORACLE.compile(expression.oracle)
    for client in (shop.first, shop.other):
        plain = shop.answer(client)
        boosted = shop.answer(client, boost=expression.ours, **wishes(0, given_params))
        assert boosted.keys() == plain.keys() - {item_id(0)}  # the page's item
        for row, item in enumerate(shop.items[1:], 1):
            value = evaluate_one(oracle, item, shared)
            gain = 0.0 if value is None or value != value else min(max(value, -20.0), 20.0)
            assert boosted[item_id(row)] - plain[item_id(row)] == pytest.approx(gain, abs=1e-4)


def test_an_expression_sees_only_its_user_s_properties(shop: Shop) -> None:
    def shown(user_id: str, **wishes: Any) -> int:
        asked = {**EVERY, "user_id": user_id, "params": {"region": "south"}, **wishes}
        response = shop.first.post("/v1/recommendations", json=asked)
        assert response.status_code == 200, response.text
        return len(response.json()["items"])

    for user_id, properties in {"ada": {"member": True, "region": "south"}, "bob": {"member": False}}.items():
        put = shop.first.request("PUT", f"/v1/users/{user_id}/properties", json={"properties": properties})
        assert put.status_code == 200, put.text
    shop.first.runner.run(shop.first.service.switcher.poll())
    for _ in range(2):  # the second time, the results are known
        assert [shown(user, filter="user.member") for user in ("ada", "bob", "nobody")] == [ITEMS, 0, 0]
        assert [shown(user, filter="!user.member") for user in ("ada", "bob", "nobody")] == [0, ITEMS, 0]
        assert [shown(user, filter="user.region == params.region") for user in ("ada", "bob")] == [ITEMS, 0]
    shop.first.request("PUT", "/v1/users/bob/properties", json={"properties": {"member": True}})
    assert shown("bob", filter="user.member") == ITEMS
    response = shop.first.post("/v1/recommendations", json={"history": [item_id(3)], "filter": "!known(user.member)"})
    assert len(response.json()["items"]) == 10


def test_evaluating_a_filter_does_not_block_other_requests(shop: Shop) -> None:
    """Applying the dates of items waits for the lock of such a filter, but off the event loop."""
    switcher = shop.first.service.switcher
    (served,) = switcher.served()
    lock = served.catalogue.properties.lock

    async def law() -> None:
        lock.acquire()
        evaluation = Timer(PATIENCE_S, lock.release)
        evaluation.start()
        async with in_background(partial(_follow_time, switcher)):
            await asyncio.sleep(0.01)
            assert evaluation.is_alive()
            evaluation.cancel()
            lock.release()

    shop.first.runner.run(law())


def test_an_item_is_recommended_only_between_its_dates(shop: Shop) -> None:
    def is_shown() -> list[bool]:
        for client in (shop.first, shop.other):
            client.runner.run(client.service.switcher.poll())
        return [item_id(7) in shop.answer(client) for client in (shop.first, shop.other)]

    def put(**dates: str | None) -> None:
        response = shop.first.request("PUT", f"/v1/items/{item_id(7)}", json=dates)
        assert response.status_code == 200, response.text

    def at(seconds: float) -> str:
        return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()

    put(available_from=at(3600))
    assert is_shown() == [False, False]
    put(available_from=at(-1), available_until=at(3600))
    assert is_shown() == [True, True]
    end_s = time.time() + 3
    put(available_until=at(3))
    before = is_shown()
    assert before == [True, True] or time.time() > end_s
    with patch("app.catalogue.overrides.availability.time.time", lambda: end_s + 1):
        for client in (shop.first, shop.other):
            (served,) = client.service.switcher.served()
            served.catalogue.follow_time()
            assert item_id(7) not in shop.answer(client)
    put(available_until=None)
    assert is_shown() == [True, True]
