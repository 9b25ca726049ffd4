"""Training of mechanisms: resuming, frozen and migrated codes, and model directories."""

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

from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import SERVED_MECHANISMS, DataCard, MechanismRecipe, MechanismTraining
from model.data.interactions import DataError, Histories, training_histories
from model.data.readers import read_interactions
from model.data.splits import split
from model.evaluation import evaluate
from model.mechanisms import train as mechanisms
from model.mechanisms.export import served_model
from model.mechanisms.network import MechanismNetwork
from model.mechanisms.train import MechanismTrainer
from model.training.loop import (
    BEST_CHECKPOINT,
    CHECKPOINT,
    LAST_CHECKPOINT,
    OPTIMIZER_PREFIX,
    TrainError,
    Validation,
)
from tests.model.mechanisms.small_mechanisms import ITEMS, network, small

Make = Callable[..., Any]


def recipe(name: str, **training: Any) -> MechanismRecipe:
    settings = MechanismTraining(**{"epochs": 2, "histories_per_batch": 30, "learning_rate": 0.01} | training)
    return MechanismRecipe(model=small(name), training=settings, data=DataCard(train_on="validation"))


def same_weights(one: Path, other: Path) -> bool:
    return (one / model_directory.WEIGHTS).read_bytes() == (other / model_directory.WEIGHTS).read_bytes()


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


def test_codes_are_frozen_after_their_share_of_epochs(shop: Path, silent: Make, tmp_path: Path) -> None:
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
        assert learned is not None
        assert now is not None
        assert not torch.equal(learned.codebooks, now.codebooks)


