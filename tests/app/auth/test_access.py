"""Access control on every route: scopes, tenants and keys of browsers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import Route

from app.http.access import declared_scopes
from app.http.auth.keys import SCOPES, Scope, add, make
from app.http.routes.guarded_route import GuardedRoute
from app.main import create_app
from app.settings import Settings
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import assert_refused, bearer
from tests.waiting import wait_until

SHOP = "https://shop.example"
TENANTS = ("main", "books")


@dataclass(frozen=True)
class Names:
    """The user and the other ids that a call is about."""

    user: str = "ada"
    visitor: str = "visitor"
    item: str = item_id(1)
    event: str = "one"
    model: str = "tiny"


@dataclass(frozen=True)
class Call:
    """A route of the app, and how to call it for a user of a tenant."""

    method: str
    path: str
    scope: Scope | None

    def options(self, names: Names) -> dict[str, Any]:
        if self.path == "/v1/events":
            return {"json": {"event_id": names.event, "user_id": names.user, "item_id": names.item}}
        if self.path == "/v1/items" and self.method == "POST":
            return {"json": {"item_id": names.item, "categories": ["tea"]}}
        if self.path.endswith("/merge"):
            return {"json": {"from": names.visitor}}
        if self.method in ("POST", "PUT", "PATCH"):
            return {"json": {"user_id": names.user}}
        return {}

    def url(self, names: Names) -> str:
        return self.path.format(
            user_id=names.user, item_id=names.item, name=names.model, event_id=names.event, kind="js"
        )


def calls_of(app: FastAPI) -> list[Call]:
    """Every route of the app with its scope; fails unless each route declares exactly one scope."""
    calls = []
    for route in app.routes:
        if not isinstance(route, APIRoute):
            assert isinstance(route, Route)
            assert route.path == "/openapi.json", f"{route.path} is not guarded"
            continue
        scopes = declared_scopes(route.dependencies)
        assert len(scopes) == 1, f"{route.path} has to declare one scope, or that it is open, and declares {scopes}"
        assert isinstance(route, GuardedRoute), f"{route.path} is read before its key"
        calls += [Call(method, route.path, scopes[0]) for method in sorted(route.methods or ())]
    return calls


PAGES = {
    "/client.js",
    "/playground",
    "/playground/",
    "/playground/playground.{kind}",
}  # what browsers load is no part of the description


def test_openapi_names_the_scope_of_every_operation(tmp_path: Path, model_dir: Path) -> None:
    settings = Settings(model_dir=model_dir, data_dir=tmp_path, keys_file=tmp_path / "keys")
    app = create_app(settings)
    document = app.openapi()
    (scheme,) = document["components"]["securitySchemes"]
    calls = calls_of(app)
    assert document["paths"].keys() <= {call.path for call in calls}
    for call in calls:
        operation = document["paths"].get(call.path, {}).get(call.method.lower())
        if operation is None:
            assert call.method == "HEAD" or (call.path in PAGES and call.scope is None)
            continue
        assert operation["security"] == ([] if call.scope is None else [{scheme: [call.scope]}])
        assert (call.scope is None) == ("401" not in operation["responses"])
        assert call.scope is None or call.scope in operation["responses"]["403"]["description"]


class Shops:
    """Two tenants with a model each, and keys of every kind."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "keys"
        self.text: dict[tuple[str, Scope], str] = {}
        for tenant in TENANTS:
            for scope in SCOPES:
                self.text[tenant, scope] = self.add(tenant, [scope])
        self.settings = Settings(
            model_dir=write_model(directory / "models" / "main" / "tiny"),
            tenants={"books": write_model(directory / "models" / "books" / "tiny", seed=8)},
            data_dir=directory / "state",
            keys_file=self.file,
        )
        self.client = Client(self.settings)

    def add(self, tenant: str, scopes: list[Scope], **rest: Any) -> str:
        text, key = make(tenant, scopes, **rest)
        add(self.file, key)
        return text

    def calls(self) -> list[Call]:
        return calls_of(create_app(self.settings))

    def call(self, call: Call, headers: Any, names: Names = Names()) -> httpx.Response:
        return self.client.request(call.method, call.url(names), headers=headers, **call.options(names))


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shops]:
    shops = Shops(tmp_path_factory.mktemp("shops"))
    yield shops
    shops.client.close()


