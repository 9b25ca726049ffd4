"""Laws of all mechanisms: stepping equals the parallel form, gradients are right, a resumed training is the same."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from model import artifact, evaluate
from model.config import MECHANISMS, SERVED_MECHANISMS, DataCard, MechanismConfig, MechanismRecipe, MechanismTraining
from model.data import DataError, Histories, training_histories
from model.data_readers import read_interactions
from model.data_splits import split
from model.loop import CHECKPOINT, LAST_CHECKPOINT, OPTIMIZER_PREFIX, TrainError
from model.mechanisms import linear, prefix
from model.mechanisms import train as mechanisms
from model.mechanisms.interests import Interests
from model.mechanisms.linear import Linear
from model.mechanisms.mechanism import Events
from model.mechanisms.network import DistinctItems, MechanismNetwork
from model.mechanisms.quantiser import TEMPERATURE, Quantiser, StraightThrough
from model.mechanisms.softmax import Softmax

Make = Callable[..., Any]
ITEMS = 50
SMALL = {"width": 12, "window": 40, "memory": 5, "interests": 3}


def small(name: str) -> MechanismConfig:
    shape = MECHANISMS[name]
    words = {"codebooks": 2, "target_codebooks": 3}
    words |= {"codewords": 7} if shape.codewords else {}
    words |= {"target_codewords": 9} if shape.target_codewords else {}
    return shape.model_copy(update=SMALL | words)


def network(name: str, **other: Any) -> MechanismNetwork:
    torch.manual_seed(0)
    made = MechanismNetwork(small(name).model_copy(update=other), ITEMS).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights += 0.1 * torch.randn_like(weights)
    return made


CONSTANT = [name for name in MECHANISMS if network(name).mechanism.state_shape is not None]


def test_all_but_softmax_and_decoupled_positions_have_a_state_of_constant_size() -> None:
    assert set(MECHANISMS) - set(CONSTANT) == {"transformer-paper", "transformer-codes", "lightsans-decoupled"}


@pytest.mark.parametrize("name", CONSTANT)
@torch.inference_mode()
def test_steps_equal_the_parallel_forward(name: str) -> None:
    """For as many events as the published presets have positions."""
    net = network(name, window=300)
    items, lengths = torch.randint(ITEMS, (3, 300)), torch.tensor([300, 1, 123])
    distinct = net.distinct(items)
    parallel = net(items, lengths, distinct)
    for event, stepped in enumerate(steps(net, items, distinct)):
        real = lengths > event
        torch.testing.assert_close(stepped[real], parallel[real, event], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONSTANT)
def test_gradients_equal_those_of_stepping(name: str) -> None:
    """Of every weight: what is written by hand for the way back against autograd, step after step."""
    net = network(name).double()
    items, wanted = torch.randint(ITEMS, (2, 9)), torch.randn(2, 9, 12, dtype=torch.float64)
    lengths = torch.tensor([9, 9])
    distinct = net.distinct(items)
    (net(items, lengths, distinct) * wanted).sum().backward()
    found = {name: weights.grad for name, weights in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    distinct = net.distinct(items)
    (torch.stack(steps(net, items, distinct), dim=1) * wanted).sum().backward()
    for name, weights in net.named_parameters():
        if weights.grad is None:
            assert found[name] is None, name  # of targets
        else:
            torch.testing.assert_close(found[name], weights.grad, rtol=1e-6, atol=1e-9, msg=name)


def steps(net: MechanismNetwork, items: torch.Tensor, distinct: DistinctItems) -> list[torch.Tensor]:
    """The queries after each event of histories of the same length, from the state alone."""
    assert net.mechanism.state_shape is not None
    state, queries = distinct.targets.new_zeros(len(items), *net.mechanism.state_shape), []
    for event in range(items.shape[1]):
        state, query = net.step(state, torch.full((len(items),), event), items[:, event], distinct)
        queries.append(query)
    return queries


@pytest.mark.parametrize("name", MECHANISMS)
@torch.inference_mode()
def test_later_events_and_padding_change_nothing(name: str) -> None:
    net = network(name)
    items = torch.randint(ITEMS, (2, 20))
    changed = items.clone()
    changed[:, 12:] = torch.randint(ITEMS, (2, 8))
    before = net(items, torch.tensor([20, 20]), net.distinct(items))
    after = net(changed, torch.tensor([20, 12]), net.distinct(changed))
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=1e-4, atol=1e-5)


class TestHistograms:
    """The pass over prefixes, against histograms that are counted one by one."""

    def case(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        codes = torch.rand(6, 2, 4, dtype=torch.float64, requires_grad=True)
        logits = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
        return codes, logits, torch.randint(6, (3, 5)), torch.tensor([5, 3, 1])

    def test_shares_are_those_of_counted_histograms(self) -> None:
        codes, logits, places, lengths = self.case()
        found = prefix.shares(codes, logits, places, lengths, 0.8)
        for row in range(3):
            for event in range(5):
                if event >= lengths[row]:
                    assert (found[row, event] == 0).all()
                    continue
                past = places[row, : event + 1]
                counts = sum(codes[item] * 0.8 ** (event - at) for at, item in enumerate(past))
                mass = counts * logits[places[row, event]].exp()
                torch.testing.assert_close(found[row, event], (mass / mass.sum(-1, keepdim=True)).flatten())

    def test_gradients_are_right(self) -> None:
        codes, logits, places, lengths = self.case()
        assert gradcheck(lambda *given: prefix.shares(*given, places, lengths, 0.8), (codes, logits))

    def test_logits_far_apart_do_no_harm(self) -> None:
        codes, logits, places, lengths = self.case()
        hard = torch.nn.functional.one_hot(codes.argmax(-1), 4).double().requires_grad_()
        prefix.shares(hard, logits * 1e4, places, lengths, 0.8).square().sum().backward()
        assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in (hard, logits))


class TestLinear:
    def test_lookups_are_those_of_summed_outer_products(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear, "EVENTS_PER_CHUNK", 4)
        added, queries = torch.randn(2, 11, 3), torch.randn(2, 11, 3)
        states = torch.einsum("sli,slj->slij", added, added).cumsum(1)
        expected = torch.einsum("slij,slj->sli", states, queries)
        torch.testing.assert_close(linear.prefix_lookups(added, queries), expected, rtol=1e-4, atol=1e-5)

    def test_gradients_are_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear, "EVENTS_PER_CHUNK", 3)
        given = [torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        assert gradcheck(linear.prefix_lookups, given)

    @pytest.mark.parametrize("gated", [False, True])
    def test_the_way_back_keeps_no_states(self, gated: bool) -> None:
        mechanism, length, memory = Linear(8, 6, gated), 200, 6
        kept: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            mechanism(events(torch.randn(1, length, 8, requires_grad=True)))
        assert max(kept) < length * memory * memory / 2

    def test_a_gate_lets_features_through_in_part(self) -> None:
        mechanism, hidden = Linear(4, 3, gated=True), torch.randn(2, 4)
        assert mechanism.gate is not None
        projected = mechanism.hidden(hidden)
        added = torch.sigmoid(mechanism.gate(projected)) * projected
        torch.testing.assert_close(mechanism.feature(hidden)[:, :3], added[:, :, None] * added[:, None, :])


@torch.inference_mode()
def test_interests_are_averages_of_events_that_are_attended_to() -> None:
    torch.manual_seed(0)
    mechanism, hidden = Interests(6, 3), torch.randn(1, 9, 6)
    found = mechanism(events(hidden))
    for event in range(9):
        past = hidden[0, : event + 1]
        weights = (20 * torch.tanh(past @ mechanism.aggregate.T / 20)).softmax(dim=0)  # (events, k)
        interests = weights.T @ past
        share = (mechanism.key(interests) @ mechanism.query(hidden[0, event]) / math.sqrt(6)).softmax(dim=0)
        torch.testing.assert_close(found[0, event], mechanism.out(share @ mechanism.value(interests)))


@torch.inference_mode()
def test_decoupled_positions_add_what_stood_at_attended_places() -> None:
    torch.manual_seed(0)
    mechanism, hidden = Interests(6, 3, window=9), torch.randn(1, 7, 6)
    assert mechanism.places is not None
    without = Interests(6, 3)
    without.load_state_dict(mechanism.state_dict(), strict=False)
    added = mechanism(events(hidden)) - without(events(hidden))
    places = mechanism.places[:5]
    share = (mechanism.place_key(places) @ mechanism.place_query(places[4]) / math.sqrt(6)).softmax(dim=0)
    torch.testing.assert_close(added[0, 4], mechanism.out.weight @ (share @ mechanism.value(hidden[0, :5])))


@torch.inference_mode()
def test_softmax_attends_to_all_events_so_far() -> None:
    torch.manual_seed(0)
    mechanism, hidden = Softmax(6, 2), torch.randn(1, 5, 6)
    queries, keys, values = (part.view(5, 2, 3) for part in mechanism.project(hidden[0]).split(6, dim=-1))
    share = (torch.einsum("khd,hd->kh", keys[:4], queries[3]) / math.sqrt(3)).softmax(dim=0)
    expected = mechanism.out(torch.einsum("kh,khd->hd", share, values[:4]).flatten())
    torch.testing.assert_close(mechanism(events(hidden))[0, 3], expected)


class TestQuantiser:
    def test_each_codebook_encodes_what_is_left_over(self) -> None:
        torch.manual_seed(0)
        made, vectors = Quantiser(5, 3, 4), torch.randn(10, 5)
        encoded = made(vectors)
        left = vectors
        for book in range(3):
            likeness = left @ made.similarity[0] @ made.codebooks[book].T
            assert torch.equal(encoded.codes[:, book].argmax(-1), likeness.argmax(-1))
            left = left - made.codebooks[book][likeness.argmax(-1)]
        torch.testing.assert_close(encoded.vectors, vectors - left)

    def test_ties_are_won_by_the_first_and_rows_stay_one_hot(self) -> None:
        one_hot = StraightThrough.apply(torch.tensor([[0.25, 0.25, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1]]))
        assert one_hot.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]

    def test_gradients_pass_straight_through(self) -> None:
        """As if the codes were the shares that they were chosen by, everywhere after the choice."""
        torch.manual_seed(0)
        made = Quantiser(5, 1, 4).double()
        vectors, wanted = (torch.randn(6, 5, dtype=torch.float64) for _ in range(2))
        made(vectors.requires_grad_()).vectors.backward(wanted)
        own = vectors.detach().clone().requires_grad_()
        share = (own @ made.similarity[0] @ made.codebooks[0].detach().T / TEMPERATURE).softmax(-1)
        (share @ made.codebooks[0].detach()).backward(wanted)
        torch.testing.assert_close(vectors.grad, own.grad)

    def test_soft_codes_are_shares(self) -> None:
        codes = Quantiser(5, 3, 4, soft=True)(torch.randn(10, 5)).codes
        assert (codes > 0).all()
        torch.testing.assert_close(codes.sum(-1), torch.ones(10, 3))

    def test_frozen_codes_decode_to_what_they_were_encoded_to(self) -> None:
        made = Quantiser(5, 3, 4)
        encoded = made(torch.randn(10, 5))
        decoded = made.decode(encoded.codes.argmax(-1).byte())
        assert torch.equal(decoded.codes, encoded.codes)
        torch.testing.assert_close(decoded.vectors, encoded.vectors)


def events(hidden: torch.Tensor) -> Events:
    rows, length = hidden.shape[:2]
    return Events(hidden, None, torch.zeros(rows, length, dtype=torch.int64), torch.full((rows,), length))


# Training


def recipe(name: str, **training: Any) -> MechanismRecipe:
    settings = MechanismTraining(**{"epochs": 2, "histories_per_batch": 30, "learning_rate": 0.01} | training)
    return MechanismRecipe(model=small(name), training=settings, data=DataCard(train_on="validation"))


def same_weights(one: Path, other: Path) -> bool:
    return (one / artifact.WEIGHTS).read_bytes() == (other / artifact.WEIGHTS).read_bytes()


@pytest.mark.parametrize(("loss", "learned"), [("binary", 1.0), ("softmax", 1.0), ("softmax", 0.3), ("softmax", 0.6)])
def test_a_resumed_training_equals_an_uninterrupted_one(
    shop: Path, silent: Make, tmp_path: Path, loss: str, learned: float
) -> None:
    wanted = recipe("lisa-mini-paper", epochs=4, loss=loss, codes_learned_share=learned)
    mechanisms.train(shop, tmp_path / "whole", wanted, progress=silent())
    with pytest.raises(KeyboardInterrupt):
        mechanisms.train(shop, tmp_path / "parts", wanted, progress=silent(stop_after=2))
    torch.rand(100)
    mechanisms.train(shop, tmp_path / "parts", wanted, resume=True, progress=silent())
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    assert not (tmp_path / "parts" / CHECKPOINT).exists()


def test_codes_stay_after_their_share_of_the_epochs(shop: Path, silent: Make, tmp_path: Path) -> None:
    wanted = recipe("lisa-mini-paper", epochs=4, codes_learned_share=0.5)
    with pytest.raises(KeyboardInterrupt):
        mechanisms.train(shop, tmp_path / "model", wanted, progress=silent(stop_after=1))
    before = load_file(tmp_path / "model" / LAST_CHECKPOINT)
    mechanisms.train(shop, tmp_path / "model", wanted, resume=True, progress=silent())
    net = MechanismNetwork(wanted.model, len(before["embedding.weight"])).eval()
    net.load_state_dict({name: tensor for name, tensor in before.items() if not name.startswith(OPTIMIZER_PREFIX)})
    after = mechanisms.load(tmp_path / "model").network
    assert net.frozen_codes is None
    assert torch.equal(after.distinct().history.indices(), net.distinct().history.indices())
    assert torch.equal(after.target_codes(), net.target_codes())
    for learned, now in zip(
        (net.quantiser, net.target_quantiser), (after.quantiser, after.target_quantiser), strict=True
    ):
        assert not torch.equal(learned.codebooks, now.codebooks)


@pytest.mark.parametrize("name", ["transformer-paper", "lisa-base-paper", "gated-linear"])
def test_training_learns_what_follows(shop: Path, silent: Make, tmp_path: Path, name: str) -> None:
    """Four steps in five go to the next item of the ring."""
    wanted = recipe(name, epochs=12, loss="softmax")
    model = mechanisms.train(shop, tmp_path / "model", wanted, progress=silent())
    found = evaluate.evaluate([model], shop, "loo_full", "none").to_json()
    assert found["metrics"]["hr_at_10_full"] > 0.6
    losses = [report["loss"] for report in model.metrics["epochs"]]
    assert losses[-1] < 0.8 * losses[0]


def test_negatives_are_never_of_the_users_own_items(shop: Path, tmp_path: Path) -> None:
    wanted = recipe("linear")
    interactions = read_interactions(shop)
    parts = split(interactions, "loo", "validation")
    net = MechanismNetwork(wanted.model, len(interactions.item_ids))
    trainer = mechanisms.MechanismTrainer(net, interactions, parts, wanted, tmp_path, "cpu")
    whole = training_histories(interactions, parts.train, wanted.event_weights)
    had = [set(items.tolist()) for items in whole]
    users = np.repeat([user for user, items in enumerate(had) if len(items) < 30], 50)
    drawn = trainer.draw_negatives(users, np.random.default_rng(0))
    assert all(item not in had[user] for user, item in zip(users, drawn, strict=True))
    assert len(set(drawn.tolist())) == len(interactions.item_ids)


def test_long_histories_are_cut_to_their_newest_events() -> None:
    histories = Histories(np.arange(9, dtype=np.int32), np.ones(9, np.float32), np.array([0, 5, 5, 9]))
    cut = mechanisms.newest_events(histories, 3)
    assert [items.tolist() for items in cut] == [[2, 3, 4], [], [6, 7, 8]]


@pytest.mark.parametrize("name", ["transformer-paper", "lisa-soft-paper"])
def test_scores_are_those_of_each_history_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(name)
    rng = np.random.default_rng(0)
    lengths = np.array([3, 60, 1, 17])
    item = rng.integers(0, ITEMS, lengths.sum()).astype(np.int32)
    histories = Histories(item, np.ones(len(item), np.float32), np.cumsum([0, *lengths]))
    monkeypatch.setattr(mechanisms, "POSITIONS_AT_ONCE", 20)
    together = mechanisms.mechanism_scorer(net)(histories)
    for row, items in enumerate(histories):
        newest = torch.from_numpy(items[-40:].astype(np.int64))[None]
        with torch.inference_mode():
            distinct = net.distinct()
            query = net(newest, torch.tensor([newest.shape[1]]), distinct)[0, -1]
            np.testing.assert_allclose(together[row], (distinct.targets @ query).numpy(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def source(shop: Path, silent: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("source") / "model"
    mechanisms.train(shop, out, recipe("transformer-codes"), progress=silent())
    return out


class TestMigration:
    def test_codes_stay_while_all_else_learns(self, shop: Path, source: Path, silent: Make, tmp_path: Path) -> None:
        out, wanted = tmp_path / "model", recipe("lisa-base-paper")
        with pytest.raises(KeyboardInterrupt):
            mechanisms.train(shop, out, wanted, codes_from=source, progress=silent(stop_after=0))
        mechanisms.train(shop, out, wanted, codes_from=source, resume=True, progress=silent())
        before, after = mechanisms.load(source).network, mechanisms.load(out).network
        with torch.inference_mode():
            codes = before.distinct().history.codes
            assert torch.equal(after.distinct().history.codes, codes)
        assert after.quantiser is not None
        assert before.quantiser is not None
        assert not torch.equal(after.quantiser.codebooks, before.quantiser.codebooks)

    @pytest.mark.parametrize("name", ["lisa-mini-paper", "lisa-base"])
    def test_a_model_without_codes_gives_those_of_its_vectors(
        self, shop: Path, silent: Make, tmp_path: Path, name: str
    ) -> None:
        mechanisms.train(shop, tmp_path / "source", recipe("transformer-paper"), progress=silent())
        before = mechanisms.load(tmp_path / "source").network.embedding.weight.detach() * math.sqrt(12)
        net = MechanismNetwork(small(name), len(before))
        net.migrate(mechanisms.load(tmp_path / "source").network)
        codes, vectors = net.distinct().history.indices(), net.distinct().history.vectors
        assert len(torch.unique(codes, dim=0)) == len(codes)
        assert (vectors - before).square().sum() < 0.8 * before.square().sum()
        out = tmp_path / "model"
        mechanisms.train(shop, out, recipe(name), codes_from=tmp_path / "source", progress=silent())
        after = evaluate.load_model(out)
        kept = after.model.history_codes if isinstance(after, artifact.Artifact) else after.network.frozen_codes
        assert torch.equal(kept, codes)

    @pytest.mark.parametrize("name", ["lisa-base", "lisa-mini-paper", "lisa-soft"])
    @torch.inference_mode()
    def test_codes_that_are_made_lose_nothing_but_what_they_round(self, name: str) -> None:
        """Histories are read, and items scored, at the scale at which the other network learned to."""
        before, net, found = network("transformer-paper"), network(name, codewords=60), torch.randn(3, 12)
        net.migrate(before)
        torch.testing.assert_close(net.vectors() * net.scale_of_read, before.vectors() * before.scale_of_read)
        torch.testing.assert_close(net.norms[1](found) @ net.vectors().T, before.norms[1](found) @ before.vectors().T)

    def test_soft_codes_are_learned_while_those_of_the_targets_stay(self) -> None:
        before, net = network("transformer-paper"), network("lisa-soft")
        net.migrate(before)
        codes = net.target_codes()
        assert net.frozen_codes is None
        assert len(torch.unique(codes, dim=0)) == ITEMS
        lost = net.distinct().targets - before.embedding.weight
        assert lost.square().sum() < 0.8 * before.embedding.weight.square().sum()

    def test_codes_that_do_not_fit_are_refused(self, shop: Path, source: Path, silent: Make, tmp_path: Path) -> None:
        with pytest.raises(TrainError, match="needs codes"):
            mechanisms.train(shop, tmp_path / "m", recipe("linear"), codes_from=source, progress=silent())
        other = recipe("lisa-base-paper")
        other = other.model_copy(update={"model": other.model.model_copy(update={"codewords": 5})})
        with pytest.raises(TrainError, match="other codebooks or items"):
            mechanisms.train(shop, tmp_path / "m", other, codes_from=source, progress=silent())
        card = other.model_copy(update={"data": DataCard(train_on="train")})
        with pytest.raises(TrainError, match="learned from other events"):
            mechanisms.train(shop, tmp_path / "m", card, codes_from=source, progress=silent())


@pytest.fixture(scope="module")
def made(shop: Path, silent: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "model"
    mechanisms.train(shop, out, recipe("lisa-soft-paper"), progress=silent())
    return out


class TestModelDirectory:
    def test_it_is_compared_and_not_served(self, made: Path) -> None:
        with pytest.raises(artifact.ArtifactError, match="compared, not served; 'lisarec evaluate' takes it"):
            artifact.load(made)
        assert isinstance(evaluate.load_model(made), mechanisms.TrainedMechanism)

    def test_a_broken_one_is_refused(self, made: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(made, tmp_path / "copy")
        (copy / artifact.WEIGHTS).write_bytes(b"no weights")
        with pytest.raises(artifact.ArtifactError, match="not the file its manifest names"):
            mechanisms.load(copy)

    def test_the_papers_protocol_has_a_name(self, shop: Path, made: Path) -> None:
        found = evaluate.evaluate([evaluate.load_model(made)], shop, "loo_paper100").to_json()
        assert found["tie_rule"] == "in the model's favour"
        assert found["metrics"]["hr_at_10_paper100"] >= 0
        with pytest.raises(DataError, match="negatives of loo_paper100 lie outside the history"):
            evaluate.evaluate([evaluate.load_model(made)], shop, "loo_paper100", "none")

    @pytest.mark.parametrize("name", sorted(SERVED_MECHANISMS))
    def test_a_preset_that_is_served_is_trained_ready_for_it(
        self, shop: Path, silent: Make, tmp_path: Path, name: str
    ) -> None:
        wanted = recipe(name, epochs=12, loss="softmax")
        model = mechanisms.train(shop, tmp_path / "model", wanted, progress=silent())
        assert isinstance(model, artifact.Artifact)
        assert isinstance(evaluate.load_model(tmp_path / "model"), artifact.Artifact)
        assert model.config.training == wanted.training
        found = evaluate.evaluate([model], shop, "loo_full", "none").to_json()
        assert found["metrics"]["hr_at_10_full"] > 0.6
