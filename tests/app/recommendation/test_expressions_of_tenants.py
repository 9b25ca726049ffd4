"""Expressions see only the properties of their tenant and user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.auth.keys import SCOPES, add, make
from app.settings import Settings
from tests.app.conftest import ITEMS, Client, item_id, write_model
from tests.app.support import ALL_ITEMS, bearer

TENANTS, USERS = ("main", "books"), ("ada", "bob")
SECRET = "Beeblebrox"
values = st.fixed_dictionaries(
    {"price": st.none() | st.sampled_from([1.0, 2.0]), "note": st.sampled_from(["x", SECRET])}
)
shops = st.fixed_dictionaries(
    {tenant: st.dictionaries(st.sampled_from(ALL_ITEMS), values, max_size=8) for tenant in TENANTS}
)
people = st.fixed_dictionaries({(tenant, user): st.sampled_from([1.0, 2.0]) for tenant in TENANTS for user in USERS})


class Shops:
    """Two tenants in one process whose items and users have equal ids."""

    def __init__(self, directory: Path) -> None:
        self._keys: dict[str, str] = {}
        for tenant in TENANTS:
            self._keys[tenant], key = make(tenant, list(SCOPES))
            add(directory / "keys", key)
        self.client = Client(
            Settings(
                model_dir=write_model(directory / "models" / "main" / "tiny"),
                tenants={"books": write_model(directory / "models" / "books" / "tiny", seed=8)},
                data_dir=directory / "state",
                keys_file=directory / "keys",
            )
        )
        self.prices: dict[str, dict[str, float | None]] = {tenant: {} for tenant in TENANTS}
        types = {"items": {"price": "number", "note": "text"}, "users": {"limit": "number"}}
        for tenant in TENANTS:
            self.call("PUT", "/v1/admin/properties", tenant, types)
        self.call("PUT", "/v1/admin/properties", "books", {"items": {"isbn": "text"}, "users": {"grade": "number"}})

    def call(self, method: str, path: str, tenant: str, body: Any, status: int = 200) -> Any:
        response = self.client.request(method, path, json=body, headers=bearer(self._keys[tenant]))
        assert response.status_code == status, response.text
        return response.json()

    def poll(self) -> None:
        for service in self.client.services.by_tenant.values():
            self.client.runner.run(service.switcher.poll())


@pytest.fixture(scope="module")
def two_shops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shops]:
    found = Shops(tmp_path_factory.mktemp("shops"))
    yield found
    found.client.close()


@given(shops, people)
@settings(max_examples=15)
def test_an_expression_uses_the_values_of_its_tenant_and_user(
    two_shops: Shops, items: dict[str, dict[str, dict[str, Any]]], limits: dict[tuple[str, str], float]
) -> None:
    for tenant in TENANTS:
        two_shops.prices[tenant] |= {one: own["price"] for one, own in items[tenant].items()}
        posted = [{"item_id": one, "properties": own} for one, own in items[tenant].items()]
        if posted:
            two_shops.call("POST", "/v1/items", tenant, posted)
        for user in USERS:
            put = {"properties": {"limit": limits[tenant, user]}}
            two_shops.call("PUT", f"/v1/users/{user}/properties", tenant, put)
    two_shops.poll()
    for _ in range(2):  # the second time, the results are known
        for tenant in TENANTS:
            for user in USERS:
                wish = {"user_id": user, "k": ITEMS, "filter": "item.price <= user.limit"}
                answer = two_shops.call("POST", "/v1/recommendations", tenant, wish)
                prices, limit = two_shops.prices[tenant], limits[tenant, user]
                wanted = {one for one, price in prices.items() if price is not None and price <= limit}
                assert {item["item_id"] for item in answer["items"]} == wanted
                assert SECRET not in str(answer)
                assert "limit" not in str(answer)


@pytest.mark.parametrize("name", ["item.isbn", "current.isbn", "user.grade"])
def test_another_tenants_property_does_not_exist(two_shops: Shops, name: str) -> None:
    two_shops.poll()
    wish = {"user_id": "ada", "filter": f"known({name})", "current_item": item_id(1)}
    two_shops.call("POST", "/v1/recommendations", "books", wish)
    refused = two_shops.call("POST", "/v1/recommendations", "main", wish, status=422)
    (detail,) = refused["error"]["details"]
    assert f"there is no {name}" in detail["reason"]
    assert detail["reason"].count(name.partition(".")[2]) == 1  # and none is suggested