def test_a_route_without_a_scope_fails_the_check(tmp_path: Path, model_dir: Path) -> None:
    app = create_app(Settings(model_dir=model_dir, data_dir=tmp_path, keys_file=tmp_path / "keys"))
    app.get("/v1/forgotten")(lambda: None)
    with pytest.raises(AssertionError, match="/v1/forgotten has to declare one scope"):
        calls_of(app)


class TestEveryRoute:
    def test_has_a_scope_unless_it_is_public(self, shops: Shops) -> None:
        calls = shops.calls()
        assert {call.path for call in calls if call.scope is None} == {"/healthz", "/readyz", "/client.js"}
        assert {call.scope for call in calls} >= {"events:write", "recs:read", "users:admin", "admin", "metrics:read"}

    def test_accepts_only_keys_with_its_scope(self, shops: Shops) -> None:
        for call in shops.calls():
            for tenant in TENANTS:
                for scope in SCOPES:
                    answer = shops.call(call, bearer(shops.text[tenant, scope]))
                    if call.scope in (None, scope) or (call.scope, scope) == ("scenarios:write", "admin"):
                        assert answer.status_code not in (401, 403), (call, answer.text)
                    else:
                        assert_refused(answer, 403)

    def test_answers_missing_and_wrong_keys_alike(self, shops: Shops) -> None:
        right = shops.text["main", "recs:read"]
        wrong = [
            {},
            bearer(""),
            bearer("x"),
            bearer(right[:-1]),
            bearer(right + "x"),
            bearer(right[:20] + "A" * (len(right) - 20)),
            bearer(make("main", SCOPES)[0]),
            {"authorization": right},
            {"authorization": f"Basic {right}"},
            {"authorization": b"Bearer \xff"},
            {"x-api-key": right},
        ]
        for call in shops.calls():
            if call.scope is None:
                continue
            answers = [shops.call(call, headers) for headers in wrong]
            assert {answer.status_code for answer in answers} == {401}
            assert len({answer.content for answer in answers}) == 1
            assert {answer.headers["www-authenticate"] for answer in answers} == {'Bearer realm="lisarec"'}
            assert_refused(answers[0], 401)

    def test_refuses_two_keys(self, shops: Shops) -> None:
        key = shops.text["main", "recs:read"]
        both = [("authorization", f"Bearer {key}")] * 2
        assert_refused(shops.client.get("/v1/model", headers=both), 401)

    def test_checks_the_key_before_the_rest_of_the_request(self, shops: Shops) -> None:
        client = shops.client
        for path in (
            "/v1/users/a%C2%85b",
            "/v1/users/ada/recommendations?k=0",
            "/v1/items?limit=9999",
            "/v1/items?k=1&k=1",
        ):
            assert_refused(client.get(path), 401)
        assert_refused(client.post("/v1/events", content=b"nonsense"), 401)


