"""Validation of bodies, paths and queries, and the single shape of errors."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from app.schemas.events import PostedEvent
from app.schemas.recommendations import RecommendationBatch, RecommendationRequest
from tests.app.conftest import Client
from tests.app.http.request_bodies import JSON, MALFORMED, POSTS, bodies
from tests.app.support import SECRET, assert_refused

LIMIT = 1 << 20


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(("status", "body"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_body_is_refused(shared_client: Client, path: str, status: int, body: bytes) -> None:
    assert_refused(shared_client.post(path, content=body, headers=JSON), status)


class TestBodyLimit:
    @pytest.mark.parametrize("path", POSTS)
    def test_refuses_a_too_large_body_unread(self, shared_client: Client, path: str) -> None:
        padding = b" " * LIMIT
        assert_refused(shared_client.post(path, content=b"{}" + padding, headers=JSON), 413)

    @pytest.mark.parametrize("path", POSTS)
    def test_refuses_a_too_large_chunked_body(self, shared_client: Client, path: str) -> None:
        chunks_read = 0

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal chunks_read
            for _ in range(40):
                chunks_read += 1
                yield b" " * (LIMIT // 16)

        assert_refused(shared_client.post(path, content=chunks(), headers=JSON), 413)
        assert chunks_read == 17

    def test_accepts_a_body_at_the_limit(self, client: Client) -> None:
        event = b'{"user_id": "ada", "item_id": "item-1"}'
        assert client.post("/v1/events", content=event.ljust(LIMIT), headers=JSON).status_code == 200
        assert_refused(client.post("/v1/events", content=event.ljust(LIMIT + 1), headers=JSON), 413)
        assert len(client.log("ada")) == 1


def test_a_byte_order_mark_is_refused_with_a_hint(shared_client: Client) -> None:
    refusal = shared_client.post("/v1/events", content=b'\xef\xbb\xbf{"user_id": "ada", "item_id": "i"}', headers=JSON)
    assert_refused(refusal, 400)
    assert refusal.json()["error"]["message"] == "the body begins with a byte order mark; send UTF-8 without it"


def test_an_invalid_search_text_names_its_parameter(shared_client: Client) -> None:
    refusal = shared_client.get("/v1/items", params={"query": "x" * 257})
    assert [detail["field"] for detail in refusal.json()["error"]["details"]] == ["query"]


@pytest.mark.parametrize("params", ['{"a": 1, "a": 2}', '{"a": NaN}', "[1]", "{"])
def test_params_in_a_query_are_validated_like_a_body(shared_client: Client, params: str) -> None:
    query = {"filter": "params.a == 1.0", "params": params}
    assert_refused(shared_client.get("/v1/users/ada/recommendations", params=query), 422)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "json", SECRET])
def test_a_content_type_other_than_json_is_refused(shared_client: Client, path: str, content_type: str) -> None:
    response = shared_client.post(path, content=b"{}", headers={"content-type": content_type})
    assert_refused(response, 415)


@pytest.mark.parametrize("path", POSTS)
def test_a_compressed_body_is_refused(shared_client: Client, path: str) -> None:
    headers = JSON | {"content-encoding": "gzip"}
    response = shared_client.post(path, content=gzip.compress(b"{}"), headers=headers)
    assert_refused(response, 415)
    message = response.json()["error"]["message"]
    assert message == "the body must not be compressed; send it without Content-Encoding"


@pytest.mark.parametrize(
    "headers", [{}, JSON, {"content-type": "Application/JSON; charset=utf-8"}, {"content-encoding": "Identity"}]
)
def test_the_content_type_may_be_absent(client: Client, headers: dict[str, str]) -> None:
    event = b'{"user_id": "ada", "item_id": "item-1"}'
    assert client.post("/v1/events", content=event, headers=headers).status_code == 200


@pytest.mark.parametrize("id_in_path", ["%C2%85", "%2E", "%2e%2e", "%00", "%FF", "%C3", "a%0A", "a" * 129, "%ED%A0%80"])
@pytest.mark.parametrize("path", ["/v1/users/{}", "/v1/users/{}/recommendations"])
def test_a_path_with_a_bad_id_is_refused(shared_client: Client, path: str, id_in_path: str) -> None:
    assert_refused(shared_client.get(path.format(id_in_path)), 422, 404)


@pytest.mark.parametrize("id_in_path", ["a%40b", "a:b", "A-z_0.9", "...", "a" * 128])
def test_a_path_with_a_valid_id_is_accepted(shared_client: Client, id_in_path: str) -> None:
    assert shared_client.get(f"/v1/users/{id_in_path}/recommendations").status_code == 200


CALLS = [
    ("POST", "/v1/events"),
    ("POST", "/v1/recommendations"),
    ("GET", "/v1/users/ada"),
    ("GET", "/v1/users/ada/recommendations"),
    ("GET", "/v1/items/popular"),
    ("GET", "/v1/items"),
    ("GET", "/v1/model"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
]


# of paths with more than one call
ALLOWED = {
    "/v1/users/ada": "DELETE, GET",
    "/v1/items": "GET, POST",
    "/healthz": "GET, HEAD",
    "/readyz": "GET, HEAD",
}


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_every_call_refuses_unknown_query_parameters(shared_client: Client, method: str, path: str) -> None:
    body = {"user_id": "ada", "item_id": "item-1"} if path == "/v1/events" else {"user_id": "ada"}
    options = {"json": body} if method == "POST" else {}
    assert_refused(shared_client.request(method, f"{path}?{SECRET}={SECRET}", **options), 422)


@pytest.mark.parametrize(
    ("method", "path", "body", "meant"),
    [
        ("GET", "/v1/users/ada/recommendations?exclude_sen=all", None, "exclude_seen or exclude_events"),
        ("GET", "/v1/items?limt=3", None, "limit"),
        ("POST", "/v1/recommendations", {"user_id": "ada", "diversty": 0.5}, "diversity"),
        ("POST", "/v1/events", {"user_id": "ada", "item": "item-1"}, "items or item_id"),
        ("POST", "/v1/events", {"user_id": "ada", "item_id": "item-1", SECRET: 1}, None),
        ("POST", "/v1/events", {"user_id": "ada", "item_id": "item-1", "u" * 100_000: 1}, None),
    ],
)
def test_an_unknown_field_suggests_the_known_ones(
    shared_client: Client, method: str, path: str, body: dict[str, Any] | None, meant: str | None
) -> None:
    answer = shared_client.request(method, path, json=body) if body else shared_client.request(method, path)
    assert_refused(answer, 422)
    reasons = " ".join(detail["reason"] for detail in answer.json()["error"]["details"])
    assert (f"has an unknown field, did you mean {meant}?" in reasons) == (meant is not None)
    assert "has an unknown field" in reasons
    known = reasons.partition("known fields: ")[2]
    if path == "/v1/events":
        assert set(known.split(", ")) == {field.alias or name for name, field in PostedEvent.model_fields.items()}


def test_every_parameter_has_a_description(shared_client: Client) -> None:
    paths = shared_client.get("/openapi.json").json()["paths"]
    parameters = [one for calls in paths.values() for call in calls.values() for one in call.get("parameters", [])]
    assert len(parameters) > 50
    assert {(one["in"], one["name"]) for one in parameters if not one.get("description")} == set()


@pytest.mark.parametrize("name", ["events", "items"])
def test_a_wrapped_batch_gets_a_hint(shared_client: Client, name: str) -> None:
    one = {"item_id": "item-1"} | ({"user_id": "ada"} if name == "events" else {})
    answer = shared_client.post(f"/v1/{name}", json={name: [one]})
    assert_refused(answer, 422)
    (detail, *_) = answer.json()["error"]["details"]
    assert detail["reason"].startswith(f"has an unknown field; send several {name} as an array, such as [{{")
    assert "did you mean" not in detail["reason"]


def test_null_means_absent_where_documented(shared_client: Client) -> None:
    schemas = shared_client.get("/openapi.json").json()["components"]["schemas"]
    bodies = {
        "PostedEvent": ("/v1/events", {"user_id": "ada", "item_id": "item-1"}),
        "RecommendationRequest": ("/v1/recommendations", {"user_id": "ada"}),
        "PostedItem": ("/v1/items", {"item_id": "item-1"}),
    }
    for name, (path, body) in bodies.items():
        for field, schema in schemas[name]["properties"].items():
            if field in body:
                continue
            allows_null = {"type": "null"} in schema.get("anyOf", [])
            is_taken = shared_client.post(path, json=body | {field: None})
            assert is_taken.status_code == (200 if allows_null else 422), (name, field, is_taken.text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/events", {"user_id": "ada", "item_id": "item-1", "type": None}),
        ("/v1/events", [{"user_id": None, "item_id": "item-1"}]),
        ("/v1/recommendations", {"user_id": "ada", "k": None}),
        ("/v1/recommendations", {"user_id": "ada", "mode": None}),
        ("/v1/recommendations", {"requests": [{"user_id": "ada", "exclude": None}]}),
    ],
)
def test_a_null_that_is_refused_is_named(shared_client: Client, path: str, body: object) -> None:
    answer = shared_client.post(path, json=body)
    assert_refused(answer, 422)
    (detail,) = answer.json()["error"]["details"]
    assert detail["reason"] == "is null; give it a value, or leave it out if it is optional"


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        ("/v1/events", [None, {"user_id": "ada", "item_id": "item-1"}, "x"], [(0, None), (2, None)]),
        ("/v1/events", 7, [(0, None)]),
        ("/v1/items", [{"item_id": "item-1"}, []], [(1, None)]),
        ("/v1/recommendations", [], [(None, None)]),
        ("/v1/recommendations", {"requests": [None]}, [(None, "requests.0")]),
        ("/v1/users/ada/merge", "bob", [(None, None)]),
    ],
)
def test_a_body_that_is_no_object_is_refused_as_such(
    shared_client: Client, path: str, body: object, at: list[tuple[int | None, str | None]]
) -> None:
    answer = shared_client.post(path, json=body)
    assert_refused(answer, 422)
    details = answer.json()["error"]["details"]
    assert [(detail["index"], detail["field"]) for detail in details] == at
    assert {detail["reason"] for detail in details} == {"is not a JSON object"}


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_every_call_refuses_other_methods(shared_client: Client, method: str, path: str) -> None:
    other = shared_client.request("PATCH", path)
    assert_refused(other, 405)
    assert other.headers["allow"] == ALLOWED.get(path, method)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v2/events", "/v1/events/", f"/{SECRET}", "/v1/users//", "/docs", "/%C3%BF"]
)
def test_other_paths_are_not_found(shared_client: Client, path: str) -> None:
    assert_refused(shared_client.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path", "way_out"),
    [
        ("GET", "/v1/items/unheard-of/similar", "show popular items until it has codes"),
        ("GET", "/v1/items/unheard-of/together", "show popular items until it has codes"),
        ("GET", "/v1/items/unheard-of", "PUT it, or train a model with it"),
        ("GET", "/v1/users/unheard-of", "check the id, or treat the user as new"),
        ("GET", "/v1/users/unheard-of/events", "check the id, or treat the user as new"),
        ("DELETE", "/v1/users/unheard-of/events/e1", "see the user's log"),
        ("POST", "/v1/admin/generations/unheard-of/activate", "copy the model there"),
        ("GET", "/v2", "/openapi.json lists all paths"),
    ],
)
def test_not_found_errors_suggest_a_remedy(shared_client: Client, method: str, path: str, way_out: str) -> None:
    answer = shared_client.request(method, path)
    assert_refused(answer, 404)
    assert way_out in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "query",
    ["/v1/items/popular?k=0", "/v1/items/popular?k=1&k=1", "/v1/items?limit=1001", "/v1/items?query=" + "q" * 257],
)
def test_queries_of_the_catalogue_have_bounds(shared_client: Client, query: str) -> None:
    assert_refused(shared_client.get(query), 422)


@pytest.mark.parametrize(
    ("path", "schema", "body"),
    [
        ("/v1/recommendations", RecommendationRequest, {"user_id": "ada", "boosts": {}}),
        ("/v1/recommendations", RecommendationBatch, {"requests": [{"user_id": "ada"}], "boosts": {}}),
        ("/v1/events", PostedEvent, {"user_id": "ada", "item_id": "item-1", "products": 1}),
    ],
)
def test_errors_list_all_allowed_values(
    shared_client: Client, path: str, schema: type[BaseModel], body: dict[str, Any]
) -> None:
    response = shared_client.post(path, json=body)
    assert response.status_code == 422
    reason = response.json()["error"]["details"][0]["reason"]
    names = [field.alias or name for name, field in schema.model_fields.items()]
    assert all(re.search(rf"\b{name}\b", reason) for name in names), reason


def test_many_errors_are_listed_within_a_size_limit(shared_client: Client) -> None:
    alone = shared_client.post("/v1/recommendations", json={"user_id": "ada", "boosts": {}}).json()["error"]["details"]
    response = shared_client.post("/v1/recommendations", json={"requests": [{"user_id": "ada", "boosts": {}}] * 100})
    assert len(response.content) <= 4_096
    details = response.json()["error"]["details"]
    assert len(details) > 3
    assert {detail["reason"] for detail in details} == {alone[0]["reason"]}


def test_an_encoded_slash_does_not_separate_path_segments(shared_client: Client) -> None:
    assert_refused(shared_client.get("/v1/users/ada%2Frecommendations"), 404)  # of a user without events


class TestFuzzing:
    """Exceptions of the app reach the test and fail it."""

    @given(path=st.sampled_from(POSTS), body=bodies)
    @settings(max_examples=150)
    @pytest.mark.slow
    def test_any_json_causes_no_bug(self, shared_client: Client, path: str, body: Any) -> None:
        response = shared_client.post(path, content=json.dumps(body), headers=JSON)
        if response.status_code != 200:
            assert_refused(response)

    @given(path=st.sampled_from(POSTS), body=st.binary(max_size=200))
    @settings(max_examples=100)
    def test_any_bytes_cause_no_bug(self, shared_client: Client, path: str, body: bytes) -> None:
        assert_refused(shared_client.post(path, content=body, headers=JSON))

    @given(
        user_id=st.text(min_size=1, max_size=20), name=st.sampled_from(["k", "exclude", "query", "x"]), value=st.text()
    )
    @settings(max_examples=150)
    @pytest.mark.slow
    def test_any_path_and_query_cause_no_bug(self, shared_client: Client, user_id: str, name: str, value: str) -> None:
        query = f"{quote(name)}={quote(value, errors='replace')}"
        for path in (f"/v1/users/{quote(user_id, safe='', errors='replace')}/recommendations", "/v1/items"):
            response = shared_client.get(f"{path}?{query}")
            if response.status_code != 200:
                assert_refused(response)


def test_the_description_of_every_schema_is_prose(shared_client: Client) -> None:
    """OpenAPI viewers would join an attribute list of a docstring into one paragraph."""
    schemas = shared_client.get("/openapi.json").json()["components"]["schemas"]
    listed = [
        name for name, one in schemas.items() if re.search(r"^\w+ {2,}", one.get("description", ""), re.MULTILINE)
    ]
    assert listed == []
