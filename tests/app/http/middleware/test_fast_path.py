"""The fast path returns what the declared routes return, for valid and invalid requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.auth.keys import add, make
from app.http.middleware import fast_path
from app.schemas.cursor import cursor_after
from app.schemas.events import MAX_EVENTS
from app.schemas.recommendations import MAX_REQUESTS
from app.settings import Settings
from tests.app.conftest import Client, write_model
from tests.app.http.request_bodies import JSON, MALFORMED, POSTS, bodies
from tests.app.support import assert_refused, bearer

GET = "/v1/users/{}/recommendations"
EVENT = {"event_id": "e", "user_id": "ada", "item_id": "item-1", "timestamp": 1_700_000_000}


def assert_same(client: Client, method: str, url: str, **options: Any) -> httpx.Response:
    """Compare the fast path with the declared route; return the response."""
    if url.partition("?")[0] == "/v1/events":
        client.request(method, url, **options)  # so that both are told of duplicates
    directly = client.request(method, url, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path, "fast_answer", lambda *_: None)
        declared = client.request(method, url, **options)
    assert directly.status_code == declared.status_code, (directly.text, declared.text)
    assert shown(directly) == shown(declared)
    ignored = {"x-request-id", "server-timing"}
    if directly.status_code == 200:
        ignored.add("content-length")  # scores as text
    assert heads(directly, ignored) == heads(declared, ignored)
    return directly


def heads(response: httpx.Response, ignored: set[str]) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in ignored}


def shown(response: httpx.Response) -> Any:
    """The response in its order, without generated ids."""

    def without_ids(fields: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in fields if name != "recommendation_id"]

    return json.loads(response.content, object_pairs_hook=without_ids)


@pytest.fixture(scope="module")
def known(shared_client: Client) -> Client:
    shared_client.click("ada", "item-1", "item-2", "item-9")
    return shared_client


QUERIES = {
    "": 200,
    "k=5": 200,
    "k=05": 200,
    "k=1000&exclude_seen=none": 200,
    "exclude_seen=all": 200,
    "categories=tea&categories=cup": 200,
    "categories=gr%C3%BCn": 200,
    "categories=a+b": 200,
    "categories=%FF": 422,
    "exclude=item-3&exclude=item-4&k=60": 200,
    "exclude=item-3&exclude=item-3": 200,
    "k=": 422,
    "k": 422,
    "k=0": 422,
    "k=1001": 422,
    "k=+5": 422,
    "k=5.0": 422,
    "k=1_0": 422,
    "k=%35": 200,
    "k=5&k=5": 422,
    "k=5&K=5": 422,
    "exclude_seen=never": 422,
    "exclude_events=click,purchase&within=90d": 200,
    "exclude_events=click&exclude_events=purchase": 200,
    "exclude_events=": 422,
    "exclude_events=click&within=90": 422,
    "within=90d": 422,
    "exclude_seen=none&exclude_seen=none": 422,
    "exclude=a%C2%85b": 422,
    "exclude=": 422,
    "categories=": 422,
    "explain=true&k=3": 200,
    "explain=false": 200,
    "explain=1": 422,
    "explain=True": 422,
    "explain": 422,
    "because=item-3": 200,
    "because=": 200,
    "because=unheard-of": 200,
    "because=a%C2%85b": 422,
    "mode=repeat": 200,
    "mode=repeat&k=3&exclude_seen=all": 200,
    "mode=next": 200,
    "mode=": 422,
    "mode=again": 422,
    "mode=repeat&because=": 422,
    "mode=repeat&basket_only=true": 422,
    "user_id=bob": 422,
    "history=item-1": 422,
    "candidates=item-1": 422,
    "&&": 200,
    "=": 422,
    "x=1": 422,
    "exclude=%C3%A4": 200,
    "cursor=": 200,
    f"cursor={cursor_after(['item-3', 'item-4'])}&k=3": 200,
    "cursor=x": 422,
    "cursor=&cursor=": 422,
}


@pytest.mark.parametrize(("query", "status"), QUERIES.items())
def test_queries(known: Client, query: str, status: int) -> None:
    assert assert_same(known, "GET", f"{GET.format('ada')}?{query}").status_code == status


@pytest.mark.parametrize(
    "user_id",
    [
        *("ada", "nobody", "a:b", "a%40b", "...", "a" * 128, "a" * 129, "..", "%2E", "a b", "a%2Fb", "%00", "ä"),
        *("%C2%85", "%ff", "100%25", "%E5%95%86%E5%93%81", "%2F", "ada%2frecommendations"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_users_and_methods(known: Client, method: str, user_id: str) -> None:
    assert_same(known, method, GET.format(user_id))


@pytest.mark.parametrize(
    "url", ["/v1/users//recommendations", f"{GET.format('ada')}/", "/v1/users/a/b/recommendations"]
)
def test_paths_beside_it(known: Client, url: str) -> None:
    assert assert_same(known, "GET", url).status_code == 404


VALID_BODIES: dict[str, list[Any]] = {
    "/v1/events": [EVENT, [EVENT] * 3, {"user_id": "ada", "item_id": "nothing-here", "value": 1.5, "type": "purchase"}],
    "/v1/recommendations": [
        {"user_id": "ada", "k": 60, "exclude_seen": "none"},
        {"user_id": "nobody", "categories": ["tea"]},
        {"user_id": "ada", "because": "", "explain": True},
        {"history": ["item-1", "nothing-here"], "candidates": ["item-2", "item-3"], "exclude": ["item-2"]},
        {"requests": [{"user_id": "ada"}, {"history": [], "k": 3}]},
    ],
}
INVALID_BODIES: dict[str, list[Any]] = {
    "/v1/events": [[], [EVENT] * (MAX_EVENTS + 1), {**EVENT, "x": 1}, {**EVENT, "user_id": "a\x85b"}, [EVENT, {}]],
    "/v1/recommendations": [
        {},
        {"user_id": "ada", "history": []},
        {"user_id": "ada", "k": "5"},
        {"requests": []},
        {"requests": [{"user_id": "ada"}] * (MAX_REQUESTS + 1)},
    ],
}


@pytest.mark.parametrize("path", POSTS)
def test_bodies(known: Client, path: str) -> None:
    assert {assert_same(known, "POST", path, json=body).status_code for body in VALID_BODIES[path]} == {200}
    assert {assert_same(known, "POST", path, json=body).status_code for body in INVALID_BODIES[path]} == {422}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [body for _, body in MALFORMED.values()], ids=MALFORMED)
def test_malformed_bodies(known: Client, path: str, body: bytes) -> None:
    assert assert_same(known, "POST", path, content=body, headers=JSON).status_code in (400, 422)


@pytest.mark.parametrize("path", POSTS)
def test_heads_of_posts(known: Client, path: str) -> None:
    body = VALID_BODIES[path][0]
    assert assert_same(known, "POST", path, json=body, headers={"content-type": "text/plain"}).status_code == 415
    assert assert_same(known, "POST", path, json=body, headers={"content-encoding": "gzip"}).status_code == 415
    assert assert_same(known, "POST", path, content=b" " * (1 << 21)).status_code == 413
    assert assert_same(known, "POST", f"{path}?x=1", json=body).status_code == 422
    assert assert_same(known, "POST", f"{path}?", json=body).status_code == 200
    assert assert_same(known, "GET", path).status_code == 405


@given(path=st.sampled_from(POSTS), body=bodies)
@settings(max_examples=25)
def test_any_json(known: Client, path: str, body: Any) -> None:
    assert_same(known, "POST", path, content=json.dumps(body), headers=JSON)


@given(
    user_id=st.text(min_size=1, max_size=8),
    query=st.lists(
        st.tuples(st.sampled_from(["k", "exclude", "categories", "exclude_seen", "x"]), st.text(max_size=5))
    ),
)
@settings(max_examples=100)
def test_any_user_and_query(known: Client, user_id: str, query: list[tuple[str, str]]) -> None:
    text = "&".join(f"{name}={quote(value, errors='replace')}" for name, value in query)
    assert_same(known, "GET", f"{GET.format(quote(user_id, safe='', errors='replace'))}?{text}")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, dict[str, str]]]:
    """A service with keys of every kind."""
    directory = tmp_path_factory.mktemp("guarded")
    texts = {"none": "", "wrong": "lisarec_0_0"}
    kinds: dict[str, Any] = {
        "right": {"scopes": ["events:write", "recs:read"]},
        "other scope": {"scopes": ["metrics:read"]},
        "a browser's": {"scopes": ["events:write"], "origins": ["https://shop.example"]},
    }
    for name, kind in kinds.items():
        texts[name], key = make("main", **kind)
        add(directory / "keys", key)
    model_dir = write_model(directory / "models" / "tiny")
    client = Client(Settings(model_dir=model_dir, data_dir=directory, keys_file=directory / "keys"))
    yield client, texts
    client.close()


@pytest.mark.parametrize("origin", ["", "https://shop.example", "https://elsewhere.example"])
@pytest.mark.parametrize(
    ("kind", "statuses"),
    {
        "none": (401,),
        "wrong": (401,),
        "right": (200,),
        "other scope": (403,),
        "a browser's": (200, 403),
    }.items(),
)
def test_keys(guarded: tuple[Client, dict[str, str]], kind: str, statuses: tuple[int, ...], origin: str) -> None:
    client, texts = guarded
    headers = (bearer(texts[kind]) if texts[kind] else {}) | ({"origin": origin} if origin else {})
    assert assert_same(client, "GET", GET.format("ada"), headers=headers).status_code in statuses
    for path in POSTS:
        assert assert_same(client, "POST", path, json=VALID_BODIES[path][0], headers=headers).status_code in statuses


def test_a_key_that_is_used_up(guarded: tuple[Client, dict[str, str]]) -> None:
    client, _ = guarded
    text, key = make("main", ["events:write", "recs:read"], requests_per_minute=1)
    assert client.settings.keys_file is not None
    add(client.settings.keys_file, key)
    while client.get(GET.format("ada"), headers=bearer(text)).status_code != 429:
        pass  # the service has not looked at the file yet, or the key has a request left
    refused = client.post("/v1/events", json=EVENT, headers=bearer(text))
    assert_refused(refused, 429)
    assert refused.json()["error"]["code"] == "too_many_requests"
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_an_unavailable_store_is_reported_like_the_declared_routes(start: Any, tmp_path: Path) -> None:
    client = start(tmp_path)
    client.close_store()
    assert assert_same(client, "POST", "/v1/events", json=EVENT).status_code == 503
    assert assert_same(client, "GET", GET.format("ada")).status_code == 200
    client.close()


def test_both_ways_are_counted_under_one_route(client: Client) -> None:
    client.click("ada", "item-1")
    assert_same(client, "POST", "/v1/recommendations", json={"user_id": "ada"})
    assert_same(client, "GET", GET.format("ada"))
    exposition = client.get("/metrics").text
    counts = dict(
        line.rsplit(" ", 1) for line in exposition.splitlines() if line.startswith("lisarec_request_seconds_count")
    )
    assert {labels.partition("route=")[2]: float(count) for labels, count in counts.items()} == {
        '"/v1/events",status="200"}': 1,
        '"/v1/recommendations",status="200"}': 2,
        '"/v1/users/{user_id}/recommendations",status="200"}': 2,
    }


def test_a_bug_returns_500_and_is_logged(known: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(known.service.switcher.recommender, "recommend", fail)
    with pytest.raises(ZeroDivisionError):
        known.get(GET.format("ada"))
    monkeypatch.setattr(known.transport, "raise_app_exceptions", False)
    answer = assert_same(known, "GET", GET.format("ada"))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert len(answer.headers.get_list("x-request-id")) == 1