@pytest.mark.parametrize("name", ["lisa-base", "lisa-soft"])
def test_the_best_epoch_may_precede_the_freezing_of_codes(
    name: str, shop: Path, silent: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = iter((0.4, 0.3, 0.2))
    monkeypatch.setattr(MechanismTrainer, "_judge", lambda *_: Validation(next(falling), 0.5))
    wanted = recipe(name, epochs=3, codes_learned_share=0.3).model_copy(update={"data": DataCard()})
    with pytest.raises(KeyboardInterrupt):
        mechanisms.train(shop, tmp_path / "model", wanted, progress=silent(stop_after=0))
    first = load_file(tmp_path / "model" / BEST_CHECKPOINT)
    made = mechanisms.train(shop, tmp_path / "model", wanted, resume=True, progress=silent())
    assert [report["ndcg_at_10"] for report in made.metrics["epochs"]] == [0.4, 0.3, 0.2]
    assert isinstance(made, Artifact)
    net = MechanismNetwork(wanted.model, len(first["embedding.weight"])).eval()
    net.load_state_dict(first)
    assert torch.equal(made.model.history_codes, served_model(net).history_codes)


@pytest.mark.parametrize("name", ["transformer-paper", "lisa-base-paper", "gated-linear"])
def test_training_learns_the_next_item(shop: Path, silent: Make, tmp_path: Path, name: str) -> None:
    """Four steps in five lead to the next item of the ring."""
    wanted = recipe(name, epochs=12, loss="softmax")
    model = mechanisms.train(shop, tmp_path / "model", wanted, progress=silent())
    found = evaluate.evaluate([model], shop, "loo_full", "none").to_json()
    assert found["metrics"]["hr_at_10_full"] > 0.6
    losses = [report["loss"] for report in model.metrics["epochs"]]
    assert losses[-1] < 0.8 * losses[0]


def test_negatives_exclude_items_of_the_user(shop: Path, tmp_path: Path) -> None:
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


def test_long_histories_are_truncated_to_the_newest_events() -> None:
    histories = Histories(np.arange(9, dtype=np.int32), np.ones(9, np.float32), np.array([0, 5, 5, 9]))
    cut = mechanisms.newest_events(histories, 3)
    assert [items.tolist() for items in cut] == [[2, 3, 4], [], [6, 7, 8]]


@pytest.mark.parametrize("name", ["transformer-paper", "lisa-soft-paper"])
def test_a_batch_equals_single_histories(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_keeps_codes_while_other_parameters_learn(
        self, shop: Path, source: Path, silent: Make, tmp_path: Path
    ) -> None:
        out, wanted = tmp_path / "model", recipe("lisa-base-paper")
        with pytest.raises(KeyboardInterrupt):
            mechanisms.train(shop, out, wanted, codes_from=source, progress=silent(stop_after=0))
        mechanisms.train(shop, out, wanted, codes_from=source, resume=True, progress=silent())
        before, after = mechanisms.load(source).network, mechanisms.load(out).network
        with torch.inference_mode():
            given, kept = before.distinct().history.codes, after.distinct().history.codes
        assert given is not None
        assert kept is not None
        assert torch.equal(kept, given)
        assert after.quantiser is not None
        assert before.quantiser is not None
        assert not torch.equal(after.quantiser.codebooks, before.quantiser.codebooks)

    @pytest.mark.parametrize("name", ["lisa-mini-paper", "lisa-base"])
    def test_derives_codes_from_the_vectors_of_a_model_without_codes(
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
        kept = after.model.history_codes if isinstance(after, model_directory.Artifact) else after.network.frozen_codes
        assert kept is not None
        assert torch.equal(kept, codes)

    @pytest.mark.parametrize("name", ["lisa-base", "lisa-mini-paper", "lisa-soft"])
    @torch.inference_mode()
    def test_loses_only_the_quantisation_error(self, name: str) -> None:
        """The scales for reading histories and scoring items are taken over."""
        before, net, found = network("transformer-paper"), network(name, codewords=60), torch.randn(3, 12)
        net.migrate(before)
        torch.testing.assert_close(net.vectors() * net.read_scale, before.vectors() * before.read_scale)
        torch.testing.assert_close(net.norms[1](found) @ net.vectors().T, before.norms[1](found) @ before.vectors().T)

    def test_learns_soft_codes_while_target_codes_stay(self) -> None:
        before, net = network("transformer-paper"), network("lisa-soft")
        net.migrate(before)
        codes = net.target_codes()
        assert net.frozen_codes is None
        assert len(torch.unique(codes, dim=0)) == ITEMS
        lost = net.distinct().targets - before.embedding.weight
        assert lost.square().sum() < 0.8 * before.embedding.weight.square().sum()

    def test_refuses_codes_of_another_shape(self, shop: Path, source: Path, silent: Make, tmp_path: Path) -> None:
        with pytest.raises(TrainError, match="needs codes"):
            mechanisms.train(shop, tmp_path / "m", recipe("linear"), codes_from=source, progress=silent())
        other = recipe("lisa-base-paper")
        other = other.model_copy(update={"model": other.model.model_copy(update={"codewords": 5})})
        with pytest.raises(TrainError, match="codebooks or items differ"):
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
    def test_can_be_evaluated_but_not_served(self, made: Path) -> None:
        with pytest.raises(
            model_directory.ArtifactError, match="a mechanism, which can only be evaluated with 'lisarec evaluate'"
        ):
            model_directory.load(made)
        assert isinstance(evaluate.load_model(made), mechanisms.TrainedMechanism)

    def test_refuses_invalid_content(self, made: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(made, tmp_path / "copy")
        (copy / model_directory.WEIGHTS).write_bytes(b"no weights")
        with pytest.raises(model_directory.ArtifactError, match="does not match its manifest"):
            mechanisms.load(copy)

    def test_names_the_protocol_of_the_paper(self, shop: Path, made: Path) -> None:
        found = evaluate.evaluate([evaluate.load_model(made)], shop, "loo_paper100").to_json()
        assert found["tie_rule"] == "in the model's favour"
        assert found["metrics"]["hr_at_10_paper100"] >= 0
        with pytest.raises(DataError, match="negatives of loo_paper100 are never in the history"):
            evaluate.evaluate([evaluate.load_model(made)], shop, "loo_paper100", "none")

    @pytest.mark.parametrize("protocol", ["loo_full", "loo_paper100"])
    def test_ranks_independently_of_compared_models(self, shop: Path, trained: Path, made: Path, protocol: Any) -> None:
        own = evaluate.load_model(made)
        ranks = [
            evaluate.prepare_trial(first, shop, protocol, None).test_model(own).ranks.tolist()
            for first in (own, model_directory.load(trained))
        ]
        assert ranks[0] == ranks[1]

    @pytest.mark.parametrize("name", sorted(SERVED_MECHANISMS))
    def test_trains_servable_presets_ready_to_serve(self, shop: Path, silent: Make, tmp_path: Path, name: str) -> None:
        wanted = recipe(name, epochs=12, loss="softmax")
        model = mechanisms.train(shop, tmp_path / "model", wanted, progress=silent())
        assert isinstance(model, model_directory.Artifact)
        assert isinstance(evaluate.load_model(tmp_path / "model"), model_directory.Artifact)
        assert model.config.training == wanted.training
        found = evaluate.evaluate([model], shop, "loo_full", "none").to_json()
        assert found["metrics"]["hr_at_10_full"] > 0.6
