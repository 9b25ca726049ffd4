"""Cache headers: shared caches may store only what is the same for everybody."""

from __future__ import annotations

import pytest

from tests.app.conftest import Client
from tests.app.http.middleware.server import Server, post, request

USERS_LIST = "/v1/users/ada/recommendations"
PATHS = [
    *(USERS_LIST, f"{USERS_LIST}?explain=true", f"{USERS_LIST}?cursor=x", "/v1/users/nobody/events", "/v1/model"),
    *("/v1/items/popular", "/metrics", "/healthz", "/nothing", "/v1/users/%00", "/v1/events", f"{USERS_LIST}?k=0"),
]


@pytest.mark.parametrize("path", PATHS)
def test_responses_about_users_and_tenants_are_not_cacheable(shared_client: Client, path: str) -> None:
    ((_, headers, _),) = shared_client.runner.run(Server(shared_client).exchange(request(path)))
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/v1/recommendations", "/v1/recommendations?", "/v1/portable/recommendations"])
def test_responses_to_calls_with_a_body_are_not_cacheable(shared_client: Client, path: str) -> None:
    sent = post({"user_id": "ada"}, path=path)
    ((_, headers, _),) = shared_client.runner.run(Server(shared_client).exchange(sent))
    assert headers["cache-control"] == "no-store"


def test_the_browser_script_is_cacheable(shared_client: Client) -> None:
    script, head = shared_client.get("/client.js"), shared_client.request("HEAD", "/client.js")
    assert (script.status_code, head.status_code, head.content) == (200, 200, b"")
    assert script.headers["cache-control"] == head.headers["cache-control"] == "public, max-age=3600"
    assert head.headers["content-length"] == str(len(script.content))
