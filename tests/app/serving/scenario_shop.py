"""Two services over one store with item properties for scenarios, and random settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from app.settings import Settings
from tests.app.catalogue.expressions.oracle import TEXTS, conditions
from tests.app.conftest import CATEGORIES, ITEMS, Client, item_id

TYPES = {"price": "number", "margin": "number", "brand": "text", "new": "boolean"}
URL = "/v1/admin/scenarios"
PREVIEW = "/v1/admin/preview"
PAGE = ITEMS - 1  # whose page is asked for
SEEN_RULES = ["none", "recent", "all"]

some = st.lists(st.sampled_from(CATEGORIES), unique=True, max_size=2)
ids = st.lists(st.integers(0, ITEMS - 1).map(item_id), unique=True, max_size=10)
filters = conditions.map(lambda pair: pair.ours)
narrowing: dict[str, st.SearchStrategy[Any]] = {
    "k": st.integers(1, ITEMS),
    "exclude_seen": st.sampled_from(SEEN_RULES),
    "categories": some,
    "categories_all": some,
    "categories_none": some,
    "exclude": ids,
    "filter": filters,
    "max_per_category": st.integers(1, 8),
    "max_per": st.dictionaries(st.sampled_from(["brand", "categories"]), st.integers(1, 8), max_size=2),
}
pins = st.lists(st.integers(0, ITEMS - 1), unique=True, max_size=3).map(
    lambda rows: [{"item_id": item_id(row), "place": place} for place, row in enumerate(rows, 1)]
)


class Shop(NamedTuple):
    """Two services over one store."""

    first: Client
    other: Client

    def put(self, name: str, **settings: Any) -> Any:
        response = self.first.request("PUT", f"{URL}/{name}", json=settings)
        assert response.status_code == 200, response.text
        self.other.runner.run(self.other.service.scenarios.follow())
        return response.json()


@pytest.fixture(scope="module")
def shop(store_url: str | None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    data_dir = tmp_path_factory.mktemp("state")
    made = Settings(model_dir=model_dir, data_dir=data_dir, redis_url=store_url)
    first, other = Client(made), Client(made)
    first.click("ada", "item-3", "item-4", "item-9")
    assert first.request("PUT", "/v1/admin/properties", json={"items": TYPES}).status_code == 200
    posted = [
        {
            "item_id": item_id(row),
            "properties": {"price": row / 10, "margin": None if row % 5 else 1.0, "brand": TEXTS[row % len(TEXTS)]},
        }
        for row in range(ITEMS)
    ]
    assert first.post("/v1/items", json=posted).status_code == 200
    other.runner.run(other.service.switcher.poll())
    yield Shop(first, other)
    first.close()
    other.close()


def answer(client: Client, **body: Any) -> Any:
    response = client.post("/v1/recommendations", json={"user_id": "ada", "current_item": item_id(PAGE), **body})
    assert response.status_code == 200, response.text
    return response.json()


def listed(answered: Any) -> list[tuple[str, Any]]:
    return [(item["item_id"], pytest.approx(item["score"], abs=1e-4)) for item in answered["items"]]