class TestTenants:
    def test_have_separate_users_models_and_catalogues(self, shops: Shops) -> None:
        def ask(tenant: str, scope: Scope, path: str) -> httpx.Response:
            return shops.client.get(path, headers=bearer(shops.text[tenant, scope]))

        event = {"event_id": "first", "user_id": "zoe", "item_id": item_id(3)}
        write = bearer(shops.text["main", "events:write"])
        assert shops.client.post("/v1/events", json=event, headers=write).json()["accepted"] == 1
        assert ask("main", "users:admin", "/v1/users/zoe").json()["event_count"] == 1
        for path in ("/v1/users/zoe", "/v1/users/zoe/events"):
            of_nobody = ask("books", "users:admin", path.replace("zoe", "nobody"))
            of_another = ask("books", "users:admin", path)
            assert (of_another.status_code, of_another.content) == (404, of_nobody.content)
        answer = ask("books", "recs:read", "/v1/users/zoe/recommendations").json()
        assert answer["source"] == "popular"
        write = bearer(shops.text["books", "events:write"])  # the same id is another event there
        assert shops.client.post("/v1/events", json=event, headers=write).json()["duplicates"] == 0
        erase = bearer(shops.text["books", "users:admin"])
        assert shops.client.request("DELETE", "/v1/users/zoe", headers=erase).status_code == 202
        assert ask("main", "users:admin", "/v1/users/zoe").json()["event_count"] == 1
        tags = {ask(tenant, "recs:read", "/v1/model").json()["tag"] for tenant in TENANTS}
        assert len(tags) == 2

    def test_cannot_tell_data_of_other_tenants_from_missing_data(self, shops: Shops) -> None:
        """For every route and a key that may call it, ids of another shop are like unknown ids."""
        theirs, nobodys = (
            Names(*(f"{kind}-of-{whose}" for kind in ("user", "visitor", "item", "event", "model")))
            for whose in ("main", "nobody")
        )
        write_model(shops.client.model_dir.parent / theirs.model, seed=10)
        requests: tuple[tuple[Scope, str, dict[str, str]], ...] = (
            ("events:write", "/v1/events", {"event_id": theirs.event, "user_id": theirs.user, "item_id": item_id(2)}),
            ("events:write", "/v1/events", {"event_id": "v", "user_id": theirs.visitor, "item_id": item_id(2)}),
            ("catalogue:write", "/v1/items", {"item_id": theirs.item, "title": "Secret"}),
        )
        for scope, path, body in requests:
            assert shops.client.post(path, json=body, headers=bearer(shops.text["main", scope])).status_code == 200

        def response_without_names(call: Call, names: Names) -> tuple[int, str]:
            answer = shops.call(call, bearer(shops.text["books", call.scope or "recs:read"]), names)
            response_text = re.sub(r'"(recommendation_id|files_by|timestamp)":("[^"]+"|[0-9.]+)', "", answer.text)
            for name in ("user", "visitor", "item", "event", "model"):
                response_text = response_text.replace(getattr(names, name), f"<{name}>")
            return answer.status_code, response_text

        for call in sorted(shops.calls(), key=lambda call: call.method != "GET"):
            if call.path != "/metrics":
                assert response_without_names(call, theirs) == response_without_names(call, nobodys), call
        metrics = shops.client.get("/metrics", headers=bearer(shops.text["books", "metrics:read"])).text
        assert "-of-main" not in metrics
        state = shops.client.get(f"/v1/users/{theirs.user}", headers=bearer(shops.text["main", "users:admin"])).json()
        assert state["event_count"] == 1
        item = shops.client.get(f"/v1/items/{theirs.item}", headers=bearer(shops.text["main", "recs:read"])).json()
        assert (item["title"], item["categories"]) == ("Secret", [])

    def test_activate_only_their_own_models(self, shops: Shops) -> None:
        def activate(tenant: str, name: str) -> httpx.Response:
            headers = bearer(shops.text[tenant, "admin"])
            return shops.client.post(f"/v1/admin/generations/{name}/activate", headers=headers)

        books = shops.settings.tenants["books"]
        assert isinstance(books, Path)
        write_model(books.parent / "summer", seed=9)
        unknown = activate("main", "winter")
        refused = activate("main", "summer")
        assert (refused.status_code, refused.content) == (404, unknown.content)
        assert activate("books", "summer").json()["generation"] == "summer"
        for tenant, name in (("books", "summer"), ("main", "tiny")):
            shops.client.runner.run(shops.client.services.by_tenant[tenant].switcher.poll())
            headers = bearer(shops.text[tenant, "recs:read"])
            assert shops.client.get("/v1/model", headers=headers).json()["generation"] == name

    def test_require_keys_and_separate_folders(self, model_dir: Path, tmp_path: Path) -> None:
        with pytest.raises(ValidationError, match="--keys FILE"):
            Settings(model_dir=model_dir, tenants={"books": tmp_path / "books"})
        with pytest.raises(ValidationError, match="models/TENANT/NAME"):
            Settings(model_dir=model_dir, tenants={"books": model_dir.parent / "b"}, keys_file=tmp_path / "keys")
        with pytest.raises(ValidationError, match="two models"):
            Settings(model_dir=model_dir, tenants={"main": tmp_path / "b"}, keys_file=tmp_path / "keys")

    @pytest.mark.parametrize("path", ["own/../books/june", "linked/june"])
    def test_cannot_share_a_folder_through_a_link(self, model_dir: Path, tmp_path: Path, path: str) -> None:
        (tmp_path / "linked").symlink_to(tmp_path / "books")
        tenants = {"books": tmp_path / "books" / "may", "other": tmp_path / path}
        with pytest.raises(ValidationError, match="models/TENANT/NAME"):
            Settings(model_dir=model_dir, tenants=tenants, keys_file=tmp_path / "keys")


