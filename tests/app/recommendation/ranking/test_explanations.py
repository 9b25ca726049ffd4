"""Explanations and similar items, recomputed from the model's weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from app.recommendation.ranking.explanations import _fill_contributions, _write_explanations
from app.schemas.recommendations import RecommendationRequest
from app.schemas.scored_items import Explanation, HistoryCodeword, RecentItem, TargetCodeword
from app.serving.empty_model import NAME as NO_MODEL
from app.settings import Settings
from model.artifact import model_directory
from model.lisa.lisa_mini import LisaMini
from tests.app.conftest import ITEMS, Client, categories_of, item_id, write_model
from tests.app.support import item_ids, recommend, same_items
from tests.model.lisa.naive_similarity import similarities
from tests.waiting import PATIENCE_S

CLICKS = [4, 9, 4, 30, 17, 55, 23, 9]


@pytest.fixture(scope="module")
def model_with_followers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with followers for its items."""
    directory = write_model(tmp_path_factory.mktemp("models") / "followed")
    trained = model_directory.load(directory)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        trained.model.followers.copy_(torch.from_numpy(rng.integers(-1, ITEMS, trained.model.followers.shape)))
        trained.model.lift.copy_(torch.from_numpy(rng.random(trained.model.lift.shape, np.float32)))
        trained.model.lift[trained.model.followers < 0] = 0
        trained.model.bias.normal_()
    model_directory.save(directory, trained.model, trained.config, trained.items, {})
    return directory


