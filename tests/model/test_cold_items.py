"""Cold items: they score by their codes like trained ones, and get codes from the users who chose them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.cold_items import (
    ColdCodes,
    ColdItemEvent,
    ColdItems,
    Neighbours,
    codes_of_nearest_items,
    codes_of_similar_items,
    drawn,
    likeliest_codes,
    query_sample,
    sampled_query,
    with_cold_items,
)
from model.config import Config, ModelConfig
from model.content.content_map import NO_CONTENT
from model.inference.engine import Engine
from model.lisa.lisa_mini import LisaMini

ITEMS, LEARNED = 40, 30
SHAPE = ModelConfig(width=16, history_codebooks=3, history_codewords=8, target_codebooks=3, target_codewords=16)


def model_of(items: int, seed: int = 3) -> Artifact:
    """The first items of a random model with followers among the first ten only."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    codes = [
        torch.from_numpy(rng.integers(0, words, (ITEMS, books)))[:items]
        for books, words in (
            (SHAPE.history_codebooks, SHAPE.history_codewords),
            (SHAPE.target_codebooks, SHAPE.target_codewords),
        )
    ]
    model = LisaMini(SHAPE, *codes).eval()
    with torch.no_grad():
        model.target_codebooks.normal_()
        model.bias.copy_(torch.randn(ITEMS)[:items])
        model.followers[:10] = torch.from_numpy(rng.integers(0, 10, (10, SHAPE.followers)))
        model.lift[:10] = torch.rand(10, SHAPE.followers)
        tables = model.tables()
    labels = [("a",) if row % 2 else () for row in range(items)]
    model.fold_norms_and_round()
    ids = ItemTable([f"i{row}" for row in range(items)], [f"t{row}" for row in range(items)], labels, np.arange(items))
    return Artifact("m", "00" * 8, Config(model=SHAPE), ids, model, tables, {})


