"""Keys: the file that operators edit, and who may do what with which key, on every route there is."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import ValidationError

from app import keys, rates
from app.access import declared_scopes
from app.errors import TooManyRequests
from app.keys import SCOPES, Key, Keyring, KeysFileError, Scope, add, make, read, remove
from app.main import create_app
from app.rates import RateLimiter
from app.settings import Settings
from tests.app.conftest import Client, item_id, write_model
from tests.app.test_requests import assert_refused
from tests.storage.redis_servers import running_cluster

SHOP = "https://shop.example"
TENANTS = ("main", "books")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestTheFile:
    def test_has_hashes_and_no_key(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        text, key = make("main", ["recs:read"], note="the app")
        add(file, key)
        assert read(file) == [key]
        assert not any(part in file.read_text() for part in (text, text.rpartition("_")[2]))

    def test_is_added_to_and_taken_from_line_by_line(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        made = [make("main", [scope])[1] for scope in SCOPES]
        file.write_text("# who has which key\n\n" + made[0].line().rstrip("\n"))  # as an editor may leave it
        for key in made[1:]:
            add(file, key)
        assert read(file) == made
        remove(file, made[2].id)
        assert read(file) == made[:2] + made[3:]
        assert file.read_text().startswith("# who has which key\n\n")
        with pytest.raises(KeysFileError, match="lisarec keys list"):
            remove(file, made[2].id)

    @pytest.mark.parametrize(
        "line",
        [
            "lisarec_0123456789ab_PASTED",
            '{"id": "lisarec_0123456789ab_PASTED"}',
            '{"lisarec_0123456789ab_PASTED": 1}',
            Key(id="0123456789ab", tenant="main", scopes=("admin",), sha256="0" * 64)
            .line()
            .replace("main", "a b PASTED"),
        ],
    )
    def test_that_is_wrong_is_refused_without_saying_what_it_holds(self, tmp_path: Path, line: str) -> None:
        file = tmp_path / "keys"
        file.write_text(f"# mine\n{line}\n")
        with pytest.raises(KeysFileError, match="line 2") as refusal:
            read(file)
        assert "PASTED" not in str(refusal.value)

    def test_has_each_id_once(self, tmp_path: Path) -> None:
        file, (_, key) = tmp_path / "keys", make("main", ["admin"])
        add(file, key)
        add(file, key)
        with pytest.raises(KeysFileError, match="two keys of one id"):
            read(file)

    def test_gives_browsers_a_key_that_writes_events_and_nothing_else(self) -> None:
        make("main", ["events:write"], [SHOP])
        for scopes, origins in (
            (["recs:read"], [SHOP]),
            (["events:write", "admin"], [SHOP]),
            (["events:write"], ["*"]),
            (["events:write"], [f"{SHOP}/path"]),
        ):
            with pytest.raises(ValidationError):
                make("main", scopes, origins)  # type: ignore[arg-type]


class TestTheKeyring:
    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(keys, "POLL_EVERY_S", 0)
        return tmp_path / "keys"

    def test_finds_a_key_and_nothing_that_is_nearly_one(self, file: Path) -> None:
        text, key = make("main", ["recs:read"])
        other, foreign = make("elsewhere", ["recs:read"])
        add(file, key)
        add(file, foreign)
        ring = Keyring(file, TENANTS)
        assert ring.find(text) == key
        swapped = f"lisarec_{key.id}_{other.rpartition('_')[2]}"
        for wrong in (other, swapped, text[:-1], text + "A", text.upper(), key.id, key.sha256, "", "é", "lisarec__"):
            assert ring.find(wrong) is None

    def test_follows_the_file(self, file: Path) -> None:
        old, old_key = make("main", ["recs:read"])
        new, new_key = make("main", ["recs:read"])
        add(file, old_key)
        ring = Keyring(file, TENANTS)
        assert (ring.find(old), ring.find(new)) == (old_key, None)
        add(file, new_key)
        assert (ring.find(old), ring.find(new)) == (old_key, new_key)
        remove(file, old_key.id)
        assert (ring.find(old), ring.find(new)) == (None, new_key)

    def test_keeps_what_it_has_when_the_file_breaks(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        text, key = make("main", ["recs:read"])
        add(file, key)
        ring = Keyring(file, TENANTS)
        file.write_text("{")
        assert ring.find(text) == key
        file.unlink()
        assert ring.find(text) == key
        assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
        file.write_text("")
        assert ring.find(text) is None

    def test_does_not_start_without_a_file(self, file: Path) -> None:
        with pytest.raises(KeysFileError, match="lisarec keys add"):
            Keyring(file, TENANTS)


@dataclass(frozen=True)
class Names:
    """Whom and what a call is about."""

    user: str = "ada"
    visitor: str = "visitor"
    item: str = item_id(1)
    event: str = "one"
    model: str = "tiny"


@dataclass(frozen=True)
class Call:
    """A route of the app, and how it is called for a user of one tenant."""

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
    """Every route of the app with the scope that it declares; one that declares none, or two, fails here."""
    calls = []
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, APIRoute):
            assert context.path == "/openapi.json", f"{context.path} is not guarded"
            continue
        scopes = declared_scopes(route.dependencies)
        assert len(scopes) == 1, f"{route.path} has to declare one scope, or that it is open, and declares {scopes}"
        calls += [Call(method, route.path, scopes[0]) for method in sorted(route.methods)]
    return calls


PAGES = {
    "/client.js",
    "/playground",
    "/playground/",
    "/playground/playground.{kind}",
}  # what browsers load is no part of the description


def test_the_description_names_the_scope_of_every_call(tmp_path: Path, model_dir: Path) -> None:
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


def test_a_route_that_declares_no_scope_is_noticed(tmp_path: Path, model_dir: Path) -> None:
    app = create_app(Settings(model_dir=model_dir, data_dir=tmp_path, keys_file=tmp_path / "keys"))
    app.get("/v1/forgotten")(lambda: None)
    with pytest.raises(AssertionError, match="/v1/forgotten has to declare one scope"):
        calls_of(app)


class TestEveryRoute:
    def test_declares_what_it_needs_and_only_health_is_open(self, shops: Shops) -> None:
        calls = shops.calls()
        assert {call.path for call in calls if call.scope is None} == {"/healthz", "/readyz", "/client.js"}
        assert {call.scope for call in calls} >= {"events:write", "recs:read", "users:admin", "admin", "metrics:read"}

    def test_takes_the_right_scope_and_no_other(self, shops: Shops) -> None:
        for call in shops.calls():
            for tenant in TENANTS:
                for scope in SCOPES:
                    answer = shops.call(call, bearer(shops.text[tenant, scope]))
                    if call.scope in (None, scope):
                        assert answer.status_code not in (401, 403), (call, answer.text)
                    else:
                        assert_refused(answer, 403)

    def test_gives_no_key_and_any_wrong_key_the_same_answer(self, shops: Shops) -> None:
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

    def test_that_two_keys_are_sent_to_takes_neither(self, shops: Shops) -> None:
        key = shops.text["main", "recs:read"]
        both = [("authorization", f"Bearer {key}")] * 2
        assert_refused(shops.client.get("/v1/model", headers=both), 401)

    def test_asks_for_the_key_before_it_looks_at_anything_else(self, shops: Shops) -> None:
        client = shops.client
        for path in ("/v1/users/a%20b", "/v1/users/ada/recommendations?k=0", "/v1/items?limit=9999"):
            assert_refused(client.get(path), 401)
        assert_refused(client.post("/v1/events", content=b"nonsense"), 401)


class TestTenants:
    def test_have_users_models_and_catalogues_of_their_own(self, shops: Shops) -> None:
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

    def test_get_the_same_answers_about_what_others_have_as_about_nothing(self, shops: Shops) -> None:
        """Every route, by a key that may call it: ids of another shop make no difference, to neither shop."""
        theirs, nobodys = (
            Names(*(f"{kind}-of-{whose}" for kind in ("user", "visitor", "item", "event", "model")))
            for whose in ("main", "nobody")
        )
        write_model(shops.settings.model_dirs["main"].parent / theirs.model, seed=10)  # type: ignore[union-attr]
        for scope, path, body in (
            ("events:write", "/v1/events", {"event_id": theirs.event, "user_id": theirs.user, "item_id": item_id(2)}),
            ("events:write", "/v1/events", {"event_id": "v", "user_id": theirs.visitor, "item_id": item_id(2)}),
            ("catalogue:write", "/v1/items", {"item_id": theirs.item, "title": "Secret"}),
        ):
            assert shops.client.post(path, json=body, headers=bearer(shops.text["main", scope])).status_code == 200

        def told(call: Call, names: Names) -> tuple[int, str]:
            answer = shops.call(call, bearer(shops.text["books", call.scope or "recs:read"]), names)
            said = re.sub(r'"(recommendation_id|files_by|timestamp)":("[^"]+"|[0-9.]+)', "", answer.text)
            for name in ("user", "visitor", "item", "event", "model"):
                said = said.replace(getattr(names, name), f"<{name}>")
            return answer.status_code, said

        for call in sorted(shops.calls(), key=lambda call: call.method != "GET"):
            if call.path != "/metrics":
                assert told(call, theirs) == told(call, nobodys), call
        metrics = shops.client.get("/metrics", headers=bearer(shops.text["books", "metrics:read"])).text
        assert "-of-main" not in metrics
        state = shops.client.get(f"/v1/users/{theirs.user}", headers=bearer(shops.text["main", "users:admin"])).json()
        assert state["event_count"] == 1
        item = shops.client.get(f"/v1/items/{theirs.item}", headers=bearer(shops.text["main", "recs:read"])).json()
        assert (item["title"], item["categories"]) == ("Secret", [])

    def test_switch_apart_and_only_to_models_of_their_own(self, shops: Shops) -> None:
        def activate(tenant: str, name: str) -> httpx.Response:
            headers = bearer(shops.text[tenant, "admin"])
            return shops.client.post(f"/v1/admin/generations/{name}/activate", headers=headers)

        write_model(shops.settings.tenants["books"].parent / "summer", seed=9)
        unknown = activate("main", "winter")
        refused = activate("main", "summer")
        assert (refused.status_code, refused.content) == (404, unknown.content)
        assert activate("books", "summer").json()["generation"] == "summer"
        for tenant, name in (("books", "summer"), ("main", "tiny")):
            shops.client.runner.run(shops.client.services.by_tenant[tenant].switcher.poll())
            headers = bearer(shops.text[tenant, "recs:read"])
            assert shops.client.get("/v1/model", headers=headers).json()["generation"] == name

    def test_need_keys_and_folders_of_their_own(self, model_dir: Path, tmp_path: Path) -> None:
        with pytest.raises(ValidationError, match="--keys FILE"):
            Settings(model_dir=model_dir, tenants={"books": tmp_path / "books"})
        with pytest.raises(ValidationError, match="models/TENANT/NAME"):
            Settings(model_dir=model_dir, tenants={"books": model_dir.parent / "b"}, keys_file=tmp_path / "keys")
        with pytest.raises(ValidationError, match="two models"):
            Settings(model_dir=model_dir, tenants={"main": tmp_path / "b"}, keys_file=tmp_path / "keys")


class TestEvents:
    def test_need_an_id_where_keys_are(self, shops: Shops) -> None:
        headers = bearer(shops.text["main", "events:write"])
        events = [{"user_id": "kim", "item_id": "i", "event_id": "a"}, {"user_id": "kim", "item_id": "i"}]
        answer = shops.client.post("/v1/events", json=events, headers=headers)
        assert_refused(answer, 422)
        (detail,) = answer.json()["error"]["details"]
        assert (detail["index"], detail["field"]) == (1, "event_id")
        assert shops.client.log("kim") == []


@pytest.fixture(scope="module")
def page_key(shops: Shops) -> str:
    """One for the pages of the shop, which the running service has noticed."""
    key = shops.add("main", ["events:write"], origins=[SHOP])
    shops.client.services.keyring._poll_at_s = 0  # type: ignore[union-attr]
    return key


class TestBrowsers:
    def preflight(
        self, shops: Shops, origin: str, *, method: str = "POST", headers: str = "authorization, content-type"
    ) -> httpx.Response:
        asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}
        return shops.client.request("OPTIONS", "/v1/events", headers=asked)

    @pytest.mark.usefixtures("page_key")
    def test_are_told_that_they_may_post(self, shops: Shops) -> None:
        answer = self.preflight(shops, SHOP)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == SHOP
        assert answer.headers["access-control-allow-methods"] == "POST"
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers

    @pytest.mark.usefixtures("page_key")
    def test_are_told_when_they_may_not(self, shops: Shops) -> None:
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

    def test_post_from_the_pages_of_the_key_and_no_others(self, shops: Shops, page_key: str) -> None:
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


class TestWithoutKeys:
    """Whoever reaches the service may do everything, and so must not be a page that somebody happens to look at."""

    OWN = "http://127.0.0.1:8000"
    EVENT = MappingProxyType({"user_id": "rebound", "item_id": "i"})

    @pytest.mark.parametrize(
        "headers",
        [
            {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"},  # rebinding
            {"host": "evil.example:8000", "sec-fetch-site": "same-origin"},
            {"host": "127.0.0.1:8000", "origin": "https://evil.example", "sec-fetch-site": "cross-site"},
            {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"},
            {"host": "127.0.0.1:8000", "origin": "null"},
            {"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site"},
            {"host": "[::1", "origin": "http://evil.example"},
        ],
    )
    def test_pages_of_others_may_do_nothing(self, shared_client: Client, headers: dict[str, str]) -> None:
        assert_refused(shared_client.post("/v1/events", json=dict(self.EVENT), headers=headers), 403)
        assert_refused(shared_client.get("/v1/users/rebound", headers=headers), 403)
        assert_refused(shared_client.post("/v1/admin/generations/tiny/activate", headers=headers), 403)
        assert shared_client.get("/v1/users/rebound").status_code == 404

    @pytest.mark.parametrize(
        "headers",
        [
            {"host": "127.0.0.1:8000", "origin": OWN, "sec-fetch-site": "same-origin"},
            {"host": "localhost", "origin": "http://localhost"},
            {"host": "127.0.0.1:8000", "sec-fetch-site": "none"},
            {"host": "anything.example"},  # no browser
        ],
    )
    def test_its_own_page_and_other_programs_may(self, shared_client: Client, headers: dict[str, str]) -> None:
        assert shared_client.get("/v1/items/popular", headers=headers).status_code == 200

    def test_the_script_is_for_every_page(self, shared_client: Client) -> None:
        headers = {"origin": "https://shop.example", "sec-fetch-site": "cross-site"}
        assert shared_client.get("/client.js", headers=headers).status_code == 200


class TestMetrics:
    def test_name_no_key_and_can_be_opened(self, start: Callable[..., Client], tmp_path: Path) -> None:
        text, key = make("main", ["recs:read"])
        add(tmp_path / "keys", key)
        client = start(tmp_path, keys_file=tmp_path / "keys", open_metrics=True)
        client.get("/v1/model", headers=bearer(text))
        client.get(f"/{text}", headers=bearer(text))
        shown = client.get("/metrics")
        assert shown.status_code == 200
        assert not any(secret in shown.text for secret in (text, text.rpartition("_")[2], key.sha256))
        client.close()


def test_a_key_has_as_many_requests_as_it_says(
    start: Callable[..., Client], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    few, few_key = make("main", ["recs:read"], requests_per_minute=5)
    many, many_key = make("main", ["recs:read"])
    add(tmp_path / "keys", few_key)
    add(tmp_path / "keys", many_key)
    server = request.getfixturevalue("redis_server")
    for redis_url in (None, server.url):
        clients = [start(tmp_path, keys_file=tmp_path / "keys", redis_url=redis_url) for _ in range(2)]
        together = clients if redis_url else clients[:1]  # without Redis each process counts for itself
        answers = [together[n % len(together)].get("/v1/model", headers=bearer(few)) for n in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 3
        assert_refused(answers[-1], 429)
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
        assert clients[0].get("/v1/model", headers=bearer(many)).status_code == 200
        if redis_url:
            server.kill()  # from now on each process counts alone
            answers = [clients[0].get("/v1/model", headers=bearer(few)) for n in range(7)]
            assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
        for client in clients:
            client.close()


def test_processes_on_a_cluster_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "REDIS_TIMEOUT_S", 60.0)  # on a machine with other things to do
    cluster = running_cluster()
    _, key = make("main", ["recs:read"], requests_per_minute=5)
    _, other = make("main", ["recs:read"], requests_per_minute=5)

    async def law() -> None:
        processes = [RateLimiter(cluster.url, "lisarec") for _ in range(2)]
        try:
            for n in range(5):
                await processes[n % 2].count(key)
            for process in processes:
                with pytest.raises(TooManyRequests):
                    await process.count(key)
                await process.count(other)
        finally:
            for process in processes:
                await process.close()

    asyncio.run(law())


def test_without_the_cluster_each_process_counts_alone() -> None:
    _, key = make("main", ["recs:read"], requests_per_minute=2)

    async def law() -> None:
        alone = RateLimiter("redis://127.0.0.1:1,127.0.0.1:2", "lisarec")
        try:
            await alone.count(key)
            await alone.count(key)
            with pytest.raises(TooManyRequests):
                await alone.count(key)
        finally:
            await alone.close()

    asyncio.run(law())


def test_the_cli_makes_lists_and_removes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from app.cli import main

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["keys", *arguments, "--keys", str(tmp_path / "new" / "keys")])
        assert not exit_.value.code
        return capsys.readouterr().out.strip()

    text = run(
        "add", "--scope", "events:write", "--origin", SHOP, "--tenant", "books", "--rate", "600", "--note", "web"
    )
    (key,) = read(tmp_path / "new" / "keys")
    assert Keyring(tmp_path / "new" / "keys", ["books"]).find(text) == key
    listed = run("list")
    assert all(part in listed for part in (key.id, "books", "events:write", SHOP, "600/min", "web"))
    assert key.sha256 not in listed
    run("remove", key.id)
    assert read(tmp_path / "new" / "keys") == []


def test_the_line_of_a_key_is_as_the_manual_shows_it() -> None:
    _, key = make("main", ["recs:read"], note="the app")
    assert list(json.loads(key.line())) == ["id", "tenant", "scopes", "sha256", "note"]