@pytest.fixture(scope="module")
def model(model_with_followers: Path) -> LisaMini:
    model = model_directory.load(model_with_followers).model
    assert isinstance(model, LisaMini)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def followed(model_with_followers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(Settings(model_dir=model_with_followers, data_dir=tmp_path_factory.mktemp("state")))
    client.click("ada", *map(item_id, CLICKS))
    client.post("/v1/events", json={"user_id": "ada", "item_id": "item-2", "type": "dislike"})
    yield client
    client.close()


def row_of(item: Any) -> int:
    return int(item["item_id"].removeprefix("item-"))


def test_the_parts_of_an_explanation_add_up_to_the_score(followed: Client, model: LisaMini) -> None:
    items = followed.recommend("ada", k=ITEMS, exclude_seen="none", explain="true")["items"]
    assert len(items) == ITEMS
    assert sum(item["explanation"]["follows"] > 0 for item in items) > 5
    for item in items:
        parts = item["explanation"]
        adds = [word["adds"] for word in parts["codewords"]]
        assert adds == sorted(adds, reverse=True)
        total = sum(adds) + parts["other_codewords"] + parts["bias"] + parts["follows"]
        assert item["score"] == pytest.approx(total, abs=1e-4)
        assert parts["bias"] == pytest.approx(float(model.bias[row_of(item)]), abs=1e-6)
        for word in parts["codewords"]:
            assert model.target_codes[row_of(item), word["codebook"]] == word["codeword"]


def test_no_request_waits_for_a_compiler(followed: Client) -> None:
    for request in ({"user_id": "ada"}, {"history": ["item-1"]}, {"user_id": "ada", "because": "item-3"}):
        recommend(followed, **request, explain=True)
    assert len(_fill_contributions.signatures) == len(_write_explanations.signatures) == 1


def test_the_json_equals_orjson(followed: Client) -> None:
    fields = {"codewords": TargetCodeword, "history": HistoryCodeword, "recent_items": RecentItem}
    for wish in ({}, {"boost": {"tea": 0.7}, "basket": ["item-7"], "exclude_seen": "none"}, {"because": "item-3"}):
        for k in (1, 10, ITEMS):
            request = {"user_id": "ada", "k": k, "explain": True, **wish}
            body = followed.post("/v1/recommendations", json=request).content
            answer = orjson.loads(body)
            assert orjson.dumps(answer) == body
            for item in answer["items"]:
                assert ordered(item["explanation"], Explanation)
                for name, kind in fields.items():
                    assert all(ordered(one, kind) for one in item["explanation"][name])


def ordered(found: dict[str, Any], kind: Any) -> bool:
    """Whether the fields equal those of the schema, in its order."""
    names = [name for name in kind.__annotations__ if name in found]
    return list(found) == names and kind.__required_keys__ <= set(names)


def test_a_codeword_adds_its_inner_product_with_the_query(followed: Client, model: LisaMini) -> None:
    user = followed.get("/v1/users/ada").json()
    window = [CLICKS[::-1][:5]]
    query = model.read(torch.tensor([user["histogram"]]), torch.tensor([CLICKS[-1]]), torch.tensor(window))[0]
    for item in followed.recommend("ada", k=20, explain="true")["items"]:
        for word in item["explanation"]["codewords"]:
            expected = float(query @ model.target_codebooks[word["codebook"], word["codeword"]])
            assert word["adds"] == pytest.approx(expected, abs=1e-4)


def test_history_codewords_show_their_share_of_the_history(followed: Client, model: LisaMini) -> None:
    histogram = np.array(followed.get("/v1/users/ada").json()["histogram"])[0]  # (B, W) at the slowest rate
    shares = histogram / histogram.sum(axis=1, keepdims=True)
    for item in followed.recommend("ada", k=20, explain="true")["items"]:
        codes = model.history_codes[row_of(item)].tolist()
        expected = sorted((share for book, code in enumerate(codes) if (share := shares[book, code]) > 0), reverse=True)
        history = item["explanation"]["history"]
        np.testing.assert_allclose([word["share"] for word in history], expected[:3], rtol=1e-5)
        assert all(codes[word["codebook"]] == word["codeword"] for word in history)


def test_recent_items_share_codewords_or_are_followed_by_the_item(followed: Client, model: LisaMini) -> None:
    recent = [2, *dict.fromkeys(reversed(CLICKS))]  # what was disliked is the newest
    found_some = 0
    for item in followed.recommend("ada", k=ITEMS, exclude_seen="none", explain="true")["items"]:
        row, parts = row_of(item), item["explanation"]
        adding = {word["codebook"]: word["adds"] for word in parts["codewords"]}  # all three codebooks
        expected = {}
        for other in recent:
            common = [book for book in range(3) if model.target_codes[row, book] == model.target_codes[other, book]]
            of_history = int((model.history_codes[row] == model.history_codes[other]).sum())
            follows = sum(
                float(lift) * np.exp(-0.7 * ago)
                for ago, newest in enumerate(CLICKS[::-1][:5])
                if newest == other
                for follower, lift in zip(model.followers[newest], model.lift[newest], strict=True)
                if int(follower) == row
            )
            if common or of_history or follows > 0:
                expected[item_id(other)] = (len(common), of_history, sum(adding[book] for book in common), follows)
        shown = {
            one["item_id"]: (one["shared"], one["shared_history"], one["adds"], one["follows"])
            for one in parts["recent_items"]
        }
        assert len(shown) == min(3, len(expected))
        for name, numbers in shown.items():
            assert numbers == pytest.approx(expected[name], abs=1e-4)
        strongest = sorted((adds + follows for _, _, adds, follows in expected.values()), reverse=True)[:3]
        gains = [adds + follows for _, _, adds, follows in shown.values()]
        np.testing.assert_allclose(gains, strongest, atol=1e-4)
        found_some += len(shown)
    assert found_some > ITEMS


def test_explain_changes_nothing_else(followed: Client) -> None:
    for request in ({"user_id": "ada"}, {"history": ["item-4"]}, {"user_id": "nobody"}, {"user_id": "ada", "k": 60}):
        plain, explained = recommend(followed, **request), recommend(followed, **request, explain=True)
        if plain["source"] == "personalised":
            assert all(set(item.pop("explanation")) for item in explained["items"])
        assert explained["items"] == plain["items"]
    batch = [{"user_id": "ada", "k": k, "explain": k % 2 == 0} for k in range(1, 5)]
    for request, answer in zip(batch, recommend(followed, requests=batch)["results"], strict=True):
        assert same_items(answer, recommend(followed, **request))
        assert all(("explanation" in item) == request["explain"] for item in answer["items"])


def most_similar(model: LisaMini, row: int) -> list[str]:
    """All other items, most similar first."""
    order = np.argsort(-similarities(model)[row], kind="stable").tolist()
    return [item_id(other) for other in order if other != row]


class TestSimilar:
    def test_similar_items_equal_brute_force(self, followed: Client, model: LisaMini) -> None:
        for row in range(ITEMS):
            for k in (1, 7, ITEMS):
                answer = followed.get(f"/v1/items/{item_id(row)}/similar", params={"k": k}).json()
                assert item_ids(answer) == most_similar(model, row)[:k]
            assert (answer["source"], answer["because"]["item_id"]) == ("similar", item_id(row))
            scores = [item["score"] for item in answer["items"]]
            assert scores == sorted(scores, reverse=True)

    def test_similar_items_respect_filters(self, followed: Client, model: LisaMini) -> None:
        put = {"available": False}
        gone = most_similar(model, 8)[0]
        followed.request("PUT", f"/v1/items/{gone}", json=put)
        query = {"k": 60, "categories": "tea", "exclude": most_similar(model, 8)[1]}
        answer = followed.get("/v1/items/item-8/similar", params=query).json()
        left = [one for one in most_similar(model, 8)[2:] if "tea" in categories_of(int(one.removeprefix("item-")))]
        assert item_ids(answer) == left
        followed.request("PUT", f"/v1/items/{gone}", json={"available": True})

    def test_similar_items_name_their_shared_codewords(self, followed: Client, model: LisaMini) -> None:
        answer = followed.get("/v1/items/item-8/similar", params={"k": 60, "explain": True}).json()
        for item in answer["items"]:
            parts = item["explanation"]
            total = sum(word["adds"] for word in parts["codewords"]) + parts["other_codewords"] + parts["bias"]
            assert item["score"] == pytest.approx(total, abs=1e-4)
            shared = int((model.target_codes[row_of(item)] == model.target_codes[8]).sum())
            assert [one["shared"] for one in parts["recent_items"] if one["item_id"] == "item-8"] in ([shared], [])
            assert parts["follows"] == 0

    def test_unknown_items_have_no_similar_items(self, followed: Client) -> None:
        answer = followed.get("/v1/items/unheard-of/similar")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "item_not_found")
        for query in ("k=0", "k=1&k=2", "explain=1", "user_id=ada"):
            assert followed.get(f"/v1/items/item-1/similar?{query}").status_code == 422

    def test_concurrent_requests_prepare_similarity_once(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        current, may_go, begun = client.service.switcher.current, threading.Event(), list[int]()
        prepare = current.engine.prepare_similarity

        def prepare_later() -> None:
            begun.append(1)
            may_go.wait(PATIENCE_S)
            prepare()

        monkeypatch.setattr(current.engine, "prepare_similarity", prepare_later)

        async def law() -> None:
            similar, request = current.recommender.similar, RecommendationRequest(history=[])
            asked = [asyncio.create_task(similar(item_id(row), request)) for row in range(4)]
            await asyncio.sleep(0)  # each has begun now
            may_go.set()
            assert {answer["source"] for answer in await asyncio.gather(*asked)} == {"similar"}

        client.runner.run(law())
        assert len(begun) == 1


class TestBecause:
    def test_because_lists_similar_unseen_items(self, followed: Client, model: LisaMini) -> None:
        seen = {item_id(row) for row in [*CLICKS, 2]}
        for wish in ({"because": ""}, {"because": item_id(CLICKS[-1])}):
            answer = followed.recommend("ada", k=ITEMS, **wish)
            assert (answer["source"], answer["because"]["item_id"]) == ("similar", item_id(CLICKS[-1]))
            assert item_ids(answer) == [one for one in most_similar(model, CLICKS[-1]) if one not in seen]
            assert item_ids(recommend(followed, user_id="ada", k=ITEMS, **wish)) == item_ids(answer)
        again = recommend(followed, user_id="ada", k=ITEMS, because="item-30", exclude_seen="none")
        assert item_ids(again) == most_similar(model, 30)

    def test_because_of_several_items_takes_one_request(self, followed: Client, model: LisaMini) -> None:
        rows = [{"user_id": "ada"}, {"user_id": "ada", "because": ""}, {"user_id": "bob", "because": "item-3"}]
        plain, newest, other = recommend(followed, requests=rows)["results"]
        assert item_ids(plain) == item_ids(followed.recommend("ada"))
        assert item_ids(newest) == item_ids(followed.recommend("ada", because=""))
        assert item_ids(other) == most_similar(model, 3)[:10]

    def test_because_without_an_item_is_a_plain_list(self, followed: Client) -> None:
        for request in ({"user_id": "bob", "because": ""}, {"history": [], "because": ""}):
            answer = recommend(followed, **request)
            assert answer["source"] == "popular"
            assert "because" not in answer
        answer = recommend(followed, user_id="ada", because="unheard-of")
        assert answer["source"] == "personalised"
        assert "because" not in answer

    def test_because_without_a_model_is_popular(self, tmp_path: Path) -> None:
        client = Client(Settings(model_dir=None, data_dir=tmp_path))
        try:
            client.post("/v1/events", json={"user_id": "ada", "item_id": "tea"})
            for request in ({"user_id": "ada", "because": "tea"}, {"user_id": "ada", "because": "", "explain": True}):
                answer = recommend(client, **request)
                assert (answer["generation"], answer["source"]) == (NO_MODEL, "popular")
            assert client.get("/v1/items/tea/similar").status_code == 404
        finally:
            client.close()