def states(count: int, items: int = ITEMS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = len(SHAPE.decay_rates), SHAPE.history_codebooks, SHAPE.history_codewords
    recent = rng.integers(-1, items, (count, SHAPE.recent_items))
    return rng.random((count, *shape), np.float32), rng.integers(0, items, count), recent


def test_a_cold_item_scores_like_a_trained_item_of_its_codes() -> None:
    """All else stays the same, including the original model."""
    whole, learned = model_of(ITEMS), model_of(LEARNED)
    with torch.no_grad():
        whole.model.lift[LEARNED:] = 0
    codes = {
        f"i{row}": ColdCodes(whole.history_codes[row], whole.target_codes[row], whole.model.bias[row].item())
        for row in range(LEARNED, ITEMS)
    }
    grown = with_cold_items(learned, [*codes], ColdItems.of(codes.values()))
    for engine, name in ((Engine(grown), "grown"), (Engine(learned), "learned")):
        items = len(grown.items) if name == "grown" else LEARNED
        asked = states(50, items)
        expected = Engine(whole).scores(Engine(whole).step(*asked))[:, :items]
        torch.testing.assert_close(engine.scores(engine.step(*asked)), expected, rtol=0, atol=0)
        best, _ = engine.top_k(engine.step(*asked), 5)
        np.testing.assert_array_equal(best, expected.argsort(dim=1, descending=True)[:, :5])
    assert (grown.items.learned, len(grown.items), learned.items.learned) == (LEARNED, ITEMS, LEARNED)
    assert list(grown.items.ids) == [f"i{row}" for row in range(ITEMS)]
    assert [grown.items.rows[f"i{row}"] for row in range(ITEMS)] == list(range(ITEMS))
    assert list(grown.items.titles)[LEARNED - 1 :] == [f"t{LEARNED - 1}", *[""] * (ITEMS - LEARNED)]
    assert grown.items.categories[LEARNED:] == [()] * (ITEMS - LEARNED)
    assert grown.items.categories.items_with("a").tolist() == list(range(1, LEARNED, 2))
    assert grown.items.popular_first.tolist() == [*range(LEARNED - 1, -1, -1), *range(LEARNED, ITEMS)]
    assert with_cold_items(learned, [], ColdItems.of(codes.values())) is learned


@torch.inference_mode()
def test_users_determine_the_codes_and_event_counts_the_bias() -> None:
    """Users whose queries match a trained item choose a new one, which gets similar codes."""
    trained = model_of(ITEMS)
    vectors = trained.model.item_vectors()
    rng = np.random.default_rng(1)
    sample = [
        sampled_query(trained, query, vectors @ query + trained.model.bias)
        for query in torch.from_numpy(rng.normal(size=(200, SHAPE.width)).astype(np.float32))
    ]
    near = 0
    for row in range(8):
        wanted = vectors[row] / vectors[row].norm()
        queries = [wanted + 0.3 * torch.from_numpy(rng.normal(size=SHAPE.width).astype(np.float32)) for _ in range(30)]
        chosen = [ColdItemEvent((row, (row + 1) % ITEMS), query) for query in queries]
        found, rarest = (likeliest_codes(trained, chosen, sample, events=10**n) for n in (3, 99))
        assert found.bias > rarest.bias == trained.model.bias.min()
        assert (found.history.shape, found.target.shape, found.target.dtype) == ((3,), (3,), np.dtype(np.uint8))
        vector = trained.model.target_codebooks[torch.arange(3), torch.from_numpy(found.target).long()].sum(0)
        near += bool(((vectors @ vector).argsort(descending=True)[:3] == row).any())
    assert near >= 6


@torch.inference_mode()
def test_an_item_with_similar_ones_gets_their_lower_quartile_likelihood() -> None:
    """By softmax over all items in float64."""
    trained = model_of(ITEMS)
    queries = torch.from_numpy(np.random.default_rng(1).normal(size=(50, SHAPE.width)).astype(np.float32))
    vectors, bias = trained.model.item_vectors().double(), trained.model.bias.double()
    shares = torch.softmax(queries.double() @ vectors.T + bias, dim=1)  # (Q, N)
    sums = torch.logsumexp(queries.double() @ vectors.T + bias, dim=1)
    for alike in ([3], [5, 6, 7, 8], list(range(0, ITEMS, 3))):
        found = codes_of_similar_items(trained, np.array(alike), query_sample(trained, queries))
        for own, learned in ((found.history, trained.history_codes), (found.target, trained.target_codes)):
            for word, voted in zip(own.tolist(), learned[alike].T.tolist(), strict=True):
                assert voted.count(word) == max(map(voted.count, voted))
        vector = trained.model.target_codebooks[torch.arange(3), torch.from_numpy(found.target).long()].sum(0).double()
        likely = torch.exp(queries.double() @ vector + found.bias - sums).sum().log()
        expected = np.quantile(shares[:, alike].sum(0).log().numpy(), 0.25)
        np.testing.assert_allclose(float(likely), expected, atol=1e-4)


@torch.inference_mode()
def test_neighbours_have_the_highest_cosine_with_the_prediction() -> None:
    """Vectors are centred on the mean of the map; cosines are in float64."""
    rng = np.random.default_rng(4)
    mean = rng.normal(size=SHAPE.width).astype(np.float32)
    trained = replace(model_of(ITEMS), content=NO_CONTENT._replace(mean=mean))
    around = trained.model.item_vectors().double().numpy() - mean
    neighbours = Neighbours(trained)
    for predicted in rng.normal(size=(20, SHAPE.width)).astype(np.float32):
        cosines = around @ (predicted - mean) / np.linalg.norm(around, axis=1)
        for count in (1, 7, ITEMS, ITEMS + 5):
            found = neighbours.nearest(predicted, count)
            assert sorted(found.tolist()) == sorted(np.argsort(-cosines)[:count].tolist())


def test_each_cold_item_has_its_own_sample_of_similar_items() -> None:
    similar = np.arange(100, 120)
    of_items = {f"i{n}": drawn(similar, 10, f"i{n}") for n in range(20)}
    for item_id, rows in of_items.items():
        assert len(set(rows.tolist())) == 10
        assert set(rows.tolist()) <= set(similar.tolist())
        np.testing.assert_array_equal(drawn(similar, 10, item_id), rows)
    assert len({tuple(sorted(rows.tolist())) for rows in of_items.values()}) > 15
    assert sorted(drawn(similar[:3], 10, "i")) == [100, 101, 102]
    assert not len(drawn(similar[:0], 10, "i"))


@torch.inference_mode()
def test_two_agreeing_nearest_items_decide_or_else_the_nearest() -> None:
    trained = model_of(ITEMS)
    queries = torch.from_numpy(np.random.default_rng(1).normal(size=(50, SHAPE.width)).astype(np.float32))
    sample = query_sample(trained, queries)
    for nearest in ([4], [7, 3], [9, 20, 31], [5, 6, 8, 11]):
        found = codes_of_nearest_items(trained, np.array(nearest), sample)
        for own, learned in ((found.history, trained.history_codes), (found.target, trained.target_codes)):
            for word, voted in zip(own.tolist(), learned[nearest].T.tolist(), strict=True):
                counts = [voted.count(one) for one in voted]
                assert word == voted[counts.index(max(counts))]
    alone = codes_of_nearest_items(trained, np.array([4]), sample)
    assert abs(alone.bias - trained.model.bias[4].item()) < 1e-4
