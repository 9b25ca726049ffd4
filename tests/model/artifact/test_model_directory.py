"""Model directories round-trip; changed, truncated and forged ones are refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load, save

from model import config
from model.artifact import item_statistics, model_directory
from model.artifact.item_statistics import ItemStatistics
from model.artifact.item_table import OTHER_INDEX, ItemTable
from model.content.content_map import ContentMap, learned_content
from model.content.text_features import Description
from model.inference.engine import Engine
from model.lisa.item_complements import Complements
from model.lisa.item_intervals import Intervals
from model.lisa.lisa_mini import LisaMini

SHAPE = config.ModelConfig(
    width=8,
    decay_rates=(0.1, 1.0),
    history_codebooks=2,
    history_codewords=4,
    target_codebooks=3,
    target_codewords=256,
    dropout=0.0,
)
ITEMS = ItemTable(
    ["a", "b:2", "c"], ["", "Caf\u00e9 \u2603", "plain"], [(), ("p", "q"), ("p",)], np.array([3, 0, 2**40])
)
COMPLEMENTS = Complements(np.array([[2], [-1], [0]], np.int32), np.array([[1.5], [0], [0.25]], np.float32))
INTERVALS = Intervals(
    np.array([0.5, 1, 2, 3], np.float32),
    np.array([2, 1, 0.5, 1], np.float32),
    np.array([1, 0.5, 0, 0.1], np.float32),
    False,
)


def content_of(width: int) -> ContentMap:
    """A content map of titles and of vectors with two numbers to vectors of this width."""
    rng = np.random.default_rng(0)
    targets, vectors = rng.normal(size=(3, width)).astype(np.float32), rng.normal(size=(3, 2))
    described = [Description("Green tea"), Description("", ("a",)), Description("Cup")]
    return learned_content(targets, np.ones(3, int), described, vectors)


METRICS = {"epochs": [{"epoch": 0, "loss": 1.5, "ndcg_at_10": None}]}
ALL_FILES = (*model_directory.FILES, model_directory.MANIFEST)


@pytest.fixture(scope="module")
def model(random_model: Callable[..., LisaMini]) -> LisaMini:
    return random_model(SHAPE, len(ITEMS))


@pytest.fixture
def saved(tmp_path: Path, model: LisaMini) -> Path:
    directory = tmp_path / "models" / "mine"
    statistics = ItemStatistics(COMPLEMENTS, INTERVALS, content_of(SHAPE.width))
    model_directory.save(directory, model, config.Config(model=SHAPE), ITEMS, METRICS, statistics)
    return directory


def forge(directory: Path, name: str, content: bytes) -> None:
    """Replace a file and adjust the manifest, like a faulty writer."""
    (directory / name).write_bytes(content)
    hashes = json.loads((directory / model_directory.MANIFEST).read_bytes())
    hashes[name] = hashlib.sha256(content).hexdigest()
    (directory / model_directory.MANIFEST).write_text(json.dumps(hashes))


def unpack(directory: Path) -> None:
    """Remove the packed catalogue, like earlier versions."""
    (directory / model_directory.PACKED).unlink()
    hashes = json.loads((directory / model_directory.MANIFEST).read_bytes())
    del hashes[model_directory.PACKED]
    (directory / model_directory.MANIFEST).write_text(json.dumps(hashes))


def forge_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load((directory / model_directory.WEIGHTS).read_bytes())
    change(tensors)
    forge(directory, model_directory.WEIGHTS, save(tensors))


def forge_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    settings = json.loads((directory / model_directory.CONFIG).read_bytes())
    change(settings)
    forge(directory, model_directory.CONFIG, json.dumps(settings).encode())


@pytest.mark.parametrize("packed", ["packed", "of an earlier version", "of an earlier index", "of a later layout"])
def test_a_saved_model_round_trips(saved: Path, model: LisaMini, packed: str) -> None:
    if packed == "of an earlier version":
        unpack(saved)
    if packed == "of an earlier index":
        tensors = load((saved / model_directory.PACKED).read_bytes())
        tensors["ids.rows"] = tensors["ids.rows"].roll(1)  # not where the ids belong now
        forge(saved, model_directory.PACKED, save(tensors, {"layout": OTHER_INDEX}))
    if packed == "of a later layout":
        forge(saved, model_directory.PACKED, save({"what it will be": torch.zeros(1)}, {"layout": "later"}))
    loaded = model_directory.load(saved)
    assert loaded.name == "mine"
    assert loaded.config.model_dump() == config.Config(model=SHAPE).model_dump()
    assert loaded.metrics == METRICS
    for part in ("ids", "titles", "categories", "counts"):
        assert list(getattr(loaded.items, part)) == list(getattr(ITEMS, part))
    assert dict(loaded.items.rows) == {"a": 0, "b:2": 1, "c": 2}
    assert loaded.items.popular_first.tolist() == [2, 0, 1]
    assert [loaded.items.categories.items_with(name).tolist() for name in "pqr"] == [[1, 2], [1], []]
    assert not loaded.model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    for loaded_table, table in zip(loaded.tables, model.tables(), strict=True):
        assert torch.equal(loaded_table, table)
    assert loaded.history_codes.dtype == loaded.target_codes.dtype == np.uint8
    np.testing.assert_array_equal(loaded.history_codes, model.history_codes.numpy())
    np.testing.assert_array_equal(loaded.target_codes, model.target_codes.numpy())


def test_a_reloaded_model_scores_the_same(
    saved: Path, model: LisaMini, in_memory: Callable[[LisaMini], model_directory.Artifact]
) -> None:
    histograms = np.random.default_rng(0).random((5, 2, 2, 4), np.float32)
    items = np.arange(5) % 3, np.full((5, 5), 1)
    before, after = Engine(in_memory(model)), Engine(model_directory.load(saved))
    assert torch.equal(before.scores(before.step(histograms, *items)), after.scores(after.step(histograms, *items)))


def test_the_tag_depends_on_the_content_only(saved: Path, model: LisaMini, tmp_path: Path) -> None:
    tag = model_directory.load(saved).tag
    assert len(bytes.fromhex(tag)) == 8
    copied = model_directory.load(shutil.copytree(saved, tmp_path / "elsewhere"))
    assert (copied.name, copied.tag) == ("elsewhere", tag)
    model_directory.save(tmp_path / "again", model, config.Config(model=SHAPE), ITEMS, METRICS)
    assert model_directory.load(tmp_path / "again").tag == tag
    model_directory.save(tmp_path / "again", model, config.Config(model=SHAPE), ITEMS, {"took": "longer"})
    assert model_directory.load(tmp_path / "again").tag == tag
    model_directory.save(
        tmp_path / "again", model, config.Config(model=SHAPE, event_weights={"click": 2.0}), ITEMS, METRICS
    )
    assert model_directory.load(tmp_path / "again").tag != tag


def test_only_complete_directories_count_as_existing(saved: Path, tmp_path: Path) -> None:
    assert model_directory.exists(saved)
    assert sorted(path.name for path in saved.iterdir()) == sorted(ALL_FILES)
    assert not model_directory.exists(tmp_path / "nowhere")
    (saved / model_directory.MANIFEST).unlink()
    assert not model_directory.exists(saved)


def test_a_catalogue_without_titles_round_trips(tmp_path: Path, random_model: Callable[..., LisaMini]) -> None:
    bare = ItemTable(["x", "y"], ["", ""], [(), ()], np.zeros(2, np.int64))
    model_directory.save(tmp_path, random_model(SHAPE, 2), config.Config(model=SHAPE), bare, METRICS)
    items = model_directory.load(tmp_path).items
    assert (list(items.ids), list(items.titles), list(items.categories)) == (["x", "y"], ["", ""], [(), ()])
    assert (tmp_path / model_directory.PACKED).stat().st_mode == (tmp_path / model_directory.CONFIG).stat().st_mode


def test_anonymous_memory_is_not_released(saved: Path, model: LisaMini) -> None:
    loaded = model_directory.load(saved)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    loaded.release_pages()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    own = torch.ones(100_000)
    model_directory.release_pages(own)
    assert own.all()


class TestDamage:
    def refusal(self, directory: Path) -> str:
        with pytest.raises(model_directory.ArtifactError) as refused:
            model_directory.load(directory)
        assert str(directory) in str(refused.value)
        return str(refused.value)

    @pytest.mark.parametrize("name", ALL_FILES)
    def test_a_missing_file(self, saved: Path, name: str) -> None:
        (saved / name).unlink()
        message = self.refusal(saved)
        assert name in message
        assert "copy or train the model again" in message or "run 'lisarec train" in message

    @pytest.mark.parametrize("name", model_directory.FILES)
    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
    def test_a_directory_instead_of_a_file(self, saved: Path, name: str, make: Callable[[Path], None]) -> None:
        (saved / name).unlink()
        make(saved / name)
        assert "copy or train the model again" in self.refusal(saved)

    def test_a_missing_directory(self, tmp_path: Path) -> None:
        assert "run 'lisarec train" in self.refusal(tmp_path / "nowhere")

    @pytest.mark.parametrize("name", model_directory.FILES)
    @pytest.mark.parametrize("damage", ["one bit", "cut", "longer", "empty"])
    def test_a_changed_file(self, saved: Path, name: str, damage: str) -> None:
        content = (saved / name).read_bytes()
        changed = {
            "one bit": bytes([*content[:-2], content[-2] ^ 1, content[-1]]),
            "cut": content[: len(content) // 2],
            "longer": content + b"\n",
            "empty": b"",
        }
        (saved / name).write_bytes(changed[damage])
        message = self.refusal(saved)
        assert name in message
        assert "copy or train the model again" in message

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"{}", b'"x"', b"null", b"\xff\xfe\xfd", b'{"config.json": 3}', b"[" * 100_000]
    )
    def test_a_broken_manifest(self, saved: Path, content: bytes) -> None:
        (saved / model_directory.MANIFEST).write_bytes(content)
        assert "copy or train the model again" in self.refusal(saved)

    def test_non_finite_weights(self, saved: Path) -> None:
        forge_tensors(saved, lambda tensors: tensors["weights.bias"].fill_(torch.nan))
        assert "weights.bias contains NaN or infinity; train the model again" in self.refusal(saved)

    @pytest.mark.parametrize("name", ["weights.query", "tables.match", "weights.bias", "codes.target"])
    def test_tensors_of_another_dtype(self, saved: Path, name: str) -> None:
        forge_tensors(saved, lambda tensors: tensors.update({name: tensors[name].double()}))
        assert f"{name} has the wrong type" in self.refusal(saved)

    def test_non_finite_tables(self, saved: Path) -> None:
        forge_tensors(saved, lambda tensors: tensors["tables.match"].fill_(torch.inf))
        assert "tables.match contains NaN or infinity" in self.refusal(saved)

    def test_codes_out_of_range(self, saved: Path) -> None:
        forge_tensors(saved, lambda tensors: tensors["codes.history"][0].fill_(4))
        assert "codes point beyond their codebooks" in self.refusal(saved)

    @pytest.mark.parametrize("name", ["codes.history", "codes.target"])
    def test_codes_of_another_number_of_items(self, saved: Path, name: str) -> None:
        forge_tensors(saved, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
        self.refusal(saved)

    @pytest.mark.parametrize("name", ["codes.history", "codes.target", "tables.match", "tables.values"])
    def test_a_tensor_of_another_shape(self, saved: Path, name: str) -> None:
        forge_tensors(saved, lambda tensors: tensors.update({name: tensors[name][:, :1].contiguous()}))
        assert name in self.refusal(saved)

    @pytest.mark.parametrize("name", ["codes.history", "tables.match", "weights.bias", "weights.codebooks"])
    def test_a_missing_tensor(self, saved: Path, name: str) -> None:
        forge_tensors(saved, lambda tensors: tensors.pop(name))
        assert name.removeprefix("weights.") in self.refusal(saved)

    def test_a_catalogue_of_another_length(self, saved: Path) -> None:
        unpack(saved)
        frame = pl.read_parquet(saved / model_directory.ITEMS).head(2)
        frame.write_parquet(saved / "short.parquet")
        forge(saved, model_directory.ITEMS, (saved / "short.parquet").read_bytes())
        assert "has 2 items but 3 codes" in self.refusal(saved)

    def test_a_catalogue_without_a_column(self, saved: Path) -> None:
        unpack(saved)
        pl.read_parquet(saved / model_directory.ITEMS).drop("title").write_parquet(saved / "other.parquet")
        forge(saved, model_directory.ITEMS, (saved / "other.parquet").read_bytes())
        assert "title" in self.refusal(saved)

    @pytest.mark.parametrize(
        "change",
        [
            lambda settings: settings.update(tomorrow=1),
            lambda settings: settings["model"].update(heads=2),
            lambda settings: settings["model"].update(width=0),
            lambda settings: settings["model"].update(width="wide"),
            lambda settings: settings["model"].update(decay_rates=[]),
            lambda settings: settings["model"].update(decay_rates=[0.1, -0.1]),
            lambda settings: settings["model"].update(history_codewords=257),
            lambda settings: settings["data"].update(split="weekly"),
        ],
    )
    def test_an_unknown_configuration(self, saved: Path, change: Callable[[Any], object]) -> None:
        forge_config(saved, change)
        assert "comes from another version" in self.refusal(saved)

    @pytest.mark.parametrize("name", [model_directory.CONFIG, model_directory.METRICS])
    def test_invalid_json(self, saved: Path, name: str) -> None:
        forge(saved, name, b"\xff not JSON")
        self.refusal(saved)


class Exploding:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a model directory was unpickled",)


@pytest.mark.parametrize("name", model_directory.FILES)
def test_loading_never_unpickles(saved: Path, name: str) -> None:
    if name == model_directory.ITEMS:
        unpack(saved)  # or it is not read
    forge(saved, name, pickle.dumps(Exploding()))
    with pytest.raises(model_directory.ArtifactError):
        model_directory.load(saved)


class TestComplements:
    """Complements have an optional file of their own."""

    def test_round_trip(self, saved: Path) -> None:
        for found, expected in zip(model_directory.load(saved).complements, COMPLEMENTS, strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_may_be_absent_and_do_not_change_the_generation(self, saved: Path, model: LisaMini) -> None:
        before = model_directory.load(saved)
        model_directory.save(saved, model, config.Config(model=SHAPE), ITEMS, METRICS)
        after = model_directory.load(saved)
        assert not (saved / item_statistics.COMPLEMENTS).exists()
        assert (after.tag, after.complements.exist) == (before.tag, False)

    @pytest.mark.parametrize(
        "tensors",
        [
            {"items": torch.zeros((3, 1), dtype=torch.int64), "scores": torch.zeros((3, 1), dtype=torch.float32)},
            {"items": torch.zeros((2, 1), dtype=torch.int32), "scores": torch.zeros((2, 1), dtype=torch.float32)},
            {"items": torch.full((3, 1), 3, dtype=torch.int32), "scores": torch.zeros((3, 1), dtype=torch.float32)},
            {"items": torch.zeros((3, 1), dtype=torch.int32), "scores": -torch.ones((3, 1), dtype=torch.float32)},
            {"items": torch.zeros((3, 1), dtype=torch.int32)},
        ],
    )
    def test_of_another_version_are_refused(self, saved: Path, tensors: dict[str, torch.Tensor]) -> None:
        forge(saved, item_statistics.COMPLEMENTS, save(tensors))
        with pytest.raises(model_directory.ArtifactError, match="another version"):
            model_directory.load(saved)


def intervals_with(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of valid intervals, with some replaced."""
    parts = {name: torch.ones(4) for name in ("log_days", "spread", "repeat_share")}
    return parts | {"of_purchases": torch.ones(1, dtype=torch.uint8)} | changed