class TestEvents:
    def test_require_an_id_with_keys(self, shops: Shops) -> None:
        headers = bearer(shops.text["main", "events:write"])
        events = [{"user_id": "kim", "item_id": "i", "event_id": "a"}, {"user_id": "kim", "item_id": "i"}]
        answer = shops.client.post("/v1/events", json=events, headers=headers)
        assert_refused(answer, 422)
        (detail,) = answer.json()["error"]["details"]
        assert (detail["index"], detail["field"]) == (1, "event_id")
        assert shops.client.log("kim") == []

    def test_have_an_id_in_openapi_and_its_examples(self, shops: Shops) -> None:
        document = shops.client.get("/openapi.json").json()
        for name in ("PostedEvent", "PortableEvent"):
            schema = document["components"]["schemas"][name]
            assert "event_id" in schema["required"]
            assert schema["properties"]["event_id"].items() >= {"type": "string", "maxLength": 128}.items()
            assert "default" not in schema["properties"]["event_id"]
        examples = document["paths"]["/v1/events"]["post"]["requestBody"]["content"]["application/json"]["examples"]
        for example in examples.values():
            headers = bearer(shops.text["main", "events:write"])
            assert shops.client.post("/v1/events", json=example["value"], headers=headers).status_code == 200


@pytest.fixture(scope="module")
def page_key(shops: Shops) -> str:
    """A browser key that the running service has loaded."""
    key = shops.add("main", ["events:write"], origins=[SHOP])
    keyring = shops.client.services.keyring
    assert keyring is not None
    wait_until(lambda: keyring.find(key))
    return key


class TestBrowsers:
    def preflight(
        self, shops: Shops, origin: str, *, method: str = "POST", headers: str = "authorization, content-type"
    ) -> httpx.Response:
        asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}
        return shops.client.request("OPTIONS", "/v1/events", headers=asked)

    @pytest.mark.usefixtures("page_key")
    def test_get_a_preflight_that_allows_posting(self, shops: Shops) -> None:
        answer = self.preflight(shops, SHOP)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == SHOP
        assert answer.headers["access-control-allow-methods"] == "POST"
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers

    @pytest.mark.usefixtures("page_key")
    def test_get_no_permission_from_other_preflights(self, shops: Shops) -> None:
        refused = [
            self.preflight(shops, "https://evil.example"),
            self.preflight(shops, "null"),
            self.preflight(shops, SHOP.upper()),
            self.preflight(shops, f"{SHOP}.evil.example"),
            self.preflight(shops, SHOP, method="DELETE"),
            self.preflight(shops, SHOP, headers="x-other"),
        ]
        for answer in refused:
            assert_refused(answer, 403)
            assert "access-control-allow-origin" not in answer.headers
        for path in ("/v1/users/ada", "/v1/recommendations"):
            asked = {"origin": SHOP, "access-control-request-method": "GET"}
            answer = shops.client.request("OPTIONS", path, headers=asked)
            assert "access-control-allow-origin" not in answer.headers

    def test_post_only_from_the_origins_of_the_key(self, shops: Shops, page_key: str) -> None:
        event = {"event_id": "page", "user_id": "page", "item_id": "i"}

        def post(json: object = event, **headers: str) -> httpx.Response:
            return shops.client.post("/v1/events", json=json, headers=bearer(page_key) | headers)

        answer = post(origin=SHOP)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == SHOP
        assert "origin" in answer.headers["vary"].lower()
        assert_refused(post(origin="https://evil.example"), 403)
        assert_refused(post(), 403)
        failed = post(json={}, origin=SHOP)  # a page has to be able to read what is wrong
        assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (422, SHOP)
        assert_refused(shops.client.get("/v1/model", headers=bearer(page_key) | {"origin": SHOP}), 403)


class TestMetrics:
    def test_contain_no_key_and_can_be_public(self, start: Callable[..., Client], tmp_path: Path) -> None:
        text, key = make("main", ["recs:read"])
        add(tmp_path / "keys", key)
        client = start(tmp_path, keys_file=tmp_path / "keys", open_metrics=True)
        client.get("/v1/model", headers=bearer(text))
        client.get(f"/{text}", headers=bearer(text))
        shown = client.get("/metrics")
        assert shown.status_code == 200
        assert not any(secret in shown.text for secret in (text, text.split("_", 2)[2], key.sha256))
        client.close()
