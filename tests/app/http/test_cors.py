"""CORS without keys: pages of other origins get no access."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from tests.app.conftest import Client
from tests.app.support import assert_refused


class TestWithoutKeys:
    """Without keys every client has all rights, so pages of other origins must have none."""

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
    def test_pages_of_other_origins_get_no_access(self, shared_client: Client, headers: dict[str, str]) -> None:
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
            {"host": "anything.example", "accept-language": "*", "sec-fetch-mode": "cors"},  # Node.js
        ],
    )
    def test_its_own_page_and_other_programs_get_access(self, shared_client: Client, headers: dict[str, str]) -> None:
        assert shared_client.get("/v1/items/popular", headers=headers).status_code == 200
        assert shared_client.post("/v1/recommendations", json={"user_id": "ada"}, headers=headers).status_code == 200

    @pytest.mark.parametrize("path", ["/v1/stats", "/v1/admin/audit", "/v1/users/ada/recommendations", "/metrics"])
    def test_a_page_under_another_host_name_cannot_read(self, shared_client: Client, path: str) -> None:
        """Without TLS, browsers send neither Origin nor Sec-Fetch-Site for a GET to the page's own host."""
        headers = {"host": "evil.example:8000", "accept-language": "en", "user-agent": "Mozilla/5.0"}
        assert_refused(shared_client.get(path, headers=headers), 403)
        assert shared_client.get(path, headers=headers | {"host": "127.0.0.1:8000"}).status_code == 200

    def test_every_page_may_load_the_script(self, shared_client: Client) -> None:
        headers = {"origin": "https://shop.example", "sec-fetch-site": "cross-site"}
        assert shared_client.get("/client.js", headers=headers).status_code == 200