class TestIntervals:
    """Repurchase intervals have an optional file of their own."""

    def test_round_trip(self, saved: Path) -> None:
        for found, expected in zip(model_directory.load(saved).intervals, INTERVALS, strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_may_be_absent_and_do_not_change_the_generation(self, saved: Path, model: LisaMini) -> None:
        before = model_directory.load(saved)
        model_directory.save(saved, model, config.Config(model=SHAPE), ITEMS, METRICS)
        after = model_directory.load(saved)
        assert not (saved / item_statistics.INTERVALS).exists()
        assert (after.tag, after.intervals.exist, after.intervals.of_purchases) == (before.tag, False, True)

    @pytest.mark.parametrize(
        "changed",
        [
            {"log_days": torch.ones(3)},
            {"log_days": torch.ones(4, dtype=torch.float64)},
            {"log_days": torch.full((4,), 21.0)},
            {"log_days": torch.full((4,), torch.nan)},
            {"spread": torch.zeros(4)},
            {"spread": torch.full((4,), torch.inf)},
            {"repeat_share": torch.full((4,), 1.5)},
            {"repeat_share": torch.full((4,), -0.5)},
            {"of_purchases": torch.ones(2, dtype=torch.uint8)},
            {"of_purchases": torch.ones(1)},
        ],
    )
    def test_of_another_version_are_refused(self, saved: Path, changed: dict[str, torch.Tensor]) -> None:
        forge(saved, item_statistics.INTERVALS, save(intervals_with()))
        assert model_directory.load(saved).intervals.of_purchases
        forge(saved, item_statistics.INTERVALS, save(intervals_with(**changed)))
        with pytest.raises(model_directory.ArtifactError, match="another version"):
            model_directory.load(saved)
        lacking = intervals_with()
        del lacking[next(iter(changed))]
        forge(saved, item_statistics.INTERVALS, save(lacking))
        with pytest.raises(model_directory.ArtifactError, match="another version"):
            model_directory.load(saved)
