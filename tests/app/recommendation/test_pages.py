"""Pages of a list and their cursors, on both stores."""

from __future__ import annotations

import json
import zlib
from base64 import urlsafe_b64encode
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.schemas.cursor import MAX_ITEMS, MAX_RATIO, cursor_after, shown_before
from app.schemas.fields import MAX_K
from tests.app.conftest import SOLD_OUT, Client, item_id
from tests.app.support import ALL_ITEMS, all_pages, item_ids, recommend

ANY_ID = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=128)


class TestPages:
    @pytest.mark.parametrize("rule", [{}, {"diversity": 0.6}, {"pin": [{"item_id": "item-40", "place": 33}]}])
    def test_no_item_appears_twice_across_pages(self, shop: Client, rule: dict[str, Any]) -> None:
        """Between pages the user clicks on shown and on other items."""
        user_id = f"reader-{len(json.dumps(rule))}"
        shown: list[str] = []
        for page in all_pages(shop, {"user_id": user_id, "k": 7, "exclude_seen": "none", **rule}):
            shown += item_ids(page)
            shop.click(user_id, page["items"][0]["item_id"], item_id(len(shown)))
        assert len(set(shown)) == len(shown)
        assert set(shown) == set(ALL_ITEMS) - set(SOLD_OUT)

    def test_items_seen_between_pages_are_excluded(self, shop: Client) -> None:
        first = recommend(shop, user_id="leaver", k=5, cursor="")
        clicked = [item for item in ALL_ITEMS if item not in item_ids(first)][:3]
        shop.click("leaver", *clicked)
        rest = recommend(shop, user_id="leaver", k=MAX_K, cursor=first["cursor"])
        assert set(item_ids(rest)) == set(ALL_ITEMS) - set(SOLD_OUT) - set(clicked) - set(item_ids(first))

    def test_items_sold_out_between_pages_are_excluded(self, shop: Client) -> None:
        first = recommend(shop, history=["item-1"], k=5, cursor="")
        shop.request("PUT", "/v1/items/item-50", json={"available": False})
        rest = recommend(shop, history=["item-1"], k=MAX_K, cursor=first["cursor"])
        shop.request("PUT", "/v1/items/item-50", json={"available": True})
        assert "item-50" not in item_ids(first) + item_ids(rest)
        assert rest["cursor"] is None

    @pytest.mark.parametrize("user_id", ["pager", "pager@shop.example"])
    def test_a_query_string_returns_pages(self, shop: Client, user_id: str) -> None:
        """The second user's path is percent-encoded, so that a declared route answers."""
        path = f"/v1/users/{quote(user_id, safe='')}/recommendations"
        first = shop.get(path, params={"k": 5, "cursor": ""}).json()
        second = shop.get(path, params={"k": 5, "cursor": first["cursor"]}).json()
        assert len({*item_ids(first), *item_ids(second)}) == 10

    def test_a_cursor_is_returned_only_on_request(self, shop: Client) -> None:
        assert "cursor" not in recommend(shop, user_id="clicker", k=5)

    def test_similar_items_have_pages_too(self, shop: Client) -> None:
        whole = item_ids(recommend(shop, history=[], because="item-5", k=MAX_K))
        pages = all_pages(shop, {"history": [], "because": "item-5", "k": 9})
        assert [item for page in pages for item in item_ids(page)] == whole

    @given(ids=st.lists(st.sampled_from([*ALL_ITEMS, "x" * 128]) | ANY_ID, unique=True, min_size=1))
    def test_a_cursor_contains_the_shown_items(self, ids: list[str]) -> None:
        assert list(shown_before(cursor_after(ids))) == ids

    @pytest.mark.parametrize("character", ["x", "\N{TEAPOT}"])
    def test_similar_ids_round_trip_within_the_compression_limit(self, character: str) -> None:
        ids = [f"{character * 123}{number:05}" for number in range(MAX_ITEMS)]
        cursor = cursor_after(ids)
        assert list(shown_before(cursor)) == ids
        assert len("\n".join(ids).encode()) <= MAX_RATIO * len(cursor)


def packed(text: bytes, layout: bytes = b"\x01") -> str:
    return urlsafe_b64encode(layout + zlib.compress(text)).decode().rstrip("=")


BAD_CURSORS = {
    "no base64": "!!!",
    "not ASCII": "ä",
    "nothing in it": "AQ",
    "noise": "AX" + "A" * 50,
    "half of one": cursor_after(ALL_ITEMS)[:-9],
    "more behind it": cursor_after(ALL_ITEMS) + "AAAA",
    "another layout": packed(b"item-1", b"\x02"),
    "no ids": packed(b"item\x1f1\nitem-2"),
    "an empty id": packed(b"item-1\n"),
    "no UTF-8": packed(b"\xff\xfe"),
    "too many ids": packed(b"\n".join(b"%d" % n for n in range(10_001))),
    "a bomb": packed(b"a" * 30_000_000),
    "one id ten thousand times": packed("\n".join(["\N{TEAPOT}" * 128] * MAX_ITEMS).encode()),
}


class TestCursors:
    @pytest.mark.parametrize("cursor", BAD_CURSORS.values(), ids=BAD_CURSORS)
    def test_no_other_text_is_a_cursor(self, shop: Client, cursor: str) -> None:
        for response in (
            shop.post("/v1/recommendations", json={"user_id": "clicker", "cursor": cursor}),
            shop.get("/v1/users/clicker/recommendations", params={"cursor": cursor}),
        ):
            assert response.status_code == 422
            assert [detail["field"] for detail in response.json()["error"]["details"]] == ["cursor"]

    def test_a_forged_cursor_only_excludes_its_items(self, shop: Client) -> None:
        answer = recommend(shop, user_id="nobody", k=MAX_K, cursor=cursor_after(["item-1", "item-2", "unheard-of"]))
        assert set(item_ids(answer)) == set(ALL_ITEMS) - set(SOLD_OUT) - {"item-1", "item-2"}
